"""Batch-invariant paged attention on a GPU: a query's bits depend on its sequence alone.

They depend neither on the queries beside it in a tile, nor on where its prompt is cut into steps, nor on whether its
context is split among programs:

- Blocks of keys begin at fixed positions, also behind the edge of a sliding window. A block that a query does not see
  changes nothing of it.
- Contexts are cut into segments (`work.SEGMENT_KEYS`), each summed by itself. They are added in their order, by the
  program that computed them or, where each has an item of its own, by `_combine`.
- Weights, which are at most 1, are summed as whole multiples of 2^-23, in any order: sums of floating point numbers
  would round by how a tile is divided among threads. The largest score is the same in any order.
- Tiles have 16 rows for decode rows and 32 for prompts, which Hopper multiplies by one instruction, `mma.sync` (64 rows
  would take `wgmma`). Multiplications and additions are never contracted, so that masked and unmasked code round alike.

Decode reads what `triton.py` reads, by tiles of the same size. Prompts multiply 32 rows per block of keys instead of
128, at 32 flops per byte from L2: some four times as long, which is a tenth of a prefill of 1,000 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..blocks import multiply
from ..launch import (
    is_exact_dot,
    is_interpreted,
    launch,
    most_registers,
    next_power_of_2,
    num_persistent_programs,
)
from ..layouts.pages import PageLayout
from .triton import PROGRAMS_PER_MULTIPROCESSOR, _combine, _sinks_of
from .types import AttentionRule
from .work import COMBINE_FIELDS, ITEM_FIELDS, AttentionWork, tile_rows_for

# Bytes of one feature of a block of keys: 64 keys of 2 bytes, as in `triton.py`.
_BLOCK_BYTES = 128


@triton.jit
def _block(
    largest, total, acc, queries, positions, start, end, page_numbers, pool_at_head, page_elements, dims, in_dims,
    scale, softcap, window,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TO_VALUES: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`largest`, `total` and `acc` with BLOCK_N more keys. Unless IS_MASKED, all queries see all these keys."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    ONE: tl.constexpr = 0x3F800000  # the bits of 1.0; those of 1.0 + w are w x 2^23 more
    keys_at = start + tl.arange(0, BLOCK_N)
    is_key = keys_at < end
    at = page_numbers + keys_at // PAGE
    page = (tl.load(at, mask=is_key, other=0) if IS_MASKED else tl.load(at)).to(tl.int64)
    at = pool_at_head + page * page_elements + (keys_at % PAGE) * HEAD_DIM
    inside = in_dims[:, None] & is_key[None, :] if IS_MASKED else in_dims[:, None]
    keys = tl.load(at[None, :] + dims[:, None], mask=inside, other=0.0)
    scores = multiply(queries, keys, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), EXACT) * scale
    if HAS_SOFTCAP:
        # tanh(z) = 2 sigmoid(2 z) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores *= LOG2_E
    if IS_MASKED:
        seen = is_key[None, :] & (keys_at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (keys_at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # a row that has seen no key yet keeps 0 - (-inf) out of the exponent
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(largest - shift)
    whole = tl.sum((weights + 1.0).to(tl.int32, bitcast=True) - ONE, axis=1)
    inside = is_key[:, None] & in_dims[None, :] if IS_MASKED else in_dims[None, :]
    values = tl.load((at + TO_VALUES)[:, None] + dims[None, :], mask=inside, other=0.0)
    acc = multiply(weights.to(values.dtype), values, acc * shrink[:, None], EXACT)
    return new_largest, total * shrink + whole.to(tl.float32) * 1.1920928955078125e-07, acc


@triton.jit
def _segment(
    first, last,
    queries, position, page_numbers, pool_at_head, page_elements, dims, in_dims, scale, softcap, window,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TO_VALUES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and of weighted values over keys first:last, for queries from `position` on."""
    positions = position + tl.arange(0, BLOCK_M) // G
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    if HAS_WINDOW:
        masked_from = first
    else:
        # every query sees the keys up to the first one's own
        masked_from = tl.maximum(first, tl.minimum(last, position + 1) // BLOCK_N * BLOCK_N)
    for start in range(first, masked_from, BLOCK_N):
        largest, total, acc = _block(
            largest, total, acc, queries, positions, start, last, page_numbers, pool_at_head, page_elements, dims,
            in_dims, scale, softcap, window,
            HEAD_DIM, PAGE, TO_VALUES, False, HAS_WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, EXACT,
        )  # fmt: skip
    for start in range(masked_from, last, BLOCK_N):
        largest, total, acc = _block(
            largest, total, acc, queries, positions, start, last, page_numbers, pool_at_head, page_elements, dims,
            in_dims, scale, softcap, window,
            HEAD_DIM, PAGE, TO_VALUES, True, HAS_WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, EXACT,
        )  # fmt: skip
    return largest, total, acc


@triton.jit
def _sum(sum_largest, sum_total, sum_acc, largest, total, acc):
    """Sums with those of one more segment, as `_combine` adds partial results."""
    new_largest = tl.maximum(sum_largest, largest)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    keep = tl.exp2(sum_largest - shift)
    take = tl.exp2(largest - shift)
    return new_largest, sum_total * keep + total * take, sum_acc * keep[:, None] + acc * take[:, None]


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _attend_in_order(
    out, q, q_stride, pool, page_elements, layer, block_tables, table_stride, header, items, values, stats, sinks,
    scale, softcap, window,
    H: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    FIELDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SEGMENT: tl.constexpr, SPANS_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    G: tl.constexpr = H // K
    TO_VALUES: tl.constexpr = K * PAGE * HEAD_DIM
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    for work in range(tl.program_id(0), tl.load(header) * K, tl.num_programs(0)):
        item = items + (work // K) * FIELDS
        kv_head = work % K
        row = tl.load(item)
        num_queries = tl.load(item + 1)
        position = tl.load(item + 2)
        sequence = tl.load(item + 3).to(tl.int64)
        begin = tl.load(item + 4)
        end = tl.load(item + 5)
        partial = tl.load(item + 6).to(tl.int64)
        is_query = m < num_queries * G
        # row m of the tile: token m // G, query head m % G of this key head
        heads = kv_head * G + m % G
        q_rows = (row + m // G).to(tl.int64)
        inside = is_query[:, None] & in_dims[None, :]
        q_at = q + q_rows[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        queries = tl.load(q_at, mask=inside, other=0.0)
        page_numbers = block_tables + sequence * table_stride
        pool_at_head = pool + (layer * 2 * K + kv_head) * (PAGE * HEAD_DIM)
        if HAS_WINDOW:
            # the block of the first key that the first query sees
            begin = tl.maximum(begin, (position - window + 1) // BLOCK_N * BLOCK_N)
        if SPANS_SEGMENTS:
            sum_largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            sum_total = tl.zeros((BLOCK_M,), dtype=tl.float32)
            if HAS_SINKS:
                sum_largest = _sinks_of(sinks + heads)
                sum_total += 1.0
            sum_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
            for segment in range(begin // SEGMENT * SEGMENT, end, SEGMENT):
                largest, total, acc = _segment(
                    tl.maximum(begin, segment), tl.minimum(end, segment + SEGMENT),
                    queries, position, page_numbers, pool_at_head, page_elements, dims, in_dims, scale, softcap, window,
                    G, HEAD_DIM, PAGE, TO_VALUES, HAS_WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, BLOCK_D, EXACT,
                )  # fmt: skip
                sum_largest, sum_total, sum_acc = _sum(sum_largest, sum_total, sum_acc, largest, total, acc)
        else:
            sum_largest, sum_total, sum_acc = _segment(
                begin, end,
                queries, position, page_numbers, pool_at_head, page_elements, dims, in_dims, scale, softcap, window,
                G, HEAD_DIM, PAGE, TO_VALUES, HAS_WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, BLOCK_D, EXACT,
            )  # fmt: skip
            if HAS_SINKS:
                if partial < 0:  # else `_combine` adds them
                    ones, zeros = tl.full((BLOCK_M,), 1.0, dtype=tl.float32), tl.zeros_like(sum_acc)
                    sum_largest, sum_total, sum_acc = _sum(
                        _sinks_of(sinks + heads), ones, zeros, sum_largest, sum_total, sum_acc
                    )
        if partial >= 0:
            at_head = partial * H + heads
            tl.store(values + at_head[:, None] * HEAD_DIM + dims[None, :], sum_acc, mask=inside)
            tl.store(stats + at_head * 2, sum_largest, mask=is_query)
            tl.store(stats + at_head * 2 + 1, sum_total, mask=is_query)
        else:
            divided = sum_acc / tl.where(sum_total == 0.0, 1.0, sum_total)[:, None]
            out_at = out + (q_rows * H + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_at, divided.to(out.dtype.element_ty), mask=inside)


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
    """Write the attention of each query to `out` [num_tokens, H, head_dim], with bits fixed by its sequence alone."""
    num_programs = num_persistent_programs(q.device, PROGRAMS_PER_MULTIPROCESSOR)
    tile_rows, block_d = work.limits.tile_rows, max(16, next_power_of_2(layout.head_dim))
    block_bytes = _BLOCK_BYTES if block_d <= 128 else _BLOCK_BYTES // 2
    # 4 warps and 2 stages, as decode tiles of `triton.py`; not tuned for prompts
    launch(
        _attend_in_order, num_programs,
        out, q, q.stride(0), pool, layout.page_elements, layer, block_tables, block_tables.stride(0),
        work.header, work.items, *partials, sinks,
        rule.scale, rule.softcap or 0.0, rule.window or 0,
        H=layout.num_heads, K=layout.num_kv_heads, HEAD_DIM=layout.head_dim, BLOCK_D=block_d, PAGE=layout.page_tokens,
        FIELDS=ITEM_FIELDS, HAS_WINDOW=rule.window is not None, HAS_SOFTCAP=rule.softcap is not None,
        HAS_SINKS=sinks is not None,
        # items of decode rows are within one, see `work.plan_attention`
        SEGMENT=work.limits.segment_keys, SPANS_SEGMENTS=tile_rows == tile_rows_for(layout, q.dtype, False, True),
        BLOCK_M=tile_rows, BLOCK_N=16 if is_interpreted() else block_bytes // q.element_size(),
        EXACT=is_exact_dot(q.dtype), num_warps=4, num_stages=2, enable_fp_fusion=False,
        # without a limit the compiler gives a prompt's tile of narrow heads 128 registers, too few
        maxnreg=most_registers(q.dtype, 3) if tile_rows > 16 and block_d <= 64 else None,
    )  # fmt: skip
    if work.limits.split_keys:
        launch(
            _combine, num_programs,
            out, work.header, work.combines, *partials, sinks,
            H=layout.num_heads, HEAD_DIM=layout.head_dim, BLOCK_D=block_d, FIELDS=COMBINE_FIELDS,
            HAS_SINKS=sinks is not None, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
