"""Rotary position embedding in the half-split form of the Llama families (RoFormer, section 3.4.2).

With `x = [x1, x2]` along a head: `y1 = x1 cos - x2 sin`, `y2 = x2 cos + x1 sin`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` [num_tokens, heads, head_dim] in place by `cos`, `sin` [num_tokens, 1, head_dim // 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = first * cos
    turned.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


def rotary_tables(angles: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `angles` [num_tokens, head_dim // 2] (fp32), each [num_tokens, 1, head_dim // 2]."""
    cos = angles.cos().mul_(attention_factor).to(dtype).unsqueeze(1)
    sin = angles.sin().mul_(attention_factor).to(dtype).unsqueeze(1)
    return cos, sin
