"""Unmerged LoRA over segments: `y[segment, columns] += scaling * (x[segment] A^T) B` for each segment's own adapter.

A step's tokens stand sorted by adapter, so each adapter owns one contiguous run of rows, a *segment*; rows
without an adapter belong to no segment and cost nothing. Linear layers that read the same input are packed
(q, k, v; gate, up): their A matrices are stacked, so that one multiplication shrinks for all of them, and each
member's B adds into its own columns. Ranks are exact, nothing is padded.

Shapes: `x` [num_tokens, in_features], `y` [num_tokens, out_features of the packed layer].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu import MAX_MEMBERS, SiteRecord, add_lora_natively_, native_lora


@dataclass(frozen=True, slots=True)
class LoraMember:
    """One linear layer's share of a packed layer: rows of the stacked A, columns of the packed output."""

    rank_start: int
    rank_end: int
    column_start: int
    column_end: int
    b: Tensor  # [rank, out_features of the member]
    scaling: float


@dataclass(frozen=True)
class LoraSiteWeights:
    """One adapter at one packed layer: stacked A [sum of ranks, in_features] and the members' B.

    Compiled kernels take A whose memory lies by input feature (`a.t()` contiguous), B contiguous, both fp32.
    """

    a: Tensor
    members: tuple[LoraMember, ...]

    @cached_property
    def record(self) -> SiteRecord | None:
        """What compiled kernels read, or None if they cannot serve these tensors."""
        tensors = [self.a.t(), *(member.b for member in self.members)]
        fits = all(t.is_contiguous() and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        if not fits or len(self.members) > MAX_MEMBERS:
            return None
        members = [(m.rank_start, m.rank_end, m.column_start, m.column_end, m.b, m.scaling) for m in self.members]
        return SiteRecord.of(self.a, members)


class LoraSegment(NamedTuple):
    """Rows `start:end` of the step belong to one adapter; None where it leaves this layer alone."""

    start: int
    end: int
    site: LoraSiteWeights | None


def add_lora_(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """Add every segment's LoRA to `y` in place. Rows outside all segments are not touched.

    Segments may overlap: a row gets what every one of them adds, in their order. Compiled, a row's result does not
    depend on the other rows of the step, bit for bit; by torch it may.
    """
    native = native_lora() if _is_dense(x) and _is_dense(y) else None
    records = [(start, end, site.record) for start, end, site in segments if site is not None]
    served = [(start, end, record) for start, end, record in records if record is not None]
    if native is None or len(served) < len(records):
        add_lora_by_torch_(y, x, segments)
        return
    first = 0
    for i in range(1, len(served) + 1):
        # one call takes segments that lie apart
        if i == len(served) or served[i][0] < served[i - 1][1]:
            add_lora_natively_(native, y, x, served[first:i])
            first = i


def _is_dense(rows: Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.is_contiguous()


def add_lora_by_torch_(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """`add_lora_` for every device and dtype: one product per segment, and one per member."""
    for segment in segments:
        site = segment.site
        if site is None:
            continue
        rows = slice(segment.start, segment.end)
        shrunk = torch.mm(x[rows], site.a.t())  # [segment rows, sum of ranks]
        for member in site.members:
            y[rows, member.column_start : member.column_end].addmm_(
                shrunk[:, member.rank_start : member.rank_end], member.b, alpha=member.scaling
            )
