"""Reads safetensors files: the header alone, then single tensors.

The format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header that maps each
tensor to dtype, shape and byte offsets, then the bytes. Nothing in it can run code. Unlike the library's reader, this
one names what is wrong with a damaged file, gives bf16 bytes without torch, and reads tensors only when asked. JSON is
parsed strictly (`parse_object`): a repeated key, or NaN for a number, is an error and not a guess.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AdapterRefusedError
from ..untrusted import parse_object, shown

# Pairs on every expert of the largest mixtures are 100,000 tensors and 18 MB of header.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 120_000
MAX_NAME_CHARACTERS = 512
MAX_DIMENSIONS = 8
# Bytes per element; only the float types of FLOAT_TYPES can hold adapter weights.
ELEMENT_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
FLOAT_TYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of one tensor: `num_bytes` bytes from absolute position `start` of `file`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """All tensors of one file, without reading their values. Raises `AdapterRefusedError` for a damaged file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"only {file_bytes} bytes long")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > file_bytes - 8:
                raise _damaged(path, f"its header claims {header_bytes} bytes of a file of {file_bytes}")
            if header_bytes > MAX_HEADER_BYTES:
                raise _damaged(path, f"its header has {header_bytes} bytes, expected at most {MAX_HEADER_BYTES}")
            text = file.read(header_bytes)
            # Seen before the parser makes objects of them.
            _check_count(path, text.count(b'"dtype"'))
            header = parse_object(text)
    except OSError as error:
        raise AdapterRefusedError(f"{path.name}: cannot be read ({error.strerror}). Check its permissions.") from None
    except ValueError as error:
        raise _damaged(path, f"its header is not a JSON object ({error})") from None
    header.pop("__metadata__", None)
    _check_count(path, len(header))
    data_start = 8 + header_bytes
    entries = tuple(_entry(path, key, value, data_start) for key, value in header.items())
    _check_cover(path, entries, data_start, file_bytes)
    return entries


def _check_count(path: Path, num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise _damaged(path, f"it lists {num_tensors} tensors, expected at most {MAX_TENSORS}")


def _entry(path: Path, key: str, value: Any, data_start: int) -> TensorEntry:
    if len(key) > MAX_NAME_CHARACTERS:
        raise _damaged(path, f"{shown(key)} has {len(key)} characters, expected at most {MAX_NAME_CHARACTERS}")
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
        num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"its header entry for {shown(key)} is malformed: {shown(value)}") from None
    if end - begin != num_bytes:
        raise _damaged(
            path, f"{shown(key)} of shape {shown(list(shape))} {dtype} has {end - begin} bytes, not {num_bytes}"
        )
    return TensorEntry(key, dtype, shape, path, data_start + begin, num_bytes)


def _check_cover(path: Path, entries: tuple[TensorEntry, ...], data_start: int, file_bytes: int) -> None:
    """The tensors must fill the file exactly: no hole, no overlap, no missing tail."""
    position = data_start
    for entry in sorted(entries, key=lambda e: (e.start, e.num_bytes)):
        if entry.start != position:
            raise _damaged(path, f"{shown(entry.key)} starts at byte {entry.start}, expected {position}")
        position += entry.num_bytes
    if position != file_bytes:
        raise _damaged(path, f"its tensors end at byte {position} but the file has {file_bytes}")


def _damaged(path: Path, what: str) -> AdapterRefusedError:
    return AdapterRefusedError(
        f"{path.name}: not a whole safetensors file, {what}. Copy or download the adapter again."
    )


class TensorReader:
    """Reads tensors' bytes into memory of their own; a context manager that keeps each file open."""

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}

    def read(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, uint8 [num_bytes]. Raises `AdapterRefusedError` when the file has become shorter."""
        data = np.empty(entry.num_bytes, np.uint8)
        if entry.num_bytes == 0:
            return data
        if entry.file not in self._files:
            # Tensors are read one by one, most of them small: a buffer would only be filled and thrown away.
            self._files[entry.file] = entry.file.open("rb", buffering=0)
        file, found_bytes = self._files[entry.file], 0
        while found_bytes < entry.num_bytes:
            found = os.preadv(file.fileno(), [data.data[found_bytes:]], entry.start + found_bytes)
            if not found:
                raise _damaged(entry.file, f"{shown(entry.key)} has {found_bytes} of its {entry.num_bytes} bytes")
            found_bytes += found
        return data

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
