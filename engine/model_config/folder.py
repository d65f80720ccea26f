"""Classifies the files of a base model's folder: read, known not to matter and why, named, or refused.

Where a folder holds two sets of weights, those are read that transformers would read: `model.safetensors` before the
shards of an index. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...system.untrusted import parse_object, read_regular, shown_name
from ..errors import ModelFilesError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files that are read beside the weights, and what they say. Their content is part of the model's identity.
READ: Mapping[str, str] = {
    "config.json": "the architecture",
    "generation_config.json": "stop tokens; sampling, where a job asks for it",
    "tokenizer.json": "the tokenizer",
    "tokenizer_config.json": "settings of the tokenizer, special tokens, chat template",
    "special_tokens_map.json": "special tokens, where tokenizer_config.json has no added_tokens_decoder",
    "chat_template.jinja": "the chat template",
    "added_tokens.json": "added tokens, where tokenizer_config.json has no added_tokens_decoder",
    "additional_chat_templates/tool_use.jinja": "the chat template for rows with tools",
}
_OLDER_TOKENIZER = "the tokenizer in an older form; transformers reads tokenizer.json first"
_OTHER_WEIGHTS = "weights in another form; transformers reads safetensors first"
_OF_TRAINING, _FOR_PEOPLE, _OF_HISTORY = "of training", "for people", "of version control and caches"
_OTHER_FORM, _OF_OTHERS = "the model in another form", "of other programs"
_OF_SENSES, _OTHER_TEMPLATES = "of images, sound and video", "a processor's; AutoTokenizer does not read it"
#: Pattern of names, as shells have them -> why such a file or folder changes nothing of what the model answers.
IRRELEVANT: Mapping[str, str] = {
    **dict.fromkeys(("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model*", "spiece.model"), _OLDER_TOKENIZER),
    **dict.fromkeys(("tekken.json", "*.tiktoken", "tiktoken.model", "sentencepiece.bpe.model"), _OLDER_TOKENIZER),
    **dict.fromkeys(("pytorch_model*", "tf_model*", "flax_model*", "model*.bin", "rust_model.ot"), _OTHER_WEIGHTS),
    **dict.fromkeys(("consolidated*", "*.bin.index.json", "*.h5.index.json", "*.msgpack"), _OTHER_WEIGHTS),
    **dict.fromkeys(("optimizer*", "scheduler.*", "scaler.pt", "rng_state*", "training_*"), _OF_TRAINING),
    **dict.fromkeys(("trainer_*", "*_results.json", "global_step*", "latest", "zero_to_fp32.py"), _OF_TRAINING),
    **dict.fromkeys(("random_states_*", "runs", "checkpoint-*", "eval"), _OF_TRAINING),
    **dict.fromkeys(("*processor_config.json",), _OF_SENSES),
    **dict.fromkeys(("*.py",), "code, which is never run; transformers has the supported families built in"),
    **dict.fromkeys(("*.md", "*.txt", "*.rst", "*.pdf", "*.html", "*.png", "*.jpg", "*.jpeg", "*.gif"), _FOR_PEOPLE),
    **dict.fromkeys(("*.svg", "*.webp", "*.yaml", "*.yml", "*.toml", "*.jsonl", "*.csv", "*.log"), _FOR_PEOPLE),
    **dict.fromkeys(("LICENSE*", "License*", "LICENCE*", "COPYING*", "NOTICE*", "Notice*", "README*"), _FOR_PEOPLE),
    **dict.fromkeys(("USE_POLICY*", "figures", "images", "assets", "ORIGIN"), _FOR_PEOPLE),
    **dict.fromkeys((".*", "__pycache__", "*.lock", "*.sha256"), _OF_HISTORY),
    **dict.fromkeys(("*.gguf", "gguf", "*.onnx", "onnx", "openvino", "coreml", "original", "metal"), _OTHER_FORM),
    **dict.fromkeys(("mlx", "*.mlmodel", "*.tflite", "*.engine", "*.pte"), _OTHER_FORM),
    **dict.fromkeys(("configuration.json", "params.json", "quant*_config.json", "model_index.json"), _OF_OTHERS),
    **dict.fromkeys(("dataset_infos.json",), _OF_OTHERS),
    "chat_template.json": _OTHER_TEMPLATES,
    "additional_chat_templates": "named templates: tool_use is read, the others are for calls that name them",
}
_ADAPTER = "adapter_config.json"
_COPIES = "consolidated*.safetensors"
_NAMES_SHOWN = 8
_CHUNK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100 << 20


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder that are read, as transformers chooses them.

    Raises `ModelFilesError` when there are none, and for an index that names files elsewhere.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelFilesError(f"{folder}: neither {SINGLE} nor {INDEX} is there. Check --model.")
    names = _shard_names(index)
    outside = sorted(name for name in names if Path(name).name != name)
    if outside or not names:
        raise ModelFilesError(f"{index}: weight_map must name files of this folder, found {outside or 'none'}.")
    return [folder / name for name in sorted(names)]


def look_at(folder: Path, *, with_weights: bool = True) -> tuple[list[str], list[str]]:
    """Notes on files of a base folder that are not read, and problems for which the folder is refused, as sentences.

    Raises what `weight_files` raises, unless without weights.
    """
    read = {path.name for path in weight_files(folder)} if with_weights else set()
    notes, problems = [], []
    stale, unknown = [], []
    for name in sorted(path.name for path in folder.iterdir()):
        if name in read or name in READ:
            continue
        if name == INDEX:
            if SINGLE in read:
                stale.append(name)
        elif name == _ADAPTER:
            problems.append(
                f"{name}: an adapter in the base model's folder, which transformers would apply. Move the adapter's "
                "files to a folder of their own, and name the adapter with --adapters"
            )
        elif name.endswith(".safetensors"):
            # Copies in other layouts, as Mistral publishes them, have names that transformers never reads.
            if not fnmatchcase(name, _COPIES) and with_weights:
                stale.append(name)
        elif irrelevance(name) is None:
            unknown.append(name)
    if stale:
        of_what = SINGLE if SINGLE in read else INDEX
        notes.append(f"not read, because {of_what} is, as in transformers: {_shown(stale)}")
    if unknown:
        notes.append(f"files that nothing reads: {_shown(unknown)}")
    return notes, problems


def irrelevance(name: str) -> str | None:
    """Why a file or folder of a base folder does not matter; None for a name of no such kind."""
    return next((why for pattern, why in IRRELEVANT.items() if fnmatchcase(name, pattern)), None)


def has_own_head(folder: Path, heads: tuple[str, ...], embeddings: tuple[str, ...]) -> bool:
    """Whether a checkpoint stores a head that differs from its embedding: then transformers ties them no longer,
    whatever `config.json` says. Both are the names that the tensor may have. False where there are no weights, or they
    cannot be read: loading them says why.
    """
    try:
        places = _places(folder, *heads, *embeddings)
        head, embedding = (
            next((places[name] for name in names if name in places), None) for names in (heads, embeddings)
        )
        return head is not None and embedding is not None and _differ(head, embedding)
    except (ModelFilesError, OSError, ValueError, KeyError, TypeError):
        return False


def has_tensor(folder: Path, names: tuple[str, ...]) -> bool:
    """Whether a checkpoint has a tensor of one of these names. True where its files cannot be read: loading them says
    why.
    """
    try:
        return bool(_places(folder, *names))
    except (ModelFilesError, OSError, ValueError, KeyError, TypeError):
        return True


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor's bytes in a weight file."""

    #: The file.
    path: Path
    #: Inode, size and times of the file, by which a comparison is remembered.
    facts: tuple[int, ...]
    #: Number format, by its name in safetensors.
    dtype: str
    #: Shape of the tensor.
    shape: tuple[int, ...]
    #: Position of its first byte in the file.
    start: int
    #: Bytes of the tensor.
    num_bytes: int


