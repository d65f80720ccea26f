"""Encodes and decodes hard texts with tokenizers of many kinds, and compares ids and texts with transformers.

The folder holds `ggml-vocab-*.gguf` with their `.inp` and `.out` files, as the source package of llama-cpp-python has
them (`vendor/llama.cpp/models`): llama.cpp's ids of its own texts. Kinds of `tokenizer_kinds.py` are made on the way,
with the files and settings that may stand beside them. With `sentencepiece` and `protobuf` installed, models of
SentencePiece are trained, too, and read from `tokenizer.model` alone and beside a `tokenizer.json`.

    python tests/suites/tokenizer_suite.py FOLDER

A tokenizer that is refused, and a class that transformers builds anew and that is documented to follow its file, are
counted. Exits with 1 if ids or texts are silently others.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hard_texts import hard_texts, some_texts
from tokenizer_kinds import folders, older_folders, sentencepiece_folders
from transformers import AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.gguf import file
from lorabatch.engine.models.gguf.tokenizer import write_tokenizer
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

#: Classes that are documented to be built anew by transformers, while their file is followed here.
FOLLOW_THEIR_FILE = ("LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer")
_SHOWN = 20
_WRONG = ("other ids", "another text", "read, and transformers does not", "crash")
Found = tuple[str, str]


def differences(ours: Tokenizer, theirs: Any, texts: Sequence[str]) -> Iterator[Found]:
    """Each comparison of ids and of texts, with what differs."""
    for is_rendered in (False, True):
        expected = theirs(texts, add_special_tokens=not is_rendered)["input_ids"]
        found = ours.encode_batch(texts, is_rendered=is_rendered)
        for text, one, other in zip(texts, found, expected, strict=True):
            yield "same" if one == other else "other ids", f"{text[:60]!r}: {one[:20]}, expected {other[:20]}"
    for skips, decode in ((True, ours.decode), (False, ours.text_of)):
        wanted = theirs.batch_decode(expected, skip_special_tokens=skips)
        for text, said, other in zip(texts, map(decode, expected), wanted, strict=True):
            yield "same" if said == other else "another text", f"{text[:60]!r}: {said[:80]!r}, expected {other[:80]!r}"


def compared(folder: Path, base: Path | None, texts: Sequence[str]) -> Iterator[Found]:
    """What became of a folder. `base`: of an adapter's folder."""
    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        theirs = f"{type(error).__name__}: {str(error)[:200]}"
    try:
        ours = Tokenizer.from_folder(folder, base=base)
    except EngineError as error:
        kind = "refused: both" if isinstance(theirs, str) else "refused"
        yield kind, str(error).removeprefix(str(folder)).lstrip("/: ")
        return
    except Exception as error:
        yield "crash", f"{type(error).__name__}: {error}"
        return
    if isinstance(theirs, str):
        yield "read, and transformers does not", theirs
        return
    try:
        found = list(differences(ours, theirs, texts))
    except Exception as error:
        yield "transformers fails", f"{type(theirs).__name__}: {error}"
        theirs, found = TokenizersBackend.from_pretrained(folder), []
        found = [
            ("same as the file, transformers fails" if kind == "same" else kind, more)
            for kind, more in differences(ours, theirs, texts)
        ]
    if type(theirs).__name__ in FOLLOW_THEIR_FILE and any(kind != "same" for kind, _ in found):
        by_file = TokenizersBackend.from_pretrained(folder)
        again = list(differences(ours, by_file, texts))
        found = [
            ("same as the file, documented", more) if kind != "same" and by_its_file == "same" else (kind, more)
            for (kind, more), (by_its_file, _) in zip(found, again, strict=True)
        ]
    yield from found


def of_llama_cpp(path: Path) -> Iterator[Found]:
    """A vocabulary of llama.cpp with the ids of its texts. It is read for its tokenizer, whatever model it is of."""
    with mock.patch.object(file, "_check_architecture"), mock.patch.object(file, "refused_keys", return_value=[]):
        metadata = file.open_gguf(path).metadata
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tokenizer(metadata, Path(folder))
        except EngineError as error:
            yield "refused", str(error)
            return
        ours = Tokenizer.from_folder(Path(folder))
    texts = Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    rows = Path(f"{path}.out").read_text("utf-8").splitlines()
    for text, row in zip(texts, rows, strict=False):
        expected = [int(number) for number in row.split()]
        (found,) = ours.encode_batch([text], is_rendered=True)
        yield "same" if found == expected else "other ids", f"{text!r}: {found}, expected {expected}"
        said = ours.decode(expected)
        is_same = said in (text, text.removeprefix(" "))
        yield "same" if is_same else "another text", f"{text!r}: {said!r}"


def trials(folder: Path, scratch: Path) -> Iterator[tuple[str, Iterator[Found]]]:
    """Name of each tokenizer, and what becomes of it."""
    for path in sorted(folder.rglob("*.gguf")):
        if Path(f"{path}.out").exists():
            yield f"llama.cpp's {path.stem.removeprefix('ggml-vocab-')}", of_llama_cpp(path)
    for kind, beside, made in folders(scratch):
        yield f"{kind}, {beside}", compared(made, None, hard_texts() if beside == "nothing" else some_texts())
        shutil.rmtree(made)
    for name, made, base in older_folders(scratch):
        yield name, compared(made, base, some_texts())
    if importlib.util.find_spec("sentencepiece") is None:
        print("sentencepiece is not installed: its models are left out")
        return
    for name, made, base in sentencepiece_folders(scratch):
        yield name, compared(made, base, hard_texts())


def main(folder: Path) -> int:
    counts: Counter[str] = Counter()
    tokenizers: Counter[str] = Counter()
    details: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, found in trials(folder, Path(scratch)):
            kinds = set()
            for kind, more in found:
                counts[kind] += 1
                kinds.add(kind)
                if kind != "same":
                    # at once: a trial takes minutes
                    print(f"{kind}: {name}: {more[:300]}", file=sys.stderr)
                    line = more if kind.startswith("refused") else f"{name}: {more}"
                    details.setdefault(kind, Counter())[line] += 1
            tokenizers[" and ".join(sorted(kinds))] += 1
    print(f"{tokenizers.total()} tokenizers, {len(hard_texts())} texts")
    for kind, number in counts.most_common():
        print(f"{number:7} {kind}")
    for kinds, number in tokenizers.most_common():
        print(f"{number:7} tokenizers: {kinds}")
    for kind, lines in details.items():
        for line, number in lines.most_common(3 if kind.startswith("same") else _SHOWN):
            print(f"  {kind} ({number}): {line[:400]}")
    return int(any(counts[kind] for kind in _WRONG))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
