"""Batch-invariant products on a GPU.

All launch shapes give equal bits. Every tile has 64 or 128 rows; rows behind the last one are computed and not
stored, so that a GPU multiplies every tile by one instruction (`wgmma` on Hopper; tiles of 16 rows would take
`mma.sync`), which sums 16 features after 16. A split of the contraction is summed in registers. Splits are added in
their order: with few rows each has programs of its own, which leave planes in fp32 that a second kernel adds, else one
program computes all of a tile and adds them itself. Multiplications and additions are never contracted.

Bytes and flops of Llama-3-8B with 256 rows on an H200 (4.3 TB/s, 790 TFLOP/s): qkv 50 MB, 12 us, 13 GFLOP, 16 us;
gate_up 235 MB, 55 us, 60 GFLOP, 76 us. At full speed tiles of 128 x 128 ask L2 for 12 TB/s, those of 128 x 256 for 9:
the largest tile is taken that leaves 96 programs. Its sums are 128 registers of 256 threads. A program that adds splits
itself holds two sums, so it has 128 x 128. With 64 rows weights are all that counts: 4.3 TB/s x 800 ns / 132 = 26 KiB
in flight, where two programs of 6 buffers of 8 KiB have 80.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..blocks import multiply
from ..launch import compile_capability, is_exact_dot, launch
from .splits import block_features, split_features_of

# Programs that a launch should have, of the 132 multiprocessors of an H200. Not tuned.
_ENOUGH_PROGRAMS = 96
# Rows up to which splits have programs of their own. Not tuned.
_MOST_PLANE_ROWS = 256
# Tiles of rows whose programs stand side by side and share weights in L2. Not tuned.
_GROUP_M = 8
# Outputs of a program that adds planes: 8 in each of 128 threads. Not tuned.
_ADD_COLUMNS = 1024
_KIB = 1024
# Shared memory by which two programs fit on a multiprocessor: twice 96 of 227 KiB on Hopper.
_TWO_PROGRAMS_BYTES = 96 * _KIB
# With 64 rows two programs have 5 buffers of 8 KiB of weights each in flight, three times what memory needs.
_MOST_STAGES = 6
# Most shared memory of a program, by compute capability (CUDA C++ programming guide); other GPUs have 99 KiB.
_SHARED_BYTES = {80: 163 * _KIB, 87: 163 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB}
_LEAST_SHARED_BYTES = 99 * _KIB


@triton.jit
def _sum(
    x_at, weight_at, first, last, in_features,
    HAS_TAIL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, STEP_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Products of features first:last, summed in order: [TILE_M, TILE_N]."""
    ks = tl.arange(0, STEP_K)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k in range(first, last, STEP_K):
        if HAS_TAIL:
            in_k = k + ks < in_features
            x_tile = tl.load(x_at + k, mask=in_k[None, :], other=0.0)
            weight_tile = tl.load(weight_at + k, mask=in_k[:, None], other=0.0)
        else:
            x_tile = tl.load(x_at + k)
            weight_tile = tl.load(weight_at + k)
        acc = multiply(x_tile, weight_tile, acc, EXACT)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    out, x, weight, bias, num_rows, out_features, in_features, split_features,
    ADDS_SPLITS: tl.constexpr, TO_PLANES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STEP_K: tl.constexpr, GROUP_M: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_m = tl.cdiv(num_rows, TILE_M)
    num_n = tl.cdiv(out_features, TILE_N)
    split = tl.program_id(0) // (num_m * num_n)
    tile = tl.program_id(0) % (num_m * num_n)
    group = tile // (GROUP_M * num_n)
    group_rows = tl.minimum(num_m - group * GROUP_M, GROUP_M)
    first_row = (group * GROUP_M + tile % (GROUP_M * num_n) % group_rows) * TILE_M
    first_column = tile % (GROUP_M * num_n) // group_rows * TILE_N
    rows = first_row + tl.arange(0, TILE_M)
    columns = first_column + tl.arange(0, TILE_N)
    ks = tl.arange(0, STEP_K)
    # places behind the last row or column read the last one, and are not stored
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    weight_rows = tl.minimum(columns, out_features - 1).to(tl.int64)
    x_at = x + x_rows[:, None] * in_features + ks[None, :]
    weight_at = weight + weight_rows[None, :] * in_features + ks[:, None]
    if ADDS_SPLITS:
        total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for first in range(0, in_features, split_features):
            last = tl.minimum(first + split_features, in_features)
            total += _sum(x_at, weight_at, first, last, in_features, HAS_TAIL, TILE_M, TILE_N, STEP_K, EXACT)
    else:
        first = split * split_features
        last = tl.minimum(first + split_features, in_features)
        total = _sum(x_at, weight_at, first, last, in_features, HAS_TAIL, TILE_M, TILE_N, STEP_K, EXACT)
    out_rows = rows.to(tl.int64)
    if TO_PLANES:
        out_rows += split.to(tl.int64) * num_rows
    elif HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < out_features, other=0.0).to(tl.float32)[None, :]
    inside = (rows < num_rows)[:, None] & (columns < out_features)[None, :]
    tl.store(out + out_rows[:, None] * out_features + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
    out, planes, bias, num_rows, out_features,
    NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_blocks = tl.cdiv(out_features, BLOCK)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_features
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(planes + (row + split * num_rows) * out_features + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + columns, total.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=4096)
def launch_shape(
    num_rows: int, out_features: int, num_splits: int, element_size: int, shared_bytes: int
) -> tuple[int, int, int]:
    """How a product is divided among programs; no number's bits depend on it. Rows and outputs of a tile, and stages of
    the pipelined loop over features. The docstring of this module gives the reasons.
    """
    if element_size > 2:  # multiplied on the ordinary cores: 32 sums in each of 128 threads; not tuned
        return 64, 64, 2
    tile_m = 64 if num_rows <= 64 else 128
    widest = 128 if tile_m == 64 or num_splits > 1 else 256
    num_tiles = -(-num_rows // tile_m) * (num_splits if num_rows <= _MOST_PLANE_ROWS else 1)
    tile_n = next((n for n in (256, 128) if n <= widest and num_tiles * -(-out_features // n) >= _ENOUGH_PROGRAMS), 64)
    stage_bytes = (tile_m + tile_n) * 128
    budget = _TWO_PROGRAMS_BYTES if tile_n < 256 else min(4 * stage_bytes, shared_bytes - _KIB)
    num_stages = max(2, min(_MOST_STAGES, budget // stage_bytes))
    return tile_m, tile_n, num_stages


def multiply_rows(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write `x W^T + bias` to `out` [num_rows, out_features], with the bits of every launch shape."""
    num_rows, (out_features, in_features) = len(x), weight.shape
    block = block_features(x.dtype)
    split = split_features_of(weight.shape, x.dtype)
    num_splits = -(-in_features // split)
    shared_bytes = _SHARED_BYTES.get(compile_capability(), _LEAST_SHARED_BYTES)
    tile_m, tile_n, num_stages = launch_shape(num_rows, out_features, num_splits, x.element_size(), shared_bytes)
    num_programs = -(-num_rows // tile_m) * -(-out_features // tile_n)
    # whether splits have programs of their own, which leave planes in fp32
    in_planes = num_splits > 1 and num_rows <= _MOST_PLANE_ROWS
    into = out
    if in_planes:
        num_programs *= num_splits
        into = torch.empty(num_splits, num_rows, out_features, dtype=torch.float32, device=x.device)
    launch(
        _multiply, num_programs,
        into, x, weight, bias, num_rows, out_features, in_features, split,
        ADDS_SPLITS=num_splits > 1 and not in_planes, TO_PLANES=in_planes, HAS_BIAS=bias is not None,
        HAS_TAIL=in_features % block != 0, TILE_M=tile_m, TILE_N=tile_n, STEP_K=block,
        GROUP_M=_GROUP_M, EXACT=is_exact_dot(x.dtype),
        # 4 warps hold up to 64 sums in each thread, 8 warps up to 128
        num_warps=8 if tile_m * tile_n >= 128 * 128 else 4, num_stages=num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if in_planes:
        launch(
            _add_splits, num_rows * -(-out_features // _ADD_COLUMNS),
            out, into, bias, num_rows, out_features,
            NUM_SPLITS=num_splits, HAS_BIAS=bias is not None, BLOCK=_ADD_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
