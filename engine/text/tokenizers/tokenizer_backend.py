"""Builds a `tokenizers.Tokenizer` from a folder's files as transformers' `AutoTokenizer` does, or refuses them by name.

`tokenizer.json` is followed as it is written, also where transformers builds its class anew. Byte pairs in the older
form (`vocab.json`, `merges.txt`) are built as the class that is named builds them. A SentencePiece model is read only
where its pieces are those of the base, whose tokenizer serves then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizerFile

from ....system.untrusted import MALFORMED, STOPS, shown, shown_name
from ...errors import ModelFilesError
from ...tokenizer_files import ADDED, SETTINGS, SPECIAL_MAP, TOKENIZER, TokenizerFiles
from .expansion import expansion_problem
from .tokenizer_settings import TokenizerSettings, read_settings

_SAVE = "transformers makes one with `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMES_SHOWN = 4


def build(
    files: TokenizerFiles, *, base: TokenizerFiles | None = None, model_type: str = "", model_class: str = ""
) -> tuple[TokenizerFile, TokenizerSettings]:
    """The tokenizer of a folder, with its settings applied. `base`: files of the base, for an adapter's folder.
    `model_type`, `model_class`: what the model's own configuration says of the class.

    Raises `ModelFilesError` for files that are missing, damaged, or cannot be read as transformers reads them.
    """
    home = files if base is None or files.has_vocabulary else base
    config = ({"tokenizer_class": model_class} if model_class else {}) | home.json(SETTINGS)
    older = home.older_vocabularies
    if TOKENIZER in home.contents:
        backend = _parsed(home)
    elif base is not None and older:
        backend = _older(home, base, config)
    else:
        raise ModelFilesError(f"{home.folder / TOKENIZER}: missing. A model folder needs it; {_SAVE}.")
    backend.no_truncation()
    backend.no_padding()
    settings = read_settings(
        config,
        home.json(SPECIAL_MAP),
        home.json(ADDED),
        backend.get_added_tokens_decoder(),
        model_type=model_type,
        is_byte_level="ByteLevel" in _state(backend.pre_tokenizer),
    )
    _apply(backend, settings, home, is_older=TOKENIZER not in home.contents)
    if home is not files:
        _check_beside(files, backend)
    problem = expansion_problem(backend)
    if problem is not None:
        raise ModelFilesError(f"{home.folder / TOKENIZER}: {problem}. Repair it, or take another tokenizer.")
    return backend, settings


def _parsed(files: TokenizerFiles) -> TokenizerFile:
    try:
        return TokenizerFile.from_str(files.text(TOKENIZER))
    except (*STOPS, ModelFilesError):
        raise
    except BaseException as error:
        # The library raises plain `Exception` for whatever it cannot parse, and `PanicException`, which is none.
        reason = shown_name(str(error))
        raise ModelFilesError(
            f"{files.folder / TOKENIZER}: not a tokenizer ({reason}). Fetch the model again."
        ) from None


def _apply(backend: TokenizerFile, settings: TokenizerSettings, home: TokenizerFiles, *, is_older: bool) -> None:
    """Add tokens and apply settings. Raises `ModelFilesError` for what would not be as transformers has it."""
    problems = list(settings.problems)
    if settings.tokens:
        backend.add_tokens(list(settings.tokens))
    for text, number in settings.numbers.items():
        found = backend.token_to_id(text)
        if found != number:
            problems.append(f"token {shown(text)}: number {number} here, {found} by the vocabulary")
    backend.encode_special_tokens = settings.splits_special_tokens
    if settings.prefix_space is not None and not is_older:
        problems += _apply_prefix_space(backend, settings)
    if settings.cleans_up and not isinstance(backend.model, models.BPE):
        problems.append("clean_up_tokenization_spaces=True: takes blanks out of answers, expected false")
    if problems:
        shown_problems = "; ".join(problems[:_NAMES_SHOWN])
        raise ModelFilesError(
            f"{home.folder / SETTINGS}: {shown_problems}. Save the tokenizer with transformers again."
        )


def _apply_prefix_space(backend: TokenizerFile, settings: TokenizerSettings) -> Iterator[str]:
    """Have byte-level texts begin with a blank, or not. What another kind of tokenizer does instead is a problem."""
    asked = settings.prefix_space
    steps = backend.pre_tokenizer
    state = json.loads(_state(steps))
    found = [
        step for step in (state, *state.get("pretokenizers", ())) if step.get("type") in ("ByteLevel", "Metaspace")
    ]
    has_prepend = '"Prepend"' in _state(backend.normalizer)
    for step in found:
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = asked
        elif (step.get("prepend_scheme", "always") != "never") != asked:
            yield f"add_prefix_space={asked}: tokenizer.json has prepend_scheme={step.get('prepend_scheme')!r}"
    if has_prepend and asked is False:
        yield f"add_prefix_space={asked}: tokenizer.json puts a blank before each text"
    if any(step["type"] == "ByteLevel" for step in found):
        steps.__setstate__(json.dumps(state).encode())
        backend.pre_tokenizer = steps


def _check_beside(files: TokenizerFiles, backend: TokenizerFile) -> None:
    """Refuse settings of a folder without a vocabulary that the base's tokenizer does not have."""
    settings = read_settings(files.json(SETTINGS), files.json(SPECIAL_MAP), files.json(ADDED), {})
    known = backend.get_added_tokens_decoder()
    # A token that fills up batches is no part of a prompt.
    padding = settings.special_tokens.get("pad_token")
    texts = [token.content for token in settings.tokens if token.content != padding or padding in settings.numbers]
    unknown = [text for text in texts if backend.token_to_id(text) is None]
    moved = [text for text, number in settings.numbers.items() if number not in known or known[number].content != text]
    names = ", ".join(name for name in (SETTINGS, SPECIAL_MAP, ADDED) if name in files.contents)
    wrong = list(dict.fromkeys([*unknown, *moved]))
    if wrong:
        raise ModelFilesError(
            f"{files.folder}: {names} names tokens that the base's tokenizer does not have, and there is no "
            f"{TOKENIZER}: {', '.join(map(shown, wrong[:_NAMES_SHOWN]))}. Save the tokenizer that the adapter was "
            "trained with there."
        )
    if settings.splits_special_tokens:
        raise ModelFilesError(
            f"{files.folder / SETTINGS}: split_special_tokens=True, and there is no {TOKENIZER}. Save the tokenizer "
            "that the adapter was trained with there."
        )


