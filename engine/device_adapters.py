"""Resident adapters as rows of the device table that LoRA kernels read.

An adapter's matrices lie in the pool as `residency` put them: stacked A rows and B rows of each linear layer, both
contiguous, so that chunks of 16 rank rows are found by arithmetic. A row of the table is written when an adapter is
first used on the device and given to another when it was not used for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.lora_table import CHUNK_RANK, NUM_SITES, Chunk, LoraTable, ResidentSite
from ..kernels.segment_lora import LoraSiteWeights
from .model_config import PACKED_SITES, ModelConfig
from .pool import PagePool
from .residency import ResidentAdapter

_ALIGNED_ELEMENTS = 8


class DeviceAdapters:
    """The table and who stands in it. `max_chunks` bounds the chunks of all adapters of one step together."""

    def __init__(self, memory: torch.Tensor, model: ModelConfig, max_residents: int, max_chunks: int) -> None:
        sizes = [n for site in PACKED_SITES for shape in model.members_of_site(site).values() for n in shape]
        alignment = 1 if any(n % _ALIGNED_ELEMENTS for n in sizes) else _ALIGNED_ELEMENTS
        self.table = LoraTable.allocate(memory, max_residents, model.num_layers, max_chunks, alignment)
        # most chunks in any layer, per packed site
        self.chunk_counts: NDArray[np.int32] = np.zeros((max_residents, NUM_SITES), np.int32)
        self._chunk_rows = PagePool(max_chunks)
        self._free = list(range(max_residents))
        self._row_of: OrderedDict[int, int] = OrderedDict()  # ResidentAdapter.order -> row, longest unused first

    def rows_of(self, adapters: Iterable[ResidentAdapter]) -> dict[int, int]:
        """Table rows of a step's adapters by their `order`. Raises ValueError when they do not all fit."""
        wanted = {adapter.order: adapter for adapter in adapters}
        for order in wanted:
            if order in self._row_of:
                self._row_of.move_to_end(order)
        for order, adapter in wanted.items():
            if order not in self._row_of:
                self._enter(adapter, wanted.keys())
        return {order: self._row_of[order] for order in wanted}

    def _enter(self, adapter: ResidentAdapter, needed: Iterable[int]) -> None:
        layers = [[_device_site(of_layer.get(site)) for site in PACKED_SITES] for of_layer in adapter.sites]
        counts = np.array([[len(site.chunks) for site in sites] for sites in layers], np.int32)
        num_chunks = max(int(counts.sum()), 1)
        run = self._chunk_rows.allocate(adapter.order, num_chunks) if self._free else None
        while run is None:
            self._drop(next((order for order in self._row_of if order not in needed), None), num_chunks)
            run = self._chunk_rows.allocate(adapter.order, num_chunks)
        row = self._free.pop()
        self._row_of[adapter.order] = row
        self.chunk_counts[row] = counts.max(0)
        self.table.write(row, run.start, layers)

    def _drop(self, order: int | None, num_chunks: int) -> None:
        if order is None:
            rows, chunks = len(self.chunk_counts), self._chunk_rows.num_pages
            raise ValueError(
                f"the adapters of one step need more than the device table's {rows} rows or {chunks} chunks "
                f"(the next one has {num_chunks}). Lower max_batch_rows."
            )
        self._chunk_rows.release(order)
        self._free.append(self._row_of.pop(order))


def _device_site(weights: LoraSiteWeights | None) -> ResidentSite:
    """Chunks of one packed site: offsets into the pool that `weights` are views of."""
    if weights is None:
        return ResidentSite()
    in_features = weights.a.shape[1]
    chunks = []
    for member in weights.members:
        width = member.column_end - member.column_start
        for first in range(0, member.rank_end - member.rank_start, CHUNK_RANK):
            rows = min(CHUNK_RANK, member.rank_end - member.rank_start - first)
            a_offset = int(weights.a.storage_offset()) + (member.rank_start + first) * in_features
            b_offset = int(member.b.storage_offset()) + first * width
            chunks.append(Chunk(a_offset, b_offset, rows, member.column_start, width, member.scaling))
    return ResidentSite(tuple(chunks))
