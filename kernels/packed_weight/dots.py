"""Weights whose products are dot products of groups in compiled kernels (`dots.c`): in bf16, or in 8 bits.

Sums are in fp32 and int32. Rows of x are encoded in each product: in 8 bits with a scale for each row, of its largest
number; the weight has a scale for each output.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import native_number
from .panels import PANEL_TYPES, StoredWeight, unpack

_MOST_CODE = 127
_OFFSET = 128
# Most inputs of an output: a sum of as many products of 8 bits fits in 32 bits.
_MOST_INPUTS = 65536
_KINDS = {"bfloat16": 0, "int8": 1}  # as in dots.h
# Numbers behind a row's codes: its scale, and the sum of the codes.
_SCALE_NUMBERS = 2


def has_dots(products: Literal["bfloat16", "int8"]) -> bool:
    """Whether this processor has the instructions, and the compiled kernels are there."""
    return bool(native_number("kinds_of_dots") >> _KINDS[products] & 1)


class Bf16Weight(StoredWeight):
    """A packed weight rounded to bf16 and multiplied in bf16."""

    kind = _KINDS["bfloat16"]

    def __init__(self, weight: Tensor) -> None:
        plain = weight.to(torch.bfloat16)
        self.shape = (plain.shape[0], plain.shape[1])
        self.numbers = _panels(pad(plain, (0, plain.shape[1] % 2)).contiguous().view(torch.int32)).view(torch.bfloat16)

    def num_codes(self, num_rows: int) -> int:
        """Numbers of 32 bits to which `num_rows` rows of x are encoded."""
        return num_rows * (-(-self.shape[1] // 2) + _SCALE_NUMBERS)

    def dense(self) -> Tensor:
        """W, rounded to bf16, in the plain layout and fp32."""
        depth = self.numbers.numel() // self.shape[0]
        return unpack(self.numbers, PANEL_TYPES[torch.bfloat16], (self.shape[0], depth))[:, : self.shape[1]]


class Int8Weight(StoredWeight):
    """A packed weight multiplied in 8 bits: `code * scale`, codes -127 .. 127, a scale for each output.

    A row with a number that is not finite gives NaN.

    `numbers`: codes plus `_OFFSET`, then scales in fp32, as bytes.
    """

    kind = _KINDS["int8"]

    def __init__(self, weight: Tensor) -> None:
        wide = weight.float()
        assert wide.shape[1] <= _MOST_INPUTS, f"a row of {wide.shape[1]} numbers may overflow its sum"
        scales = wide.abs().amax(1).div_(_MOST_CODE)
        codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().add_(_OFFSET)
        groups = pad(codes.to(torch.uint8), (0, -wide.shape[1] % 4), value=_OFFSET).view(torch.int32)
        self.shape = (wide.shape[0], wide.shape[1])
        self.numbers = torch.cat([_panels(groups).view(torch.uint8), scales.view(torch.uint8)])

    def num_codes(self, num_rows: int) -> int:
        """Numbers of 32 bits to which `num_rows` rows of x are encoded."""
        return num_rows * (-(-self.shape[1] // 4) + _SCALE_NUMBERS)

    @property
    def panels_type(self) -> int:
        """Always 0: this class has no panels that are multiplied in fp32."""
        return 0

    def dense(self) -> Tensor:
        """W, the codes times their scales, in the plain layout and fp32."""
        codes = _rows(self.numbers[: -4 * self.shape[0]].view(torch.int32), self.shape[0]).view(torch.uint8)
        return (codes[:, : self.shape[1]].float() - _OFFSET) * self.scales[:, None]

    @property
    def scales(self) -> Tensor:
        """Scale of each output, fp32 [out_features]."""
        return self.numbers[-4 * self.shape[0] :].view(torch.float32)


def _panels(groups: Tensor) -> Tensor:
    """Groups [out_features, num_groups] (int32) as panels, flat."""
    width = native_number("panel_columns")
    num_full = len(groups) // width * width
    full = groups[:num_full].view(-1, width, groups.shape[1]).transpose(1, 2)
    return torch.cat([full.flatten(), groups[num_full:].t().flatten()])


def _rows(panels: Tensor, num_rows: int) -> Tensor:
    """Groups [num_rows, num_groups] (int32) from panels; undoes `_panels`."""
    width = native_number("panel_columns")
    num_groups, num_full = len(panels) // num_rows, num_rows // width * width
    full = panels[: num_full * num_groups].view(-1, num_groups, width).transpose(1, 2).reshape(-1, num_groups)
    last = panels[num_full * num_groups :].view(num_groups, -1).t()
    return torch.cat([full, last])
