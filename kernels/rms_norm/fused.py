"""RMSNorm with the residual sum before it: `x += y`, then `out = x / sqrt(mean(x^2) + eps) * (weight + offset)`.

`offset` is 1 for Gemma's norms. Sum, mean and product are taken in fp32; x and out are rounded once each.
"""

from __future__ import annotations

from torch import Tensor


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """New tensor of the shape of `x` [num_rows, features]; `x` is updated in place when `y` is given."""
    assert x.is_contiguous(), "x must be contiguous"
    assert y is None or (y.shape == x.shape and y.is_contiguous()), "y must be contiguous, of the shape of x"
    from .triton import norm

    return norm(x, y, weight, eps, offset)
