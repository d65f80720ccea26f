"""Adapters at packed layers, and the rows of a step that belong to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..native import adapter_type
from ..native.segments import MAX_MEMBERS, SITE, addresses_and_ranks


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


@dataclass(frozen=True, slots=True)
class LoraSiteWeights:
    """One adapter at one packed layer."""

    #: Stacked A, [sum of ranks, in_features]; or its panels, flat.
    a: Tensor
    #: The members, each with its B.
    members: tuple[LoraMember, ...]
    #: Whether A and the transposed B are in panels (`kernels.packed_weight`) of their `adapter_type`, as compiled
    #: kernels read them.
    in_panels: bool = False


def site_records(sites: Sequence[LoraSiteWeights | None]) -> NDArray[np.void]:
    """Sites in panels as compiled kernels read them, `native.segments.SITE` [num_sites]. Valid as long as their
    matrices.
    """
    records = np.zeros(len(sites), SITE)
    for i, site in enumerate(sites):
        if site is not None:
            records[i] = _record(site)
    return records


def _record(site: LoraSiteWeights) -> tuple[object, ...]:
    """Fields of `SITE`."""
    a, members = site.a, site.members
    assert site.in_panels, "compiled kernels read panels"
    assert len(members) <= MAX_MEMBERS, f"{len(members)} members of a packed layer"
    ranks = [member.rank_end - member.rank_start for member in members]
    end = a.data_ptr() + a.nbytes
    for member in members:
        end += member.b.nbytes if member.b.data_ptr() == end else 0
    fields = [(m.rank_start, m.rank_end, m.column_start, m.column_end, m.b.data_ptr(), m.scaling) for m in members]
    fields += [(0, 0, 0, 0, 0, 0.0)] * (MAX_MEMBERS - len(members))
    panels_type = adapter_type(a.dtype, (a.numel() // sum(ranks), *ranks))
    return a.data_ptr(), end - a.data_ptr(), sum(ranks), panels_type, len(members), fields


class AdapterSites:
    """One adapter at the packed layers of a model, in an order that all adapters share.

    `table`: the matrices as compiled kernels read them, as `site_records` makes them (None: they are not in panels).
    `sites`: makes the matrices as views, None for a layer that the adapter leaves alone.
    """

    def __init__(
        self, sites: Callable[[], Sequence[LoraSiteWeights | None]], table: NDArray[np.void] | None = None
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
        return cls(lambda: sites, site_records(sites))

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
