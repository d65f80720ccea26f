"""Adapters at packed layers, and the rows of a step that belong to each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..native.segments import SiteRecord


@dataclass(frozen=True, slots=True)
class LoraMember:
    """One linear layer's share of a packed layer: rows of the stacked A, columns of the packed output."""

    rank_start: int
    rank_end: int
    column_start: int
    column_end: int
    b: Tensor  # [rank, out_features of the member]; or panels of its transpose, flat
    scaling: float


@dataclass(frozen=True)
class LoraSiteWeights:
    """One adapter at one packed layer: stacked A [sum of ranks, in_features] and the members' B.

    `in_panels`: A and the transposed B are in panels (`kernels.packed_weight`) of their `adapter_type`, flat, as
    compiled kernels read them.
    """

    a: Tensor
    members: tuple[LoraMember, ...]
    in_panels: bool = False

    @cached_property
    def record(self) -> SiteRecord | None:
        """What compiled kernels read, or None where matrices are not in panels."""
        if not self.in_panels:
            return None
        members = [(m.rank_start, m.rank_end, m.column_start, m.column_end, m.b, m.scaling) for m in self.members]
        return SiteRecord.of(self.a, sum(m.rank_end - m.rank_start for m in self.members), members)


class AdapterSites:
    """One adapter at the packed layers of a model, in an order that all adapters share; None where it leaves a layer
    alone."""

    def __init__(self, sites: Sequence[LoraSiteWeights | None]) -> None:
        self.sites = tuple(sites)

    @cached_property
    def records(self) -> NDArray[np.int64] | None:
        """[num_sites, 2]: address of the site's record and its rank, both 0 where there is none. None: matrices are not
        in panels."""
        in_panels = {site.in_panels for site in self.sites if site is not None}
        assert len(in_panels) < 2, "some matrices are in panels and some are not"
        if False in in_panels:
            return None
        records = [None if site is None else site.record for site in self.sites]
        numbers = [(0, 0) if record is None else (ctypes.addressof(record), record.rank) for record in records]
        return np.array(numbers, dtype=np.int64).reshape(-1, 2)


class LoraSpan(NamedTuple):
    """Rows `start:end` of the step belong to one adapter."""

    start: int
    end: int
    adapter: AdapterSites


class LoraSegment(NamedTuple):
    """`LoraSpan` at one packed layer; None where the adapter leaves it alone."""

    start: int
    end: int
    site: LoraSiteWeights | None
