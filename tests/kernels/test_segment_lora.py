"""Unmerged LoRA over segments against one token at a time in fp64, compiled and by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from lorabatch.kernels.native import adapter_type, native_number
from lorabatch.kernels.packed_weight import Products, can_multiply, pack
from lorabatch.kernels.packed_weight.blocks import Blocks, BlockWeight
from lorabatch.kernels.packed_weight.panels import MatrixRows, StoredWeight, has_panels, pack_matrices_
from lorabatch.kernels.segment_lora import (
    AdapterSites,
    LoraMember,
    LoraSiteWeights,
    LoraSpan,
    PreparedLora,
)
from lorabatch.kernels.segment_lora.reference import add_lora

IN, OUTS = 24, (40, 8, 37)
needs_library = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")


def in_panels(site: LoraSiteWeights, dtype: torch.dtype = torch.float32) -> LoraSiteWeights:
    """The same adapter as compiled kernels read it, each matrix in one piece."""
    return in_pieces(site, [], dtype)


def in_scattered_panels(site: LoraSiteWeights, dtype: torch.dtype = torch.float32) -> LoraSiteWeights:
    """Pieces of a panel, of less than one and of several."""
    panel = native_number("panel_columns")
    return in_pieces(site, [panel, panel + 1, panel + panel // 2, 2 * panel, 4 * panel], dtype)


def in_pieces(site: LoraSiteWeights, ends: list[int], dtype: torch.dtype) -> LoraSiteWeights:
    """The same adapter in panels, its matrices cut behind these columns and put anywhere."""
    (a,) = site.a
    panels_type = adapter_type(dtype, [a.shape[1], *(len(member.b[0]) for member in site.members)])

    def pieces(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = [0, *(end for end in ends if end < len(matrix)), len(matrix)]
        found = []
        for first, end in reversed(list(pairwise(places))):
            found.append(torch.empty((end - first) * matrix.shape[1], dtype=dtype))
            pack_matrices_(found[-1], np.array([MatrixRows(0, panels_type, 0, end - first)]), [matrix[first:end]])
        return tuple(reversed(found))

    members = tuple(replace(member, b=pieces(member.b[0].t())) for member in site.members)
    return LoraSiteWeights(pieces(a), members, in_panels=True)


def in_bf16_panels(site: LoraSiteWeights) -> LoraSiteWeights:
    return in_panels(site, torch.bfloat16)


def as_it_is(site: LoraSiteWeights) -> LoraSiteWeights:
    return site


Layout = Callable[[LoraSiteWeights], LoraSiteWeights]


def check_near(y: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, layout: Layout) -> None:
    """In bf16, rows and what they shrink to may have been rounded, to 1/256 each."""
    error = (y.double() - expected).abs()
    if layout is in_bf16_panels and native_number("kinds_of_dots"):
        added = (expected - before.double()).norm(dim=1)
        assert (error.norm(dim=1) <= added / 128).all()
    else:
        assert error.max() < 1e-3


@pytest.fixture(
    params=[
        pytest.param(in_panels, marks=needs_library, id="compiled"),
        pytest.param(in_bf16_panels, marks=needs_library, id="compiled, bf16"),
        as_it_is,
    ]
)
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


def span(start: int, end: int, weights: LoraSiteWeights | None) -> LoraSpan:
    """Rows of an adapter at one packed layer."""
    return LoraSpan(start, end, AdapterSites.of([weights]))


def laid_out(spans: Sequence[LoraSpan], layout: Layout) -> list[LoraSpan]:
    return [span(start, end, layout(adapter.sites[0])) for start, end, adapter in spans]


def add_lora_(y: torch.Tensor, x: torch.Tensor, spans: Sequence[LoraSpan]) -> None:
    PreparedLora(spans).add_(y, x, 0)


def site(
    ranks: tuple[int | None, ...], seed: int, in_features: int = IN, outs: tuple[int, ...] = OUTS
) -> LoraSiteWeights:
    """An adapter at a packed layer of three members, of numbers that bf16 holds; None leaves a member alone."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    members, stacked, row, column = [], [], 0, 0
    for rank, out in zip(ranks, outs, strict=True):
        if rank is not None:
            stacked.append(random(rank, in_features))
            b = random(rank, out)
            members.append(LoraMember(row, row + rank, column, column + out, (b,), scaling=0.5 * (seed + 1)))
            row += rank
        column += out
    return LoraSiteWeights((torch.cat(stacked),), tuple(members))


