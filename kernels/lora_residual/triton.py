"""LoRA expand of o and down, fused with bias and residual, on a GPU.

Bytes per row: y and residual read, residual written, 3 x 4096 x 2 = 24 KiB, which an unfused residual add would
move as well; on top of that only B, 16 x 4096 x 2 = 128 KiB per chunk and tile. An item is up to 8 blocks of 256
columns of a tile, walked as `lora_gate_up` does: while one chunk of a block is multiplied, B of the next chunk or
block is on its way, 8 KiB. 168 registers x 128 threads let 3 programs fit on a multiprocessor: 24 KiB in flight, as
good as the 25 of the full bandwidth; y and residual come from the L2 cache. Tiles without chunks and tiles of few rows
are computed as `lora_gate_up` does. Tiles of 64 rows (prefill) take 64 columns.
In fp32 blocks have half as many columns: products run on the ordinary cores, which need more registers.
"""

from __future__ import annotations

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
    step_after,
    tile_chunks,
    tile_fields,
    vector_offsets,
)
from ..launch import few_rows_of, is_exact_dot, launch, most_registers, num_persistent_programs
from ..layouts.lora_table import NUM_SITES, LoraTable
from ..layouts.segments import SPLITS_AT, Segments

# 65536 registers / (168 x 128 threads).
PROGRAMS_PER_MULTIPROCESSOR = 3
# Bytes of a row of B: 16 rows x 256 columns in 16 bits are 8 KiB, and 16 x 256 sums 32 in each of 128 threads; with 64
# rows x 64 columns as many sums.
_BLOCK_BYTES, _PREFILL_BLOCK_BYTES = 512, 128
# Columns at once of a row by itself: 16 x 512 numbers of B are 64 in each of 128 threads (ADR 110). Not tuned.
_WIDE_N = 512


