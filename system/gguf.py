"""Goes through the bytes of a GGUF file: keys and tensors by their lengths, before any value is read.

Lengths are compared with the file before anything is made of them. Format: ggml `docs/gguf.md`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .untrusted import shown

# Types of metadata values; those that are numbers, as `struct` names them.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Vocabularies of 260,000 tokens have 1.3 million, with their types, scores and merges.
_MAX_VALUES = 3_000_000
#: Versions of the format that are read.
VERSIONS = (2, 3)
#: Alignment of tensors in a file that does not say one.
ALIGNMENT = 32
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


def check_sizes(tensors: Mapping[str, GgufTensor], file_bytes: int) -> None:
    """Raise ValueError for a tensor that is not in a file of this size, or has no whole blocks."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] % KINDS_READ[tensor.kind][1]:
            raise ValueError(f"{name} has rows of {tensor.shape[-1]} numbers, which are no whole blocks")
        if tensor.offset + tensor.num_bytes > file_bytes:
            raise ValueError(f"{name} ends at byte {tensor.offset + tensor.num_bytes} of a file of {file_bytes}")


class GgufWalk:
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
