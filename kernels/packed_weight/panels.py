"""Packs weights into panels of transposed rows, see `../native/panels.h`.

A panel is as wide as two vectors of the processor, so what one machine packs is not for another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, NUMBER, native_build, native_function

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in cpu.c
#: To be raised when the same weight is packed into other numbers: panels are kept in files (`engine/models`).
PANELS_VERSION = 1


def has_panels() -> bool:
    """Whether this processor has compiled kernels, which alone can read and write panels."""
    return native_build() is not None


class PanelWeight:
    """See `PackedWeight`."""

    def __init__(self, weight: Tensor) -> None:
        plain = weight.contiguous()
        assert plain.dtype == torch.float32, f"panels hold fp32, not {plain.dtype}"
        self._out_features, self._in_features = plain.shape
        self._panels = torch.empty(plain.numel())
        pack_weight = native_function("pack_weight", ADDRESS, ADDRESS, COUNT, COUNT)
        assert pack_weight is not None, "compiled kernels are not there"
        pack_weight(self._panels.data_ptr(), plain.data_ptr(), *plain.shape)

    @classmethod
    def of_panels(cls, panels: Tensor, shape: tuple[int, int]) -> PanelWeight:
        """A weight of `shape` [out_features, in_features] whose panels (flat, fp32) were written by `pack_rows_`."""
        assert panels.numel() == shape[0] * shape[1], f"{panels.numel()} numbers for {shape}"
        assert panels.dtype == torch.float32, f"panels hold fp32, not {panels.dtype}"
        packed = cls.__new__(cls)
        packed._panels, (packed._out_features, packed._in_features) = panels, shape
        return packed

    @property
    def shape(self) -> tuple[int, int]:
        """See `PackedWeight`."""
        return self._out_features, self._in_features

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `PackedWeight`."""
        x = x.contiguous()
        y = torch.empty(len(x), self._out_features)
        places = (ADDRESS, ADDRESS, COUNT, ADDRESS, ADDRESS, COUNT, COUNT)
        linear_panels = native_function("linear_panels", *places)
        assert linear_panels is not None, "compiled kernels are not there"
        linear_panels(
            y.data_ptr(), x.data_ptr(), len(x), self._panels.data_ptr(), None if bias is None else bias.data_ptr(),
            self._out_features, self._in_features,
        )  # fmt: skip
        return y

    def add_product_(self, y: Tensor, x: Tensor, scaling: float) -> None:
        """`y += scaling * x W^T`, y [num_rows, out_features] contiguous, in fp32."""
        assert y.is_contiguous(), "rows must be contiguous"
        assert y.shape == (len(x), self._out_features), f"{y.shape} for {len(x)} rows of {self._out_features}"
        x = x.contiguous()
        places = (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, NUMBER)
        add_linear_panels = native_function("add_linear_panels", *places)
        assert add_linear_panels is not None, "compiled kernels are not there"
        add_linear_panels(
            y.data_ptr(), x.data_ptr(), len(x), self._panels.data_ptr(), self._out_features, self._in_features, scaling
        )

    def dense(self) -> Tensor:
        """See `PackedWeight`."""
        return unpacked(self._panels, self._out_features)


def unpacked(panels: Tensor, num_rows: int) -> Tensor:
    """The weight [num_rows, in_features] that `panels` (flat) hold."""
    plain = torch.empty(num_rows, panels.numel() // num_rows)
    unpack_weight = native_function("unpack_weight", ADDRESS, ADDRESS, COUNT, COUNT)
    assert unpack_weight is not None, "compiled kernels are not there"
    unpack_weight(plain.data_ptr(), panels.data_ptr(), *plain.shape)
    return plain


def pack_rows_(panels: Tensor, first_row: int, num_rows: int, rows: Tensor) -> None:
    """Write `rows` [n, in_features] (fp32, bf16 or fp16) as rows `first_row` and so on of a weight of `num_rows` rows
    in panels (flat, fp32).

    It takes one thread and no lock of the interpreter: made for threads that prepare adapters while others step.
    """
    plain = rows.contiguous()
    if plain.dtype not in _TYPES:
        plain = plain.float()
    assert panels.numel() == num_rows * plain.shape[1], f"{panels.numel()} numbers for {num_rows} rows of {plain.shape}"
    assert first_row + len(plain) <= num_rows, f"rows {first_row} to {first_row + len(plain)} of {num_rows}"
    pack_rows = native_function("pack_rows", ADDRESS, COUNT, COUNT, ADDRESS, COUNT, COUNT, COUNT)
    assert pack_rows is not None, "compiled kernels are not there"
    pack_rows(panels.data_ptr(), first_row, num_rows, plain.data_ptr(), *plain.shape, _TYPES[plain.dtype])
