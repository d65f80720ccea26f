"""LoRA expand of o and down, fused with bias and residual, on a GPU.

Bytes per row: y and residual read, residual written, 3 x 4096 x 2 = 24 KiB, which an unfused residual add would
move as well; on top of that only B, 16 x 4096 x 2 = 128 KiB per chunk and tile. BLOCK_N = 128: one work item reads
4 KiB of B per chunk, and 4096 columns give 32 items per tile, so even one tile of 16 rows is spread over 32
programs, and 33 tiles over all 1056. Each item walks a chain of small loads (tile, site, chunk, H, B) of about 700 ns
each; programs on one multiprocessor hide one another's. 62 registers x 128 threads let 8 of them fit. Tiles of 64 rows
(prefill) have 32 sums in each of 256 threads, 126 registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..blocks import finish_columns, lora_columns, tile_fields
from ..launch import is_exact_dot, num_persistent_programs, num_warps_for
from ..layouts.lora_table import NUM_SITES, LoraTable
from ..layouts.segments import SPLITS_AT, Segments

PROGRAMS_PER_MULTIPROCESSOR = 8
_BLOCK_N = 128
_SUMS_PER_THREAD = 32


@triton.jit(do_not_specialize=["site_row", "splits_at", "scratch_rows"])
def _add_residual(
    out, y, residual, bias, out_features, site_row, rows_per_resident, splits_at,
    pool, pool_fp32, sites, chunks, scales, header, perm, tiles, scratch, scratch_rows,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_splits = tl.load(header + splits_at)
    plane_stride = (scratch_rows // num_splits).to(tl.int64) * 16
    num_blocks = tl.cdiv(out_features, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    for work in range(tl.program_id(0), tl.load(header) * num_blocks, tl.num_programs(0)):
        row_start, num_rows, plus, minus, scratch_row = tile_fields(tiles, work // num_blocks)
        first = (work % num_blocks) * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        in_columns = columns < out_features
        acc = lora_columns(
            columns, in_columns, first, first + BLOCK_N - 1, m, scratch_row, num_rows,
            plus, minus, site_row, rows_per_resident, num_splits,
            pool, sites, chunks, scales, scratch, plane_stride, BLOCK_M, BLOCK_N, EXACT, ALIGN,
        )  # fmt: skip
        rows = tl.load(perm + row_start + m, mask=m < num_rows, other=0).to(tl.int64)
        at = rows[:, None] * out_features + columns[None, :]
        inside = (m < num_rows)[:, None] & in_columns[None, :]
        acc += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        acc = finish_columns(
            acc, columns, in_columns, plus, minus, site_row, rows_per_resident, sites, pool_fp32, bias, HAS_BIAS
        )
        if HAS_RESIDUAL:
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


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
    """See `lora_residual_`."""
    grid = (num_persistent_programs(y.device, PROGRAMS_PER_MULTIPROCESSOR),)
    _add_residual[grid](
        out, y, residual, bias, y.shape[1], layer * NUM_SITES + site, table.sites.shape[1] * NUM_SITES,
        SPLITS_AT + site, table.pool, table.pool_fp32, table.sites, table.chunks, table.scales,
        segments.header, segments.perm, segments.tiles, scratch, len(scratch),
        HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None,
        BLOCK_M=segments.limits.tile_rows, BLOCK_N=_BLOCK_N, EXACT=is_exact_dot(y.dtype),
        ALIGN=table.alignment, num_stages=2,
        num_warps=num_warps_for(segments.limits.tile_rows * _BLOCK_N, _SUMS_PER_THREAD, fewest=4),
    )  # fmt: skip
