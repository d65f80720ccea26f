"""LoRA expand of gate and up, fused with bias and activation, on a GPU.

Bytes per row: y read, out written, (2 + 1) x 14336 x 2 = 84 KiB, what an unfused activation moves as well; on top
only B, 2 x 16 x 14336 x 2 = 896 KiB per adapter of rank 16 and tile. BLOCK_N = 128 columns of gate and the same
of up: 2 x 4 KiB of B per chunk pair, two fp32 accumulators of 16 x 128 in 128 threads = 32 registers each. 14336
columns give 112 items per tile: one tile nearly fills the 132 multiprocessors. 95 registers x 128 threads let 5
programs fit on each. Tiles of 64 rows (prefill) take 64 columns and 256 threads for as many sums in each, so that two
programs fit: one loads while the other computes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..blocks import finish_columns, lora_columns, tile_fields
from ..launch import is_exact_dot, num_persistent_programs, num_warps_for
from ..layouts.lora_table import GATE_UP, NUM_SITES, LoraTable
from ..layouts.segments import SPLITS_AT, Segments

PROGRAMS_PER_MULTIPROCESSOR = 5
_BLOCK_N, _PREFILL_BLOCK_N = 128, 64
_SUMS_PER_THREAD = 32


@triton.jit
def _side(
    y, rows, m, columns, in_columns, first, scratch_row, num_rows, plus, minus, site_row, rows_per_resident,
    num_splits, width, bias, pool, pool_fp32, sites, chunks, scales, scratch, plane_stride,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Gate or up of one block, fp32 [BLOCK_M, BLOCK_N]."""
    acc = lora_columns(
        columns, in_columns, first, first + BLOCK_N - 1, m, scratch_row, num_rows,
        plus, minus, site_row, rows_per_resident, num_splits,
        pool, sites, chunks, scales, scratch, plane_stride, BLOCK_M, BLOCK_N, EXACT, ALIGN,
    )  # fmt: skip
    inside = (m < num_rows)[:, None] & in_columns[None, :]
    acc += tl.load(y + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return finish_columns(
        acc, columns, in_columns, plus, minus, site_row, rows_per_resident, sites, pool_fp32, bias, HAS_BIAS
    )


@triton.jit(do_not_specialize=["site_row", "scratch_rows"])
def _gate_up(
    out, y, bias, intermediate, site_row, rows_per_resident,
    pool, pool_fp32, sites, chunks, scales, header, perm, tiles, scratch, scratch_rows,
    SPLITS: tl.constexpr, IS_SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_splits = tl.load(header + SPLITS)
    plane_stride = (scratch_rows // num_splits).to(tl.int64) * 16
    num_blocks = tl.cdiv(intermediate, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    for work in range(tl.program_id(0), tl.load(header) * num_blocks, tl.num_programs(0)):
        row_start, num_rows, plus, minus, scratch_row = tile_fields(tiles, work // num_blocks)
        rows = tl.load(perm + row_start + m, mask=m < num_rows, other=0).to(tl.int64)
        first = (work % num_blocks) * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        in_columns = columns < intermediate
        gate = _side(
            y, rows, m, columns, in_columns, first, scratch_row, num_rows, plus, minus, site_row, rows_per_resident,
            num_splits, 2 * intermediate, bias, pool, pool_fp32, sites, chunks, scales, scratch, plane_stride,
            HAS_BIAS, BLOCK_M, BLOCK_N, EXACT, ALIGN,
        )  # fmt: skip
        up = _side(
            y, rows, m, columns + intermediate, in_columns, first + intermediate, scratch_row, num_rows,
            plus, minus, site_row, rows_per_resident, num_splits, 2 * intermediate,
            bias, pool, pool_fp32, sites, chunks, scales, scratch, plane_stride,
            HAS_BIAS, BLOCK_M, BLOCK_N, EXACT, ALIGN,
        )  # fmt: skip
        if IS_SILU:
            active = gate * tl.sigmoid(gate)
        else:
            # tanh(z) = 2 sigmoid(2 z) - 1, so 0.5 g (1 + tanh(z)) = g sigmoid(2 z); 1.5957... = 2 sqrt(2 / pi)
            active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        inside = (m < num_rows)[:, None] & in_columns[None, :]
        at = out + rows[:, None] * intermediate + columns[None, :]
        tl.store(at, (active * up).to(out.dtype.element_ty), mask=inside)


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
    """See `lora_gate_up`."""
    tile_rows = segments.limits.tile_rows
    block_n = _BLOCK_N if tile_rows < 64 else _PREFILL_BLOCK_N
    grid = (num_persistent_programs(y.device, PROGRAMS_PER_MULTIPROCESSOR),)
    _gate_up[grid](
        out, y, bias, out.shape[1], layer * NUM_SITES + GATE_UP, table.sites.shape[1] * NUM_SITES,
        table.pool, table.pool_fp32, table.sites, table.chunks, table.scales,
        segments.header, segments.perm, segments.tiles, scratch, len(scratch),
        SPLITS=SPLITS_AT + GATE_UP, IS_SILU=activation == "silu", HAS_BIAS=bias is not None,
        BLOCK_M=tile_rows, BLOCK_N=block_n, EXACT=is_exact_dot(y.dtype),
        ALIGN=table.alignment, num_stages=2,
        num_warps=num_warps_for(tile_rows * 2 * block_n, _SUMS_PER_THREAD, fewest=4),
    )  # fmt: skip
