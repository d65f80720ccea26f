"""The fused expand of qkv (norm, rotation, store to the pool) against its plain twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lorabatch.kernels.layouts.lora_table import QKV, LoraTable
from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.layouts.segments import Segments
from lorabatch.kernels.lora_qkv import HeadFinish, lora_qkv_
from lorabatch.kernels.lora_qkv.reference import qkv
from lorabatch.kernels.lora_shrink import lora_shrink

IN = 24
LAYOUT = PageLayout(num_heads=2, num_kv_heads=1, head_dim=8, num_layers=2, page_tokens=4)
MEMBERS = [(0, 16), (16, 24), (24, 32)]
RANKS = [(1, 1, 1), (8, None, 8), (20, 3, 64), (None, None, 5)]
NUM_PAGES = 8


def with_pages(table: LoraTable, layout: PageLayout) -> LoraTable:
    """The same table, its pool behind pages for keys and values."""
    size = NUM_PAGES * layout.page_elements
    pool = torch.cat([torch.zeros(size, dtype=table.pool.dtype, device=table.pool.device), table.pool])
    chunks = table.chunks.clone()
    chunks[:, :2] += size
    sites = table.sites.clone()
    vectors = sites[..., 2:4]
    vectors[vectors >= 0] += size * pool.element_size() // 4
    return replace(table, pool=pool, pool_fp32=pool.view(torch.float32), chunks=chunks, sites=sites)


def finish_for(num_rows: int, rotary_dim: int, dtype: torch.dtype, device: torch.device, **extra: object) -> HeadFinish:
    angles = torch.randn(num_rows, rotary_dim // 2, device=device) * 3
    slots = torch.randperm(NUM_PAGES * LAYOUT.page_tokens)[:num_rows].int().to(device)
    slots[num_rows // 2] = -1
    return HeadFinish(cos=angles.cos(), sin=angles.sin(), slots=slots, **extra)  # type: ignore[arg-type]


def check(
    table: LoraTable,
    segments: Segments,
    finish: HeadFinish,
    layout: PageLayout,
    dtype: torch.dtype,
    assert_close: Callable[..., None],
) -> None:
    num_rows = len(finish.slots)
    x = torch.randn(num_rows, IN, device=table.pool.device).to(dtype)
    columns = (layout.num_heads + 2 * layout.num_kv_heads) * layout.head_dim
    y = torch.randn(num_rows, columns, device=x.device).to(dtype)
    scratch = torch.full_like(segments.allocate_scratch(), torch.nan)
    lora_shrink(x, table, segments, scratch, 1, QKV)
    expected_pool = table.pool.clone()
    expected_table = replace(table, pool=expected_pool, pool_fp32=expected_pool.view(torch.float32))
    expected = y.clone()
    qkv(expected, finish, layout, expected_table, segments, scratch, 1)
    found = lora_qkv_(y, finish, layout, table, segments, scratch, 1)
    assert_close(found, expected.view(num_rows, -1, layout.head_dim)[:, : layout.num_heads])
    size = NUM_PAGES * layout.page_elements
    assert_close(table.pool[:size], expected_pool[:size])
    assert int((table.pool[:size] != 0).sum()) > 0, "nothing was stored"
    assert torch.equal(table.pool[:size] == 0, expected_pool[:size] == 0), "other places were written"


def test_each_row_gets_its_own_adapter(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    popularity: list[int],
    device: torch.device,
) -> None:
    table = with_pages(make_table(QKV, IN, MEMBERS, RANKS), LAYOUT)
    segments = group(table, popularity, num_programs=8)
    finish = finish_for(max(len(popularity), 1), LAYOUT.head_dim, dtype, device)
    if len(popularity) == 1:
        finish = replace(finish, slots=finish.slots * 0 + 5)
    check(table, segments, finish, LAYOUT, dtype, assert_close)


@pytest.mark.parametrize(("rotary_dim", "norm_offset"), [(0, 0.0), (4, 1.0), (8, 0.0)])
def test_norms_partial_rotation_biases_and_factors(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    device: torch.device,
    rotary_dim: int,
    norm_offset: float,
) -> None:
    table = with_pages(make_table(QKV, IN, MEMBERS, RANKS, vectors=[1]), LAYOUT)
    segments = group(table, [0, 1, -1, 1, 2])
    weights = {name: torch.randn(8, device=device).to(dtype) for name in ("q_norm", "k_norm")}
    bias = torch.randn(32, device=device).to(dtype)
    finish = finish_for(5, rotary_dim, dtype, device, bias=bias, norm_offset=norm_offset, **weights)
    check(table, segments, finish, LAYOUT, dtype, assert_close)


def test_heads_whose_size_is_no_power_of_two(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """SmolLM's 9 heads over 3, with a head of 40 features: halves of 20."""
    layout = PageLayout(num_heads=3, num_kv_heads=1, head_dim=40, num_layers=2, page_tokens=4)
    table = with_pages(make_table(QKV, IN, [(0, 120), (120, 160), (160, 200)], [(8, 20, 1)]), layout)
    check(table, group(table, [0, -1, 0]), finish_for(3, 40, dtype, device), layout, dtype, assert_close)


def test_a_pair_over_the_whole_packed_layer_reaches_queries_keys_and_values(
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """As Phi-3's qkv_proj has."""
    table = with_pages(make_table(QKV, IN, [(0, 32)], [(20,), (8,)], parts=[16, 8, 8]), LAYOUT)
    segments = group(table, [0, 1, -1, 0], [-1, -1, 1, -1])
    check(table, segments, finish_for(4, 8, dtype, device), LAYOUT, dtype, assert_close)