def _places(folder: Path, *names: str) -> dict[str, _Place]:
    """Places of those of the tensors that the checkpoint has. If two shards have a tensor, the last one counts."""
    found: dict[str, _Place] = {}
    for path in weight_files(folder):
        facts = path.stat()
        key = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, facts.st_size):
                raise ValueError("no header")
            header = json.loads(file.read(header_bytes))
        for name in names:
            if name in header:
                begin, end = header[name]["data_offsets"]
                shape = tuple(header[name]["shape"])
                found[name] = _Place(path, key, header[name]["dtype"], shape, 8 + header_bytes + begin, end - begin)
    return found


@lru_cache(maxsize=16)
def _differ(first: _Place, second: _Place) -> bool:
    if (first.dtype, first.shape, first.num_bytes) != (second.dtype, second.shape, second.num_bytes):
        return True
    pairs = zip(_chunks(first), _chunks(second), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


def _chunks(place: _Place) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    with place.path.open("rb") as file:
        file.seek(place.start)
        for done in range(0, place.num_bytes, _CHUNK_BYTES):
            yield np.frombuffer(file.read(min(_CHUNK_BYTES, place.num_bytes - done)), np.uint8)


def _shard_names(index: Path) -> set[str]:
    try:
        weight_map = parse_object(read_regular(index))["weight_map"]
        return set(map(str, dict(weight_map).values()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFilesError(
            f"{index}: expected a JSON object with weight_map ({type(error).__name__}: {shown_name(str(error))}). "
            "Fetch the model again."
        ) from None


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(shown_name, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
