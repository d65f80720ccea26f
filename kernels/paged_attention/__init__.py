"""Attends to keys and values in pages: decoding sequences and prefill chunks by one operator.

    out[t, h] = softmax over keys j of the token's sequence, j <= position(t) and j > position(t) - window, of
                softcap(scale * q[t, h] . k[j, h // G])  times  v[j, h // G]

with G = H / K query heads per key head and softcap(s) = cap * tanh(s / cap). Where heads have sinks, the softmax of
head h is over one more score, `sinks[h]`, whose value is zero. `q`, `out` [num_tokens, H, head_dim];
`block_tables` int32 [num_sequences, max_pages]: page of key j is entry j // page_tokens. Keys and values of the
step's own tokens must be in the pool already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts.pages import PageLayout
from .libraries import StepAttention
from .types import AttentionRule, allocate_partials
from .work import AttentionWork

__all__ = ["AttentionRule", "allocate_partials", "attend_pages"]


def attend_pages(
    q: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    partials: tuple[Tensor, Tensor],
    layout: PageLayout,
    layer: int,
    rule: AttentionRule,
    library: StepAttention | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """New tensor [num_tokens, H * head_dim]. `q` may be a view into a packed product; its features are contiguous.
    `library`: a library's attention that computes this step instead of our kernel (see `libraries`). `sinks`: [H],
    which no library knows.
    """
    assert q.stride(2) == 1, "features of a query must be contiguous"
    assert q.stride(1) == q.shape[2], "query heads of a token must be contiguous"
    assert q.shape[1:] == (layout.num_heads, layout.head_dim), f"q is {list(q.shape)}, layout {layout}"
    if library is not None:
        assert sinks is None, "libraries have no attention sinks"
        return library(q, pool, layer, rule)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if work.limits.segment_keys:
        from .invariant import attend
    else:
        from .triton import attend
    attend(out, q, pool, block_tables, work, partials, layout, layer, rule, sinks)
    return out.view(len(q), -1)
