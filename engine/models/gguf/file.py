"""Reads an opened GGUF file: metadata as plain values, tensors memory-mapped.

Keys and tensors are gone through by their lengths first, and what is not supported is refused then: the vocabulary,
hundreds of thousands of texts, is read last. Format: ggml `docs/gguf.md`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....system.gguf import ALIGNMENT, KINDS_NOT_READ, KINDS_READ, VERSIONS, GgufTensor, GgufWalk, check_sizes
from ....system.untrusted import shown, shown_name
from ...errors import EngineError, ModelFilesError
from ...model_config.gguf import ARCHITECTURES, family_of
from .keys import refused_keys

if TYPE_CHECKING:
    import numpy as np

    from ...model_config.family import Family


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key and tensors by name. `content`: the file's bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    content: mmap.mmap

    @property
    def architecture(self) -> str:
        """GGUF's name of the model family."""
        return str(self.metadata.get("general.architecture"))

    @property
    def family(self) -> Family:
        """The family that the file stands for."""
        return family_of(self.architecture, self.metadata)[0]

    @property
    def in_layers(self) -> frozenset[str]:
        """Names of tensors in layers, without the numbers of layers."""
        return frozenset(name.split(".", 2)[-1] for name in self.tensors if name.startswith("blk."))

    @property
    def num_blocks(self) -> int:
        """Layers in the file."""
        return int(self.require("block_count"))

    @property
    def num_layers(self) -> int:
        """Layers that text goes through: those that predict further tokens come behind them."""
        return self.num_blocks - int(self.optional("nextn_predict_layers", 0))

    def require(self, key: str) -> Any:
        """A value of this architecture, e.g. `block_count`. Raises `ModelFilesError` when absent."""
        full_key = f"{self.architecture}.{key}"
        if full_key not in self.metadata:
            raise ModelFilesError(f"{self.path}: metadata key {full_key!r} is missing. Fetch the file again.")
        return self.metadata[full_key]

    def optional(self, key: str, default: Any = None) -> Any:
        """A value of this architecture, or the default."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """A count of this architecture, which may be listed layer by layer. Raises `EngineError` where layers differ,
        `ModelFilesError` when it is absent and there is no default.
        """
        value = self.require(key) if default is None else self.optional(key, default)
        if not isinstance(value, list):
            return int(value)
        if len(value) != self.num_blocks or len(set(value)) != 1:
            raise EngineError(
                f"{self.path}: {self.architecture}.{key} differs by layer: not supported. Give the model's Hugging "
                "Face folder instead."
            )
        return int(value[0])

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor as it is stored: numbers, or [out_features, bytes of a row]."""
        import numpy as np

        tensor = self.tensors[name]
        dtype = {"F32": np.float32, "F16": np.float16}.get(tensor.kind_name, np.uint8)
        data = np.frombuffer(self.content, dtype, tensor.num_bytes // np.dtype(dtype).itemsize, tensor.offset)
        return data.reshape(*tensor.shape[:-1], -1)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor dequantised to float32: `[out_features, in_features]` or `[features]`."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return dequantize(self.raw(name), GGMLQuantizationType(self.tensors[name].kind))


def open_binary(path: Path) -> BufferedReader:
    """`path` for reading. Raises `ModelFilesError` with the reason when it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror}). Check --model.") from error


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and read its metadata. Raises `ModelFilesError` for a damaged file; `EngineError` for
    another architecture, a key that asks for what is not served, and a kind of quantisation that is not read.
    """
    with open_binary(path) as stream:
        if stream.read(4) != b"GGUF":
            raise ModelFilesError(f"{path}: not a GGUF file (it does not start with 'GGUF'). Check --model.")
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        walk = GgufWalk(content)
        version, num_tensors, num_keys = walk.preamble()
        if version not in VERSIONS:
            raise EngineError(
                f"{path}: version {version} of GGUF is not supported. Convert the model again; current files have 3."
            )
        places = walk.keys(num_keys, lambda architecture: _check_architecture(path, architecture))
        scalars = {key: read() for key, (is_array, read) in places.items() if not is_array}
        _check_architecture(path, scalars.get("general.architecture"))
        problems = refused_keys(scalars, {key for key, (is_array, _) in places.items() if is_array})
        if problems:
            raise EngineError(f"{path}: {' '.join(problems)} Give the model's Hugging Face folder instead.")
        tensors = walk.tensors(num_tensors, scalars.get("general.alignment", ALIGNMENT))
        _check_kinds(path, tensors)
        check_sizes(tensors, len(content))
        if walk.order == ">":
            raise EngineError(f"{path}: it is of a big-endian machine. Convert it with gguf_convert_endian.")
        metadata = {key: scalars[key] if key in scalars else read() for key, (_, read) in places.items()}
    except (ValueError, OverflowError) as error:
        raise ModelFilesError(
            f"{path}: damaged or cut short ({shown_name(str(error))}). Fetch the file again."
        ) from None
    return GgufFile(path, metadata, tensors, content)


def _check_architecture(path: Path, architecture: Any) -> None:
    if architecture not in ARCHITECTURES:
        raise EngineError(
            f"{path}: general.architecture={shown(architecture)} is not supported. "
            f"Supported GGUF files: {', '.join(sorted(ARCHITECTURES))}."
        )


def _check_kinds(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.kind not in KINDS_READ:
            kind = KINDS_NOT_READ.get(tensor.kind, f"number {tensor.kind}, which is none of ggml's known here")
            raise EngineError(
                f"{path}: {shown_name(name)} is quantised as {kind}: not read. Read are "
                f"{', '.join(found for found, _, _ in KINDS_READ.values())}. Take a file of such a kind, or give the "
                "model's Hugging Face folder."
            )
