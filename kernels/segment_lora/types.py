"""Adapters at packed layers, and the rows of a step that belong to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..native import adapter_type
from ..native.segments import MAX_MEMBERS, PIECE, RUN, SITE


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
    #: Pieces of B [rank, out_features of the member], one behind the other, each some of its rows; or pieces of its
    #: transpose in panels, flat.
    b: tuple[Tensor, ...]
    #: Factor of its product.
    scaling: float


@dataclass(frozen=True, slots=True)
class LoraSiteWeights:
    """One adapter at one packed layer. Its matrices may be in pieces, anywhere in memory."""

    #: Pieces of the stacked A [sum of ranks, in_features], one behind the other, each some of its rows; or of its
    #: panels, flat.
    a: tuple[Tensor, ...]
    #: The members, each with its B.
    members: tuple[LoraMember, ...]
    #: Whether A and the transposed B are in panels (`kernels.packed_weight`) of their `adapter_type`, as compiled
    #: kernels read them. A piece begins and ends with a panel, or lies within one and has a panel of its own.
    in_panels: bool = False

    @property
    def rank(self) -> int:
        """Rows of the stacked A."""
        return self.members[-1].rank_end


Sites = Sequence[LoraSiteWeights | None]


class AdapterSites:
    """One adapter at the packed layers of a model, in an order that all adapters share.

    `sites`: makes the matrices as views, None for a layer that the adapter leaves alone. `tables`: the pieces, runs and
    sites (`native.segments`) by which compiled kernels read the matrices; None: they are not in panels. The pieces of a
    site come one after the other, and so do its runs.
    """

    def __init__(
        self,
        sites: Callable[[], Sites],
        tables: tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void]] | None = None,
    ) -> None:
        self._sites = sites
        self._tables = tables
        #: Address of each site's record and its rank, [num_sites, 2], both 0 without a record. None: not in panels.
        self.records: NDArray[np.int64] | None = None
        if tables is not None:
            ranks = tables[2]["rank"]
            addresses = tables[2].ctypes.data + np.arange(len(ranks)) * SITE.itemsize
            self.records = np.stack([np.where(ranks > 0, addresses, 0), ranks], axis=1)

    @classmethod
    def of(cls, sites: Sites) -> AdapterSites:
        """The adapter with these sites, all in panels or none."""
        in_panels = {site.in_panels for site in sites if site is not None}
        assert len(in_panels) < 2, "some matrices are in panels and some are not"
        if False in in_panels:
            return cls(lambda: sites)
        pieces: list[tuple[int, int]] = []
        runs: list[tuple[int, int]] = []
        records = np.zeros(len(sites), SITE)
        for number, site in enumerate(sites):
            if site is not None:
                records[number] = _record(site, pieces, runs)
        tables = np.array(pieces, PIECE), np.array(runs, RUN), records
        _point(records, tables[0].ctypes.data, tables[1].ctypes.data)
        return cls(lambda: sites, tables)

    def moved(self, sites: Callable[[], Sites], piece_bytes: NDArray[np.int64], run_bytes: NDArray[np.int64]) -> Self:
        """The adapter in panels, its pieces and runs further on in memory by `piece_bytes` [num_pieces] and
        `run_bytes` [num_runs]. `sites`: as in the constructor."""
        assert self._tables is not None, "only matrices in panels are read by address"
        pieces, runs, records = (table.copy() for table in self._tables)
        pieces["numbers"] += piece_bytes
        runs["start"] += run_bytes
        _point(
            records,
            pieces.ctypes.data - self._tables[0].ctypes.data,
            runs.ctypes.data - self._tables[1].ctypes.data,
        )
        return type(self)(sites, (pieces, runs, records))

    @property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Addresses of the first byte of each piece and of each run of an adapter in panels, [num_pieces] and
        [num_runs]."""
        assert self._tables is not None, "only matrices in panels are read by address"
        starts = [matrix.data_ptr() for site in self.sites if site is not None for matrix in _pieces_of(site)]
        return np.array(starts, np.int64), self._tables[1]["start"]

    @cached_property
    def sites(self) -> Sites:
        """The matrices at each layer, made at first use; None for a layer that the adapter leaves alone."""
        return tuple(self._sites())

    @property
    def is_empty(self) -> bool:
        """Whether the adapter leaves all layers alone."""
        return not any(self.sites) if self.records is None else not self.records.any()


def _pieces_of(site: LoraSiteWeights) -> list[Tensor]:
    """The pieces of A, then those of each B."""
    return [*site.a, *(piece for member in site.members for piece in member.b)]


def _record(site: LoraSiteWeights, pieces: list[tuple[int, int]], runs: list[tuple[int, int]]) -> tuple[object, ...]:
    """Fields of `SITE`, whose addresses of pieces and runs are their places in the lists, in bytes. Adds the pieces and
    the runs of the site to the lists."""
    members = site.members
    assert site.in_panels, "compiled kernels read panels"
    assert len(members) <= MAX_MEMBERS, f"{len(members)} members of a packed layer"
    ranks = [member.rank_end - member.rank_start for member in members]
    in_features = sum(piece.numel() for piece in site.a) // sum(ranks)
    a, first_run = len(pieces), len(runs)
    pieces += _pieces(site.a, in_features)
    fields = []
    for m, rank in zip(members, ranks, strict=True):
        fields.append((m.rank_start, m.rank_end, m.column_start, m.column_end, len(pieces) * PIECE.itemsize, m.scaling))
        pieces += _pieces(m.b, rank)
    fields += [(0, 0, 0, 0, 0, 0.0)] * (MAX_MEMBERS - len(members))
    for matrix in _pieces_of(site):
        if len(runs) > first_run and sum(runs[-1]) == matrix.data_ptr():
            runs[-1] = runs[-1][0], runs[-1][1] + matrix.nbytes
        else:
            runs.append((matrix.data_ptr(), matrix.nbytes))
    num_bytes = sum(size for _, size in runs[first_run:])
    panels_type = adapter_type(site.a[0].dtype, (in_features, *ranks))
    places = a * PIECE.itemsize, first_run * RUN.itemsize
    return *places, len(runs) - first_run, num_bytes, sum(ranks), panels_type, len(members), fields


def _pieces(matrix: tuple[Tensor, ...], depth: int) -> list[tuple[int, int]]:
    """Fields of `PIECE` for a matrix whose columns are `depth` numbers."""
    ends = np.cumsum([piece.numel() for piece in matrix]) // depth
    starts = [0, *ends[:-1].tolist()]
    return [
        (end, piece.data_ptr() - start * depth * piece.element_size())
        for piece, start, end in zip(matrix, starts, ends.tolist(), strict=True)
    ]


def _point(records: NDArray[np.void], pieces_by: int, runs_by: int) -> None:
    """Add to the addresses of the pieces and runs of records that are not empty."""
    is_used = records["rank"] > 0
    records["a"] += np.where(is_used, pieces_by, 0)
    records["runs"] += np.where(is_used, runs_by, 0)
    is_member = np.arange(MAX_MEMBERS) < records["num_members"][:, None]
    records["members"]["b"] += np.where(is_member, pieces_by, 0)


class LoraSpan(NamedTuple):
    """Rows `start:end` of the step belong to one adapter."""

    start: int
    end: int
    adapter: AdapterSites