@triton.jit
def _store_sum(
    out, at, inside, value, kept, columns, in_columns, vectors, pool_fp32, bias,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Bias and the residual `kept` added to `value`, fp32 [BLOCK_M, BLOCK_N], and the store of the sum."""
    value = finish_columns(value, columns, in_columns, vectors, pool_fp32, bias, HAS_BIAS)
    if HAS_RESIDUAL:
        value += kept.to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site_row", "rows_per_resident", "splits_at", "scratch_rows"])
def _add_residual(
    out, y, residual, bias, out_features, site_row, rows_per_resident, splits_at,
    pool, pool_fp32, sites, chunks, scales, header, perm, tiles, scratch, scratch_rows,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE_N: tl.constexpr, FEW_ROWS: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    num_splits = tl.load(header + splits_at)
    num_tiles = tl.load(header)
    plane_stride = (scratch_rows // num_splits).to(tl.int64) * 16
    num_blocks = tl.cdiv(out_features, BLOCK_N)
    blocks = blocks_per_item(num_blocks, num_tiles, 8)
    num_groups = tl.cdiv(num_blocks, blocks)
    m = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), num_tiles * num_groups, tl.num_programs(0)):
        row_start, num_rows, plus, minus, scratch_row = tile_fields(tiles, item // num_groups)
        rows = tl.load(perm + row_start + m, mask=m < num_rows, other=0).to(tl.int64)
        of_tile = tile_chunks(sites, plus, minus, site_row, rows_per_resident, 0, 0)
        vectors = vector_offsets(sites, plus, minus, site_row, rows_per_resident)
        first_block = (item % num_groups) * blocks
        end_block = tl.minimum(first_block + blocks, num_blocks)
        if of_tile[1] == 0:
            if PDL:
                gdc_wait()
            for block in range(first_block, end_block):
                columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
                at = rows[:, None] * out_features + columns[None, :]
                inside = (m < num_rows)[:, None] & (columns < out_features)[None, :]
                base = tl.load(y + at, mask=inside, other=0.0)
                kept = base
                if HAS_RESIDUAL:
                    kept = tl.load(residual + at, mask=inside, other=0.0)
                _store_sum(
                    out, at, inside, base.to(tl.float32), kept, columns, columns < out_features,
                    vectors, pool_fp32, bias, HAS_RESIDUAL, HAS_BIAS,
                )  # fmt: skip
        elif FEW_ROWS > 0 and num_rows <= FEW_ROWS:
            if PDL:
                gdc_wait()
            for begin in range(first_block * BLOCK_N, end_block * BLOCK_N, WIDE_N):
                columns = begin + tl.arange(0, WIDE_N)
                in_columns = (columns < out_features) & (columns < end_block * BLOCK_N)
                for r in range(0, num_rows):
                    row = tl.load(perm + row_start + r + tl.arange(0, 1)).to(tl.int64)
                    at = row[:, None] * out_features + columns[None, :]
                    base = tl.load(y + at, mask=in_columns[None, :], other=0.0)
                    kept = base
                    if HAS_RESIDUAL:
                        kept = tl.load(residual + at, mask=in_columns[None, :], other=0.0)
                    added = expand_row(
                        pool, chunks, scales, of_tile, scratch, scratch_row, num_rows, r, num_splits, plane_stride,
                        columns, in_columns, WIDE_N, ALIGN,
                    )  # fmt: skip
                    _store_sum(
                        out, at, in_columns[None, :], base.to(tl.float32) + added[None, :], kept, columns, in_columns,
                        vectors, pool_fp32, bias, HAS_RESIDUAL, HAS_BIAS,
                    )  # fmt: skip
        else:
            num_steps = (end_block - first_block) * of_tile[1]
            block, c = first_block, 0
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            next_chunk, next_shrink = chunk_fields(chunks, scales, of_tile, 0, True, ALIGN)
            next_b = load_b(pool, next_chunk, columns, columns < out_features)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            if PDL:
                gdc_wait()  # tiles, table and B were there before the kernels whose y and shrinks are read from here on
            for step in range(0, num_steps):
                columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
                is_last, block, c = step_after(block, c, of_tile[1])
                at = rows[:, None] * out_features + columns[None, :]
                inside = ((m < num_rows) & is_last)[:, None] & (columns < out_features)[None, :]
                base = tl.load(y + at, mask=inside, other=0.0)
                kept = base
                if HAS_RESIDUAL:
                    kept = tl.load(residual + at, mask=inside, other=0.0)
                b = next_b
                shrink = next_shrink
                # B of the next chunk or block is on its way while this one is multiplied
                ahead = block * BLOCK_N + tl.arange(0, BLOCK_N)
                next_chunk, next_shrink = chunk_fields(chunks, scales, of_tile, c, step + 1 < num_steps, ALIGN)
                next_b = load_b(pool, next_chunk, ahead, ahead < out_features)
                h = load_h(scratch, shrink, scratch_row, num_rows, m, num_splits, plane_stride, BLOCK_M)
                acc = multiply(h.to(b.dtype), b, acc, EXACT)
                if is_last:
                    _store_sum(
                        out, at, inside, acc + base.to(tl.float32), kept, columns, columns < out_features,
                        vectors, pool_fp32, bias, HAS_RESIDUAL, HAS_BIAS,
                    )  # fmt: skip
                    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PDL:
        gdc_wait()  # programs without items too: a kernel that waits for this one also waits for its predecessors


def add_residual(
    out: Tensor,
    y: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
    site: int,
) -> None:
    """Write `residual + factor * (y + LoRA) + biases` to `out` [num_tokens, out_features], in one launch."""
    tile_rows = segments.limits.tile_rows
    num_programs = num_persistent_programs(y.device, PROGRAMS_PER_MULTIPROCESSOR)
    # 1 stage: the loop itself carries B on its way in registers (ADR 85)
    launch(
        _add_residual, num_programs,
        out, y, residual, bias, y.shape[1], layer * NUM_SITES + site, table.sites.shape[1] * NUM_SITES,
        SPLITS_AT + site, table.pool, table.pool_fp32, table.sites, table.chunks, table.scales,
        segments.header, segments.perm, segments.tiles, scratch, len(scratch),
        HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None,
        BLOCK_M=tile_rows, BLOCK_N=(_BLOCK_BYTES if tile_rows < 64 else _PREFILL_BLOCK_BYTES) // y.element_size(),
        WIDE_N=_WIDE_N, FEW_ROWS=few_rows_of(segments.limits.few_rows, segments.limits.tile_rows),
        EXACT=is_exact_dot(y.dtype), ALIGN=table.alignment,
        num_stages=1, num_warps=4, maxnreg=most_registers(y.dtype, PROGRAMS_PER_MULTIPROCESSOR),
    )  # fmt: skip
