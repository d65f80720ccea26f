"""Attention on views of the pool, for CPUs.

The G query heads that share a key head are folded into the query length, so each key is read once for all of
them; decoding sequences of evenly spaced extents form one call. (Gathering pages into a padded copy first costs
about three times as much: decode attention on a CPU is bound by memory reads.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import AttentionPlan, DecodeGroup, PrefillChunk


def paged_attention(
    q: Tensor, pool: Tensor, plan: AttentionPlan, layer: int, num_kv_heads: int, scale: float
) -> Tensor:
    """Attend `q` [T, H, D] to the pool (flat) for one layer; returns [T, H * D].

    The keys and values of the step's own tokens must be in the pool already.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty_like(q)
    if plan.decode_rows is not None:
        # [S, K, G, D]: query heads of one key head side by side
        queries = q.index_select(0, plan.decode_rows).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        answers = torch.empty_like(queries)
        for group in plan.groups:
            keys, values = _group_views(pool, group, layer, num_kv_heads, head_dim)
            answers[group.start : group.end] = scaled_dot_product_attention(
                queries[group.start : group.end], keys, values, attn_mask=group.mask, scale=scale
            )
        out.index_copy_(0, plan.decode_rows, answers.view(-1, num_heads, head_dim))
    for chunk in plan.chunks:
        out[chunk.start : chunk.end] = _attend_chunk(q, pool, chunk, layer, num_kv_heads, scale)
    return out.view(num_tokens, num_heads * head_dim)


def _group_views(
    pool: Tensor, group: DecodeGroup, layer: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of a group, each [rows, K, max_context, D], as views."""
    head_stride = group.capacity_tokens * head_dim
    shape = (group.end - group.start, num_kv_heads, group.max_context, head_dim)
    strides = (group.stride, head_stride, head_dim, 1)
    offset = group.offset + 2 * layer * num_kv_heads * head_stride
    keys = pool.as_strided(shape, strides, offset)
    return keys, pool.as_strided(shape, strides, offset + num_kv_heads * head_stride)


def _attend_chunk(q: Tensor, pool: Tensor, chunk: PrefillChunk, layer: int, num_kv_heads: int, scale: float) -> Tensor:
    """Attention of one chunk, [chunk tokens, H, D]."""
    _, num_heads, head_dim = q.shape
    per_kv = num_heads // num_kv_heads
    length = chunk.end - chunk.start
    context = chunk.num_past + length
    head_stride = chunk.capacity_tokens * head_dim
    offset = chunk.offset + 2 * layer * num_kv_heads * head_stride
    # batch = K, heads = G (stride 0: the G query heads read the same keys)
    shape, strides = (num_kv_heads, per_kv, context, head_dim), (head_stride, 0, head_dim, 1)
    keys = pool.as_strided(shape, strides, offset)
    values = pool.as_strided(shape, strides, offset + num_kv_heads * head_stride)
    queries = q[chunk.start : chunk.end].view(length, num_kv_heads, per_kv, head_dim).permute(1, 2, 0, 3)
    answers = scaled_dot_product_attention(
        queries, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale
    )
    return answers.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)
