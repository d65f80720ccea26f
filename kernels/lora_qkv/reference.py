"""The plain twin of `lora_qkv_`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts.lora_table import QKV, LoraTable
from ..layouts.pages import PageLayout
from ..layouts.reference import expanded
from ..layouts.segments import Segments
from .types import HeadFinish


def qkv(
    y: Tensor,
    finish: HeadFinish,
    layout: PageLayout,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
) -> None:
    """Finish the query heads of `y` in place, and store keys and values in the pool, in fp64, token by token."""
    num_heads, num_kv_heads, head_dim = layout.num_heads, layout.num_kv_heads, layout.head_dim
    value = expanded(y, finish.bias, table, segments, scratch, layer, QKV).view(len(y), -1, head_dim)
    q, k, v = value[:, :num_heads], value[:, num_heads : num_heads + num_kv_heads], value[:, -num_kv_heads:]
    if finish.q_norm is not None and finish.k_norm is not None:
        q, k = _normed(q, finish.q_norm, finish), _normed(k, finish.k_norm, finish)
    q, k = _rotated(q, finish), _rotated(k, finish)
    y.view(len(y), -1, head_dim)[:, :num_heads] = q
    pages = table.pool[: len(table.pool) // layout.page_elements * layout.page_elements]
    pages = pages.view(-1, layout.num_layers, 2, num_kv_heads, layout.page_tokens, head_dim)
    for token, slot in enumerate(finish.slots.tolist()):
        if slot >= 0:
            pages[slot // layout.page_tokens, layer, 0, :, slot % layout.page_tokens] = k[token].to(pages.dtype)
            pages[slot // layout.page_tokens, layer, 1, :, slot % layout.page_tokens] = v[token].to(pages.dtype)


def _normed(x: Tensor, weight: Tensor, finish: HeadFinish) -> Tensor:
    mean = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + finish.norm_eps) * (weight.double() + finish.norm_offset)


def _rotated(x: Tensor, finish: HeadFinish) -> Tensor:
    half = finish.cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = finish.cos.double()[:, None], finish.sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
