"""The fused expand of o and down against one row and one chunk at a time, and against plain matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.layouts.lora_table import DOWN, LoraTable
from lorabatch.kernels.layouts.segments import Segments
from lorabatch.kernels.lora_residual import lora_residual_
from lorabatch.kernels.lora_residual.reference import add_residual
from lorabatch.kernels.lora_shrink import lora_shrink

IN, OUT = 40, 300
RANKS = [(1,), (8,), (20,), (64,)]


def shrunk(x: torch.Tensor, table: LoraTable, segments: Segments) -> torch.Tensor:
    scratch = torch.full_like(segments.allocate_scratch(), torch.nan)
    lora_shrink(x, table, segments, scratch, 1, DOWN)
    return scratch


@pytest.mark.parametrize("has_residual", [True, False])
def test_each_row_gets_its_own_adapter(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    popularity: list[int],
    has_residual: bool,
) -> None:
    table = make_table(DOWN, IN, [(0, OUT)], RANKS)
    segments = group(table, popularity, num_programs=8)
    x = torch.randn(len(popularity), IN, device=table.pool.device).to(dtype)
    y = torch.randn(len(popularity), OUT, device=x.device).to(dtype)
    residual = torch.randn_like(y) if has_residual else None
    scratch = shrunk(x, table, segments)
    expected = torch.empty(y.shape, dtype=torch.float64, device=x.device)
    add_residual(expected, y, residual, None, table, segments, scratch, 1, DOWN)
    plain = y + residual if residual is not None else y.clone()
    found = lora_residual_(y, residual, None, table, segments, scratch, 1, DOWN)
    assert_close(found, expected)
    base = [row for row, resident in enumerate(popularity) if resident < 0]
    assert torch.equal(found[base], plain[base]), "rows without an adapter changed"


def test_factors_and_biases_apply_as_dora_and_lora_bias_do(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    """DoRA by its definition: rows of W + s B A times magnitude over norm, the bias left alone."""
    table = make_table(DOWN, IN, [(0, OUT)], RANKS, vectors=[1], biases=[2])
    plus = [1, 1, -1, 2, 0]
    segments = group(table, plus)
    x = torch.randn(5, IN, device=table.pool.device).to(dtype)
    w, bias = torch.randn(OUT, IN).to(x) * 0.2, torch.randn(OUT).to(x)
    y = (x.double() @ w.double().t()).to(dtype)
    expected = torch.stack([by_definition(x[row], w, bias, table, plus[row]) for row in range(5)])
    found = lora_residual_(y, None, bias, table, segments, shrunk(x, table, segments), 1, DOWN)
    assert_close(found, expected)


def by_definition(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, table: LoraTable, resident: int
) -> torch.Tensor:
    if resident < 0:
        return w.double() @ x.double() + bias.double()
    effective, added = w.double().clone(), bias.double().clone()
    first, count, factor_at, bias_at = table.sites[resident, 1, DOWN].tolist()[:4]
    for index in range(first, first + count):
        a_at, b_at, rank, _, _ = table.chunks[index].tolist()
        a = table.pool[a_at : a_at + rank * IN].view(rank, IN).double()
        b = table.pool[b_at : b_at + rank * OUT].view(rank, OUT).double()
        effective += float(table.scales[index]) * (b.t() @ a)
    if factor_at >= 0:
        effective *= table.pool_fp32[factor_at : factor_at + OUT, None].double()
    if bias_at >= 0:
        added += table.pool_fp32[bias_at : bias_at + OUT].double()
    return effective @ x.double() + added


def test_taking_the_merged_adapter_out_gives_back_what_the_base_alone_would(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    """Mixture: the weights hold adapter 3; base rows and rows of other adapters must not see it."""
    table = make_table(DOWN, IN, [(0, OUT)], RANKS, biases=[3])
    x = torch.randn(5, IN, device=table.pool.device).to(dtype)
    w, none = torch.randn(OUT, IN).to(x) * 0.2, torch.zeros(OUT).to(x)
    served = [3, -1, 0, 1, 3]
    y = torch.stack([by_definition(row, w, none, table, 3) for row in x])
    segments = group(table, [-1 if r == 3 else r for r in served], [-1 if r == 3 else 3 for r in served])
    found = lora_residual_(y.to(dtype), None, None, table, segments, shrunk(x, table, segments), 1, DOWN)
    assert_close(found, torch.stack([by_definition(x[i], w, none, table, r) for i, r in enumerate(served)]))