def _older(files: TokenizerFiles, base: TokenizerFiles, config: Mapping[str, Any]) -> TokenizerFile:
    """A tokenizer from a vocabulary in an older form."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    make = _OF_CLASS.get(name)
    try:
        if make is not None and {"vocab.json", "merges.txt"} <= files.contents.keys():
            return make(files, config)
        if "tokenizer.model" in files.contents and _is_of_base(files.contents["tokenizer.model"], base):
            return _parsed(base)
    except (*STOPS, ModelFilesError):
        raise
    except (*MALFORMED, Exception) as error:
        reason = f"{type(error).__name__}: {shown_name(str(error))}"
        raise ModelFilesError(f"{files.folder}: not a vocabulary ({reason}). Save the tokenizer again.") from None
    raise ModelFilesError(
        f"{files.folder}: {', '.join(files.older_vocabularies)} of "
        f"tokenizer_class={shown(config.get('tokenizer_class'))} and no {TOKENIZER}. Read are {TOKENIZER}, vocab.json "
        f"with merges.txt of {' and '.join(_OF_CLASS)}, and a tokenizer.model with the base's pieces; {_SAVE}."
    )


def _byte_pairs(files: TokenizerFiles) -> models.BPE:
    merges = [line.strip() for line in files.text("merges.txt").splitlines()]
    pairs = [tuple(line.split(" ")) for line in merges if line and not line.startswith("#version")]
    vocab = {text: int(number) for text, number in files.json("vocab.json").items()}
    return models.BPE(vocab, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)  # type: ignore[arg-type]


def _gpt2(files: TokenizerFiles, config: Mapping[str, Any]) -> TokenizerFile:
    backend = TokenizerFile(_byte_pairs(files))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space") is True)
    backend.decoder = decoders.ByteLevel()
    _add_defaults(backend, config, dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"))
    return _with_ends(backend, config, "<|endoftext|>")


def _qwen2(files: TokenizerFiles, config: Mapping[str, Any]) -> TokenizerFile:
    backend = TokenizerFile(_byte_pairs(files))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated", invert=False)
    prefix = config.get("add_prefix_space") is True
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_defaults(backend, config, dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"))
    return _with_ends(backend, config, None)


_OF_CLASS: Mapping[str, Callable[[TokenizerFiles, Mapping[str, Any]], TokenizerFile]] = {
    "GPT2Tokenizer": _gpt2,
    "Qwen2Tokenizer": _qwen2,
}


def _add_defaults(backend: TokenizerFile, config: Mapping[str, Any], defaults: Mapping[str, str]) -> None:
    """Special tokens that a class has where nothing names others."""
    texts = [text for name, text in defaults.items() if config.get(name) is None]
    known = [text for text in dict.fromkeys(texts) if backend.token_to_id(text) is not None]
    if len(known) < len(set(texts)):
        raise ValueError(f"the vocabulary lacks {texts[0]!r}, which its class has by default")
    backend.add_special_tokens([AddedToken(text, special=True) for text in known])


def _with_ends(backend: TokenizerFile, config: Mapping[str, Any], default: str | None) -> TokenizerFile:
    """Have `add_bos_token` and `add_eos_token` put tokens around prompts, as without a `tokenizer.json`."""
    before, after = (
        _content(config.get(f"{end}_token"), default) if config.get(f"add_{end}_token") is True else None
        for end in ("bos", "eos")
    )
    ends = [text for text in (before, after) if text is not None]
    if ends:
        parts = [*([before] if before else []), "$A", *([after] if after else [])]
        numbers = [(text, backend.token_to_id(text)) for text in dict.fromkeys(ends)]
        if any(number is None for _, number in numbers):
            raise ValueError(f"the vocabulary lacks {', '.join(ends)}")
        backend.post_processor = processors.TemplateProcessing(single=" ".join(parts), special_tokens=numbers)
    return backend


def _content(value: Any, default: str | None) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else default


def _is_of_base(model: bytes, base: TokenizerFiles) -> bool:
    """Whether a SentencePiece model is the base's: the same file, or the same pieces under the same numbers."""
    if model == base.contents.get("tokenizer.model"):
        return True
    backend = _parsed(base)
    pieces = list(_pieces(model))
    return bool(pieces) and all(backend.id_to_token(number) == piece for number, piece in enumerate(pieces))


def _pieces(model: bytes) -> Iterator[str]:
    """Pieces of a SentencePiece model, a protocol buffer: field 1 of each of the model's fields 1."""
    for number, value in _fields(model):
        if number == 1:
            yield next((text.decode("utf-8") for inner, text in _fields(value) if inner == 1), "")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Fields of a protocol buffer with bytes; numbers are passed over. Raises `ValueError` for anything else."""
    place = 0
    while place < len(data):
        tag, place = _number(data, place)
        kind = tag & 7
        if kind == 0:
            _, place = _number(data, place)
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        elif kind == 2:
            size, place = _number(data, place)
            if place + size > len(data):
                raise ValueError("it is cut off")
            yield tag >> 3, data[place : place + size]
            place += size
        else:
            raise ValueError(f"a field of kind {kind}")


def _number(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if place >= len(data):
            raise ValueError("it is cut off")
        value |= (data[place] & 0x7F) << shift
        place += 1
        if not data[place - 1] & 0x80:
            return value, place
    raise ValueError("a number without an end")


def _state(step: Any) -> str:
    return "{}" if step is None else str(step.__getstate__(), "utf-8")
