"""Root mean square normalisation: `y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension."""

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
