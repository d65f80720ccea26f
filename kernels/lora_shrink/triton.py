"""LoRA shrink on a GPU.

Bytes: each chunk of A once per tile, 16 x in_features x 2 (128 KiB for 4096 in bf16), plus the tile's rows of x,
which stay in L2 (512 x 4096 x 2 = 4 MiB of 60). Flops are nothing: 16 per byte of A. So it is a stream of A, and
all that counts is that enough loads are in flight: 4.8 TB/s x 700 ns / 132 multiprocessors = 25 KiB on each. One
k-step loads 16 x 128 x 2 = 4 KiB of A and as much of x; a program buffers 3 of them (24 KiB of shared memory) and 4
programs hold 48 KiB of A in flight. On an H200 that reached 2.4 TB/s with 256 adapters of one row each: its warps
waited for shared memory. So a row by itself is multiplied on the ordinary cores, from registers: 2 x 8 KiB of A
are asked for at once, and the sums of 256 columns are added up once, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..blocks import multiply, site_chunks, tile_fields
from ..launch import few_rows_of, is_exact_dot, launch, most_registers, num_persistent_programs
from ..layouts.lora_table import NUM_SITES, LoraTable
from ..layouts.segments import ITEMS_AT, SPLITS_AT, Segments

# 118 registers x 128 threads and 24 KiB of shared memory: 4 programs fit, and have 48 KiB of A in flight.
PROGRAMS_PER_MULTIPROCESSOR = 4
# Bytes of a row of A and of x in one step: 16 rows of A are 4 KiB. Not tuned.
_BLOCK_K_BYTES = 256
# Columns at once of a row by itself: 16 x 256 sums are 32 in each of 128 threads. Not tuned.
_WIDE_K = 256


@triton.jit(do_not_specialize=["site", "site_row", "rows_per_resident", "max_items", "scratch_rows"])
def _shrink(
    x, x_stride, in_features, site, site_row, rows_per_resident,
    pool, sites, chunks, header, perm, tiles, items, max_items, scratch, scratch_rows,
    ITEMS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WIDE_K: tl.constexpr, FEW_ROWS: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_splits = tl.load(header + SPLITS + site)
    num_works = tl.load(header + ITEMS + site) * num_splits
    plane_stride = (scratch_rows // num_splits).to(tl.int64) * 16
    # k-steps of a split, rounded up: late splits may have none and then write zeros
    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), num_splits)
    items += site * 2 * max_items
    ranks = tl.arange(0, 16)
    ks = tl.arange(0, BLOCK_K)
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        item = work // num_splits
        split = work % num_splits
        c = tl.load(items + max_items + item)
        row_start, num_rows, plus, minus, scratch_row = tile_fields(tiles, tl.load(items + item))
        first_plus, num_plus = site_chunks(sites, plus, site_row, rows_per_resident)
        first_minus, num_minus = site_chunks(sites, minus, site_row, rows_per_resident)
        # items are listed for the layer with most chunks; this layer may have fewer
        if c < num_plus + num_minus:
            chunk = tl.where(c < num_plus, first_plus + c, first_minus + c - num_plus)
            a_offset = tl.multiple_of(tl.load(chunks + chunk * 5), ALIGN)
            num_ranks = tl.load(chunks + chunk * 5 + 2)
            begin, end = split * steps * BLOCK_K, (split + 1) * steps * BLOCK_K
            in_ranks = (ranks < num_ranks)[:, None]
            h_at = scratch + split * plane_stride + (scratch_row + c * num_rows).to(tl.int64) * 16
            if FEW_ROWS > 0 and num_rows == 1:
                x_row = x + tl.load(perm + row_start).to(tl.int64) * x_stride
                a_row = pool + a_offset + ranks[:, None] * in_features
                end = tl.minimum(end, in_features)
                wide = tl.arange(0, WIDE_K)
                products = tl.zeros((16, WIDE_K), dtype=tl.float32)
                for k in range(begin, end, 2 * WIDE_K):
                    # both on their way before the first is multiplied
                    first, second = k + wide, k + WIDE_K + wide
                    first_x = tl.load(x_row + first, mask=first < end, other=0.0)
                    second_x = tl.load(x_row + second, mask=second < end, other=0.0)
                    first_a = tl.load(a_row + first[None, :], mask=in_ranks & (first < end)[None, :], other=0.0)
                    second_a = tl.load(a_row + second[None, :], mask=in_ranks & (second < end)[None, :], other=0.0)
                    products += first_x.to(tl.float32)[None, :] * first_a.to(tl.float32)
                    products += second_x.to(tl.float32)[None, :] * second_a.to(tl.float32)
                tl.store(h_at + ranks, tl.sum(products, axis=1))
            else:
                m = tl.arange(0, BLOCK_M)
                rows = tl.load(perm + row_start + m, mask=m < num_rows, other=0).to(tl.int64)
                x_at = x + rows[:, None] * x_stride + ks[None, :]
                a_at = pool + a_offset + ranks[:, None] * in_features + ks[None, :]
                acc = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
                for k in range(begin, tl.minimum(end, in_features), BLOCK_K):
                    in_k = (k + ks < in_features)[None, :]
                    x_tile = tl.load(x_at + k, mask=(m < num_rows)[:, None] & in_k, other=0.0)
                    a_tile = tl.load(a_at + k, mask=in_ranks & in_k, other=0.0)
                    acc = multiply(x_tile, tl.trans(a_tile), acc, EXACT)
                tl.store(h_at + m[:, None] * 16 + ranks[None, :], acc, mask=(m < num_rows)[:, None])


def shrink(x: Tensor, table: LoraTable, segments: Segments, scratch: Tensor, layer: int, site: int) -> None:
    """Fill `scratch` with `x A_c^T` of every chunk of every tile: a plane for each split, in one launch."""
    num_programs = num_persistent_programs(x.device, PROGRAMS_PER_MULTIPROCESSOR)
    # 4 stages are 3 buffers of 8 KiB in decode
    launch(
        _shrink, num_programs,
        x, x.stride(0), x.shape[1], site, layer * NUM_SITES + site, table.sites.shape[1] * NUM_SITES,
        table.pool, table.sites, table.chunks,
        segments.header, segments.perm, segments.tiles, segments.items, segments.limits.max_items,
        scratch, len(scratch),
        ITEMS=ITEMS_AT, SPLITS=SPLITS_AT, BLOCK_M=segments.limits.tile_rows, BLOCK_K=_BLOCK_K_BYTES // x.element_size(),
        WIDE_K=_WIDE_K, FEW_ROWS=few_rows_of(segments.limits.few_rows, segments.limits.tile_rows),
        EXACT=is_exact_dot(x.dtype), ALIGN=table.alignment, num_warps=4, num_stages=4,
        maxnreg=most_registers(x.dtype, PROGRAMS_PER_MULTIPROCESSOR),
    )  # fmt: skip
