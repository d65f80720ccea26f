"""Every LoRA kernel in every case that must hold, one cell of the matrix each, beside its plain twin.

Scratch holds NaN before each shrink, and so do the gaps of the pool. What attention must hold (windows, softcap,
prefixes, split contexts) stands in `test_paged_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lorabatch.kernels.layouts.lora_table import DOWN, GATE_UP, QKV, LoraTable
from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.layouts.segments import SPLITS_AT, Segments
from lorabatch.kernels.lora_gate_up import lora_gate_up
from lorabatch.kernels.lora_gate_up import reference as gate_up_reference
from lorabatch.kernels.lora_qkv import HeadFinish, lora_qkv_
from lorabatch.kernels.lora_qkv import reference as qkv_reference
from lorabatch.kernels.lora_residual import lora_residual_
from lorabatch.kernels.lora_residual import reference as residual_reference
from lorabatch.kernels.lora_shrink import lora_shrink
from lorabatch.kernels.lora_shrink import reference as shrink_reference

IN, LAYER = 24, 1
LAYOUT = PageLayout(num_heads=2, num_kv_heads=1, head_dim=8, num_layers=2, page_tokens=4)
NUM_PAGES = 20
RANKS = (1, 8, 20, 64)


@dataclass(frozen=True)
class Case:
    """Resident adapters by rank, and each row's own adapter and the merged one that it must not see (-1: none)."""

    plus: Sequence[int]
    minus: Sequence[int] = ()
    ranks: Sequence[int] = RANKS
    with_dora: Sequence[int] = ()
    with_bias: Sequence[int] = ()


CASES = {
    "rank 1": Case([0] * 5, ranks=[1]),
    "rank 8": Case([0] * 5, ranks=[8]),
    "rank 20": Case([0] * 5, ranks=[20]),
    "rank 64": Case([0] * 5, ranks=[64]),
    "empty segments": Case([1, 1, 3]),
    "one token": Case([2]),
    "no adapter at all": Case([-1] * 3),
    "rows without adapter among others": Case([0, -1, 3, -1]),
    "mixed popularity": Case([2, -1, 0, 0, 3, 0, -1, 1] + [0] * 14),
    "identical popularity": Case([1] * 19),
    "all distinct": Case([3, 1, 0, 2]),
    "more rows than a tile of prompts": Case([2] * 70 + [0, 1]),
    "signed mixture chunks": Case([0, -1, 2, -1], [1, 1, 1, -1]),
    "DoRA": Case([1, 0, -1], with_dora=[1]),
    "lora_bias": Case([2, 0, -1], with_bias=[2]),
    "lora_bias of the merged adapter": Case([-1, 0, -1], [2, 2, -1], with_bias=[2]),
}
Result = tuple[Tensor, Tensor]  # of the kernel and of its twin, a row of numbers for each row


# What they have, others have too.
_LONG = ("rank 8", "rank 20", "one token", "identical popularity", "all distinct")


@pytest.fixture(
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.long] if name in _LONG else []) for name, case in CASES.items()
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def scratch_of(table: LoraTable, segments: Segments, x: Tensor, site: int) -> Tensor:
    scratch = torch.full_like(segments.allocate_scratch(), torch.nan)
    lora_shrink(x, table, segments, scratch, LAYER, site)
    # what a longer contraction leaves in the planes of its other splits; NaN where nothing was written stays NaN
    plane_rows = len(scratch) // int(segments.header[SPLITS_AT + site])
    later = scratch[plane_rows:]
    later += torch.randn(later.shape, generator=torch.Generator().manual_seed(5)).to(later)
    return scratch


def numbers(num_rows: int, columns: int, table: LoraTable, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, columns, generator=generator).to(table.pool)


