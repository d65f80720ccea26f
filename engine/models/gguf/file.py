"""Reads an opened GGUF file: metadata as plain values, tensors memory-mapped.

Keys and tensors are gone through by their lengths first, and what is not supported is refused then: the vocabulary,
hundreds of thousands of texts, is read last. Format: ggml `docs/gguf.md`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....system.untrusted import shown, shown_name
from ...errors import EngineError, ModelFilesError
from .keys import ARCHITECTURES, refused_keys

if TYPE_CHECKING:
    import numpy as np

# Types of metadata values; those that are numbers, as `struct` names them.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Vocabularies of 260,000 tokens have 1.3 million, with their types, scores and merges.
_MAX_VALUES = 3_000_000
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
#: Number of a kind of quantisation -> its name, numbers of a block, bytes of a block.
KINDS_READ: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
#: Kinds that are known and not read: of ggml's own arithmetic, of no weights, newer, or removed from ggml.
KINDS_NOT_READ: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in its file. `kind`: number of its quantisation. `shape`: [out_features, in_features] or
    [features]. `offset`: position of its first byte in the file.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int

    @property
    def kind_name(self) -> str:
        """Name of its quantisation, such as `Q4_K`."""
        return KINDS_READ[self.kind][0]

    @property
    def num_bytes(self) -> int:
        """Bytes of its blocks."""
        _, block, block_bytes = KINDS_READ[self.kind]
        return math.prod(self.shape) // block * block_bytes


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

    def require(self, key: str) -> Any:
        """A value of this architecture, e.g. `block_count`. Raises `ModelFilesError` when absent."""
        full_key = f"{self.architecture}.{key}"
        if full_key not in self.metadata:
            raise ModelFilesError(f"{self.path}: metadata key {full_key!r} is missing. Fetch the file again.")
        return self.metadata[full_key]

    def optional(self, key: str, default: Any = None) -> Any:
        """A value of this architecture, or the default."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

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
        walk = _Walk(content)
        version, num_tensors, num_keys = walk.preamble()
        if version not in _VERSIONS:
            raise EngineError(
                f"{path}: version {version} of GGUF is not supported. Convert the model again; current files have 3."
            )
        places = walk.keys(num_keys, lambda architecture: _check_architecture(path, architecture))
        scalars = {key: read() for key, (is_array, read) in places.items() if not is_array}
        _check_architecture(path, scalars.get("general.architecture"))
        problems = refused_keys(scalars, {key for key, (is_array, _) in places.items() if is_array})
        if problems:
            raise EngineError(f"{path}: {' '.join(problems)} Give the model's Hugging Face folder instead.")
        tensors = walk.tensors(num_tensors, scalars.get("general.alignment", _ALIGNMENT))
        _check_kinds(path, tensors)
        _check_sizes(tensors, len(content))
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


def _check_sizes(tensors: Mapping[str, GgufTensor], file_bytes: int) -> None:
    for name, tensor in tensors.items():
        if tensor.shape[-1] % KINDS_READ[tensor.kind][1]:
            raise ValueError(f"{name} has rows of {tensor.shape[-1]} numbers, which are no whole blocks")
        if tensor.offset + tensor.num_bytes > file_bytes:
            raise ValueError(f"{name} ends at byte {tensor.offset + tensor.num_bytes} of a file of {file_bytes}")


class _Walk:
    """Goes through a file's bytes from behind the magic on. Raises ValueError with what is wrong.

    Lengths are compared with the file before anything is made of them: a file may speak of 2**63 numbers.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._num_values = content, 4, 0
        #: `<` for little-endian files, `>` for big-endian ones.
        self.order = "<"

    def preamble(self) -> tuple[int, int, int]:
        """Version of the format, number of tensors, number of keys."""
        version = self._number("I")
        if version & 0xFFFF == 0:
            self.order, self._at = ">", 4
            version = self._number("I")
        return version, self._count(self._number("Q")), self._count(self._number("Q"))

    def keys(self, num_keys: int, check: Callable[[Any], None]) -> dict[str, tuple[bool, Callable[[], Any]]]:
        """Key -> whether its value is an array, and a function that reads the value. `check`: called with the
        architecture, whose key stands first.
        """
        found: dict[str, tuple[bool, Callable[[], Any]]] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in found:
                raise ValueError(f"key {key} is given twice")
            kind, num_items = self._number("I"), 1
            is_array = kind == _ARRAY
            if is_array:
                kind, num_items = self._number("I"), self._count(self._number("Q"))
            found[key] = is_array, self._skip(kind, num_items, is_array)
            if key == "general.architecture":
                check(found[key][1]())
        return found

    def tensors(self, num_tensors: int, alignment: Any) -> dict[str, GgufTensor]:
        """Tensors by name, in the order of the file."""
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={shown(alignment)} is no power of two")
        places: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name, num_dimensions = self._text(), self._number("I")
            if name in places:
                raise ValueError(f"tensor {name} is there twice")
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise ValueError(f"{name} has {num_dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
            kind, offset = self._number("I"), self._number("Q")
            places[name] = kind, shape, offset
        start = -(-self._at // alignment) * alignment
        return {name: GgufTensor(kind, shape, start + offset) for name, (kind, shape, offset) in places.items()}

    def _skip(self, kind: int, num_items: int, is_array: bool) -> Callable[[], Any]:
        """Pass over a value; returns a function that reads it."""
        start = self._at
        if kind == _STRING:
            content, size, unpack = self._content, len(self._content), struct.Struct(self.order + "Q").unpack_from
            at = start
            for _ in range(num_items):
                if at + 8 > size:
                    raise ValueError("its metadata ends with the file")
                at += 8 + unpack(content, at)[0]
                if at > size:
                    raise ValueError(f"a value of {unpack(content, self._at)[0]} bytes in a file of {size}")
                self._at = at
            return lambda: self._texts(start, num_items) if is_array else self._texts(start, 1)[0]
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}{', which is an array in an array' if kind == _ARRAY else ''}")
        form = f"{self.order}{num_items}{_NUMBERS[kind]}"
        self._pass(struct.calcsize(form))

        def read() -> Any:
            values = struct.unpack_from(form, self._content, start)
            return list(values) if is_array else values[0]

        return read

    def _texts(self, at: int, num_items: int) -> list[str]:
        unpack, content, texts = struct.Struct(self.order + "Q").unpack_from, self._content, []
        for _ in range(num_items):
            end = at + 8 + unpack(content, at)[0]
            texts.append(content[at + 8 : end].decode())
            at = end
        return texts

    def _text(self) -> str:
        num_bytes = self._number("Q")
        start = self._at
        self._pass(num_bytes)
        return self._content[start : self._at].decode()

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        if self._at + size > len(self._content):
            raise ValueError("its metadata ends with the file")
        found: int = struct.unpack_from(self.order + form, self._content, self._at)[0]
        self._at += size
        return found

    def _pass(self, num_bytes: int) -> None:
        if num_bytes > len(self._content) - self._at:
            raise ValueError(f"a value of {num_bytes} bytes in a file of {len(self._content)}")
        self._at += num_bytes

    def _count(self, more: int) -> int:
        self._num_values += more
        if self._num_values > _MAX_VALUES:
            raise ValueError(f"its metadata has {self._num_values} values, expected at most {_MAX_VALUES}")
        return more
