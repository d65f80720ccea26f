"""The fused expand of gate and up against its plain twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.layouts.lora_table import GATE_UP, LoraTable
from lorabatch.kernels.layouts.segments import Segments
from lorabatch.kernels.lora_gate_up import Activation, lora_gate_up
from lorabatch.kernels.lora_gate_up.reference import gate_up
from lorabatch.kernels.lora_shrink import lora_shrink

IN, INTERMEDIATE = 24, 140
SEPARATE = [(0, INTERMEDIATE), (INTERMEDIATE, 2 * INTERMEDIATE)]


def check(
    table: LoraTable,
    segments: Segments,
    num_rows: int,
    dtype: torch.dtype,
    activation: Activation,
    assert_close: Callable[..., None],
    bias: torch.Tensor | None = None,
) -> None:
    x = torch.randn(num_rows, IN, device=table.pool.device).to(dtype)
    y = torch.randn(num_rows, int(table.part_ends[GATE_UP, 1]), device=x.device).to(dtype)
    scratch = torch.full_like(segments.allocate_scratch(), torch.nan)
    lora_shrink(x, table, segments, scratch, 1, GATE_UP)
    expected = torch.empty(num_rows, y.shape[1] // 2, dtype=torch.float64, device=x.device)
    gate_up(expected, y, bias, activation, table, segments, scratch, 1)
    assert_close(lora_gate_up(y, bias, activation, table, segments, scratch, 1), expected)


def test_each_row_gets_its_own_adapter(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    popularity: list[int],
) -> None:
    table = make_table(GATE_UP, IN, SEPARATE, [(1, 8), (None, 20), (64, 64), (8, None)])
    check(table, group(table, popularity, num_programs=8), len(popularity), dtype, "silu", assert_close)


# of a large negative number, whose sigmoid is 0: a GPU does not warn, NumPy under the interpreter does
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_pair_over_the_whole_packed_layer_reaches_gate_and_up(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    activation: Activation,
) -> None:
    table = make_table(GATE_UP, IN, [(0, 2 * INTERMEDIATE)], [(20,), (8,)], vectors=[0], parts=[INTERMEDIATE] * 2)
    bias = torch.randn(2 * INTERMEDIATE, device=table.pool.device).to(dtype)
    check(table, group(table, [0, 1, -1, 0], [-1, -1, 1, -1]), 4, dtype, activation, assert_close, bias)


def test_an_item_of_several_blocks_takes_every_chunk_of_each(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    """Five blocks in two items; gate and up have other numbers of chunks, and one of them none."""
    columns = 600
    table = make_table(GATE_UP, IN, [(0, columns), (columns, 2 * columns)], [(40, 8), (None, 64), (20, None)])
    segments = group(table, [0, 1, -1, 2, 0], [-1, 2, 0, -1, -1], num_programs=3)
    check(table, segments, 5, dtype, "silu", assert_close)
