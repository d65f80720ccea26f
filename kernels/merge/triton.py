"""Merge pass on a GPU.

Bytes: every weight read once and written once. Llama-3-8B has 6.98e9 weights in its linear layers: 2 x 2 x 6.98e9 =
27.9 GB, 5.8 ms at 4.8 TB/s. A and B of rank 16 are 84 MB, read once per row (column) of tiles from L2. Flops at rank
16: 2 x 16 x 6.98e9 = 0.22 TFLOP, nothing for bf16 tensor cores; pairs stored in fp32 are multiplied in full precision
by the ordinary cores (67 TFLOP/s: 3.3 ms, still under the reads).

A tile of 64 x 128 weights is 16 KiB each way and 32 weights in each of 256 threads, twice over (sum and product of
the pair at hand): 65536 registers / (2 x 256) = 128 let 2 programs fit and keep 32 KiB of reads in flight, where 25
KiB are needed; the launch limits the compiler to them, since Triton 3.6 would take 136 by itself. One launch serves
all layers: 224 launches of their own would leave 26 us to each, about what it takes the host to make one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..blocks import multiply
from ..launch import is_exact_dot, mend_interpreter, num_persistent_programs, to_device
from .types import MergeJob

# 65536 registers / (128 x 256 threads).
PROGRAMS_PER_MULTIPROCESSOR = 2
# Weights of a tile: 64 x 128 in 16 bits are 16 KiB, and 32 in each of 256 threads.
_BLOCK_OUT, _BLOCK_IN = 64, 128
# Ranks of a step: the least depth of a tensor core's product.
_BLOCK_RANK = 16
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Addresses and lengths of rows that are multiples of it let a thread load 16 bytes at a time.
_ALIGNMENT = 16


@triton.jit(do_not_specialize=["num_jobs", "num_tiles"])
def _merge(
    jobs, num_jobs, pairs, scales, overflow, num_tiles,
    WEIGHT: tl.constexpr, PAIR: tl.constexpr, SEARCH_STEPS: tl.constexpr, ALIGN: tl.constexpr, BY_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_RANK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    ranks = tl.arange(0, BLOCK_RANK)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # the last job whose first tile is not behind this one
        index = 0
        for step in tl.static_range(SEARCH_STEPS):
            probe = index + (1 << (SEARCH_STEPS - 1 - step))
            first = tl.load(jobs + probe * 7 + 4, mask=probe < num_jobs, other=0)
            index = tl.where((probe < num_jobs) & (first <= tile), probe, index)
        job = jobs + index * 7
        base = tl.multiple_of(tl.load(job).to(tl.pointer_type(WEIGHT)), ALIGN)
        live = tl.multiple_of(tl.load(job + 1).to(tl.pointer_type(WEIGHT)), ALIGN)
        out_features = tl.load(job + 2)
        in_features = tl.multiple_of(tl.load(job + 3), ALIGN)
        place = tile - tl.load(job + 4)
        blocks = tl.cdiv(in_features, BLOCK_IN)
        first_row = (place // blocks) * BLOCK_OUT
        first_column = (place % blocks) * BLOCK_IN
        rows, columns = tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
        in_rows, in_columns = (
            (first_row + rows < out_features)[:, None],
            (first_column + columns < in_features)[None, :],
        )
        # 64 bits to the tile, 32 within it: twice as many would halve the programs that fit
        corner = first_row * in_features + first_column
        at = rows[:, None] * in_features.to(tl.int32) + columns[None, :]
        value = tl.load(base + corner + at, mask=in_rows & in_columns, other=0.0).to(tl.float32)
        first_pair = tl.load(job + 5)
        delta = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
        for index_of_pair in range(0, tl.load(job + 6)):
            pair = pairs + (first_pair + index_of_pair) * 4
            a = tl.multiple_of(tl.load(pair).to(tl.pointer_type(PAIR)), ALIGN)
            b = tl.load(pair + 1).to(tl.pointer_type(PAIR))
            rank = tl.load(pair + 2).to(tl.int32)
            is_last = tl.load(pair + 3) == 0  # of an adapter's pieces
            a += first_column
            b += first_row if BY_RANK else first_row * rank
            for start in range(0, rank, BLOCK_RANK):
                in_rank = start + ranks < rank
                if BY_RANK:  # rows of B's transpose, of all rows of the pair's layer
                    b_at = b + rows[:, None] + (start + ranks)[None, :] * out_features.to(tl.int32)
                else:
                    b_at = b + rows[:, None] * rank + (start + ranks)[None, :]
                b_tile = tl.load(b_at, mask=in_rows & in_rank[None, :], other=0.0)
                a_at = a + (start + ranks)[:, None] * in_features.to(tl.int32) + columns[None, :]
                a_tile = tl.load(a_at, mask=in_rank[:, None] & in_columns, other=0.0)
                delta = multiply(b_tile, a_tile, delta, EXACT)
            scale = tl.load(scales + first_pair + index_of_pair)
            value = tl.where(is_last, value + scale * delta, value)
            delta = tl.where(is_last, 0.0, delta)
        rounded = value.to(WEIGHT)
        tl.store(live + corner + at, rounded, mask=in_rows & in_columns)
        # neither infinity nor NaN is below infinity; masked places are 0
        is_finite = tl.abs(rounded.to(tl.float32)) < float("inf")
        if tl.max(tl.max(tl.where(is_finite, 0, 1), axis=1), axis=0) > 0:
            tl.store(overflow, 1)


def merge(jobs: Sequence[MergeJob], pair_dtype: torch.dtype, overflow: torch.Tensor) -> None:
    """Fill every job's `live` in one launch; set `overflow` when a merged weight is not finite. The lists of layers and
    pairs are copied to the device in one copy each; the host does not wait."""
    device, weight_dtype = jobs[0].live.device, jobs[0].live.dtype
    rows: list[tuple[int, ...]] = []
    pairs: list[tuple[int, int, int, int]] = []
    scales: list[float] = []
    num_tiles = 0
    for job in jobs:
        out_features, in_features = job.live.shape
        shape = (out_features, in_features, num_tiles, len(pairs), len(job.pairs))
        rows.append((job.base.data_ptr(), job.live.data_ptr(), *shape))
        pairs.extend((pair.a.data_ptr(), pair.b.data_ptr(), pair.a.shape[0], pair.goes_on) for pair in job.pairs)
        scales.extend(pair.scaling for pair in job.pairs)
        num_tiles += triton.cdiv(out_features, _BLOCK_OUT) * triton.cdiv(in_features, _BLOCK_IN)
    numbers = [n for row in rows for n in (row[0], row[1], row[3])] + [pair[0] for pair in pairs]
    grid = (num_persistent_programs(device, PROGRAMS_PER_MULTIPROCESSOR),)
    mend_interpreter()
    # 8 warps and 128 registers: see the tile's numbers above; 2 stages are not tuned
    _merge[grid](
        to_device(torch.tensor(rows), device), len(rows), to_device(torch.tensor(pairs or [(0, 0, 0, 0)]), device),
        to_device(torch.tensor(scales or [0.0]), device), overflow, num_tiles,
        WEIGHT=_TYPES[weight_dtype], PAIR=_TYPES[pair_dtype], SEARCH_STEPS=len(rows).bit_length(),
        ALIGN=1 if any(n % _ALIGNMENT for n in numbers) else _ALIGNMENT,
        BY_RANK=any(not pair.b.is_contiguous() for job in jobs for pair in job.pairs),
        BLOCK_OUT=_BLOCK_OUT, BLOCK_IN=_BLOCK_IN, BLOCK_RANK=_BLOCK_RANK, EXACT=is_exact_dot(pair_dtype),
        num_warps=8, num_stages=2, maxnreg=128,
    )  # fmt: skip
