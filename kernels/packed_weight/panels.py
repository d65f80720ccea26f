"""Packs weights into panels of transposed rows (`../native/panels.h`).

Panels hold a weight in its own number format; products are in fp32 and have the same bits in every format. A panel is
as wide as two vectors of the processor, so panels of one machine cannot be used on another.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..native import ADDRESS, COUNT, NUMBER, native_build, native_function
from ..native.linears import LinearRecord
from ..native.segments import NO_SEGMENTS, SiteSegments

#: Number formats of weights in panels, and their numbers in vector.h: bf16 in pairs.
PANEL_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Number formats of plain rows, and their numbers in vector.h.
_ROW_TYPES = {torch.float32: 0, torch.bfloat16: 3, torch.float16: 2}
#: Forms in which rows are written: in panels, one after the other, or as columns [in_features, num_rows].
IN_PANELS, IN_ROWS, IN_COLUMNS = range(3)
#: Version of the packing; raise it when a weight is packed into other numbers, since panels are kept in files
#: (`engine/models`).
PANELS_VERSION = 2


def has_panels() -> bool:
    """Whether this processor has compiled kernels, which alone can read and write panels."""
    return native_build() is not None


class StoredWeight(ABC):
    """A packed weight that compiled kernels read: it can be kept in a file and mapped from it."""

    #: Number of the kind of products, as in dots.h.
    kind: ClassVar[int] = 2
    #: The packed numbers, flat, in the layout and type of the class.
    numbers: Tensor
    #: [out_features, in_features].
    shape: tuple[int, int]

    @classmethod
    def of_numbers(cls, numbers: Tensor, shape: tuple[int, int]) -> Self:
        """The weight with the `numbers` of another weight of this class."""
        packed = cls.__new__(cls)
        packed.numbers, packed.shape = numbers, shape
        return packed

    @property
    def panels_type(self) -> int:
        """Type of panels that are multiplied in fp32, as in vector.h."""
        return PANEL_TYPES[self.numbers.dtype]

    @property
    def scales(self) -> Tensor | None:
        """Scale of each output, fp32 [out_features], of a weight with codes of 8 bits; None for others."""
        return None

    def record(self, bias: Tensor | None) -> LinearRecord:
        """The linear layer as compiled kernels read it; valid as long as the weight and `bias`."""
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (self.scales, bias))
        return LinearRecord(self.numbers.data_ptr(), *addresses, *self.shape, self.kind, self.panels_type)

    def num_codes(self, num_rows: int) -> int:
        """Numbers of 32 bits to which `num_rows` rows of x are encoded before products; 0 for products in fp32."""
        return 0

    def multiply(self, x: Tensor, bias: Tensor | None, lora: SiteSegments | None = None) -> Tensor:
        """`x W^T + bias`, fp32 [num_tokens, out_features], plus the LoRA of the segments in `lora`."""
        x, lora = x.contiguous(), lora or NO_SEGMENTS
        y = torch.empty(len(x), self.shape[0])
        scratch = torch.empty(self.num_codes(len(x)) + lora.num_scratch(self.shape[1]))
        linear = native_function("linear", ADDRESS, ADDRESS, COUNT, ADDRESS, ADDRESS, ADDRESS)
        assert linear is not None, "compiled kernels are not there"
        layer, segments = ctypes.byref(self.record(bias)), ctypes.byref(lora.record)
        linear(y.data_ptr(), x.data_ptr(), len(x), layer, segments, scratch.data_ptr())
        return y

    @abstractmethod
    def dense(self) -> Tensor:
        """W in the plain layout and fp32, with the bits of the numbers that are multiplied."""


class PanelWeight(StoredWeight):
    """A packed weight in panels of fp32, bf16 or fp16, multiplied in fp32."""

    def __init__(self, weight: Tensor) -> None:
        plain = weight.contiguous()
        self.shape = (plain.shape[0], plain.shape[1])
        self.numbers = torch.empty(plain.numel(), dtype=panels_dtype(plain.dtype, plain.shape[1]))
        if plain.dtype not in PANEL_TYPES:
            plain = plain.float()
        pack_weight = native_function("pack_weight", ADDRESS, COUNT, ADDRESS, COUNT, COUNT, COUNT)
        assert pack_weight is not None, "compiled kernels are not there"
        plain_type = _ROW_TYPES[plain.dtype]
        pack_weight(self.numbers.data_ptr(), self.panels_type, plain.data_ptr(), *plain.shape, plain_type)

    def add_product_(self, y: Tensor, x: Tensor, scaling: float) -> None:
        """`y += scaling * x W^T`, y [num_rows, out_features] contiguous, all in fp32."""
        assert self.numbers.dtype == torch.float32, f"panels hold {self.numbers.dtype}, and fp32 is added"
        assert y.is_contiguous(), "rows must be contiguous"
        assert y.shape == (len(x), self.shape[0]), f"{y.shape} for {len(x)} rows of {self.shape[0]}"
        x = x.contiguous()
        places = (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, NUMBER)
        add_linear_panels = native_function("add_linear_panels", *places)
        assert add_linear_panels is not None, "compiled kernels are not there"
        add_linear_panels(y.data_ptr(), x.data_ptr(), len(x), self.numbers.data_ptr(), *self.shape, scaling)

    def dense(self) -> Tensor:
        """W in the plain layout and fp32."""
        return unpack(self.numbers, self.panels_type, self.shape)


def panels_dtype(dtype: torch.dtype, depth: int) -> torch.dtype:
    """The type of the numbers in panels of a weight of `dtype` with rows of `depth` numbers: `dtype`, or fp32 when no
    kernel reads it."""
    is_served = dtype in PANEL_TYPES and not (dtype == torch.bfloat16 and depth % 2)
    return dtype if is_served else torch.float32


def unpack(panels: Tensor, panels_type: int, shape: tuple[int, int]) -> Tensor:
    """The weight of this shape from panels of this type, plain and in fp32."""
    plain = torch.empty(shape)
    unpack_weight = native_function("unpack_weight", ADDRESS, ADDRESS, COUNT, COUNT, COUNT)
    assert unpack_weight is not None, "compiled kernels are not there"
    unpack_weight(plain.data_ptr(), panels.data_ptr(), *shape, panels_type)
    return plain


class MatrixRows(NamedTuple):
    """The place of packed rows in a matrix in some memory."""

    #: Place of the matrix's first number in the memory.
    start: int
    #: Type of its numbers: in panels as `native.adapter_type` gives it, else as in `POOL_TYPES`.
    type: int
    #: First of the packed rows in the matrix.
    first_row: int
    #: Rows of the whole matrix.
    num_rows: int
    #: `IN_PANELS`, `IN_ROWS` or `IN_COLUMNS`.
    form: int = IN_PANELS


def pack_matrices_(memory: Tensor, places: NDArray[np.int64], rows: Sequence[Tensor]) -> None:
    """Write each of `rows` [n, in_features] to its place in `memory` (flat, in a format of the page pool).

    `places`: int64 [number of `rows`, 5], a `MatrixRows` each. It uses one thread without the interpreter's lock: made
    for threads that prepare adapters while others compute steps.
    """
    plain = [_as_rows(each, memory.dtype) for each in rows]
    sources = np.array(
        [(each.data_ptr(), *each.shape, each.stride(0), _ROW_TYPES[each.dtype]) for each in plain], dtype=np.int64
    ).reshape(-1, 5)
    start, _, first_row, num_rows, _ = places.T
    _, rows_of_each, depths, _, _ = sources.T
    ends = start + num_rows * depths
    assert (ends <= memory.numel()).all(), f"matrices end at {ends.max()} of {memory.numel()} numbers"
    assert (first_row + rows_of_each <= num_rows).all(), f"{rows_of_each} rows from {first_row} of {num_rows}"
    pack_matrices = native_function("pack_matrices", ADDRESS, ADDRESS, COUNT)
    assert pack_matrices is not None, "compiled kernels are not there"
    records = np.concatenate([places, sources], axis=1)
    pack_matrices(memory.data_ptr(), records.ctypes.data, len(records))


def _as_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows, each dense; in `dtype` if their own format cannot be packed."""
    rows = rows if rows.dtype in _ROW_TYPES else rows.to(dtype)
    return rows if rows.stride(1) == 1 else rows.contiguous()
