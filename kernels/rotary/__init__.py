"""Rotary position embedding in the half-split form of the Llama families (RoFormer, section 3.4.2).

With `x = [x1, x2]` along a head: `y1 = x1 cos - x2 sin`, `y2 = x2 cos + x1 sin`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, POOL_TYPES, native_function
from .reference import rotate

__all__ = ["rotary_tables", "rotate_and_store_"]

_COMPILED_ARGUMENTS = (ADDRESS, ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS, *(COUNT,) * 5)


def rotate_and_store_(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    pool: Tensor,
    places: tuple[Tensor, Tensor],
    layer: int,
    num_heads: int,
) -> None:
    """Rotate query and key heads of `qkv` [num_tokens, num_heads + 2 K, head_dim] in place, then copy its key and
    value heads to their places in `pool` (flat), rounded to its number format. `rotary`: cosine and sine, or None for
    layers that do not rotate. `places`, in rows of head_dim numbers of the pool: of each token's key and value heads in
    layer 0, [num_tokens, 2 K], and from one layer to the next, [num_tokens, 1]."""
    tensors = (qkv, pool, *places, *(rotary or ()))
    is_served = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and qkv.dtype == torch.float32
    compiled = native_function("rotate_and_store", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        rotate(qkv, rotary, pool, places, layer, num_heads)
        return
    num_tokens, num_all_heads, head_dim = qkv.shape
    cosine, sine, half = (None, None, 0) if rotary is None else (*(t.data_ptr() for t in rotary), rotary[0].shape[-1])
    num_kv_heads = (num_all_heads - num_heads) // 2
    compiled(
        qkv.data_ptr(), cosine, sine, half, pool.data_ptr(), POOL_TYPES[pool.dtype],
        *(place.data_ptr() for place in places), layer, num_tokens, num_heads, num_kv_heads, head_dim,
    )  # fmt: skip


def rotary_tables(angles: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `angles` [num_tokens, head_dim // 2] (fp32), each [num_tokens, 1, head_dim // 2]."""
    cos = angles.cos().mul_(attention_factor).to(dtype).unsqueeze(1)
    sin = angles.sin().mul_(attention_factor).to(dtype).unsqueeze(1)
    return cos, sin
