"""Lays an adapter's matrices out in pages of the pool, which may be anywhere in it.

A matrix is cut into blocks, none of which crosses a page: on GPUs at most 16 rank rows of a linear layer's A or B,
which kernels read through a table; on CPUs panels of A and of B, which compiled kernels read by address. A block goes
to the first page that has room for it, so that pages are full but for the last one and a few numbers. (S-LoRA, section
4.2, calls it unified paging, with a row of a matrix in each page.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.lora_table import CHUNK_RANK
from ...kernels.native import native_number
from ...kernels.segment_lora import AdapterSites, LoraMember, LoraSiteWeights
from ..errors import AdapterRefusedError
from ..model_config.model import ModelConfig, packed_members
from ..model_config.names import PackedSite

# Layouts that are remembered: the adapters of a job have few shapes.
_MAX_LAYOUTS = 32
Sites = tuple[dict[str, LoraSiteWeights], ...]  # per layer, by packed site
#: Blocks of a matrix, one behind the other: first row, row behind the last, and the place of the first number.
Blocks = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _PairLayout:
    """Place of one linear layer's pair within the packed site that it adds to."""

    #: Name of the linear layer.
    module: str
    #: First row of the pair's A in the stacked A of the site.
    rank_start: int
    #: Row behind the last one.
    rank_end: int
    #: First output of the site that the pair adds to.
    column_start: int
    #: Output behind the last one.
    column_end: int
    #: Blocks of the pair's B: of its rank rows, or in panels of the outputs.
    b_blocks: Blocks
    #: Factor of the pair's product.
    scaling: float


