"""Root mean square normalisation: `y = x / sqrt(mean(x^2) + eps) * weight`, over the last dimension.

Gemma stores the weight's distance from one: `rms_norm_from_zero`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, NUMBER, native_function

_COMPILED_ARGUMENTS = (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, NUMBER)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of `x` [..., features] times `weight` [features], in the shape and dtype of `x`.

    The mean is taken in fp32 whatever the dtype, and the product with `weight` in the dtype of `x`, the order
    in which the model families define it.
    """
    rows = x.reshape(-1, x.shape[-1])
    is_served = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and rows.stride(-1) == 1
    compiled = native_function("rms_norm", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        return rms_norm_by_torch(x, weight, eps)
    out = torch.empty(x.shape)
    compiled(out.data_ptr(), rows.data_ptr(), rows.stride(0), weight.data_ptr(), *rows.shape, eps)
    return out


def rms_norm_by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` for every device and dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return weight * normed.to(x.dtype)


def rms_norm_from_zero(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of `x` [..., features] times `1 + weight`, in the shape and dtype of `x`.

    Everything up to the product is fp32 and rounded once, as Gemma defines it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return normed.mul_(weight.float() + 1.0).to(x.dtype)
