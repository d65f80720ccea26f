"""The shrink kernel against its plain twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.layouts.lora_table import O_PROJ, QKV, LoraTable
from lorabatch.kernels.layouts.segments import SPLITS_AT, Segments
from lorabatch.kernels.lora_shrink import lora_shrink, reference

MEMBERS = [(0, 12), (12, 20), (20, 28)]
RANKS = [(1, 1, 1), (8, None, 8), (20, 3, 64), (None, None, 5)]


def both(x: torch.Tensor, table: LoraTable, segments: Segments, layer: int, site: int) -> list[torch.Tensor]:
    """Scratch summed over its splits, from the kernel and from the twin; NaN where nothing was written."""
    results = []
    for shrink in (lora_shrink, reference.shrink):
        scratch = torch.full_like(segments.allocate_scratch(), torch.nan)
        shrink(x, table, segments, scratch, layer, site)
        num_splits = int(segments.header[SPLITS_AT + site])
        plane_rows = len(scratch) // num_splits
        results.append(scratch[: num_splits * plane_rows].view(num_splits, plane_rows, -1).sum(0))
    return results


@pytest.mark.parametrize(("in_features", "num_programs"), [(40, 1), (300, 64)])
def test_every_chunk_is_shrunk_and_nothing_else_is_written(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    popularity: list[int],
    in_features: int,
    num_programs: int,
) -> None:
    table = make_table(QKV, in_features, MEMBERS, RANKS)
    segments = group(table, popularity, num_programs=num_programs)
    x = torch.randn(len(popularity), in_features, device=table.pool.device).to(dtype)
    found, expected = both(x, table, segments, 1, QKV)
    assert torch.equal(found.isnan(), expected.isnan())
    assert_close(found.nan_to_num(), expected.nan_to_num())


def test_a_layer_that_the_adapters_leave_alone_writes_nothing(
    make_table: Callable[..., LoraTable], group: Callable[..., Segments], dtype: torch.dtype
) -> None:
    table = make_table(QKV, 40, MEMBERS, RANKS)
    segments = group(table, [0, 1, 2, -1])
    x = torch.randn(4, 40, device=table.pool.device).to(dtype)
    for layer, site in ((0, QKV), (1, O_PROJ)):
        found, _ = both(x, table, segments, layer, site)
        assert found.isnan().all()


def test_the_merged_adapter_s_chunks_follow_the_row_s_own(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    table = make_table(QKV, 40, MEMBERS, RANKS)
    segments = group(table, [0, 0, -1, -1, 2], [1, 1, 1, -1, 1])
    x = torch.randn(5, 40, device=table.pool.device).to(dtype)
    found, expected = both(x, table, segments, 1, QKV)
    assert torch.equal(found.isnan(), expected.isnan())
    assert_close(found.nan_to_num(), expected.nan_to_num())


def test_the_same_step_gives_the_same_bits(
    make_table: Callable[..., LoraTable], group: Callable[..., Segments], dtype: torch.dtype
) -> None:
    table = make_table(QKV, 300, MEMBERS, RANKS)
    segments = group(table, [0, 1, 2, -1], num_programs=64)
    assert int(segments.header[SPLITS_AT + QKV]) > 1
    x = torch.randn(4, 300, device=table.pool.device).to(dtype)
    first, _ = both(x, table, segments, 1, QKV)
    second, _ = both(x, table, segments, 1, QKV)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
