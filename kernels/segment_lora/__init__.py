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

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraMember:
    """One linear layer's share of a packed layer: rows of the stacked A, columns of the packed output."""

    rank_start: int
    rank_end: int
    column_start: int
    column_end: int
    b: Tensor  # [rank, out_features of the member]
    scaling: float


@dataclass(frozen=True, slots=True)
class LoraSiteWeights:
    """One adapter at one packed layer: stacked A [sum of ranks, in_features] and the members' B."""

    a: Tensor
    members: tuple[LoraMember, ...]


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Rows `start:end` of the step belong to one adapter; None where it leaves this layer alone."""

    start: int
    end: int
    site: LoraSiteWeights | None


def add_lora_(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """Add every segment's LoRA to `y` in place. Rows outside all segments are not touched.

    Segments may overlap: a row gets what every one of them adds.
    """
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
