"""Enters resident adapters as rows of the device table that LoRA kernels read.

An adapter's matrices are in the pool as `residency` put them: stacked A rows and B rows of each linear layer, both
contiguous, so that chunks of 16 rank rows are found by arithmetic. A row of the table is written when an adapter is
first used on the device, and reused for another when it is the one unused for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.layouts.lora_table import CHUNK_RANK, NUM_SITES, Chunk, LoraTable, ResidentSite
from ...kernels.segment_lora import LoraSiteWeights
from ..memory.pool import PagePool
from ..memory.residency import ResidentAdapter
from ..model_config.model import PACKED_SITES, ModelConfig

_ALIGNED_ELEMENTS = 8


class GpuAdapters:
    """The table and the adapters in it.

    It starts with `num_rows` adapters and `num_chunks` chunks, and doubles when one step needs more: its tensors are
    then new ones.
    """

    def __init__(self, memory: torch.Tensor, model: ModelConfig, num_rows: int, num_chunks: int) -> None:
        self._memory = memory
        self._num_layers = model.num_layers
        sizes = [n for site in PACKED_SITES for shape in model.members_of_site(site).values() for n in shape]
        self._alignment = 1 if any(n % _ALIGNED_ELEMENTS for n in sizes) else _ALIGNED_ELEMENTS
        self._start(num_rows, num_chunks)

    def rows_of(self, adapters: Iterable[ResidentAdapter]) -> dict[int, int]:
        """Table rows of a step's adapters by their `order`."""
        wanted = {adapter.order: adapter for adapter in adapters}
        while not self._enter_all(wanted):
            self._start(2 * len(self.chunk_counts), 2 * self._chunk_rows.num_pages)
        return {order: self._row_of[order] for order in wanted}

    def _start(self, num_rows: int, num_chunks: int) -> None:
        """An empty table."""
        self.table = LoraTable.allocate(self._memory, num_rows, self._num_layers, num_chunks, self._alignment)
        # most chunks in any layer, per packed site
        self.chunk_counts: NDArray[np.int32] = np.zeros((num_rows, NUM_SITES), np.int32)
        self._chunk_rows = PagePool(num_chunks)
        self._free = list(range(num_rows))
        self._row_of: OrderedDict[int, int] = OrderedDict()  # ResidentAdapter.order -> row, longest unused first

    def _enter_all(self, wanted: dict[int, ResidentAdapter]) -> bool:
        """Whether there was room for all."""
        for order in wanted:
            if order in self._row_of:
                self._row_of.move_to_end(order)
        return all(order in self._row_of or self._enter(adapter, wanted.keys()) for order, adapter in wanted.items())

    def _enter(self, adapter: ResidentAdapter, needed: Collection[int]) -> bool:
        layers = [[_device_site(of_layer.get(site)) for site in PACKED_SITES] for of_layer in adapter.sites]
        counts = np.array([[len(site.chunks) for site in sites] for sites in layers], np.int32)
        num_chunks = max(int(counts.sum()), 1)
        run = self._chunk_rows.allocate(adapter.order, num_chunks) if self._free else None
        while run is None:
            unused = next((order for order in self._row_of if order not in needed), None)
            if unused is None:
                return False
            self._chunk_rows.release(unused)
            self._free.append(self._row_of.pop(unused))
            run = self._chunk_rows.allocate(adapter.order, num_chunks)
        row = self._free.pop()
        self._row_of[adapter.order] = row
        self.chunk_counts[row] = counts.max(0)
        self.table.write(row, run.start, layers)
        return True


def _device_site(weights: LoraSiteWeights | None) -> ResidentSite:
    """Chunks of one packed site: offsets into the pool that `weights` are views of."""
    if weights is None:
        return ResidentSite()
    assert weights.a.is_contiguous(), "device kernels read A by rank"
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
