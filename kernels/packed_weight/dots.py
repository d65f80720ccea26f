"""Weights whose products are dot products of groups in compiled kernels (`dots.c`): in bf16, or in 8 bits.

Sums are in fp32 and int32. Rows of x are encoded in each product: in 8 bits with a scale for each row, of its largest
number; the weight has a scale for each output.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import ADDRESS, COUNT, native_function, native_number
from ..native.segments import NO_SEGMENTS, SiteSegments
from .panels import PANEL_TYPES, StoredWeight, unpack

_MOST_CODE = 127
_OFFSET = 128
# A sum of so many products of 8 bits fits in 32.
_MOST_INPUTS = 65536
_KINDS = {"bfloat16": 0, "int8": 1}  # as in dots.c


def has_dots(products: Literal["bfloat16", "int8"]) -> bool:
    """Whether this processor has the instructions, and the compiled kernels are there."""
    return bool(native_number("kinds_of_dots") >> _KINDS[products] & 1)


class Bf16Weight(StoredWeight):
    """See `PackedWeight`. The weight is rounded to bf16."""

    def __init__(self, weight: Tensor) -> None:
        plain = weight.to(torch.bfloat16)
        self.shape = (plain.shape[0], plain.shape[1])
        self.numbers = _panels(pad(plain, (0, plain.shape[1] % 2)).contiguous().view(torch.int32)).view(torch.bfloat16)

    def multiply(self, x: Tensor, bias: Tensor | None, lora: SiteSegments | None = None) -> Tensor:
        """See `PackedWeight`."""
        return _linear(x, self.numbers, None, bias, lora, self.shape, "bfloat16")

    def dense(self) -> Tensor:
        """See `PackedWeight`."""
        depth = self.numbers.numel() // self.shape[0]
        return unpack(self.numbers, PANEL_TYPES[torch.bfloat16], (self.shape[0], depth))[:, : self.shape[1]]


class Int8Weight(StoredWeight):
    """See `PackedWeight`. The weight is `code * scale`, codes -127 .. 127, a scale for each output.

    `numbers`: codes above zero by an offset, then scales in fp32, as bytes.
    """

    def __init__(self, weight: Tensor) -> None:
        wide = weight.float()
        assert wide.shape[1] <= _MOST_INPUTS, f"a row of {wide.shape[1]} numbers may overflow its sum"
        scales = wide.abs().amax(1).div_(_MOST_CODE)
        codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().add_(_OFFSET)
        groups = pad(codes.to(torch.uint8), (0, -wide.shape[1] % 4), value=_OFFSET).view(torch.int32)
        self.shape = (wide.shape[0], wide.shape[1])
        self.numbers = torch.cat([_panels(groups).view(torch.uint8), scales.view(torch.uint8)])

    def multiply(self, x: Tensor, bias: Tensor | None, lora: SiteSegments | None = None) -> Tensor:
        """See `PackedWeight`. A row with a number that is not finite gives NaN."""
        return _linear(x, self.numbers, self._scales, bias, lora, self.shape, "int8")

    def dense(self) -> Tensor:
        """See `PackedWeight`: what the codes stand for."""
        codes = _rows(self.numbers[: -4 * self.shape[0]].view(torch.int32), self.shape[0]).view(torch.uint8)
        return (codes[:, : self.shape[1]].float() - _OFFSET) * self._scales[:, None]

    @property
    def _scales(self) -> Tensor:
        return self.numbers[-4 * self.shape[0] :].view(torch.float32)


def _linear(
    x: Tensor, w: Tensor, scales: Tensor | None, bias: Tensor | None, lora: SiteSegments | None, shape: tuple[int, int],
    products: Literal["bfloat16", "int8"],
) -> Tensor:  # fmt: skip
    x, lora = x.contiguous(), lora or NO_SEGMENTS
    y = torch.empty(len(x), shape[0])
    num_codes = len(x) * (-(-shape[1] // (4 if products == "int8" else 2)) + 2)  # and each row's scale
    scratch = torch.empty(num_codes + lora.num_scratch(shape[1]), dtype=torch.int32)
    places = (ADDRESS, ADDRESS, COUNT, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, COUNT, ADDRESS, ADDRESS, COUNT, COUNT)
    linear_dots = native_function("linear_dots", *places)
    assert linear_dots is not None, "compiled kernels are not there"
    linear_dots(
        y.data_ptr(), x.data_ptr(), len(x), w.data_ptr(), None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(), *shape, _KINDS[products], scratch.data_ptr(),
        lora.address, lora.num_segments, lora.largest_rank,
    )  # fmt: skip
    return y


def _panels(groups: Tensor) -> Tensor:
    """Groups [out_features, num_groups] (int32) as panels, flat."""
    width = native_number("panel_columns")
    num_full = len(groups) // width * width
    full = groups[:num_full].view(-1, width, groups.shape[1]).transpose(1, 2)
    return torch.cat([full.flatten(), groups[num_full:].t().flatten()])


def _rows(panels: Tensor, num_rows: int) -> Tensor:
    """`_panels` undone."""
    width = native_number("panel_columns")
    num_groups, num_full = len(panels) // num_rows, num_rows // width * width
    full = panels[: num_full * num_groups].view(-1, num_groups, width).transpose(1, 2).reshape(-1, num_groups)
    last = panels[num_full * num_groups :].view(num_groups, -1).t()
    return torch.cat([full, last])
