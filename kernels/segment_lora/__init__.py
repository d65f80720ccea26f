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

from .cpu import SegmentTable
from .types import LoraMember, LoraSegment, LoraSiteWeights

__all__ = ["LoraMember", "LoraSegment", "LoraSiteWeights", "PreparedLora", "add_lora_", "add_lora_by_torch_"]


class PreparedLora:
    """Segments at one packed layer, to be added to the outputs of many steps.

    Segments may overlap: a row gets what every one of them adds, in their order. In panels, a row's result does not
    depend on the other rows of the step, bit for bit; otherwise it may.
    """

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        self._segments = [segment for segment in segments if segment.site is not None]
        records = [(start, end, site.record) for start, end, site in self._segments if site is not None]
        served = [(start, end, record) for start, end, record in records if record is not None]
        assert len(served) in (0, len(records)), "some matrices are in panels and some are not"
        self._tables: list[SegmentTable] = []
        first = 0
        for i in range(1, len(served) + 1):
            # one call takes segments that do not overlap
            if i == len(served) or served[i][0] < served[i - 1][1]:
                self._tables.append(SegmentTable(served[first:i]))
                first = i

    def add_(self, y: Tensor, x: Tensor) -> None:
        """Add every segment's LoRA to `y` in place. Rows outside all segments are not touched."""
        for table in self._tables:
            table.add_(y, x)
        if not self._tables:
            add_lora_by_torch_(y, x, self._segments)


def add_lora_(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """`PreparedLora`, used once."""
    PreparedLora(segments).add_(y, x)


def add_lora_by_torch_(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """`add_lora_` for every device and dtype, but not for panels: one product per segment, and one per member."""
    for segment in segments:
        site = segment.site
        if site is None:
            continue
        assert not site.in_panels, "only compiled kernels read panels"
        rows = slice(segment.start, segment.end)
        shrunk = torch.mm(x[rows], site.a.t())  # [segment rows, sum of ranks]
        for member in site.members:
            y[rows, member.column_start : member.column_end].addmm_(
                shrunk[:, member.rank_start : member.rank_end], member.b, alpha=member.scaling
            )