@pytest.mark.parametrize("ranks", [(1, 1, 1), (8, None, 8), (2, 66, 34), (20, 3, 64), (None, None, 5)])
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 5), (0, 4), (2, 23, 8)])
def test_each_segment_gets_its_own_adapter(
    ranks: tuple[int | None, ...], sizes: tuple[int, ...], layout: Layout
) -> None:
    start, spans = 2, []
    for seed, size in enumerate(sizes):
        spans.append(span(start, start + size, site(ranks, seed)))
        start += size
    x, y = torch.randn(start + 1, IN), torch.randn(start + 1, sum(OUTS))
    expected = add_lora(y, x, spans, 0)
    before = y.clone()
    add_lora_(y, x, laid_out(spans, layout))
    check_near(y, expected, before, layout)
    assert torch.equal(y[:2], before[:2]), "rows without an adapter changed"
    assert torch.equal(y[-1], before[-1]), "rows without an adapter changed"


def test_a_row_of_several_spans_gets_what_each_adds(layout: Layout) -> None:
    x, y = torch.randn(12, IN), torch.randn(12, sum(OUTS))
    cuts = [(0, 5), (5, 9), (3, 12), (3, 12)]
    spans = [span(*cut, site((8, 20, 3), seed)) for seed, cut in enumerate(cuts)]
    expected, before = add_lora(y, x, spans, 0), y.clone()
    add_lora_(y, x, laid_out(spans, layout))
    check_near(y, expected, before, layout)


def test_an_adapter_that_leaves_the_layer_alone_changes_nothing() -> None:
    x, y = torch.randn(4, IN), torch.randn(4, sum(OUTS))
    before = y.clone()
    add_lora_(y, x, [span(0, 4, None)])
    assert torch.equal(y, before)


def test_spans_are_prepared_once_for_all_layers(layout: Layout) -> None:
    sites = [
        [site((8, 8, 8), 0), None, site((2, None, 4), 1), None],
        [None, site((20, 3, 64), 2), site((4, 4, 4), 3), None],
        [None] * 4,
    ]
    cuts = [(0, 3), (3, 20), (20, 22)]
    laid = [[s and layout(s) for s in of_adapter] for of_adapter in sites]
    plain = [LoraSpan(*cut, AdapterSites.of(of)) for cut, of in zip(cuts, sites, strict=True)]
    prepared = PreparedLora([LoraSpan(*cut, AdapterSites.of(of)) for cut, of in zip(cuts, laid, strict=True)])
    for place in (2, 0, 1, 3, 0):
        x, y = torch.randn(22, IN), torch.randn(22, sum(OUTS))
        expected, before = add_lora(y, x, plain, place), y.clone()
        prepared.add_(y, x, place)
        check_near(y, expected, before, layout)


@needs_library
@pytest.mark.parametrize("panels", [in_panels, in_bf16_panels])
@pytest.mark.parametrize("ranks", [(8, 8, 8), (20, 6, 64), (20, 3, 64)])
def test_compiled_a_row_gets_the_same_bits_whatever_stands_beside_it(ranks: tuple[int, ...], panels: Layout) -> None:
    x, y = torch.randn(60, IN), torch.randn(60, sum(OUTS))
    together = y.clone()
    cuts = [(0, 1), (1, 14), (14, 17), (17, 60)]
    sites = [panels(site(ranks, seed)) for seed in range(len(cuts))]
    add_lora_(together, x, [span(*cut, s) for cut, s in zip(cuts, sites, strict=True)])
    for (start, end), s in zip(cuts, sites, strict=True):
        for row in range(start, end):
            alone = y[row : row + 1].clone()
            add_lora_(alone, x[row : row + 1], [span(0, 1, s)])
            assert torch.equal(alone[0], together[row]), f"row {row} of {start}:{end}"


