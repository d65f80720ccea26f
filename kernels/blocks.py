"""Triton functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, EXACT: tl.constexpr):
    """acc + a b in fp32. EXACT: operands widened first, without TF32."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:  # noqa: RET505  (Triton compiles one branch, so both must be branches)
        return tl.dot(a, b, acc)


@triton.jit
def tile_fields(tiles, tile):
    """row_start, num_rows, plus, minus, scratch_row of a tile (see `kernels.layouts.segments`)."""
    at = tiles + tile * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def site_chunks(sites, resident, site_row, rows_per_resident):
    """first_chunk, num_chunks of a resident at one layer and site; no chunks when `resident` is -1."""
    at = sites + (resident.to(tl.int64) * rows_per_resident + site_row) * 8
    is_there = resident >= 0
    return tl.load(at, mask=is_there, other=0), tl.load(at + 1, mask=is_there, other=0)


@triton.jit
def member_chunks(sites, resident, site_row, rows_per_resident, member, LAST: tl.constexpr):
    """first_chunk, num_chunks of a site, and begin, end among these chunks of the ones that reach `member` of the
    site's LAST + 1 members."""
    at = sites + (resident.to(tl.int64) * rows_per_resident + site_row) * 8
    is_there = resident >= 0
    first = tl.load(at, mask=is_there, other=0).to(tl.int32)
    count = tl.load(at + 1, mask=is_there, other=0).to(tl.int32)
    if LAST == 0:
        return first, count, count * 0, count
    else:  # noqa: RET505  (Triton compiles one branch, so both must be branches)
        begin = tl.load(at + 3 + 2 * member, mask=is_there & (member > 0), other=0).to(tl.int32)
        end = tl.load(at + tl.where(member == LAST, 1, 4 + 2 * member), mask=is_there, other=0).to(tl.int32)
        return first, count, begin, end


@triton.jit
def tile_chunks(sites, plus, minus, site_row, rows_per_resident, member, LAST: tl.constexpr):
    """The chunks that a tile adds to a member's columns: chunks of `plus`, then chunks of `minus`.

    num_plus, num_chunks, then chunk and scratch position of number 0 as if all chunks were of `plus`, and as if all
    were of `minus`.
    """
    first_plus, all_plus, begin_plus, end_plus = member_chunks(sites, plus, site_row, rows_per_resident, member, LAST)
    first_minus, _, begin_minus, end_minus = member_chunks(sites, minus, site_row, rows_per_resident, member, LAST)
    num_plus = end_plus - begin_plus
    num_chunks = num_plus + end_minus - begin_minus
    minus_at = all_plus + begin_minus - num_plus
    return num_plus, num_chunks, first_plus + begin_plus, begin_plus, first_minus + begin_minus - num_plus, minus_at


@triton.jit
def chunk_fields(chunks, scales, of_tile, c, is_needed, ALIGN: tl.constexpr):
    """Chunk `c` of `tile_chunks`: the place of its B (b_offset, num_ranks, start, count), then the place of its shrink
    and its scale (position, scale). A chunk that does not exist or is not needed has no ranks and scale 0.
    No load waits for another."""
    num_plus, num_chunks, plus_chunk, plus_at, minus_chunk, minus_at = of_tile
    is_plus = c < num_plus
    is_there = is_needed & (c < num_chunks)
    chunk = c + tl.where(is_plus, plus_chunk, minus_chunk)
    at = chunks + chunk * 5
    b_offset = tl.multiple_of(tl.load(at + 1, mask=is_there, other=0), ALIGN)
    num_ranks = tl.load(at + 2, mask=is_there, other=0)
    start = tl.multiple_of(tl.load(at + 3, mask=is_there, other=0), ALIGN)
    count = tl.multiple_of(tl.load(at + 4, mask=is_there, other=0), ALIGN)
    scale = tl.load(scales + chunk, mask=is_there, other=0.0) * tl.where(is_plus, 1.0, -1.0)
    position = tl.where(is_there, c + tl.where(is_plus, plus_at, minus_at), -1)
    return (b_offset, num_ranks, start, count), (position, scale)


@triton.jit
def load_b(pool, of_chunk, columns, in_columns):
    """A block of a chunk's B, [16, BLOCK_N]; zeros behind its ranks."""
    b_offset, num_ranks, start, count = of_chunk
    ranks = tl.arange(0, 16)
    at = pool + b_offset + ranks[:, None] * count + (columns - start)[None, :]
    return tl.load(at, mask=(ranks < num_ranks)[:, None] & in_columns[None, :], other=0.0)


