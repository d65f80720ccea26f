"""Enters resident adapters as rows of the device table that LoRA kernels read.

An adapter's matrices are in the pool as `residency` put them: chunks of at most 16 rank rows, each in one page of those
that the adapter has anywhere in the pool (`memory.adapter_layout`). A row of the table is written when an adapter is
first used on the device, and reused for another when it is the one unused for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.layouts.lora_table import CHUNK_FIELDS, NUM_SITES, AdapterRows, LoraTable
from ..memory.adapter_layout import AdapterLayout
from ..memory.pool import PagePool
from ..memory.residency import ResidentAdapter
from ..model_config.model import ModelConfig
from ..model_config.names import COMMON_SITES

_ALIGNED_ELEMENTS = 8
# Layouts whose rows are remembered: the adapters of a job have few shapes.
_MAX_LAYOUTS = 32


class GpuAdapters:
    """The table and the adapters in it.

    It starts with `num_rows` adapters and `num_chunks` chunks, and doubles when one step needs more: its tensors are
    then new ones.
    """

    def __init__(self, memory: torch.Tensor, model: ModelConfig, num_rows: int, num_chunks: int) -> None:
        self._memory = memory
        self._num_layers = model.num_layers
        self._parts = [model.parts_of_site(0, site) for site in COMMON_SITES]
        sizes = [n for shape in model.layer_shapes(0).values() for n in shape]
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
        self.table = LoraTable.allocate(
            self._memory, num_rows, self._num_layers, num_chunks, self._parts, self._alignment
        )
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
        rows = _rows_of(adapter.layout, adapter.pages)
        num_chunks = max(len(rows.chunks), 1)
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
        self.chunk_counts[row] = rows.counts.reshape(-1, NUM_SITES).max(0)
        self.table.write(row, run.start, rows)
        return True


def _rows_of(layout: AdapterLayout, pages: NDArray[np.int64]) -> AdapterRows:
    """An adapter in these pages of the pool as rows of the table."""
    rows = _rows_from_zero(layout)
    chunks = rows.chunks.copy()
    chunks[:, :2] = layout.starts_in(pages, chunks[:, :2])
    return replace(rows, chunks=chunks)


@lru_cache(maxsize=_MAX_LAYOUTS)
def _rows_from_zero(layout: AdapterLayout) -> AdapterRows:
    """Rows of the table for any adapter of this layout: a chunk for each block, at its place in the layout."""
    assert not layout.in_panels, "device kernels read A by rank"
    counts = np.zeros(len(layout.layers) * NUM_SITES, np.int32)
    chunks: list[tuple[int, int, int, int, int]] = []
    scales: list[float] = []
    for layer, of_layer in enumerate(layout.layers):
        for number, name in enumerate(COMMON_SITES):
            if (site := of_layer.get(name)) is None:
                continue
            a_blocks = iter(site.a_blocks)
            for pair in site.pairs:
                columns = pair.column_start, pair.column_end - pair.column_start
                # A and B of a pair are cut at the same rows
                for (first, end, b), (_, _, a) in zip(pair.b_blocks, a_blocks, strict=False):
                    chunks.append((a, b, end - first, *columns))
                scales += [pair.scaling] * len(pair.b_blocks)
            counts[layer * NUM_SITES + number] = sum(len(pair.b_blocks) for pair in site.pairs)
    return AdapterRows(counts, np.array(chunks, np.int64).reshape(-1, CHUNK_FIELDS), np.array(scales, np.float32))
