"""Reads an adapter folder: its configuration and the headers of its weight files.

Nothing of the folder is executed or unpickled, and neither an index file nor a link can point outside of the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...system.untrusted import parse_object, read_regular, shown, shown_name
from ..errors import AdapterRefusedError
from .dialects import Dialect, read_gguf_header
from .tensor_file import Header, TensorEntry, read_header

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 8 << 20
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
#: Weights of mlx-lm, and names of its checkpoints of training beside them.
MLX_NAME, _MLX_CHECKPOINT = "adapters.safetensors", "[0-9]*_adapters.safetensors"
_MLX_OLD_NAME = "adapters.npz"
#: Ending of an adapter in GGUF, which is one file with any name.
GGUF_SUFFIX = ".gguf"
#: Pickled weights, which are converted before the folder is read.
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
#: Why a file holds no values, and what to do.
ZERO3 = (
    "as DeepSpeed ZeRO-3 leaves a tensor whose values are on the ranks, saved without gathering them. Gather when "
    "saving (stage3_gather_16bit_weights_on_model_save: true), or take the values from the checkpoint beside it: "
    "zero_to_fp32.py"
)
_OTHER_PICKLES = ("pytorch_model.bin",)
# Endings of the files that are read.
_READ_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".bin", ".pt", ".pth", GGUF_SUFFIX)
# Safetensors files that trainers leave beside an adapter and that do not take part in generation.
BYSTANDERS: Mapping[str, str] = {"value_head.safetensors": "a value head for reinforcement learning"}


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The weights as listed by the files' headers."""

    #: Headers of the files that are read.
    headers: tuple[Header, ...]
    #: Remarks on files that take no part.
    notes: tuple[str, ...]
    #: Program whose form the files have.
    dialect: Dialect = "peft"

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors by key."""
        if len(self.headers) == 1:
            return self.headers[0].tensors
        return {key: entry for header in self.headers for key, entry in header.tensors.items()}

    @property
    def is_shared(self) -> bool:
        """Whether adapters with the same headers have these very ones."""
        return all(header.is_shared for header in self.headers)

    @property
    def weight_bytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())


def check_links(path: Path) -> None:
    """Raise `AdapterRefusedError` for a link to a file outside of the folder: it may be another tenant's.

    In a cache of the Hugging Face hub the files of a snapshot are links to the blobs of the same repository, which are
    part of the folder there.
    """
    inside = [path.resolve(), *_blobs(path)]
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        if file.suffix not in _READ_SUFFIXES or not file.is_symlink():
            continue
        target = file.resolve()
        if target.is_file() and not any(target.is_relative_to(folder) for folder in inside):
            raise AdapterRefusedError(
                f"{shown_name(file.name)}: a link that leads out of the adapter's folder. Put the file itself there."
            )


def _blobs(path: Path) -> list[Path]:
    """`models--O--N/blobs` of a folder at or below `models--O--N/snapshots/REVISION`, where it is in a hub's cache."""
    parents = [path.resolve(), *path.resolve().parents]
    return [
        repository / "blobs"
        for snapshots, repository in pairwise(parents)
        if snapshots.name == "snapshots" and repository.name.startswith("models--")
    ]


