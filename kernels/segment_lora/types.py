"""Adapters at packed layers, and the rows of a step that belong to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..native.segments import SiteRecord, addresses_and_ranks, record_table


@dataclass(frozen=True, slots=True)
class LoraMember:
    """One linear layer's share of a packed layer: rows of the stacked A, columns of the packed output."""

    #: First of its rows in the stacked A.
    rank_start: int
    #: End of its rows in the stacked A.
    rank_end: int
    #: First of its columns in the packed output.
    column_start: int
    #: End of its columns in the packed output.
    column_end: int
    #: B, [rank, out_features of the member]; or panels of its transpose, flat.
    b: Tensor
    #: Factor of its product.
    scaling: float


@dataclass(frozen=True)
class LoraSiteWeights:
    """One adapter at one packed layer."""

    #: Stacked A, [sum of ranks, in_features]; or its panels, flat.
    a: Tensor
    #: The members, each with its B.
    members: tuple[LoraMember, ...]
    #: Whether A and the transposed B are in panels (`kernels.packed_weight`) of their `adapter_type`, as compiled
    #: kernels read them.
    in_panels: bool = False

    @cached_property
    def record(self) -> SiteRecord | None:
        """The matrices as compiled kernels read them; None when they are not in panels."""
        if not self.in_panels:
            return None
        members = [(m.rank_start, m.rank_end, m.column_start, m.column_end, m.b, m.scaling) for m in self.members]
        return SiteRecord.of(self.a, sum(m.rank_end - m.rank_start for m in self.members), members)


class AdapterSites:
    """One adapter at the packed layers of a model, in an order that all adapters share.

    `table`: the matrices as compiled kernels read them, a `native.segments.record_table` (None: they are not in
    panels). `sites`: makes the matrices as views, None for a layer that the adapter leaves alone.
    """

    def __init__(
        self, sites: Callable[[], Sequence[LoraSiteWeights | None]], table: NDArray[np.int64] | None = None
    ) -> None:
        self._sites = sites
        self._table = table
        #: Address of each site's record and its rank, [num_sites, 2], both 0 without a record. None: not in panels.
        self.records = None if table is None else addresses_and_ranks(table)

    @classmethod
    def of(cls, sites: Sequence[LoraSiteWeights | None]) -> AdapterSites:
        """The adapter with these sites, all in panels or none."""
        in_panels = {site.in_panels for site in sites if site is not None}
        assert len(in_panels) < 2, "some matrices are in panels and some are not"
        if False in in_panels:
            return cls(lambda: sites)
        return cls(lambda: sites, record_table([None if site is None else site.record for site in sites]))

    @cached_property
    def sites(self) -> Sequence[LoraSiteWeights | None]:
        """The matrices at each layer, made at first use; None for a layer that the adapter leaves alone."""
        return tuple(self._sites())

    @property
    def is_empty(self) -> bool:
        """Whether the adapter leaves all layers alone."""
        return not any(self.sites) if self.records is None else not self.records.any()


class LoraSpan(NamedTuple):
    """Rows `start:end` of the step belong to one adapter."""

    start: int
    end: int
    adapter: AdapterSites