@needs_library
@pytest.mark.parametrize("panels", [in_panels, in_bf16_panels])
@pytest.mark.parametrize("ranks", [(20, 6, 64), (20, 3, 64)])
@pytest.mark.parametrize("sizes", [(90,), (1, 70, 3, 33), (17, 16)])
def test_compiled_any_number_of_threads_shares_the_work_without_changing_a_bit(
    sizes: tuple[int, ...], ranks: tuple[int, ...], panels: Layout
) -> None:
    x, y = torch.randn(sum(sizes), IN), torch.randn(sum(sizes), sum(OUTS))
    ends = list(accumulate(sizes))
    spans = [span(e - n, e, site(ranks, i)) for i, (e, n) in enumerate(zip(ends, sizes, strict=True))]
    expected = add_lora(y, x, spans, 0)
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            results.append(y.clone())
            add_lora_(results[-1], x, laid_out(spans, panels))
    finally:
        torch.set_num_threads(before)
    check_near(results[0], expected, y, panels)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [(8, 8, 8), (20, 6, 64), (20, 3, 64)])
@pytest.mark.parametrize("weight", [None, "float32", "bfloat16", "int8"])
def test_matrices_in_pieces_anywhere_give_the_bits_of_whole_ones(
    weight: Products | None, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Added by itself, and by products, which fetch what the adapters' pieces hold while they multiply."""
    if weight is not None and not can_multiply(weight):
        pytest.skip(f"this processor has no instructions for products in {weight}")
    depth, outs, cuts = 90, (130, 64, 137), [(0, 3), (3, 60), (61, 100)]
    x, found = torch.randn(101, depth), []
    start = torch.randn(101, sum(outs))
    packed = None if weight is None else pack(torch.randn(sum(outs), depth), weight)
    threads = torch.get_num_threads()
    for panels, num_threads in ((in_panels, 1), (in_scattered_panels, 1), (in_scattered_panels, 3)):
        sites = [panels(site(ranks, seed, depth, outs), dtype) for seed in range(len(cuts))]
        spans = [LoraSpan(*cut, AdapterSites.of([each])) for cut, each in zip(cuts, sites, strict=True)]
        prepared = PreparedLora(spans)
        torch.set_num_threads(num_threads)
        try:
            if packed is None:
                found.append(start.clone())
                prepared.add_(found[-1], x, 0)
            else:
                assert isinstance(packed, StoredWeight)
                found.append(packed.multiply(x, None, prepared.of_product(0)))
        finally:
            torch.set_num_threads(threads)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_rank_rows_in_pieces_are_multiplied_by_torch() -> None:
    x, y = torch.randn(9, IN), torch.randn(9, sum(OUTS))
    whole = site((20, None, 37), 0)
    members = tuple(replace(member, b=member.b[0].split([16, len(member.b[0]) - 16])) for member in whole.members)
    pieces = replace(whole, a=whole.a[0].split([7, 30, 20]), members=members)
    expected = add_lora(y, x, [span(0, 9, whole)], 0)
    assert add_lora(y, x, [span(0, 9, pieces)], 0).equal(expected)
    add_lora_(y, x, [span(0, 9, pieces)])
    assert (y.double() - expected).abs().max() < 1e-3


@needs_library
def test_rows_that_do_not_lie_dense_are_served_too() -> None:
    x, y = torch.randn(IN, 4).t(), torch.randn(4, sum(OUTS))
    spans = [span(0, 2, site((8, 8, 8), 0)), span(2, 4, site((8, 8, 8), 1))]
    expected = add_lora(y, x, spans, 0)
    add_lora_(y, x, laid_out(spans, in_panels))
    assert (y.double() - expected).abs().max() < 1e-3


@needs_library
def test_panels_and_plain_matrices_in_one_step_are_a_mistake_of_ours() -> None:
    spans = [span(0, 1, site((8, 8, 8), 0)), span(1, 2, in_panels(site((8, 8, 8), 1)))]
    with pytest.raises(AssertionError, match="some are not"):
        add_lora_(torch.randn(2, sum(OUTS)), torch.randn(2, IN), spans)


WEIGHTS: dict[str, tuple[Products, torch.dtype]] = {
    "fp32": ("float32", torch.float32),
    "bf16, products in fp32": ("float32", torch.bfloat16),
    "fp16": ("float32", torch.float16),
    "products in bf16": ("bfloat16", torch.bfloat16),
    "products in 8 bits": ("int8", torch.float32),
}


@needs_library
@pytest.mark.parametrize("panels", [in_panels, in_bf16_panels])
@pytest.mark.parametrize("sizes", [(1, 2), (0, 7, 30), (3, 1, 9, 5), (150, 1, 33)], ids=str)
@pytest.mark.parametrize("outs", [OUTS, (64, 32, 37)], ids=["between panels", "at panels"])
@pytest.mark.parametrize("weight", [*WEIGHTS, "blocks"])
def test_a_product_with_lora_has_the_bits_of_one_after_the_other(
    weight: str, outs: tuple[int, ...], sizes: tuple[int, ...], panels: Layout
) -> None:
    packed: StoredWeight
    if weight == "blocks":
        codes = torch.randint(0, 16, (sum(outs), 2 * 32), dtype=torch.uint8)
        packed, depth = BlockWeight(Blocks(codes, torch.randn(sum(outs), 2).abs(), None, 4)), 64
    else:
        products, stored = WEIGHTS[weight]
        if not can_multiply(products):
            pytest.skip(f"this processor has no instructions for products in {products}")
        found, depth = pack(torch.randn(sum(outs), IN).to(stored), products), IN
        assert isinstance(found, StoredWeight)
        packed = found
    starts = list(accumulate(sizes, initial=3))
    ranks = [(8, 20, 64), (2, None, 34), (6, 4, 3), (None, None, 16)]
    spans = [
        LoraSpan(start, start + size, AdapterSites.of([None, panels(site(r, seed, depth, outs))]))
        for seed, (start, size, r) in enumerate(zip(starts, sizes, ranks, strict=False))
    ]
    x, bias = torch.randn(starts[-1] + 2, depth), torch.randn(sum(outs))
    prepared = PreparedLora([*spans, LoraSpan(4, 5, spans[-1].adapter)])  # the last over another, by itself
    expected = packed.multiply(x, bias)
    before, threads = expected.clone(), torch.get_num_threads()
    assert prepared.of_product(0) is None
    prepared.add_(expected, x, 1)
    assert not expected.equal(before)
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            y = packed.multiply(x, bias, prepared.of_product(1))
            prepared.add_rest_(y, x, 1)
            assert y.equal(expected), num_threads
    finally:
        torch.set_num_threads(threads)


def test_rows_in_bfloat16_are_served_by_torch() -> None:
    x, y = torch.zeros(2, IN, dtype=torch.bfloat16), torch.ones(2, sum(OUTS), dtype=torch.bfloat16)
    s = site((4, None, None), 0)
    member = s.members[0]
    half = LoraMember(0, 4, member.column_start, member.column_end, (member.b[0].bfloat16(),), 1.0)
    add_lora_(y, x, [span(0, 2, LoraSiteWeights((s.a[0].bfloat16(),), (half,)))])
    assert torch.equal(y, torch.ones_like(y))
