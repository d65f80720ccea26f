"""A step's rows grouped by adapter: the lists that LoRA kernels walk, in one int32 buffer, copied once per step.

    header [16]             num_tiles, then num_items and num_splits of each packed site
    perm [max_rows]         step rows, rows of the same adapter side by side
    tiles [max_tiles, 5]    row_start (in perm), num_rows, plus, minus, scratch_row; most chunks first
    items, per site [2, max_items]   the tile and the chunk position of each shrink that exists

`plus` is the resident adapter of a tile's rows, `minus` the resident whose merged weights they must not see
(mixture); -1 means none. Tiles cover every row, for the expands do more than LoRA; rows that need neither have no
items: no bytes of an adapter are read for them. Persistent kernels read the counts from the header: one captured graph
serves every mix.

Scratch: a shrink leaves [num_rows, 16] fp32 for (tile, chunk position c) at row `scratch_row + c * num_rows` of
each split's plane. Every number that is read has been written in the same step: no clearing, no atomics, and the
same step gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .lora_table import CHUNK_RANK, NUM_SITES

HEADER_LENGTH = 16
ITEMS_AT = 1  # header[ITEMS_AT + site]: items of a site
SPLITS_AT = ITEMS_AT + NUM_SITES
TILE_FIELDS = 5

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """The sizes of the buffer and the limits of a step, fixed for the engine's life."""

    #: Most rows of a step.
    max_rows: int
    #: Most shrinks of a step at one site.
    max_items: int
    #: Rows of 16 fp32 in the scratch planes, all splits together.
    scratch_rows: int
    #: Most rows of a tile, a kernel's BLOCK_M: at least 16, the smallest tensor core tile. Decode segments are short,
    #: so they waste least with 16; prefill takes 64.
    tile_rows: int = 16
    #: Most splits of the contraction.
    max_splits: int = 16
    #: Most rows of a tile that is expanded row by row, where a tensor core tile of 16 would be mostly waste; 0: no tile
    #: is, so that the rounding of a row does not depend on the number of rows.
    few_rows: int = 4

    @property
    def length(self) -> int:
        """int32 elements of the buffer; at worst every row is a tile."""
        return HEADER_LENGTH + self.max_rows * (1 + TILE_FIELDS) + NUM_SITES * 2 * self.max_items


@dataclass(frozen=True)
class Segments:
    """Views of one int32 buffer on the host or the device; the docstring of this module gives its layout. Each view is
    made once, since a step's kernels use it in every layer."""

    #: Sizes of the buffer.
    limits: SegmentLimits
    #: The buffer, int32 [`limits.length`].
    buffer: Tensor

    @cached_property
    def header(self) -> Tensor:
        return self.buffer[:HEADER_LENGTH]

    @cached_property
    def perm(self) -> Tensor:
        return self.buffer[HEADER_LENGTH : HEADER_LENGTH + self.limits.max_rows]

    @cached_property
    def tiles(self) -> Tensor:
        start = HEADER_LENGTH + self.limits.max_rows
        return self.buffer[start : start + self.limits.max_rows * TILE_FIELDS].view(-1, TILE_FIELDS)

    @cached_property
    def items(self) -> Tensor:
        """Tiles, then chunk positions of each site's shrinks, [4, 2, max_items]."""
        start = HEADER_LENGTH + self.limits.max_rows * (1 + TILE_FIELDS)
        return self.buffer[start : self.limits.length].view(NUM_SITES, 2, -1)

    def allocate_scratch(self) -> Tensor:
        """Planes for the shrinks, fp32 [scratch_rows, 16], on the buffer's device; needs no clearing."""
        shape = (self.limits.scratch_rows, CHUNK_RANK)
        return torch.empty(shape, dtype=torch.float32, device=self.buffer.device)

    def tiles_list(self) -> list[list[int]]:
        """Fields of each tile in use, for references and tests (reads device memory)."""
        fields: list[list[int]] = self.tiles[: int(self.header[0])].tolist()
        return fields


def plan_segments(
    plus: _Ints,
    minus: _Ints,
    chunk_counts: _Ints,
    limits: SegmentLimits,
    num_programs: int,
    into: Tensor | None = None,
) -> Segments:
    """Group the rows of a step by adapter, on the host, in a new buffer or in `into`, which is overwritten.

    `plus`, `minus` [num_rows]: resident numbers, -1 for none. `chunk_counts` [num_residents, 4]: most chunks of a
    resident in any layer, per site. `num_programs`: programs of the shrink's grid; contraction is split until all
    of them have work (1 keeps a row's sum independent of what else is in the step). Raises ValueError when the
    step needs more rows, items or scratch than `limits` allow.
    """
    segments = Segments(limits, torch.zeros(limits.length, dtype=torch.int32) if into is None else into)
    num_rows = len(plus)
    _check("rows", num_rows, limits.max_rows)
    order = np.lexsort((minus, plus)).astype(np.int32)
    starts, sizes = _cut(plus[order], minus[order], limits.tile_rows)
    counts = np.zeros((len(starts), NUM_SITES), np.int64)
    for resident_of_row in (plus, minus):
        resident = resident_of_row[order][starts]
        counts[resident >= 0] += chunk_counts[resident[resident >= 0]]
    # most chunks first: the last work to be handed out is the shortest, so programs end together
    by_size = np.argsort(-counts.sum(1), kind="stable")
    starts, sizes, counts = starts[by_size], sizes[by_size], counts[by_size]
    scratch = sizes * counts.max(1)
    fields = (starts, sizes, plus[order][starts], minus[order][starts], np.cumsum(scratch) - scratch)
    segments.perm[:num_rows] = torch.from_numpy(order)
    segments.tiles[: len(starts)] = torch.from_numpy(np.stack(fields, 1).astype(np.int32))
    segments.header[0] = len(starts)
    _list_items(segments, counts, int(scratch.sum()), num_programs)
    return segments


def _cut(plus: _Ints, minus: _Ints, tile_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and sizes of tiles over sorted rows: no tile crosses a segment or exceeds `tile_rows`."""
    rows = np.arange(len(plus))
    is_first = np.ones(len(plus), bool)
    is_first[1:] = (plus[1:] != plus[:-1]) | (minus[1:] != minus[:-1])
    segment_start = np.maximum.accumulate(np.where(is_first, rows, 0))
    starts = rows[(rows - segment_start) % tile_rows == 0]
    return starts, np.diff(starts, append=len(plus))


def _list_items(segments: Segments, counts: NDArray[np.int64], scratch_rows: int, num_programs: int) -> None:
    limits = segments.limits
    _check("scratch rows", scratch_rows, limits.scratch_rows)
    for site in range(NUM_SITES):
        per_tile = counts[:, site]
        num_items = int(per_tile.sum())
        _check("items", num_items, limits.max_items)
        tiles = np.repeat(np.arange(len(per_tile)), per_tile)
        positions = np.arange(num_items) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)
        segments.items[site, :, :num_items] = torch.from_numpy(np.stack((tiles, positions)).astype(np.int32))
        wanted = -(-num_programs // max(num_items, 1))
        fitting = limits.scratch_rows // max(scratch_rows, 1)
        segments.header[ITEMS_AT + site] = num_items
        segments.header[SPLITS_AT + site] = max(1, min(wanted, fitting, limits.max_splits))


def _check(what: str, needed: int, available: int) -> None:
    if needed > available:
        raise ValueError(f"the step needs {needed} {what}, the segment buffer has room for {available}")
