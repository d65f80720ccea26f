"""Root mean square normalisation: `y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension.

Gemma stores the weight's distance from one: `rms_norm_from_zero`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x`: [..., features], `weight`: [features]; returns the shape and dtype of `x`.

    The mean is taken in fp32 whatever the dtype, and the product with `weight` in the dtype of `x`, the order
    in which the model families define it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return weight * normed.to(x.dtype)


def rms_norm_from_zero(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` with `1 + weight` for the weight; shapes and dtypes likewise.

    Everything up to the product is fp32 and rounded once, as Gemma defines it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return normed.mul_(weight.float() + 1.0).to(x.dtype)
