"""The plain twin of `add_rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Add `y` to `x` in place, if given, and return the norm of `x`, computed in fp64."""
    wide = x.double() if y is None else x.double() + y.double()
    if y is not None:
        x.copy_(wide)
        wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)
    return scaled.to(x.dtype)
