"""Reads an opened GGUF file: metadata as plain values, tensors memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ModelFilesError, UnsupportedModelError
from ...untrusted import STOPS, shown, shown_name

if TYPE_CHECKING:
    import numpy as np

# GGUF architecture -> transformers class.
ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key and tensors by name, as `gguf.GGUFReader` found them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def require(self, key: str) -> Any:
        """A value of this architecture, e.g. `block_count`. Raises `ModelFilesError` when absent."""
        full_key = f"{self.architecture}.{key}"
        if full_key not in self.metadata:
            raise ModelFilesError(f"{self.path}: metadata key {full_key!r} is missing. Fetch the file again.")
        return self.metadata[full_key]

    def optional(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor dequantised to float32: `[out_features, in_features]` or `[features]`."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type)


def open_binary(path: Path) -> BufferedReader:
    """`path` for reading. Raises `ModelFilesError` with the reason when it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror}). Check --model.") from error


def open_gguf(path: Path) -> GgufFile:
    """Raises `ModelFilesError` for a damaged file, `UnsupportedModelError` for another architecture."""
    with open_binary(path) as stream:
        if stream.read(4) != b"GGUF":
            raise ModelFilesError(f"{path}: not a GGUF file (it does not start with 'GGUF'). Check --model.")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except STOPS:
        raise
    except Exception as error:
        # The reader checks little: arrays in arrays end in a RecursionError, cut files in several others.
        raise ModelFilesError(
            f"{path}: damaged or cut short ({shown_name(str(error))}). Fetch the file again."
        ) from None
    file = GgufFile(path, metadata, tensors)
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: general.architecture={shown(file.architecture)} is not supported. "
            f"Supported GGUF files: {', '.join(sorted(ARCHITECTURES))}."
        )
    return file
