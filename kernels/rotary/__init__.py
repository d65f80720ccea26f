"""Rotary position embedding in the half-split form of the Llama families (RoFormer, section 3.4.2).

With `x = [x1, x2]` along a head: `y1 = x1 cos - x2 sin`, `y2 = x2 cos + x1 sin`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, POOL_TYPES, native_function

_COMPILED_ARGUMENTS = (ADDRESS, ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS, *(COUNT,) * 5)


class KeyPlaces(NamedTuple):
    """Places for the keys and values of a step's tokens in a flat pool, in rows of head_dim numbers."""

    #: Rows of each token's key and value heads in layer 0, [num_tokens, 2 K].
    rows: Tensor
    #: Rows from one layer to the next, [num_tokens, 1].
    layer_stride: Tensor


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` [num_tokens, heads, head_dim] in place by `cos`, `sin` [num_tokens, 1, head_dim // 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = first * cos
    turned.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


def rotate_and_store_(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, pool: Tensor, places: KeyPlaces, layer: int, num_heads: int
) -> None:
    """Rotate query and key heads of `qkv` [num_tokens, num_heads + 2 K, head_dim] in place, then copy its key and
    value heads to their places in `pool` (flat), rounded to its number format. `rotary`: cosine and sine, or None for
    layers that do not rotate."""
    tensors = (qkv, pool, *places, *(rotary or ()))
    is_served = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and qkv.dtype == torch.float32
    compiled = native_function("rotate_and_store", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        rotate_and_store_by_torch_(qkv, rotary, pool, places, layer, num_heads)
        return
    num_tokens, num_all_heads, head_dim = qkv.shape
    cosine, sine, half = (None, None, 0) if rotary is None else (*(t.data_ptr() for t in rotary), rotary[0].shape[-1])
    num_kv_heads = (num_all_heads - num_heads) // 2
    compiled(
        qkv.data_ptr(), cosine, sine, half, pool.data_ptr(), POOL_TYPES[pool.dtype], places.rows.data_ptr(),
        places.layer_stride.data_ptr(), layer, num_tokens, num_heads, num_kv_heads, head_dim,
    )  # fmt: skip


def rotate_and_store_by_torch_(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, pool: Tensor, places: KeyPlaces, layer: int, num_heads: int
) -> None:
    """`rotate_and_store_` for every device and dtype."""
    rows = places.rows + layer * places.layer_stride
    num_rotated, head_dim = num_heads + rows.shape[1] // 2, qkv.shape[-1]
    if rotary is not None:
        rotate_(qkv[:, :num_rotated, : 2 * rotary[0].shape[-1]], *rotary)
    pool.view(-1, head_dim).index_copy_(0, rows.reshape(-1), qkv[:, num_heads:].reshape(-1, head_dim).to(pool.dtype))


def rotary_tables(angles: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `angles` [num_tokens, head_dim // 2] (fp32), each [num_tokens, 1, head_dim // 2]."""
    cos = angles.cos().mul_(attention_factor).to(dtype).unsqueeze(1)
    sin = angles.sin().mul_(attention_factor).to(dtype).unsqueeze(1)
    return cos, sin
