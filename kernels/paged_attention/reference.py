"""The plain twin of `attend_pages`: one token and one head at a time, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts.pages import PageLayout
from .types import AttentionRule
from .work import AttentionWork


def attend(
    out: Tensor,
    q: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    work: AttentionWork,
    partials: tuple[Tensor, Tensor],
    layout: PageLayout,
    layer: int,
    rule: AttentionRule,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of each query to `out` [num_tokens, H, head_dim], in fp64. Partial items are recomputed
    whole, so `partials` stays unused."""
    num_pages = len(pool) // layout.page_elements
    pages = pool[: num_pages * layout.page_elements].view(
        num_pages, layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim
    )
    per_key_head = layout.num_heads // layout.num_kv_heads
    for row, num_queries, first, sequence, *_ in work.items[: int(work.header[0])].tolist():
        for token in range(num_queries):
            position = first + token
            start = 0 if rule.window is None else max(0, position - rule.window + 1)
            needed = block_tables[sequence, : position // layout.page_tokens + 1].long()
            keys, values = pages[needed, layer].double().unbind(1)  # [pages, K, page_tokens, D]
            for head in range(layout.num_heads):
                k = keys[:, head // per_key_head].flatten(0, 1)[start : position + 1]
                v = values[:, head // per_key_head].flatten(0, 1)[start : position + 1]
                scores = (k @ q[row + token, head].double()) * rule.scale
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head, None].double()])
                out[row + token, head] = torch.softmax(scores, 0)[: len(v)] @ v
