"""LoRA expand of q, k and v, fused with bias, norm, rotation and the store to the pool, on a GPU.

Bytes per row: y read, queries and keys and values written, 2 x 6144 x 2 = 24 KiB for 32 + 8 + 8 heads of 128; a
separate norm, rotation and store would move them twice more. On top only B, 16 x 6144 x 2 = 192 KiB per adapter of
rank 16 and tile. The block of columns is a head: a rotation needs both halves of one, a norm all of it, and nothing
needs more. It is computed as two halves (and a rest that is not rotated), so that partners of a rotation meet in one
thread and nothing is shuffled; both halves take the same chunks and shrinks. An item is up to 8 heads of a tile,
walked chunk by chunk as `lora_gate_up` does: while one chunk of a head is multiplied, B of the next chunk or head is on
its way, 4 KiB. 16 x 128 fp32 in 64 threads are 32 registers each, at most 168 in all: 6 programs fit on a
multiprocessor, with 24 KiB of B in flight, as good as the 25 of the full bandwidth. A tile of few rows
is computed row by row as `lora_gate_up` does, a head of 128 at once, or several narrower ones of one member. Tiles of
64 rows (prefill) take 256 threads, 128 for heads of 64, and one head per item.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..blocks import (
    blocks_per_item,
    chunk_fields,
    expand_row,
    finish_columns,
    load_b,
    load_h,
    multiply,
    tile_chunks,
    tile_fields,
    vector_offsets,
)
from ..launch import (
    few_rows_of,
    is_exact_dot,
    launch,
    most_registers,
    next_power_of_2,
    num_persistent_programs,
    num_warps_for,
)
from ..layouts.lora_table import NUM_SITES, QKV, LoraTable
from ..layouts.pages import PageLayout
from ..layouts.segments import SPLITS_AT, Segments
from .types import HeadFinish

# 65536 registers / (168 x 64 threads): 6 programs with 4 KiB of B each have 24 KiB in flight.
PROGRAMS_PER_MULTIPROCESSOR = 6
# 16 x 128 sums in 64 threads: a head of 128 in a decode tile.
_SUMS_PER_THREAD = 32
# Most heads of an item, see `blocks_per_item`.
_MOST_HEADS = 8
# Columns at once of a row by itself, of heads of one member: 16 x 128 numbers of B are 32 in each of 64 threads. Not
# tuned.
_ROW_COLUMNS = 128


@triton.jit
def _norm_weight(q_norm, k_norm, head, H: tl.constexpr, dims, in_dims, offset):
    if head < H:
        weight = tl.load(q_norm + dims, mask=in_dims, other=0.0)
    else:
        weight = tl.load(k_norm + dims, mask=in_dims, other=0.0)
    return (weight.to(tl.float32) + offset)[None, :]


@triton.jit
def _chunks_of_head(sites, plus, minus, site_row, rows_per_resident, head, H: tl.constexpr, K: tl.constexpr):
    """`tile_chunks` of the member that has this head: queries, keys or values."""
    member = tl.where(head < H, 0, tl.where(head < H + K, 1, 2))
    return tile_chunks(sites, plus, minus, site_row, rows_per_resident, member, 2)


@triton.jit
def _row_of_heads(
    y, bias, cos, sin, slots, layer, page_elements,
    site_row, rows_per_resident, pool, pool_fp32, sites, chunks, scales, perm, scratch,
    tile, r, num_splits, plane_stride, vectors, head, first_head, end_head,
    H: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Computes row `r` of a tile for GROUP heads of one member from `head` on, within `first_head` to `end_head`."""
    row_start, num_rows, plus, minus, scratch_row = tile
    of_head = _chunks_of_head(sites, plus, minus, site_row, rows_per_resident, head, H, K)
    row = tl.load(perm + row_start + r).to(tl.int64)
    columns = head * HEAD_DIM + tl.arange(0, GROUP * HEAD_DIM)
    in_columns = (columns >= first_head * HEAD_DIM) & (columns < end_head * HEAD_DIM)
    at_y = y + row * ((H + 2 * K) * HEAD_DIM)
    value = tl.load(at_y + columns, mask=in_columns, other=0.0).to(tl.float32)
    value += expand_row(
        pool, chunks, scales, of_head, scratch, scratch_row, num_rows, r, num_splits, plane_stride,
        columns, in_columns, GROUP * HEAD_DIM, ALIGN,
    )  # fmt: skip
    value = finish_columns(value[None, :], columns, in_columns, vectors, pool_fp32, bias, HAS_BIAS)
    first, second = tl.split(tl.permute(tl.reshape(value, (GROUP, 2, HALF)), (0, 2, 1)))
    halves = tl.arange(0, HALF)
    in_half = halves < HALF
    heads = head + tl.arange(0, GROUP)
    in_heads = ((heads >= first_head) & (heads < end_head))[:, None] & in_half[None, :]
    if head < H + K:
        c = tl.load(cos + row * HALF + halves)[None, :]
        s = tl.load(sin + row * HALF + halves)[None, :]
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if head < H:
        at = at_y + heads[:, None] * HEAD_DIM + halves[None, :]
        tl.store(at, first.to(y.dtype.element_ty), mask=in_heads)
        tl.store(at + HALF, second.to(y.dtype.element_ty), mask=in_heads)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        is_value = (head - H) // K
        at = (
            pool
            + (slot // PAGE) * page_elements
            + ((layer * 2 + is_value) * K + (heads - H)[:, None] % K) * (PAGE * HEAD_DIM)
            + (slot % PAGE) * HEAD_DIM
            + halves[None, :]
        )
        tl.store(at, first.to(pool.dtype.element_ty), mask=in_heads & (slot >= 0))
        tl.store(at + HALF, second.to(pool.dtype.element_ty), mask=in_heads & (slot >= 0))


@triton.jit(do_not_specialize=["layer", "site_row", "rows_per_resident", "scratch_rows"])
def _qkv(
    y, bias, q_norm, k_norm, norm_eps, norm_offset, cos, sin, slots, layer, page_elements,
    site_row, rows_per_resident,
    pool, pool_fp32, sites, chunks, scales, header, perm, tiles, scratch, scratch_rows,
    H: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, SPLITS: tl.constexpr, MOST_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    FEW_ROWS: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    heads: tl.constexpr = H + 2 * K
    num_splits = tl.load(header + SPLITS)
    num_tiles = tl.load(header)
    plane_stride = (scratch_rows // num_splits).to(tl.int64) * 16
    m = tl.arange(0, BLOCK_M)
    halves = tl.arange(0, HALF_BLOCK)
    in_half = halves < HALF
    rests = 2 * HALF + tl.arange(0, REST_BLOCK)
    in_rest = rests < HEAD_DIM
    if MOST_HEADS == 1:
        heads_per_item: tl.constexpr = 1
    else:
        heads_per_item = blocks_per_item(heads, num_tiles, MOST_HEADS)
    num_groups = tl.cdiv(heads, heads_per_item)
    for item in range(tl.program_id(0), num_tiles * num_groups, tl.num_programs(0)):
        row_start, num_rows, plus, minus, scratch_row = tile_fields(tiles, item // num_groups)
        vectors = vector_offsets(sites, plus, minus, site_row, rows_per_resident)
        first_head = (item % num_groups) * heads_per_item
        if MOST_HEADS == 1:
            num_heads: tl.constexpr = 1
        else:
            num_heads = tl.minimum(heads_per_item, heads - first_head)
        if GROUP > 0 and FEW_ROWS > 0 and num_rows <= FEW_ROWS:
            if PDL:
                gdc_wait()
            for group in range(first_head // GROUP, tl.cdiv(first_head + num_heads, GROUP)):
                for r in range(0, num_rows):
                    _row_of_heads(
                        y, bias, cos, sin, slots, layer, page_elements,
                        site_row, rows_per_resident, pool, pool_fp32, sites, chunks, scales, perm, scratch,
                        (row_start, num_rows, plus, minus, scratch_row), r, num_splits, plane_stride, vectors,
                        group * GROUP, first_head, first_head + num_heads,
                        H, K, HEAD_DIM, HALF, PAGE, GROUP, HAS_BIAS, ALIGN,
                    )  # fmt: skip
        else:
            of_head = _chunks_of_head(sites, plus, minus, site_row, rows_per_resident, first_head, H, K)
            next_chunk, next_shrink = chunk_fields(chunks, scales, of_head, 0, True, ALIGN)
            next_at = first_head * HEAD_DIM
            if HALF > 0:
                next_first_b = load_b(pool, next_chunk, next_at + halves, in_half)
                next_second_b = load_b(pool, next_chunk, next_at + HALF + halves, in_half)
            if 2 * HALF < HEAD_DIM:
                next_rest_b = load_b(pool, next_chunk, next_at + rests, in_rest)
            if PDL:
                gdc_wait()  # tiles, table and B were there before the kernels whose y and shrinks are read from here on
            for number in range(0, num_heads):
                head = first_head + number
                rows = tl.load(perm + row_start + m, mask=m < num_rows, other=0).to(tl.int64)
                slot = tl.load(slots + rows, mask=m < num_rows, other=-1).to(tl.int64)
                # rows that keep this head in y, turn it, store it in the pool: all of the tile's or none
                rows_in_y = tl.where(head < H, num_rows, 0)
                rows_turned = tl.where(head < H + K, num_rows, 0)
                rows_in_pool = num_rows - rows_in_y
                # queries stay in y, keys and values go to their slot of their page
                kv_head = (head - H) % K
                is_value = (head - H) // K
                at_pool = (
                    (slot // PAGE) * page_elements
                    + ((layer * 2 + is_value) * K + kv_head) * (PAGE * HEAD_DIM)
                    + (slot % PAGE) * HEAD_DIM
                )
                at_y = rows * (heads * HEAD_DIM) + head * HEAD_DIM
                to_y = (m < rows_in_y)[:, None]
                to_pool = ((m < rows_in_pool) & (slot >= 0))[:, None]

                begin = head * HEAD_DIM
                if HALF > 0:
                    at = y + at_y[:, None] + halves[None, :]
                    inside = (m < num_rows)[:, None] & in_half[None, :]
                    first_y = tl.load(at, mask=inside, other=0.0)
                    second_y = tl.load(at + HALF, mask=inside, other=0.0)
                    first = tl.zeros((BLOCK_M, HALF_BLOCK), dtype=tl.float32)
                    second = tl.zeros((BLOCK_M, HALF_BLOCK), dtype=tl.float32)
                if 2 * HALF < HEAD_DIM:
                    inside = (m < num_rows)[:, None] & in_rest[None, :]
                    rest_y = tl.load(y + at_y[:, None] + rests[None, :], mask=inside, other=0.0)
                    rest = tl.zeros((BLOCK_M, REST_BLOCK), dtype=tl.float32)
                if MOST_HEADS == 1:
                    of_next_head = of_head
                else:
                    of_next_head = _chunks_of_head(sites, plus, minus, site_row, rows_per_resident, head + 1, H, K)
                num_chunks = tl.maximum(of_head[1], 1)
                for c in range(0, num_chunks):
                    shrink = next_shrink
                    if HALF > 0:
                        first_b = next_first_b
                        second_b = next_second_b
                    if 2 * HALF < HEAD_DIM:
                        rest_b = next_rest_b
                    # B of the next chunk or head is on its way while this one is multiplied
                    is_last = c + 1 == num_chunks
                    is_needed = (number + 1 < num_heads) | (c + 1 < num_chunks)
                    of_next = of_head
                    if is_last:
                        of_next = of_next_head
                    next_c = tl.where(is_last, 0, c + 1)
                    next_chunk, next_shrink = chunk_fields(chunks, scales, of_next, next_c, is_needed, ALIGN)
                    next_at = begin + tl.where(is_last, HEAD_DIM, 0)
                    if HALF > 0:
                        next_first_b = load_b(pool, next_chunk, next_at + halves, in_half)
                        next_second_b = load_b(pool, next_chunk, next_at + HALF + halves, in_half)
                    if 2 * HALF < HEAD_DIM:
                        next_rest_b = load_b(pool, next_chunk, next_at + rests, in_rest)
                    h = load_h(scratch, shrink, scratch_row, num_rows, m, num_splits, plane_stride, BLOCK_M)
                    if HALF > 0:
                        first = multiply(h.to(first_b.dtype), first_b, first, EXACT)
                        second = multiply(h.to(second_b.dtype), second_b, second, EXACT)
                    if 2 * HALF < HEAD_DIM:
                        rest = multiply(h.to(rest_b.dtype), rest_b, rest, EXACT)
                of_head = of_next_head
                squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
                if HALF > 0:
                    first += first_y.to(tl.float32)
                    second += second_y.to(tl.float32)
                    first = finish_columns(first, begin + halves, in_half, vectors, pool_fp32, bias, HAS_BIAS)
                    second = finish_columns(second, begin + HALF + halves, in_half, vectors, pool_fp32, bias, HAS_BIAS)
                    squares += tl.sum(first * first + second * second, axis=1)
                if 2 * HALF < HEAD_DIM:
                    rest += rest_y.to(tl.float32)
                    rest = finish_columns(rest, begin + rests, in_rest, vectors, pool_fp32, bias, HAS_BIAS)
                    squares += tl.sum(rest * rest, axis=1)
                    if HAS_NORM:
                        if head < H + K:
                            weight = _norm_weight(q_norm, k_norm, head, H, rests, in_rest, norm_offset)
                            rest = rest * tl.rsqrt(squares / HEAD_DIM + norm_eps)[:, None] * weight
                    y_at, kept_y = y + at_y[:, None] + rests[None, :], to_y & in_rest[None, :]
                    tl.store(y_at, rest.to(y.dtype.element_ty), mask=kept_y)
                    kept = to_pool & in_rest[None, :]
                    tl.store(pool + at_pool[:, None] + rests[None, :], rest.to(pool.dtype.element_ty), mask=kept)
                if HALF > 0:
                    if HAS_NORM:
                        if head < H + K:
                            inverse = tl.rsqrt(squares / HEAD_DIM + norm_eps)[:, None]
                            first *= inverse * _norm_weight(q_norm, k_norm, head, H, halves, in_half, norm_offset)
                            weight = _norm_weight(q_norm, k_norm, head, H, halves + HALF, in_half, norm_offset)
                            second *= inverse * weight
                    turns = (m < rows_turned)[:, None] & in_half[None, :]
                    c = tl.load(cos + rows[:, None] * HALF + halves[None, :], mask=turns, other=1.0)
                    s = tl.load(sin + rows[:, None] * HALF + halves[None, :], mask=turns, other=0.0)
                    turned_first = first * c - second * s
                    turned_second = second * c + first * s
                    kept_y, kept_pool = to_y & in_half[None, :], to_pool & in_half[None, :]
                    y_at = y + at_y[:, None] + halves[None, :]
                    tl.store(y_at, turned_first.to(y.dtype.element_ty), mask=kept_y)
                    tl.store(y_at + HALF, turned_second.to(y.dtype.element_ty), mask=kept_y)
                    pool_at = pool + at_pool[:, None] + halves[None, :]
                    tl.store(pool_at, turned_first.to(pool.dtype.element_ty), mask=kept_pool)
                    tl.store(pool_at + HALF, turned_second.to(pool.dtype.element_ty), mask=kept_pool)
    if PDL:
        gdc_wait()  # programs without items too: a kernel that waits for this one also waits for its predecessors


def qkv(
    y: Tensor,
    finish: HeadFinish,
    layout: PageLayout,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
) -> None:
    """Finish the query heads of `y` in place, and store keys and values in the pool, in one launch."""
    half, tile_rows = finish.cos.shape[1], segments.limits.tile_rows
    # 16 columns are the narrowest tensor core tile
    half_block = max(16, next_power_of_2(half))
    rest_block = max(16, next_power_of_2(layout.head_dim - 2 * half))
    num_columns = (2 * half_block if half else 0) + (rest_block if 2 * half < layout.head_dim else 0)
    is_decode = tile_rows < 64
    # 2 warps hold a head of 128 of a decode tile; narrower heads take as many
    num_warps = num_warps_for(tile_rows * num_columns, _SUMS_PER_THREAD, fewest=2)
    # 168 registers in decode: 6 programs of 64 threads are 3 of 128. 128 in a prompt's tile of heads of 64, by which 4
    # programs fit. Larger tiles are left to the compiler.
    max_registers = None
    if is_decode or num_warps == 4:
        max_registers = most_registers(y.dtype, PROGRAMS_PER_MULTIPROCESSOR // 2 if is_decode else 4)
    num_programs = num_persistent_programs(y.device, PROGRAMS_PER_MULTIPROCESSOR)
    # 1 stage: the loops themselves carry B on its way in registers (ADR 85)
    launch(
        _qkv, num_programs,
        y, finish.bias, finish.q_norm, finish.k_norm, finish.norm_eps, finish.norm_offset,
        finish.cos, finish.sin, finish.slots, layer, layout.page_elements,
        layer * NUM_SITES + QKV, table.sites.shape[1] * NUM_SITES,
        table.pool, table.pool_fp32, table.sites, table.chunks, table.scales,
        segments.header, segments.perm, segments.tiles, scratch, len(scratch),
        H=layout.num_heads, K=layout.num_kv_heads, HEAD_DIM=layout.head_dim, HALF=half, PAGE=layout.page_tokens,
        HALF_BLOCK=half_block, REST_BLOCK=rest_block, SPLITS=SPLITS_AT + QKV,
        MOST_HEADS=_MOST_HEADS if is_decode else 1,
        GROUP=_heads_of_one_member(layout, half) if is_decode and finish.q_norm is None else 0,
        FEW_ROWS=few_rows_of(segments.limits.few_rows, tile_rows),
        HAS_NORM=finish.q_norm is not None, HAS_BIAS=finish.bias is not None,
        BLOCK_M=tile_rows, EXACT=is_exact_dot(y.dtype), ALIGN=table.alignment, num_stages=1,
        num_warps=num_warps, maxnreg=max_registers,
    )  # fmt: skip


def _heads_of_one_member(layout: PageLayout, half: int) -> int:
    """Heads of one member that a row by itself computes at once: as many as fit into `_ROW_COLUMNS`, at least one.

    0 when rows are not computed by themselves: when the rotated halves do not fill a head of a power of 2. Heads with
    norms are not computed so either, since the norms' weights leave too few registers.
    """
    if 2 * half != layout.head_dim or half != next_power_of_2(half):
        return 0
    return math.gcd(layout.num_heads, layout.num_kv_heads, max(1, _ROW_COLUMNS // layout.head_dim))