def read_config(path: Path) -> bytes:
    """The content of `adapter_config.json`. Raises `AdapterRefusedError` if there is none or it cannot be read."""
    if not path.is_dir():
        raise AdapterRefusedError(f"{path}: not a folder. Name the folder that holds {CONFIG_NAME}.")
    try:
        return read_regular(path / CONFIG_NAME, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise AdapterRefusedError(
            f"{CONFIG_NAME}: missing. Without it rank and scaling are unknown; save the adapter with "
            "save_pretrained and name the folder that holds this file."
        ) from None
    except OSError as error:
        raise AdapterRefusedError(f"{CONFIG_NAME}: cannot be read ({error.strerror}).") from None


def parse_config(content: bytes) -> dict[str, Any]:
    """The JSON object of `adapter_config.json`. Raises `AdapterRefusedError` if it is malformed or ambiguous."""
    try:
        return parse_object(content.decode("utf-8-sig"))
    except ValueError as error:
        raise AdapterRefusedError(
            f"{CONFIG_NAME}: not a valid JSON object ({error}). Save the adapter again."
        ) from None


def is_adapter(path: Path) -> bool:
    """Whether a folder has the configuration or the weights of an adapter."""
    if (path / CONFIG_NAME).exists() or any(path.glob("adapter_model*")) or (path / MLX_NAME).exists():
        return True
    with suppress(AdapterRefusedError):
        return any(read_gguf_header(file).metadata.get("general.type") == "adapter" for file in _in_gguf(path))
    return False


def holds_weights(path: Path) -> bool:
    """Whether a folder has weights in a form that is read."""
    return any((path / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME, MLX_NAME)) or bool(_in_gguf(path))


def is_in_gguf(path: Path) -> bool:
    """Whether a folder's weights are in GGUF, which needs no configuration beside it."""
    return bool(_in_gguf(path)) and not any((path / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME, MLX_NAME))


def _in_gguf(path: Path) -> list[Path]:
    return sorted(file for file in path.glob(f"*{GGUF_SUFFIX}") if file.is_file())


def open_folder(path: Path) -> AdapterFolder:
    """List the adapter's tensors from the headers of its weight files.

    Raises `AdapterRefusedError` for missing, pickled, damaged, ambiguous or escaping files.
    """
    check_links(path)
    sets = [name for name in (WEIGHTS_NAME, INDEX_NAME, MLX_NAME) if (path / name).is_file()]
    if len(sets) > 1:
        raise AdapterRefusedError(f"{' and '.join(sets)}: two sets of weights, unclear which one is meant. Remove one.")
    if not sets:
        return _open_gguf(path)
    name = sets[0]
    headers = _sharded(path, path / name) if name == INDEX_NAME else {name: read_header(path / name)}
    if not any(header.tensors for header in headers.values()):
        raise AdapterRefusedError(f"{name}: holds no tensors, {ZERO3}.")
    dialect: Dialect = "mlx" if name == MLX_NAME else "peft"
    return AdapterFolder(tuple(headers.values()), _bystanders(path, headers.keys()), dialect)


def _open_gguf(path: Path) -> AdapterFolder:
    files = _in_gguf(path)
    if not files:
        raise AdapterRefusedError(_why_no_weights(path))
    if len(files) > 1:
        raise AdapterRefusedError(
            f"{files[0].name}, {files[1].name}: several adapters in GGUF, unclear which one is meant. Name the file: "
            f"NAME={path.name}/{files[0].name}."
        )
    return AdapterFolder((read_gguf_header(files[0]),), _bystanders(path, [files[0].name]), "gguf")


def _why_no_weights(path: Path) -> str:
    pickles = [name for name in (*PICKLE_NAMES, *_OTHER_PICKLES) if (path / name).is_file()]
    if pickles:
        return (
            f"{pickles[0]}: pickled weights can run code when opened, so they are not read. Convert them to "
            f"{WEIGHTS_NAME}: load with PEFT where you trust the file, then save_pretrained."
        )
    if (path / _MLX_OLD_NAME).is_file():
        return (
            f"{_MLX_OLD_NAME}: weights of an early mlx-lm in NumPy's format, which is not read. Convert them where mlx "
            f"is installed: mx.save_safetensors({MLX_NAME!r}, mx.load({_MLX_OLD_NAME!r}))."
        )
    shards = sorted(file.name for file in path.glob("adapter_model-*.safetensors"))
    if shards:
        return f"{INDEX_NAME}: missing, so it is unknown whether {shards[0]} … are all the shards. Add the index file."
    return f"{WEIGHTS_NAME}: missing. Save the adapter with save_pretrained and name the folder that holds this file."


def _sharded(path: Path, index: Path) -> dict[str, Header]:
    """Headers of all shards named by an index file; index and headers must agree exactly."""
    weight_map = _weight_map(index)
    headers: dict[str, Header] = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise AdapterRefusedError(f"{INDEX_NAME}: names {shard}, which is missing. Copy the adapter again.")
        headers[shard] = read_header(path / shard)
        for key in headers[shard].tensors:
            if weight_map.get(key) != shard:
                raise AdapterRefusedError(
                    f"{shard}: holds {key!r}, which {INDEX_NAME} places in {weight_map.get(key)}. "
                    "Copy the adapter again."
                )
    missing = sorted(weight_map.keys() - {key for header in headers.values() for key in header.tensors})
    if missing:
        raise AdapterRefusedError(
            f"{INDEX_NAME}: names {len(missing)} tensors that no shard holds, first {shown(missing[0])}. "
            "Copy the adapter again."
        )
    return headers


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = parse_object(read_regular(index))["weight_map"]
        shards = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterRefusedError(
            f"{INDEX_NAME}: expected a JSON object with weight_map ({type(error).__name__}: {error}). "
            "Copy the adapter again."
        ) from None
    for shard in shards:
        # A plain file name of this very folder: an index must not reach for other files of the machine.
        is_plain = isinstance(shard, str) and shard not in ("", ".", "..") and not set(shard) & set("/\\\0")
        if not is_plain or not shard.endswith(".safetensors"):
            raise AdapterRefusedError(
                f"{INDEX_NAME}: names {shown(shard)}; expected the plain name of a .safetensors file in the same "
                "folder."
            )
    return dict(weight_map)


def _bystanders(path: Path, read: Collection[str]) -> tuple[str, ...]:
    """Notes on files left aside. Raises `AdapterRefusedError` for tensors that nothing accounts for."""
    notes = []
    checkpoints = sorted(file.name for file in path.glob(_MLX_CHECKPOINT)) if MLX_NAME in read else []
    if checkpoints:
        notes.append(f"{checkpoints[0]} to {checkpoints[-1]}: not read, checkpoints of training")
    for file in sorted(path.glob("*.safetensors")):
        if file.name in read or file.name in checkpoints:
            continue
        if file.name not in BYSTANDERS:
            raise AdapterRefusedError(
                f"{file.name}: tensors that are not part of {min(read)}; it is unknown what they are for. "
                "Move the file out of the adapter's folder if it does not belong to the adapter."
            )
        notes.append(f"{file.name}: not read, {BYSTANDERS[file.name]}")
    pickles = (*PICKLE_NAMES, *_OTHER_PICKLES)
    notes.extend(f"{name}: not read, {min(read)} is used" for name in pickles if (path / name).is_file())
    notes.extend(f"{file.name}: not read, {min(read)} is used" for file in _in_gguf(path) if file.name not in read)
    return tuple(notes)
