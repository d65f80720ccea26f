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
    at = sites + (resident.to(tl.int64) * rows_per_resident + site_row) * 4
    is_there = resident >= 0
    return tl.load(at, mask=is_there, other=0), tl.load(at + 1, mask=is_there, other=0)


@triton.jit
def lora_columns(
    columns, in_columns, first_column, last_column, rows_in_tile, scratch_row, num_rows,
    plus, minus, site_row, rows_per_resident, num_splits,
    pool, sites, chunks, scales, scratch, plane_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sum of signed chunks for one tile and BLOCK_N packed outputs, fp32 [BLOCK_M, BLOCK_N].

    `columns` [BLOCK_N] with mask `in_columns`, all within `first_column` .. `last_column`.
    """
    first_plus, num_plus = site_chunks(sites, plus, site_row, rows_per_resident)
    first_minus, num_minus = site_chunks(sites, minus, site_row, rows_per_resident)
    ranks = tl.arange(0, 16)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for c in range(0, num_plus + num_minus):
        chunk = tl.where(c < num_plus, first_plus + c, first_minus + c - num_plus)
        at = chunks + chunk * 5
        start = tl.multiple_of(tl.load(at + 3), ALIGN)
        count = tl.multiple_of(tl.load(at + 4), ALIGN)
        if (start <= last_column) & (start + count > first_column):
            scale = tl.load(scales + chunk) * tl.where(c < num_plus, 1.0, -1.0)
            h_rows = (scratch_row + c * num_rows + rows_in_tile).to(tl.int64)
            h_at = scratch + h_rows[:, None] * 16 + ranks[None, :]
            h = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
            for split in range(0, num_splits):
                h += tl.load(h_at + split * plane_stride, mask=(rows_in_tile < num_rows)[:, None], other=0.0)
            inside = in_columns & (columns >= start) & (columns < start + count)
            b_at = pool + tl.multiple_of(tl.load(at + 1), ALIGN) + ranks[:, None] * count + (columns - start)[None, :]
            b = tl.load(b_at, mask=(ranks < tl.load(at + 2))[:, None] & inside[None, :], other=0.0)
            acc = multiply((h * scale).to(b.dtype), b, acc, EXACT)
    return acc


@triton.jit
def finish_columns(
    value, columns, in_columns, plus, minus, site_row, rows_per_resident, sites, pool_fp32, bias,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """factor * value + base bias + adapter bias, fp32; `value` [BLOCK_M, BLOCK_N]."""
    plus_at = sites + (plus.to(tl.int64) * rows_per_resident + site_row) * 4
    factor_offset = tl.load(plus_at + 2, mask=plus >= 0, other=-1)
    plus_bias = tl.load(plus_at + 3, mask=plus >= 0, other=-1)
    minus_at = sites + (minus.to(tl.int64) * rows_per_resident + site_row) * 4
    minus_bias = tl.load(minus_at + 3, mask=minus >= 0, other=-1)
    if factor_offset >= 0:
        value = value * tl.load(pool_fp32 + factor_offset + columns, mask=in_columns, other=0.0)[None, :]
    if HAS_BIAS:
        value = value + tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if plus_bias >= 0:
        value = value + tl.load(pool_fp32 + plus_bias + columns, mask=in_columns, other=0.0)[None, :]
    if minus_bias >= 0:
        value = value - tl.load(pool_fp32 + minus_bias + columns, mask=in_columns, other=0.0)[None, :]
    return value
