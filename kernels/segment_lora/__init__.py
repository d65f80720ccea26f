"""Adds unmerged LoRA over segments: `y[segment, columns] += scaling * (x[segment] A^T) B`, each segment's own adapter.

A step's tokens are sorted by adapter, so each adapter owns one contiguous run of rows, a *segment*; rows
without an adapter belong to no segment and cost nothing. Linear layers that read the same input are packed
(q, k, v; gate, up): their A matrices are stacked, so that one multiplication shrinks for all of them, and each
member's B adds into its own columns. Ranks are exact, nothing is padded.

Shapes: `x` [num_tokens, in_features], `y` [num_tokens, out_features of the packed layer].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..native.segments import SiteSegments
from .cpu import SegmentTable
from .types import AdapterSites, LoraMember, LoraSiteWeights, LoraSpan

__all__ = ["AdapterSites", "LoraMember", "LoraSiteWeights", "LoraSpan", "PreparedLora"]


class PreparedLora:
    """The spans of a step, whose LoRA is added at every packed layer, and in further steps with these rows.

    Spans may overlap: a row gets the LoRA of each of its spans, in their order. In panels, a row's result does not
    depend on the other rows of the step, bit for bit; otherwise it may.
    """

    def __init__(self, spans: Sequence[LoraSpan]) -> None:
        self._spans = spans = [span for span in spans if not span.adapter.is_empty]
        served = [records for span in spans if (records := span.adapter.records) is not None]
        assert len(served) in (0, len(spans)), "some matrices are in panels and some are not"
        self._tables: list[SegmentTable] = []
        first = 0
        for i in range(1, len(served) + 1):
            # one call takes segments that do not overlap
            if i == len(served) or spans[i].start < spans[i - 1].end:
                self._tables.append(SegmentTable(spans[first:i], served[first:i]))
                first = i

    @property
    def tables(self) -> Sequence[SegmentTable] | None:
        """Tables of segments that compiled kernels add one after the other; None when matrices are not in panels."""
        return self._tables if self._tables or not self._spans else None

    def of_product(self, site: int) -> SiteSegments | None:
        """The segments that a compiled product (`StoredWeight.multiply`) adds by itself at packed layer number `site`:
        spans up to the first that overlaps another. None: no segments, and `add_rest_` adds all."""
        segments = self._tables[0].sites[site] if self._tables else None
        return segments if segments and segments.largest_rank else None

    def add_rest_(self, y: Tensor, x: Tensor, site: int) -> None:
        """Add the LoRA of the segments that `of_product` does not return."""
        for table in self._tables[1:]:
            table.add_(y, x, site)
        if not self._tables:
            _add_by_torch_(y, x, self._spans, site)

    def add_(self, y: Tensor, x: Tensor, site: int) -> None:
        """Add every span's LoRA at the packed layer number `site` of adapters to `y` in place. Rows outside all spans
        are not touched."""
        if self._tables:
            self._tables[0].add_(y, x, site)
        self.add_rest_(y, x, site)


def _add_by_torch_(y: Tensor, x: Tensor, spans: Sequence[LoraSpan], site: int) -> None:
    """Add the LoRA of spans whose matrices are not in panels: one product per span, and one per member."""
    for span in spans:
        weights = span.adapter.sites[site]
        if weights is None:
            continue
        assert not weights.in_panels, "only compiled kernels read panels"
        rows = slice(span.start, span.end)
        products = [torch.mm(x[rows], a.t()) for a in weights.a]
        shrunk = products[0] if len(products) == 1 else torch.cat(products, 1)  # [rows, sum of ranks]
        for member in weights.members:
            columns, rank = y[rows, member.column_start : member.column_end], member.rank_start
            for b in member.b:
                columns.addmm_(shrunk[:, rank : rank + len(b)], b, alpha=member.scaling)
                rank += len(b)
