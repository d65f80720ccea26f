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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ...system.untrusted import parse_object, shown
from ..errors import AdapterRefusedError

# Pairs on every expert of the largest mixtures are 100,000 tensors and 18 MB of header.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 120_000
MAX_NAME_CHARACTERS = 512
MAX_DIMENSIONS = 8
#: Size in bytes up to which findings about a header or a configuration are remembered. Headers of 80 layers have 200
#: KB.
MAX_SHARED_BYTES = 512 << 10
#: Most headers and configurations that are remembered.
MAX_SHARED = 32
# Bytes per element; only the float types of FLOAT_TYPES can hold adapter weights.
ELEMENT_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
FLOAT_TYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of a file that is a part of another one."""

    #: Name of the tensor.
    key: str
    #: Shape of the tensor.
    shape: tuple[int, ...]
    #: Name of the file, without its folder.
    file_name: str
    #: Position of the first byte in the file.
    start: int
    #: Bytes of the tensor.
    num_bytes: int

    @property
    def end(self) -> int:
        """Position in the file behind the last byte."""
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, and its place in a file."""

    #: Name of the tensor.
    key: str
    #: Number format, by its name in safetensors.
    dtype: str
    #: Shape of the tensor.
    shape: tuple[int, ...]
    #: Name of the file, without its folder.
    file_name: str
    #: Position of the first byte in the file.
    start: int
    #: Bytes of the tensor, as it is read.
    num_bytes: int
    #: Whether rows and columns are exchanged in the file.
    is_transposed: bool = False
    #: Order of rows in the file, (first, outer, n, m): those behind the first ones are [outer, n, m, …] there and
    #: [outer, m, n, …] here; None: they are in one order.
    row_order: tuple[int, int, int, int] | None = None
    #: Bytes of its blocks in the file if they are of kind Q8_0 (32 numbers: a factor in fp16, then 8 bits each); 0:
    #: plain numbers.
    q8_bytes: int = 0
    #: Tensors of its number format that it is made of; empty for a tensor that is in a file as a whole.
    parts: tuple[TensorPart, ...] = ()
    #: Whether its parts stand along its diagonal, with zeros beside them; else one below the other.
    is_diagonal: bool = False

    @property
    def end(self) -> int:
        """Position in the file behind the last byte."""
        return self.start + (self.q8_bytes or self.num_bytes)

    def joined(self, parts: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """The bytes of the tensor, uint8 [num_bytes], from those of its parts."""
        if not self.is_diagonal:
            return np.concatenate(parts)
        numbers = np.zeros(self.shape, f"<u{ELEMENT_BYTES[self.dtype]}")
        row = column = 0
        for part, data in zip(self.parts, parts, strict=True):
            height, width = part.shape
            numbers[row : row + height, column : column + width] = data.view(numbers.dtype).reshape(part.shape)
            row, column = row + height, column + width
        return numbers.reshape(-1).view(np.uint8)

    def arranged(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, uint8 [num_bytes], from those in the file: a copy where it is arranged otherwise."""
        if not (self.q8_bytes or self.is_transposed or self.row_order):
            return stored
        numbers = _unpacked(stored) if self.q8_bytes else stored.view(f"<u{ELEMENT_BYTES[self.dtype]}")
        if self.is_transposed:
            numbers = numbers.reshape(self.shape[::-1]).T
        if self.row_order:
            (first, outer, n, m), width = self.row_order, self.shape[1]
            numbers = numbers.reshape(self.shape)
            moved = numbers[first:].reshape(outer, n, m, -1, width).swapaxes(1, 2)
            numbers = np.concatenate([numbers[:first], moved.reshape(-1, width)])
        return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def _unpacked(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Numbers of blocks of kind Q8_0, float32 [num_blocks, 32]."""
    by_block = blocks.reshape(-1, 34)
    factors = np.ascontiguousarray(by_block[:, :2]).view("<f2").astype(np.float32)  # [num_blocks, 1]
    return factors * by_block[:, 2:].view(np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The tensors of one file, by key. `is_shared`: files of that name, size and header have this very object, so that
    what is found for one adapter of a job holds for the others that were trained alike. `metadata`: keys of a file in
    GGUF.
    """

    tensors: Mapping[str, TensorEntry]
    is_shared: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """All tensors of one file, without reading their values. Raises `AdapterRefusedError` for a damaged file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path.name, f"only {file_bytes} bytes long")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > file_bytes - 8:
                raise _damaged(path.name, f"its header claims {header_bytes} bytes of a file of {file_bytes}")
            if header_bytes > MAX_HEADER_BYTES:
                raise _damaged(path.name, f"its header has {header_bytes} bytes, expected at most {MAX_HEADER_BYTES}")
            text = file.read(header_bytes)
    except OSError as error:
        raise AdapterRefusedError(f"{path.name}: cannot be read ({error.strerror}). Check its permissions.") from None
    if len(text) <= MAX_SHARED_BYTES:
        return _shared(path.name, text, file_bytes)
    return Header(_tensors(path.name, text, file_bytes), is_shared=False)


@lru_cache(maxsize=MAX_SHARED)
def _shared(file_name: str, text: bytes, file_bytes: int) -> Header:
    return Header(_tensors(file_name, text, file_bytes), is_shared=True)


def _tensors(file_name: str, text: bytes, file_bytes: int) -> Mapping[str, TensorEntry]:
    """The tensors that a header describes. `file_bytes`: size of its file."""
    # Seen before the parser makes objects of them.
    _check_count(file_name, text.count(b'"dtype"'))
    try:
        header = parse_object(text)
    except ValueError as error:
        raise _damaged(file_name, f"its header is not a JSON object ({error})") from None
    header.pop("__metadata__", None)
    _check_count(file_name, len(header))
    data_start = 8 + len(text)
    entries = tuple(_entry(file_name, key, value, data_start) for key, value in header.items())
    _check_cover(file_name, entries, data_start, file_bytes)
    return MappingProxyType({entry.key: entry for entry in entries})


def _check_count(file_name: str, num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise _damaged(file_name, f"it lists {num_tensors} tensors, expected at most {MAX_TENSORS}")


def _entry(file_name: str, key: str, value: Any, data_start: int) -> TensorEntry:
    if len(key) > MAX_NAME_CHARACTERS:
        raise _damaged(file_name, f"{shown(key)} has {len(key)} characters, expected at most {MAX_NAME_CHARACTERS}")
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
        num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise _damaged(file_name, f"its header entry for {shown(key)} is malformed: {shown(value)}") from None
    if end - begin != num_bytes:
        raise _damaged(
            file_name, f"{shown(key)} of shape {shown(list(shape))} {dtype} has {end - begin} bytes, not {num_bytes}"
        )
    return TensorEntry(key, dtype, shape, file_name, data_start + begin, num_bytes)


def _check_cover(file_name: str, entries: tuple[TensorEntry, ...], data_start: int, file_bytes: int) -> None:
    """Check that the tensors fill the file exactly: no hole, no overlap, no missing tail."""
    position = data_start
    for entry in sorted(entries, key=lambda e: (e.start, e.num_bytes)):
        if entry.start != position:
            raise _damaged(file_name, f"{shown(entry.key)} starts at byte {entry.start}, expected {position}")
        position += entry.num_bytes
    if position != file_bytes:
        raise _damaged(file_name, f"its tensors end at byte {position} but the file has {file_bytes}")


def _damaged(file_name: str, what: str) -> AdapterRefusedError:
    return AdapterRefusedError(
        f"{file_name}: not a whole safetensors file, {what}. Copy or download the adapter again."
    )


class TensorReader:
    """Reads tensors' bytes out of the files of a folder; a context manager that keeps each file open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, FileIO] = {}

    def read(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, uint8 [num_bytes], in memory of their own. Raises `AdapterRefusedError` when the
        file has become shorter.
        """
        if entry.parts:
            return entry.joined([self._stored(part) for part in entry.parts])
        return entry.arranged(self._stored(entry))

    def read_all(self, entries: Iterable[TensorEntry]) -> dict[str, npt.NDArray[np.uint8]]:
        """The bytes of tensors by key. Tensors side by side in a file are read at once and share their memory, where
        each is aligned for its numbers. Raises what `read` raises.
        """
        entries = list(entries)
        found = {entry.key: self.read(entry) for entry in entries if entry.parts}
        for run in _runs(entry for entry in entries if not entry.parts):
            first, last = run[0], run[-1]
            data = np.empty(last.end - first.start, np.uint8)
            self._fill(data, first.file_name, first.start, run)
            for entry in run:
                found[entry.key] = entry.arranged(data[entry.start - first.start : entry.end - first.start])
        return found

    def _stored(self, entry: TensorEntry | TensorPart) -> npt.NDArray[np.uint8]:
        data = np.empty(entry.end - entry.start, np.uint8)
        self._fill(data, entry.file_name, entry.start, [entry])
        return data

    def _fill(
        self, data: npt.NDArray[np.uint8], file_name: str, start: int, entries: Sequence[TensorEntry | TensorPart]
    ) -> None:
        """Read as many bytes as `data` has from a position of a file. `entries`: which tensors these are, in order."""
        if file_name not in self._files:
            # Tensors are read straight from the file: a buffer would only be filled and thrown away.
            self._files[file_name] = (self._folder / file_name).open("rb", buffering=0)
        file, found_bytes = self._files[file_name], 0
        while found_bytes < len(data):
            found = os.preadv(file.fileno(), [data.data[found_bytes:]], start + found_bytes)
            if not found:
                cut = next(e for e in entries if e.end > start + found_bytes)
                read_bytes = start + found_bytes - cut.start
                raise _damaged(file_name, f"{shown(cut.key)} has {read_bytes} of its {cut.end - cut.start} bytes")
            found_bytes += found

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def _runs(entries: Iterable[TensorEntry]) -> list[list[TensorEntry]]:
    """Runs of tensors that stand side by side in one file, in order."""
    runs: list[list[TensorEntry]] = []
    for entry in sorted(entries, key=lambda e: (e.file_name, e.start, e.num_bytes)):
        if runs and _goes_on(runs[-1], entry):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def _goes_on(run: Sequence[TensorEntry], entry: TensorEntry) -> bool:
    first, last = run[0], run[-1]
    is_next = (last.file_name, last.end) == (entry.file_name, entry.start)
    return is_next and (entry.start - first.start) % ELEMENT_BYTES[entry.dtype] == 0
