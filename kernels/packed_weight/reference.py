"""Plain twins of a packed weight's product and of rows in e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_CODE = 448.0


def multiply(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + bias` in fp64, [num_tokens, out_features], by a plain `weight` [out_features, in_features]."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (e4m3, of x's shape) and scales (fp32 [num_rows, 1]) of the rows of `x` [num_rows, num_columns]."""
    finite = torch.where(x.isfinite(), x.float(), 0.0)
    largest = finite.abs().amax(1, keepdim=True)
    # a number over a tensor is the number times the reciprocal in torch, rounded twice
    factors = torch.where(largest > 0, torch.tensor(_LARGEST_CODE, device=x.device) / largest, 1.0)
    scaled = torch.where(x.isfinite(), (finite * factors).clamp(-_LARGEST_CODE, _LARGEST_CODE), torch.nan)
    return scaled.to(torch.float8_e4m3fn), torch.where(largest > 0, largest * (1 / _LARGEST_CODE), 1.0)
