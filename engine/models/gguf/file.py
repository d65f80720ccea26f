"""Reads an opened GGUF file: metadata as plain values, tensors memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ModelFilesError, UnsupportedModelError
from ...untrusted import STOPS, shown, shown_name

if TYPE_CHECKING:
    import numpy as np

# GGUF architecture -> transformers class.
ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Types of metadata values, and the bytes of those that are numbers.
_STRING, _ARRAY = 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Vocabularies of 260,000 tokens have 1.3 million, with their types, scores and merges.
_MAX_VALUES = 3_000_000


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
        try:
            _check_metadata(stream)
        except ValueError as error:
            raise ModelFilesError(f"{path}: damaged or cut short ({error}). Fetch the file again.") from None
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except STOPS:
        raise
    except Exception as error:
        # The reader checks little: cut files end in errors of several kinds.
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


def _check_metadata(stream: BufferedReader) -> None:
    """Go through the metadata, from behind the magic on, by its lengths. Raises ValueError with what is wrong.

    The library makes an object of every value, takes what lies beyond the end of the file for empty, and so would go on
    for ever in an array of 2**63 numbers. Format: ggml `docs/gguf.md`.
    """
    file_bytes, num_values = os.fstat(stream.fileno()).st_size, 0
    order: Literal["little", "big"] = "little"

    def number(width: int) -> int:
        data = stream.read(width)
        if len(data) < width:
            raise ValueError("its metadata ends with the file")
        return int.from_bytes(data, order)

    def skip(num_bytes: int) -> None:
        if num_bytes > file_bytes - stream.tell():
            raise ValueError(f"a value of {num_bytes} bytes in a file of {file_bytes}")
        stream.seek(num_bytes, os.SEEK_CUR)

    def count(more: int) -> int:
        nonlocal num_values
        num_values += more
        if num_values > _MAX_VALUES:
            raise ValueError(f"its metadata has {num_values} values, expected at most {_MAX_VALUES}")
        return more

    if number(4) & 0xFFFF == 0:
        order = "big"
    count(number(8))  # tensors
    for _ in range(count(number(8))):
        skip(number(8))  # the key
        kind, num_items = number(4), 1
        if kind == _ARRAY:
            kind, num_items = number(4), count(number(8))
        if kind == _STRING:
            for _ in range(num_items):
                skip(number(8))
        elif kind in _VALUE_BYTES:
            skip(num_items * _VALUE_BYTES[kind])
        else:
            raise ValueError(f"a value of type {kind}{', which is an array in an array' if kind == _ARRAY else ''}")