def shrink(table: LoraTable, segments: Segments, num_rows: int) -> Result:
    """Scratch has places for chunks, not for rows: whatever neither writes is marked by ones."""
    x = numbers(num_rows, IN, table, 1)
    sums = []
    for kernel in (lora_shrink, shrink_reference.shrink):
        scratch = torch.full_like(segments.allocate_scratch(), torch.nan)
        kernel(x, table, segments, scratch, LAYER, DOWN)
        num_splits = int(segments.header[SPLITS_AT + DOWN])
        planes = scratch[: len(scratch) // num_splits * num_splits].view(num_splits, -1, scratch.shape[1])
        sums.append(planes.sum(0))
    found, expected = sums
    assert torch.equal(found.isnan(), expected.isnan()), "more or less was written than by the twin"
    return found.nan_to_num(1.0), expected.nan_to_num(1.0)


def residual(table: LoraTable, segments: Segments, num_rows: int) -> Result:
    y, stream = numbers(num_rows, 48, table, 2), numbers(num_rows, 48, table, 3)
    scratch = scratch_of(table, segments, numbers(num_rows, IN, table, 1), DOWN)
    expected = torch.empty(y.shape, dtype=torch.float64, device=y.device)
    residual_reference.add_residual(expected, y, stream, None, table, segments, scratch, LAYER, DOWN)
    return lora_residual_(y, stream, None, table, segments, scratch, LAYER, DOWN), expected


def gate_up(table: LoraTable, segments: Segments, num_rows: int) -> Result:
    y = numbers(num_rows, 80, table, 2)
    scratch = scratch_of(table, segments, numbers(num_rows, IN, table, 1), GATE_UP)
    expected = torch.empty(num_rows, 40, dtype=torch.float64, device=y.device)
    gate_up_reference.gate_up(expected, y, None, "silu", table, segments, scratch, LAYER)
    return lora_gate_up(y, None, "silu", table, segments, scratch, LAYER), expected


def qkv(table: LoraTable, segments: Segments, num_rows: int) -> Result:
    """Queries, and keys and values as they are in the pages of the pool."""
    table = behind_pages(table)
    y = numbers(num_rows, 32, table, 2)
    angles = numbers(num_rows, 4, table, 3).float()
    slots = torch.arange(num_rows, dtype=torch.int32, device=y.device) + 3
    weight = numbers(2, 8, table, 4)
    finish = HeadFinish(angles.cos(), angles.sin(), slots, q_norm=weight[0], k_norm=weight[1])
    scratch = scratch_of(table, segments, numbers(num_rows, IN, table, 1), QKV)
    results = []
    for kernel in (lora_qkv_, qkv_reference.qkv):
        q, pool = y.clone(), table.pool.clone()
        its_table = replace(table, pool=pool, pool_fp32=pool.view(torch.float32))
        kernel(q, finish, LAYOUT, its_table, segments, scratch, LAYER)
        pages = pool[: NUM_PAGES * LAYOUT.page_elements].view(NUM_PAGES, 2, 2, 1, LAYOUT.page_tokens, 8)
        stored = pages[slots.long() // 4, LAYER, :, 0, slots.long() % 4]  # [num_rows, 2, head_dim]
        results.append(torch.cat([q[:, :16], stored.flatten(1)], dim=1))
    return results[0], results[1]


def behind_pages(table: LoraTable) -> LoraTable:
    """The same table, its pool behind pages for keys and values."""
    size = NUM_PAGES * LAYOUT.page_elements
    pool = torch.cat([torch.zeros(size, dtype=table.pool.dtype, device=table.pool.device), table.pool])
    chunks, sites = table.chunks.clone(), table.sites.clone()
    chunks[:, :2] += size
    vectors = sites[..., 2:4]
    vectors[vectors >= 0] += size * pool.element_size() // 4
    return replace(table, pool=pool, pool_fp32=pool.view(torch.float32), chunks=chunks, sites=sites)


KERNELS = {
    "shrink": (shrink, DOWN, [(0, 48)]),
    "qkv": (qkv, QKV, [(0, 16), (16, 24), (24, 32)]),
    "gate_up": (gate_up, GATE_UP, [(0, 40), (40, 80)]),
    "residual": (residual, DOWN, [(0, 48)]),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_gives_what_its_twin_gives(
    kernel: str,
    case: Case,
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    run, site, members = KERNELS[kernel]
    ranks = [(rank,) * len(members) for rank in case.ranks]
    table = make_table(site, IN, members, ranks, vectors=case.with_dora, biases=case.with_bias)
    minus = case.minus or [-1] * len(case.plus)
    found, expected = run(table, group(table, case.plus, minus, num_programs=4), len(case.plus))
    assert_close(found, expected)
    touched = [i for i, pair in enumerate(zip(case.plus, minus, strict=True)) if pair != (-1, -1)]
    untouched = [i for i in range(len(minus)) if i not in touched]
    if kernel != "shrink" and untouched:
        alone, _ = run(table, group(table, [-1] * len(minus)), len(minus))
        assert torch.equal(found[untouched], alone[untouched]), "rows without an adapter changed"
        assert all(not torch.equal(found[i], alone[i]) for i in touched), "an adapter did nothing"


@pytest.mark.parametrize("num_splits", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4, 5, 8, 16))])
@pytest.mark.parametrize("kernel", ["qkv", "gate_up", "residual"])
def test_all_planes_of_a_shrink_are_added(
    kernel: str,
    num_splits: int,
    make_table: Callable[..., LoraTable],
    group: Callable[..., Segments],
    assert_close: Callable[..., None],
    dtype: torch.dtype,
) -> None:
    run, site, members = KERNELS[kernel]
    table = make_table(site, IN, members, [(20,) * len(members), (8,) * len(members)])
    segments = group(table, [0, 1, 0])
    segments.header[SPLITS_AT + site] = num_splits
    assert_close(*run(table, segments, 3))
