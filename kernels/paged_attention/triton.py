"""Paged attention on a GPU.

Decode reads every key and value once: 2 x context x K x D x 2 bytes, 4 KiB per token and layer for 8 heads of 128.
The G query heads of a key head are rows of one tile, so keys are read once for all of them; with G = 4 a tile of 16
rows is a quarter full, and its 2 x 16 x 128 flops per key stay far under the 200 flops per byte at which tensor
cores would limit. BLOCK_N = 64 keys are 4 pages: 16 KiB of keys and 16 KiB of values per step; 4 programs on a
multiprocessor have 4 such steps in flight, where 4.8 TB/s x 700 ns / 132 = 25 KiB would do. A split of 512
keys reads 256 KiB and leaves 4 x 128 x 4 = 2 KiB of partial sums: under 1 %, read back once more. Where rows alone fill
the device, contexts are not split and the launch that combines them is left out: some 75 us of a step of 32 layers.

Prefill multiplies 4 x queries x keys x D per head. A tile of 128 rows (32 tokens x 4 heads) loads 32 KiB of keys and
values for 128 x 64 x 128 x 4 = 4.2 MFLOP, 128 flops per byte, which L2 serves: neighbouring items share their keys. Its
sums are 128 x 128: 256 threads hold 64 each beside 32 scores, 235 registers, and nothing is kept in memory. Heads of
256 take 64 rows and blocks of 32 keys for as many sums. Keys that all queries of a tile see, most of a long prompt's,
are loaded and compared without masks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..blocks import multiply
from ..launch import is_exact_dot, is_interpreted, launch, next_power_of_2, num_persistent_programs
from ..layouts.pages import PageLayout
from .types import AttentionRule
from .work import COMBINE_FIELDS, ITEM_FIELDS, AttentionWork

# Heads of 128 take at most 128 registers x 128 threads and 38 KiB of shared memory in decode. Of programs with tiles
# of prompts one fits at a time.
PROGRAMS_PER_MULTIPROCESSOR = 4
# Bytes of one feature of a block of keys: 64 keys of 2 bytes.
_BLOCK_BYTES = 128
# Least rows of a tile of prefill; decode tiles for groups of as many heads are computed alike.
_PREFILL_ROWS = 64


@triton.jit
def _block(
    largest, total, acc, queries, positions, start, end, page_numbers, pool_at_head, page_elements, dims, in_dims,
    scale, softcap, window,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TO_VALUES: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`largest`, `total` and `acc` with BLOCK_N more keys. Unless IS_MASKED, all queries see all these keys."""
    LOG2_E: tl.constexpr = 1.4426950408889634  # weights are powers of 2, one instruction each
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
    inside = is_key[:, None] & in_dims[None, :] if IS_MASKED else in_dims[None, :]
    values = tl.load((at + TO_VALUES)[:, None] + dims[None, :], mask=inside, other=0.0)
    acc = multiply(weights.to(values.dtype), values, acc * shrink[:, None], EXACT)
    return new_largest, total * shrink + tl.sum(weights, axis=1), acc