@triton.jit
def load_h(scratch, of_chunk, scratch_row, num_rows, rows_in_tile, num_splits, plane_stride, BLOCK_M: tl.constexpr):
    """A chunk's shrink, scaled, [BLOCK_M, 16], planes added in order; zeros for a chunk that does not exist. Up to four
    planes cost one wait: none of their loads waits for another."""
    position, scale = of_chunk
    rows = (scratch_row + position * num_rows + rows_in_tile).to(tl.int64)
    at = scratch + rows[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (rows_in_tile < tl.where(position >= 0, num_rows, 0))[:, None]
    h = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
    for first in range(0, num_splits, 4):
        for plane in tl.static_range(4):
            is_there = inside & (first + plane < num_splits)
            h += tl.load(at + (first + plane) * plane_stride, mask=is_there, other=0.0)
    return h * scale


@triton.jit
def load_h_row(scratch, of_chunk, scratch_row, num_rows, row, num_splits, plane_stride):
    """`load_h` of one row of the tile: [16]."""
    position, scale = of_chunk
    at = scratch + (scratch_row + position * num_rows + row).to(tl.int64) * 16 + tl.arange(0, 16)
    h = tl.zeros((16,), dtype=tl.float32)
    for first in range(0, num_splits, 4):
        for plane in tl.static_range(4):
            is_there = (position >= 0) & (first + plane < num_splits)
            h += tl.load(at + (first + plane) * plane_stride, mask=is_there, other=0.0)
    return h * scale


@triton.jit
def expand_row(
    pool, chunks, scales, of_tile, scratch, scratch_row, num_rows, row, num_splits, plane_stride, columns, in_columns,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """LoRA's part of one row of a tile, fp32 [BLOCK_N], on the ordinary cores: a tensor core tile has 16 rows, so a
    tile of few rows would waste most of its products and of the work on each of its numbers."""
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for c in range(0, of_tile[1]):
        chunk, shrink = chunk_fields(chunks, scales, of_tile, c, True, ALIGN)
        b = load_b(pool, chunk, columns, in_columns)
        h = load_h_row(scratch, shrink, scratch_row, num_rows, row, num_splits, plane_stride)
        total += tl.sum(h.to(b.dtype).to(tl.float32)[:, None] * b.to(tl.float32), axis=0)
    return total


@triton.jit
def vector_offsets(sites, plus, minus, site_row, rows_per_resident):
    """Offsets of a tile's fp32 vectors in the pool: factor of `plus`, bias of `plus`, bias of `minus`; -1: none."""
    plus_at = sites + (plus.to(tl.int64) * rows_per_resident + site_row) * 8
    minus_at = sites + (minus.to(tl.int64) * rows_per_resident + site_row) * 8
    factor = tl.load(plus_at + 2, mask=plus >= 0, other=-1)
    plus_bias = tl.load(plus_at + 3, mask=plus >= 0, other=-1)
    return factor, plus_bias, tl.load(minus_at + 3, mask=minus >= 0, other=-1)


@triton.jit
def finish_columns(value, columns, in_columns, vectors, pool_fp32, bias, HAS_BIAS: tl.constexpr):
    """factor * value + base bias + adapter bias, fp32; `value` [BLOCK_M, BLOCK_N], `vectors` of `vector_offsets`."""
    factor, plus_bias, minus_bias = vectors
    if factor >= 0:
        value = value * tl.load(pool_fp32 + factor + columns, mask=in_columns, other=0.0)[None, :]
    if HAS_BIAS:
        value = value + tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if plus_bias >= 0:
        value = value + tl.load(pool_fp32 + plus_bias + columns, mask=in_columns, other=0.0)[None, :]
    if minus_bias >= 0:
        value = value - tl.load(pool_fp32 + minus_bias + columns, mask=in_columns, other=0.0)[None, :]
    return value


@triton.jit
def blocks_per_item(num_blocks, num_tiles, MOST: tl.constexpr):
    """Column blocks of one item: as many as leave two items for each program, 1 to MOST.

    What the blocks share of a tile is read once (ADR 85). MOST is 8 everywhere, and not tuned.
    """
    return tl.minimum(tl.maximum(tl.cdiv(num_blocks * num_tiles, 2 * tl.num_programs(0)), 1), MOST)


@triton.jit
def step_after(block, c, chunks_per_block):
    """Whether chunk `c` is the last of its block, then block and chunk of the next step."""
    is_last = c + 1 == chunks_per_block
    return is_last, tl.where(is_last, block + 1, block), tl.where(is_last, 0, c + 1)
