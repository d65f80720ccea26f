"""Logarithm of the sum of exponentials on a GPU.

One program per row, whatever the number of rows: 128,256 numbers in bf16 are 250 KiB, 32 blocks of 4096 in 256 threads.
Each of 4096 places keeps its largest number and its sum, so that nothing is reduced across threads before the end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch import launch, next_power_of_2

# Numbers at once: 16 in each of 256 threads, with 55 registers a thread, by which 4 programs fit. Not tuned.
_BLOCK = 4096


@triton.jit
def _log_sum_exp(out, x, num_columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = x + tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, num_columns, BLOCK):
        value = tl.load(row + first + columns, mask=first + columns < num_columns, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, value)
        # a place that has seen no number yet keeps (-inf) - (-inf) out of the exponent
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2((largest - shift) * LOG2_E) + tl.exp2((value - shift) * LOG2_E)
        largest = new_largest
    most = tl.max(largest, axis=0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    whole = tl.sum(total * tl.exp2((largest - shift) * LOG2_E), axis=0)
    is_zero = whole == 0.0
    logarithm = shift + tl.log2(tl.where(is_zero, 1.0, whole)) / LOG2_E
    tl.store(out + tl.program_id(0), tl.where(is_zero, float("-inf"), logarithm))


def sum_rows(out: Tensor, x: Tensor) -> None:
    """Write `log(sum(exp(x)))` of each row of `x` to `out` [num_rows], one program per row."""
    num_columns = x.shape[1]
    launch(
        _log_sum_exp, len(x), out, x, num_columns, BLOCK=min(_BLOCK, max(16, next_power_of_2(num_columns))), num_warps=8
    )