@triton.jit
def _sinks_of(at):
    """Attention sinks, in units of log2."""
    return tl.load(at).to(tl.float32) * 1.4426950408889634


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _attend(
    out, q, q_stride, pool, page_elements, layer, block_tables, table_stride, header, items, values, stats, sinks,
    scale, softcap, window,
    H: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    FIELDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
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
        positions = position + m // G
        q_rows = (row + m // G).to(tl.int64)
        inside = is_query[:, None] & in_dims[None, :]
        q_at = q + q_rows[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        queries = tl.load(q_at, mask=inside, other=0.0)
        largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_SINKS:
            if partial < 0:  # else `_combine` adds them
                largest = _sinks_of(sinks + heads)
                total += 1.0
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        page_numbers = block_tables + sequence * table_stride
        pool_at_head = pool + (layer * 2 * K + kv_head) * (PAGE * HEAD_DIM)
        if HAS_WINDOW:
            begin = tl.maximum(begin, position - window + 1)
            masked_from = begin
        else:
            # every query sees the keys up to the first one's own
            masked_from = begin + (tl.minimum(end, position + 1) - begin) // BLOCK_N * BLOCK_N
        for start in range(begin, masked_from, BLOCK_N):
            largest, total, acc = _block(
                largest, total, acc, queries, positions, start, end, page_numbers, pool_at_head, page_elements, dims,
                in_dims, scale, softcap, window,
                HEAD_DIM, PAGE, TO_VALUES, False, HAS_WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, EXACT,
            )  # fmt: skip
        for start in range(masked_from, end, BLOCK_N):
            largest, total, acc = _block(
                largest, total, acc, queries, positions, start, end, page_numbers, pool_at_head, page_elements, dims,
                in_dims, scale, softcap, window,
                HEAD_DIM, PAGE, TO_VALUES, True, HAS_WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, EXACT,
            )  # fmt: skip
        if partial >= 0:
            at_head = partial * H + heads
            tl.store(values + at_head[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
            tl.store(stats + at_head * 2, largest, mask=is_query)
            tl.store(stats + at_head * 2 + 1, total, mask=is_query)
        else:
            divided = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            out_at = out + (q_rows * H + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_at, divided.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    out, header, combines, values, stats, sinks,
    H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    for work in range(tl.program_id(0), tl.load(header + 1) * H, tl.num_programs(0)):
        entry = combines + (work // H) * FIELDS
        row = tl.load(entry).to(tl.int64)
        first = tl.load(entry + 1).to(tl.int64)
        head = work % H
        largest = float("-inf")
        total = 0.0
        if HAS_SINKS:
            largest = _sinks_of(sinks + head)
            total = 1.0
        acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for piece in range(0, tl.load(entry + 2)):
            at = (first + piece) * H + head
            its_largest = tl.load(stats + at * 2)
            new_largest = tl.maximum(largest, its_largest)
            # with a sliding window a piece may have seen no key at all
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            keep = tl.exp2(largest - shift)
            take = tl.exp2(its_largest - shift)
            total = total * keep + tl.load(stats + at * 2 + 1) * take
            acc = acc * keep + tl.load(values + at * HEAD_DIM + dims, mask=in_dims, other=0.0) * take
            largest = new_largest
        tl.store(out + (row * H + head) * HEAD_DIM + dims, (acc / total).to(out.dtype.element_ty), mask=in_dims)


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
    """Write the attention of each query to `out` [num_tokens, H, head_dim], in one launch or two."""
    num_programs = num_persistent_programs(q.device, PROGRAMS_PER_MULTIPROCESSOR)
    tile_rows, block_d = work.limits.tile_rows, max(16, next_power_of_2(layout.head_dim))
    block_bytes = _BLOCK_BYTES if block_d <= 128 else _BLOCK_BYTES // 2
    # prompts: 64 sums in each of 256 threads, and 3 stages are 2 buffers of 32 KiB beside 32 KiB of queries; decode: 2
    # stages are one buffer of 32 KiB, so that 4 programs fit
    launch(
        _attend, num_programs,
        out, q, q.stride(0), pool, layout.page_elements, layer, block_tables, block_tables.stride(0),
        work.header, work.items, *partials, sinks,
        rule.scale, rule.softcap or 0.0, rule.window or 0,
        H=layout.num_heads, K=layout.num_kv_heads, HEAD_DIM=layout.head_dim, BLOCK_D=block_d, PAGE=layout.page_tokens,
        FIELDS=ITEM_FIELDS, HAS_WINDOW=rule.window is not None, HAS_SOFTCAP=rule.softcap is not None,
        HAS_SINKS=sinks is not None, BLOCK_M=tile_rows,
        BLOCK_N=16 if is_interpreted() else block_bytes // q.element_size(),
        EXACT=is_exact_dot(q.dtype), num_warps=8 if tile_rows >= _PREFILL_ROWS else 4,
        num_stages=3 if tile_rows >= _PREFILL_ROWS else 2,
    )  # fmt: skip
    if work.limits.split_keys:
        # 1 warp: 4 features of a head of 128 in each thread
        launch(
            _combine, num_programs,
            out, work.header, work.combines, *partials, sinks,
            H=layout.num_heads, HEAD_DIM=layout.head_dim, BLOCK_D=block_d, FIELDS=COMBINE_FIELDS,
            HAS_SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
