"""Weights multiplied in floating point numbers of 8 bits on a GPU: `y = (s_x q_x) (s_w q_w)^T`, summed in fp32.

`q` are e4m3 numbers (Micikevicius 2022, FP8 formats for deep learning): 4 bits of exponent, 3 of mantissa, 448 the
largest. A scale is a row's largest number over 448: of the weight one per output, of x one per token, so that what a
row becomes does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

#: Number of which in_features and out_features must be multiples for products on a GPU.
ALIGNED_FEATURES = 16


class Fp8Weight:
    """A packed weight multiplied in e4m3. `codes` e4m3 [out_features, in_features], `scales` fp32 [out_features, 1];
    `dtype`: type of the weight that was packed."""

    def __init__(self, weight: Tensor) -> None:
        assert can_be_fp8(weight), f"a weight {tuple(weight.shape)} is no multiple of {ALIGNED_FEATURES}"
        self.dtype = weight.dtype
        self.codes, self.scales = quantize_rows(weight)

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + bias` [num_tokens, out_features] in the type of `x`, which is bf16 on a GPU."""
        codes, scales = quantize_rows(x)
        if x.device.type == "cuda":
            y = torch._scaled_mm(codes, self.codes.t(), scales, self.scales.t(), out_dtype=x.dtype)
        else:
            y = linear(codes.float() * scales, self.dense()).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def dense(self) -> Tensor:
        """W, the codes times their scales, in the plain layout and fp32."""
        return self.codes.float() * self.scales


def can_be_fp8(weight: Tensor) -> bool:
    """Whether a weight of this shape can be multiplied in e4m3."""
    return not any(n % ALIGNED_FEATURES for n in weight.shape)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (e4m3, of x's shape) and scales (fp32 [num_rows, 1]) of the rows of `x` [num_rows, num_columns].

    A number that is not finite becomes NaN, so that no product of its row is a number.
    """
    from .triton import quantize

    return quantize(x.contiguous())
