"""Attends to views of the pool, on a CPU.

The G query heads that share a key head are folded into the query length, so each key is read once for all of
them; decoding sequences of evenly spaced extents form one call. (Gathering pages into a padded copy first costs
about three times as much: decode attention on a CPU is bound by memory reads.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from .compiled import attend_spans
from .types import AttentionPlan, DecodeGroup, PrefillChunk

_EXACT_ROWS = 16


def paged_attention(
    q: Tensor,
    pool: Tensor,
    plan: AttentionPlan,
    layer: int,
    num_kv_heads: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend `q` [T, H, D] to the pool (flat) for one layer; returns [T, H * D].

    The keys and values of the step's own tokens must be in the pool already. With `softcap` a score s becomes
    `softcap * tanh(s / softcap)` before masking (Gemma 2 report, section 2). `sinks` [H], fp32: a
    learned score of each head that joins the denominator of its softmax (gpt-oss model card, arXiv 2508.10925).
    """
    if plan.spans is not None:
        return attend_spans(q, pool, plan.spans, layer, num_kv_heads, plan.window, scale, softcap, sinks)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty_like(q)
    if plan.decode_rows is not None:
        # [S, K, G, D]: query heads of one key head side by side
        queries = q.index_select(0, plan.decode_rows).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        answers = torch.empty_like(queries)
        of_heads = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        for group in plan.groups:
            keys, values = _group_views(pool, group, layer, num_kv_heads, head_dim)
            answers[group.start : group.end] = _attend(
                queries[group.start : group.end], keys, values, group.mask, False, scale, softcap, of_heads
            )
        out.index_copy_(0, plan.decode_rows, answers.view(-1, num_heads, head_dim))
    attend_chunk = _attend_chunk_exactly if plan.is_exact else _attend_chunk
    for chunk in plan.chunks:
        out[chunk.start : chunk.end] = attend_chunk(q, pool, chunk, layer, num_kv_heads, scale, softcap, sinks)
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


def _attend_chunk(
    q: Tensor,
    pool: Tensor,
    chunk: PrefillChunk,
    layer: int,
    num_kv_heads: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
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
    of_heads = None if sinks is None else sinks.view(num_kv_heads, per_kv, 1, 1)
    answers = _attend(queries, keys, values, chunk.mask, chunk.mask is None, scale, softcap, of_heads)
    return answers.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)


def _attend_chunk_exactly(
    q: Tensor,
    pool: Tensor,
    chunk: PrefillChunk,
    layer: int,
    num_kv_heads: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one chunk, [chunk tokens, H, D], with the same bits for a token in a chunk of any size: queries
    come in multiples of 16, below which the products round by their number."""
    _, num_heads, head_dim = q.shape
    assert chunk.mask is not None, f"tokens {chunk.start} to {chunk.end} have no mask"
    per_kv, length, context = num_heads // num_kv_heads, chunk.end - chunk.start, chunk.mask.shape[1]
    head_stride = chunk.capacity_tokens * head_dim
    offset = chunk.offset + 2 * layer * num_kv_heads * head_stride
    shape, strides = (1, num_kv_heads, context, head_dim), (0, head_stride, head_dim, 1)
    keys = pool.as_strided(shape, strides, offset)
    values = pool.as_strided(shape, strides, offset + num_kv_heads * head_stride)
    num_rows = length * per_kv
    num_padded = -(-num_rows // _EXACT_ROWS) * _EXACT_ROWS
    queries = q.new_zeros(1, num_kv_heads, num_padded, head_dim)
    mine = q[chunk.start : chunk.end].view(length, num_kv_heads, per_kv, head_dim).transpose(0, 1)
    queries[0, :, :num_rows] = mine.reshape(num_kv_heads, num_rows, head_dim)
    mask = chunk.mask.new_zeros(num_padded, context)
    mask[:num_rows] = chunk.mask.repeat_interleave(per_kv, 0)
    of_rows = None
    if sinks is not None:
        of_rows = q.new_zeros(num_kv_heads, num_padded, 1)
        of_rows[:, :num_rows, 0] = sinks.view(num_kv_heads, per_kv).repeat(1, length)
    answers = _attend(queries, keys, values, mask, False, scale, softcap, of_rows)[0, :, :num_rows]
    return answers.reshape(num_kv_heads, length, per_kv, head_dim).transpose(0, 1).reshape(length, num_heads, head_dim)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of queries [..., rows, D]. `sinks`: of shape [..., rows, 1], or one that becomes it."""
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = softmax(scores, dim=-1, dtype=torch.float32)
    return weights[..., : keys.shape[-2]].to(values.dtype) @ values
