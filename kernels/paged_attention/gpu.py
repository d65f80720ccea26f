"""Attention over pages: decoding sequences and prefill chunks by one operator.

    out[t, h] = softmax over keys j of the token's sequence, j <= position(t) and j > position(t) - window, of
                softcap(scale * q[t, h] . k[j, h // G])  times  v[j, h // G]

with G = H / K query heads per key head and softcap(s) = cap * tanh(s / cap). `q`, `out` [num_tokens, H, head_dim];
`block_tables` int32 [num_sequences, max_pages]: page of key j is entry j // page_tokens. Keys and values of the
step's own tokens must be in the pool already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..launch import uses_triton
from ..lora_qkv import HeadLayout
from .work import AttentionWork


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores become weights in one layer. `window`: latest tokens seen, None for all; `softcap`: None for none."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of decode items that share a sequence: `values` fp32 [max_items, H, head_dim] (sums, not divided),
    `stats` fp32 [max_items, H, 2] (largest score in units of log2, sum of weights)."""

    values: Tensor
    stats: Tensor

    @classmethod
    def allocate(cls, max_items: int, num_heads: int, head_dim: int, device: torch.device) -> Partials:
        """Scratch that needs no clearing."""
        values = torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device)
        return cls(values, torch.empty(max_items, num_heads, 2, dtype=torch.float32, device=device))


def attend_pages(
    q: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    partials: Partials,
    layout: HeadLayout,
    layer: int,
    rule: AttentionRule,
) -> Tensor:
    """New tensor [num_tokens, H * head_dim]. `q` may be a view into a packed product; its features are contiguous."""
    assert q.stride(2) == 1, "features of a query must be contiguous"
    assert q.stride(1) == q.shape[2], "query heads of a token must lie side by side"
    assert q.shape[1:] == (layout.num_heads, layout.head_dim), f"q is {list(q.shape)}, layout {layout}"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if uses_triton(q.device):
        from .triton import attend
    else:
        from .reference import attend
    attend(out, q, pool, block_tables, work, partials, layout, layer, rule)
    return out.view(len(q), -1)