@dataclass(frozen=True, slots=True)
class _SiteLayout:
    """One packed site of one layer: the stacked A [sum of ranks, in_features], and its pairs."""

    #: Blocks of the rows of the stacked A.
    a_blocks: Blocks
    #: Inputs of the site.
    in_features: int
    #: The pairs, in the order of their rows of A.
    pairs: tuple[_PairLayout, ...]

    @property
    def rank(self) -> int:
        """Rows of the stacked A."""
        return self.pairs[-1].rank_end


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """Places of an adapter's matrices in pages that come one after the other, counted in numbers from the first."""

    #: Places of the matrices of each layer, by packed site.
    layers: tuple[dict[str, _SiteLayout], ...] = ()
    #: Packed sites of a layer, in order.
    site_names: tuple[PackedSite, ...] = ()
    #: Whether matrices are stored as compiled CPU kernels read them, and not as rows of A and of B's transpose.
    in_panels: bool = False
    #: Numbers of all matrices.
    num_elements: int = 0
    #: Numbers of a page, which no block crosses.
    page_elements: int = 1
    #: Numbers up to the end of the last block, gaps included.
    size: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that hold the adapter."""
        return -(-self.size // self.page_elements)

    def starts_in(self, pages: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in memory of the numbers at `starts`, where the memory's `pages` [num_pages] hold the adapter."""
        return pages[starts // self.page_elements] * self.page_elements + starts % self.page_elements

    def sites(self, memory: Tensor, pages: NDArray[np.int64]) -> Sites:
        """The matrices as views of `memory` (flat), whose `pages` hold the adapter."""
        views = _Views(self, memory, pages.tolist())
        return tuple({name: views.site(site) for name, site in layer.items()} for layer in self.layers)

    def all_sites(self, memory: Tensor, pages: NDArray[np.int64]) -> AdapterSites:
        """`sites` in one row, layer after layer, in the order of `site_names`; compiled kernels read `memory` by
        address."""

        def in_order() -> list[LoraSiteWeights | None]:
            return [of_layer.get(site) for of_layer in self.sites(memory, pages) for site in self.site_names]

        if not self.in_panels:
            return AdapterSites(in_order)
        unplaced, *places = _unplaced(self, memory.dtype)
        moves = (memory.data_ptr() + self.starts_in(pages, at) * memory.element_size() - by for at, by in places)
        return unplaced.moved(in_order, *moves)

    def negated(self) -> AdapterLayout:
        """The layout with negative scaling."""

        def negated(site: _SiteLayout) -> _SiteLayout:
            return replace(site, pairs=tuple(replace(pair, scaling=-pair.scaling) for pair in site.pairs))

        layers = ({name: negated(site) for name, site in layer.items()} for layer in self.layers)
        return replace(self, layers=tuple(layers))


class _Views:
    """Views of an adapter's matrices in `memory`, whose `pages` hold it."""

    def __init__(self, layout: AdapterLayout, memory: Tensor, pages: list[int]) -> None:
        self._in_panels, self._page_elements = layout.in_panels, layout.page_elements
        self._memory, self._pages, self._first = memory, pages, int(memory.storage_offset())

    def site(self, site: _SiteLayout) -> LoraSiteWeights:
        members = []
        for pair in site.pairs:
            # a block is of rows of B's transpose, or in panels of rows of B
            width = pair.rank_end - pair.rank_start if self._in_panels else pair.column_end - pair.column_start
            places = (pair.rank_start, pair.rank_end, pair.column_start, pair.column_end)
            members.append(LoraMember(*places, self._matrix(pair.b_blocks, width), pair.scaling))
        return LoraSiteWeights(self._matrix(site.a_blocks, site.in_features), tuple(members), self._in_panels)

    def _matrix(self, blocks: Blocks, width: int) -> tuple[Tensor, ...]:
        pieces: list[tuple[int, int]] = []
        for first, end, start in blocks:
            page, place = divmod(start, self._page_elements)
            at, rows = self._first + self._pages[page] * self._page_elements + place, end - first
            if pieces and place and not self._in_panels and at == pieces[-1][0] + pieces[-1][1] * width:
                pieces[-1] = pieces[-1][0], pieces[-1][1] + rows
            else:
                pieces.append((at, rows))
        if self._in_panels:
            return tuple(self._memory.as_strided((rows * width,), (1,), at) for at, rows in pieces)
        return tuple(self._memory.as_strided((rows, width), (width, 1), at) for at, rows in pieces)


_Places = tuple[NDArray[np.int64], NDArray[np.int64]]


@lru_cache(maxsize=_MAX_LAYOUTS)
def _unplaced(layout: AdapterLayout, dtype: torch.dtype) -> tuple[AdapterSites, _Places, _Places]:
    """An adapter of a layout as compiled kernels read it, in memory that is never read; the places of its pieces within
    the adapter, and their addresses; the places and addresses of its runs."""
    # a page of nothing between pages: runs end with theirs
    unread = torch.empty(2 * layout.num_pages * layout.page_elements, dtype=dtype)
    pages = 2 * np.arange(layout.num_pages)
    adapter = AdapterSites.of([of.get(site) for of in layout.sites(unread, pages) for site in layout.site_names])

    def within(addresses: NDArray[np.int64]) -> _Places:
        page, place = np.divmod((addresses - unread.data_ptr()) // unread.element_size(), layout.page_elements)
        return page // 2 * layout.page_elements + place, addresses

    pieces, runs = adapter.places
    return adapter, within(pieces), within(runs)


class _Pages:
    """Pages that are filled from their beginnings. `smallest`: numbers of the smallest block."""

    def __init__(self, page_elements: int, smallest: int) -> None:
        self._page_elements, self._smallest = page_elements, smallest
        # first free number of each page that has room, and the end of the page
        self._open: list[tuple[int, int]] = []
        self._num_pages = 0

    def take(self, size: int, most: int = 1) -> tuple[int, int]:
        """The place of as many of `most` blocks of `size` numbers as the first page with room for one holds, and how
        many these are."""
        number = next((i for i, (start, end) in enumerate(self._open) if end - start >= size), None)
        if number is None:
            number, first = len(self._open), self._num_pages * self._page_elements
            self._open.append((first, first + self._page_elements))
            self._num_pages += 1
        start, end = self._open[number]
        count = min((end - start) // size, most)
        self._open[number] = start + count * size, end
        if end - start - count * size < self._smallest:
            del self._open[number]
        return start, count


def _rank_blocks(pages: _Pages, rank: int, most: int, widths: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of rows of A and of B's transpose, `most` at most: first row, row behind the last, the place of A's first
    number and that of B's. `widths`: numbers of a row of each."""
    for first in range(0, rank, most):
        rows = min(most, rank - first)
        a, b = (pages.take(rows * width)[0] for width in widths)
        yield first, first + rows, a, b


def _panel_blocks(pages: _Pages, num_rows: int, depth: int, page_elements: int) -> Blocks:
    """Blocks of a matrix in panels: as many panels as a page has room for, or less than one where it is larger."""
    panel = native_number("panel_columns")
    blocks: list[tuple[int, int, int]] = []
    row = 0
    while row < num_rows:
        rows = min(panel - row % panel, num_rows - row, page_elements // depth)
        start, count = pages.take(rows * depth, (num_rows - row) // panel if rows == panel else 1)
        first, end, before = blocks[-1] if blocks else (0, 0, 0)
        if (
            end
            and first % panel == end % panel == 0
            and start == before + (end - first) * depth
            and start % page_elements
        ):
            blocks[-1] = first, row + rows * count, before
        else:
            blocks.append((row, row + rows * count, start))
        row += rows * count
    return tuple(blocks)


#: Module, rank, inputs, outputs and scaling of a pair.
PairShape = tuple[str, int, int, int, float]


def lay_out(shapes: Iterable[PairShape], model: ModelConfig, page_elements: int, *, in_panels: bool) -> AdapterLayout:
    """The layout of an adapter with pairs of these shapes, in pages of `page_elements` numbers. `in_panels`: see
    `AdapterLayout`. Adapters of equal shapes share one layout. Raises `AdapterRefusedError` where a row of a matrix is
    longer than a page.
    """
    return _lay_out(frozenset(shapes), model, page_elements, in_panels)


@lru_cache(maxsize=_MAX_LAYOUTS)
def _lay_out(shapes: frozenset[PairShape], model: ModelConfig, page_elements: int, in_panels: bool) -> AdapterLayout:
    pairs = {module: (rank, inputs, outputs, scaling) for module, rank, inputs, outputs, scaling in shapes}
    for module, (rank, *sizes, _) in pairs.items():
        if max(rank, *sizes) > page_elements:
            raise AdapterRefusedError(
                f"{module}: a row of its matrices has {max(rank, *sizes)} numbers, and a page of the pool "
                f"{page_elements}; raise page_tokens"
            )
    widths = [
        size
        for rank, inputs, outputs, _ in pairs.values()
        for size in ((rank, inputs) if in_panels else (inputs, outputs))
    ]
    pages = _Pages(page_elements, min(widths, default=1))
    layers: list[dict[str, _SiteLayout]] = []
    for layer in range(model.num_layers):
        of_layer: dict[str, _SiteLayout] = {}
        for name in model.sites:
            members = [m for m in packed_members(model, layer, name) if m.module in pairs]
            if members:
                of_pairs = [(m.module, m.start, m.end, *pairs[m.module]) for m in members]
                site = _panels_of_site if in_panels else _rows_of_site
                of_layer[name] = site(of_pairs, pages, page_elements)
        layers.append(of_layer)
    size = sum(rank * (inputs + outputs) for _, rank, inputs, outputs, _ in shapes)
    laid = AdapterLayout(tuple(layers), model.sites, in_panels, size, page_elements)
    found = sum((end - first) * width for width, blocks in _matrices(laid) for first, end, _ in blocks)
    assert size == found, f"laid out {found} of {size} numbers"
    ends = (start + (end - first) * width for width, blocks in _matrices(laid) for first, end, start in blocks)
    return replace(laid, size=max(ends, default=0))


# Module, first output of the site, output behind the last, rank, inputs, outputs and scaling.
_PlacedPair = tuple[str, int, int, int, int, int, float]


def _rows_of_site(pairs: list[_PlacedPair], pages: _Pages, page_elements: int) -> _SiteLayout:
    a_blocks: list[tuple[int, int, int]] = []
    placed, rank_start = [], 0
    for module, start, end, rank, inputs, outputs, scaling in pairs:
        most = min(CHUNK_RANK, page_elements // max(inputs, outputs))
        blocks = list(_rank_blocks(pages, rank, most, (inputs, outputs)))
        a_blocks += [(rank_start + first, rank_start + last, a) for first, last, a, _ in blocks]
        b_blocks = tuple((first, last, b) for first, last, _, b in blocks)
        placed.append(_PairLayout(module, rank_start, rank_start + rank, start, end, b_blocks, scaling))
        rank_start += rank
    return _SiteLayout(tuple(a_blocks), pairs[0][4], tuple(placed))


def _panels_of_site(pairs: list[_PlacedPair], pages: _Pages, page_elements: int) -> _SiteLayout:
    inputs = pairs[0][4]
    a_blocks = _panel_blocks(pages, sum(rank for *_, rank, _, _, _ in pairs), inputs, page_elements)
    placed, rank_start = [], 0
    for module, start, end, rank, _, outputs, scaling in pairs:
        b_blocks = _panel_blocks(pages, outputs, rank, page_elements)
        placed.append(_PairLayout(module, rank_start, rank_start + rank, start, end, b_blocks, scaling))
        rank_start += rank
    return _SiteLayout(a_blocks, inputs, tuple(placed))


def _matrices(layout: AdapterLayout) -> Iterator[tuple[int, Blocks]]:
    """Numbers of a row, and blocks, of each matrix."""
    for site in (site for of_layer in layout.layers for site in of_layer.values()):
        yield site.in_features, site.a_blocks
        for pair in site.pairs:
            in_rows = pair.rank_end - pair.rank_start, pair.column_end - pair.column_start
            yield in_rows[0 if layout.in_panels else 1], pair.b_blocks
