"""Batch-invariant attention: a query's bits are the same in a prompt, in any piece of it, and as a decode row, with its
context split among items or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.paged_attention import AttentionRule, allocate_partials, attend_pages
from lorabatch.kernels.paged_attention.reference import attend
from lorabatch.kernels.paged_attention.work import AttentionWork, Span, WorkLimits, plan_attention, tile_rows_for

pytestmark = pytest.mark.usefixtures("products_in_order")
LENGTH, SEGMENT = 75, 32
LAYOUT = PageLayout(num_heads=6, num_kv_heads=2, head_dim=20, num_layers=2, page_tokens=4)
RULES = {
    "plain": AttentionRule(0.25),
    "window": AttentionRule(0.25, window=21),
    "both": AttentionRule(0.3, window=40, softcap=2.0),
    "sinks": AttentionRule(0.25),
    "sinks and a window": AttentionRule(0.25, window=21),
}


class Sequenced:
    """A sequence whose keys and values are in a pool, behind one of another length; `q` of all of its tokens."""

    def __init__(self, case: str, dtype: torch.dtype, device: torch.device) -> None:
        generator, rule = torch.Generator().manual_seed(0), RULES[case]
        self.rule, self.dtype, self.device = rule, dtype, device
        self.q = torch.randn(LENGTH, 6, 20, generator=generator).to(device, dtype)
        num_pages = -(-LENGTH // 4)
        self.pool = torch.randn((num_pages + 9) * LAYOUT.page_elements, generator=generator).to(device, dtype)
        pages = torch.randperm(num_pages + 9, generator=generator).to(torch.int32)
        self.sinks = torch.randn(6, generator=generator).to(device, dtype) if "sinks" in case else None
        self.tables = torch.stack((torch.arange(num_pages).to(torch.int32) % 9, pages[:num_pages])).to(device)

    def attended(self, spans: Sequence[tuple[int, int]], *, is_decode: bool, splits: bool) -> Tensor:
        """Results of the tokens first:last of each span, behind a row of the other sequence."""
        rows, at = [Span(0, 1, 17, 0)], 1
        for first, last in spans:
            rows.append(Span(at, last - first, first, 1))
            at += last - first
        q = torch.cat([self.q[:1], *(self.q[first:last] for first, last in spans)])
        work, partials = self._work(rows, is_decode=is_decode, splits=splits)
        return attend_pages(q, self.pool, self.tables, work, partials, LAYOUT, 1, self.rule, sinks=self.sinks)[1:]

    def expected(self) -> Tensor:
        """By the plain twin."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=self.device)
        work, partials = self._work([Span(0, LENGTH, 0, 1)], is_decode=False, splits=False)
        attend(out, self.q, self.pool, self.tables, work, partials, LAYOUT, 1, self.rule, self.sinks)
        return out.flatten(1)

    def _work(self, rows: list[Span], *, is_decode: bool, splits: bool) -> tuple[AttentionWork, tuple[Tensor, Tensor]]:
        tile_rows = tile_rows_for(LAYOUT, self.dtype, is_decode, is_exact=True)
        limits = WorkLimits(300, 100, tile_rows, SEGMENT if splits else 0, SEGMENT)
        host = plan_attention(rows, LAYOUT.queries_per_key_head, limits)
        partials = allocate_partials(limits.max_items, LAYOUT.num_heads, LAYOUT.head_dim, self.device)
        partials[0].fill_(torch.nan)
        return AttentionWork(limits, host.buffer.to(self.device)), partials


@pytest.mark.parametrize("case", RULES)
def test_a_query_has_the_same_bits_however_its_prompt_is_cut(
    assert_close: Callable[[Tensor, Tensor], None], device: torch.device, dtype: torch.dtype, case: str
) -> None:
    sequence = Sequenced(case, dtype, device)
    whole = sequence.attended([(0, LENGTH)], is_decode=False, splits=False)
    assert_close(whole, sequence.expected())
    for cuts in ([0, 1, 40, LENGTH], [0, 13, 32, 64, 71, LENGTH]):
        assert torch.equal(sequence.attended([*pairwise(cuts)], is_decode=False, splits=True), whole), cuts
    decoded = [31, 32, 33, 63, 64, 70, 74]
    for splits in (False, True):  # an item is within a segment in steps of decode rows
        chosen = decoded if splits else decoded[:1]
        found = sequence.attended([(i, i + 1) for i in chosen], is_decode=True, splits=splits)
        assert torch.equal(found, whole[chosen])


def test_items_are_segments_or_whole_contexts() -> None:
    limits = WorkLimits(8, 4, 16, SEGMENT, SEGMENT)
    work = plan_attention([Span(0, 1, 99, 0), Span(1, 1, 31, 0)], 3, limits)
    items = work.items[: int(work.header[0]), 4:].tolist()
    assert sorted(items) == [[0, 32, -1], [0, 32, 0], [32, 64, 1], [64, 96, 2], [96, 100, 3]]
    with pytest.raises(AssertionError, match="no segments"):
        plan_attention([], 3, WorkLimits(8, 4, 16, SEGMENT // 2, SEGMENT))
