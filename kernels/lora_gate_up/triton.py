"""LoRA expand of gate and up, fused with bias and activation, on a GPU.

Bytes per row: y read, out written, (2 + 1) x 14336 x 2 = 84 KiB, what an unfused activation moves as well; on top
only B, 2 x 16 x 14336 x 2 = 896 KiB per adapter of rank 16 and tile. An item is up to 8 blocks of columns of a tile.
Which of three ways it takes follows from the tile:

- No chunks: bias and activation alone.
- Few rows: row by row, 512 columns at a time, on the ordinary cores. A tensor core's tile has 16 rows, and all else
  that is done to it is done 16 times: with 256 adapters of one row each an H200 took 152 us, 70 % of all issue slots,
  where B and y take 60.
- Else chunk by chunk: while one chunk of a block is multiplied, B of the next chunk or block is on its way, 8 KiB with
  128 columns of gate and as many of up. y comes from the L2 cache and is asked for before B is multiplied. Tiles of
  64 rows (prefill) take 32 columns: as many sums.

168 registers x 128 threads let 3 programs fit on a multiprocessor.
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
from ..layouts.lora_table import GATE_UP, NUM_SITES, LoraTable
from ..layouts.segments import SPLITS_AT, Segments

# 65536 registers / (168 x 128 threads). The rows' code takes 168; before it, 125 let 4 programs fit (ADR 110).
PROGRAMS_PER_MULTIPROCESSOR = 3
# Columns of gate, and of up: with 16 rows 2 x 16 x 128 sums, 32 in each of 128 threads; with 64 rows as many.
_BLOCK_N, _PREFILL_BLOCK_N = 128, 32
# Columns at once of a row by itself: 16 x 512 numbers of B are 64 in each of 128 threads (ADR 110). Not tuned.
_WIDE_N = 512


@triton.jit
def _store_active(
    out, rows, inside, gate, up, columns, intermediate, vectors, pool_fp32, bias,
    IS_SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Bias and activation of gate and up, fp32 [BLOCK_M, BLOCK_N], and the store of their product."""
    in_columns = columns < intermediate
    gate = finish_columns(gate, columns, in_columns, vectors, pool_fp32, bias, HAS_BIAS)
    up = finish_columns(up, columns + intermediate, in_columns, vectors, pool_fp32, bias, HAS_BIAS)
    if IS_SILU:
        active = gate * tl.sigmoid(gate)
    else:
        # tanh(z) = 2 sigmoid(2 z) - 1, so 0.5 g (1 + tanh(z)) = g sigmoid(2 z); 1.5957... = 2 sqrt(2 / pi)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    at = out + rows[:, None] * intermediate + columns[None, :]
    tl.store(at, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site_row", "rows_per_resident", "scratch_rows"])
def _gate_up(
    out, y, bias, intermediate, site_row, rows_per_resident,
    pool, pool_fp32, sites, chunks, scales, header, perm, tiles, scratch, scratch_rows,
    SPLITS: tl.constexpr, IS_SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE_N: tl.constexpr, FEW_ROWS: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    num_splits = tl.load(header + SPLITS)
    num_tiles = tl.load(header)
    plane_stride = (scratch_rows // num_splits).to(tl.int64) * 16
    num_blocks = tl.cdiv(intermediate, BLOCK_N)
    blocks = blocks_per_item(num_blocks, num_tiles, 8)
    num_groups = tl.cdiv(num_blocks, blocks)
    m = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), num_tiles * num_groups, tl.num_programs(0)):
        row_start, num_rows, plus, minus, scratch_row = tile_fields(tiles, item // num_groups)
        rows = tl.load(perm + row_start + m, mask=m < num_rows, other=0).to(tl.int64)
        of_gate = tile_chunks(sites, plus, minus, site_row, rows_per_resident, 0, 1)
        of_up = tile_chunks(sites, plus, minus, site_row, rows_per_resident, 1, 1)
        vectors = vector_offsets(sites, plus, minus, site_row, rows_per_resident)
        num_chunks = tl.maximum(of_gate[1], of_up[1])
        first_block = (item % num_groups) * blocks
        end_block = tl.minimum(first_block + blocks, num_blocks)
        if num_chunks == 0:
            if PDL:
                gdc_wait()
            for block in range(first_block, end_block):
                columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
                inside = (m < num_rows)[:, None] & (columns < intermediate)[None, :]
                at = y + rows[:, None] * (2 * intermediate) + columns[None, :]
                gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                up = tl.load(at + intermediate, mask=inside, other=0.0).to(tl.float32)
                _store_active(
                    out, rows, inside, gate, up, columns, intermediate, vectors, pool_fp32, bias, IS_SILU, HAS_BIAS
                )
        elif FEW_ROWS > 0 and num_rows <= FEW_ROWS:
            if PDL:
                gdc_wait()
            for begin in range(first_block * BLOCK_N, end_block * BLOCK_N, WIDE_N):
                columns = begin + tl.arange(0, WIDE_N)
                in_columns = (columns < intermediate) & (columns < end_block * BLOCK_N)
                for r in range(0, num_rows):
                    row = tl.load(perm + row_start + r + tl.arange(0, 1)).to(tl.int64)
                    at = y + row[:, None] * (2 * intermediate) + columns[None, :]
                    gate = tl.load(at, mask=in_columns[None, :], other=0.0).to(tl.float32)
                    up = tl.load(at + intermediate, mask=in_columns[None, :], other=0.0).to(tl.float32)
                    gate += expand_row(
                        pool, chunks, scales, of_gate, scratch, scratch_row, num_rows, r, num_splits, plane_stride,
                        columns, in_columns, WIDE_N, ALIGN,
                    )[None, :]  # fmt: skip
                    up += expand_row(
                        pool, chunks, scales, of_up, scratch, scratch_row, num_rows, r, num_splits, plane_stride,
                        columns + intermediate, in_columns, WIDE_N, ALIGN,
                    )[None, :]  # fmt: skip
                    _store_active(
                        out, row, in_columns[None, :], gate, up, columns, intermediate,
                        vectors, pool_fp32, bias, IS_SILU, HAS_BIAS,
                    )  # fmt: skip
        else:
            num_steps = (end_block - first_block) * num_chunks
            block, c = first_block, 0
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            next_gate, next_gate_shrink = chunk_fields(chunks, scales, of_gate, 0, True, ALIGN)
            next_up, next_up_shrink = chunk_fields(chunks, scales, of_up, 0, True, ALIGN)
            next_gate_b = load_b(pool, next_gate, columns, columns < intermediate)
            next_up_b = load_b(pool, next_up, columns + intermediate, columns < intermediate)
            gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            if PDL:
                gdc_wait()  # tiles, table and B were there before the kernels whose y and shrinks are read from here on
            for step in range(0, num_steps):
                columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
                is_last, block, c = step_after(block, c, num_chunks)
                inside = ((m < num_rows) & is_last)[:, None] & (columns < intermediate)[None, :]
                at_y = y + rows[:, None] * (2 * intermediate) + columns[None, :]
                gate_y = tl.load(at_y, mask=inside, other=0.0)
                up_y = tl.load(at_y + intermediate, mask=inside, other=0.0)
                gate_b = next_gate_b
                up_b = next_up_b
                gate_shrink = next_gate_shrink
                up_shrink = next_up_shrink
                # B of the next chunk or block is on its way while this one is multiplied
                ahead = block * BLOCK_N + tl.arange(0, BLOCK_N)
                next_gate, next_gate_shrink = chunk_fields(chunks, scales, of_gate, c, step + 1 < num_steps, ALIGN)
                next_up, next_up_shrink = chunk_fields(chunks, scales, of_up, c, step + 1 < num_steps, ALIGN)
                next_gate_b = load_b(pool, next_gate, ahead, ahead < intermediate)
                next_up_b = load_b(pool, next_up, ahead + intermediate, ahead < intermediate)
                gate_h = load_h(scratch, gate_shrink, scratch_row, num_rows, m, num_splits, plane_stride, BLOCK_M)
                up_h = load_h(scratch, up_shrink, scratch_row, num_rows, m, num_splits, plane_stride, BLOCK_M)
                gate = multiply(gate_h.to(gate_b.dtype), gate_b, gate, EXACT)
                up = multiply(up_h.to(up_b.dtype), up_b, up, EXACT)
                if is_last:
                    _store_active(
                        out, rows, inside, gate + gate_y.to(tl.float32), up + up_y.to(tl.float32), columns,
                        intermediate, vectors, pool_fp32, bias, IS_SILU, HAS_BIAS,
                    )  # fmt: skip
                    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PDL:
        gdc_wait()  # programs without items too: a kernel that waits for this one also waits for its predecessors


def gate_up(
    out: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: str,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
) -> None:
    """Write `act(gate) * up` to `out` [num_tokens, intermediate], with LoRA and biases, in one launch."""
    tile_rows = segments.limits.tile_rows
    num_programs = num_persistent_programs(y.device, PROGRAMS_PER_MULTIPROCESSOR)
    # 1 stage: the loop itself carries B on its way in registers (ADR 85)
    launch(
        _gate_up, num_programs,
        out, y, bias, out.shape[1], layer * NUM_SITES + GATE_UP, table.sites.shape[1] * NUM_SITES,
        table.pool, table.pool_fp32, table.sites, table.chunks, table.scales,
        segments.header, segments.perm, segments.tiles, scratch, len(scratch),
        SPLITS=SPLITS_AT + GATE_UP, IS_SILU=activation == "silu", HAS_BIAS=bias is not None,
        BLOCK_M=tile_rows, BLOCK_N=_BLOCK_N if tile_rows < 64 else _PREFILL_BLOCK_N,
        WIDE_N=_WIDE_N, FEW_ROWS=few_rows_of(segments.limits.few_rows, segments.limits.tile_rows),
        EXACT=is_exact_dot(y.dtype), ALIGN=table.alignment,
        num_stages=1, num_warps=4, maxnreg=most_registers(y.dtype, PROGRAMS_PER_MULTIPROCESSOR),
    )  # fmt: skip
