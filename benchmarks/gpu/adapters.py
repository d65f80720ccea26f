"""Random adapters of given ranks on all linear layers of one decoder layer, made on the device."""

from __future__ import annotations

import numpy as np
import torch

from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.kernels.layouts.lora_table import CHUNK_FIELDS, CHUNK_RANK, NUM_SITES, AdapterRows, LoraTable

_ALIGNMENT = 8


def random_table(
    shape: ModelShape, ranks: list[int], num_kv_pages: int, dtype: torch.dtype, device: torch.device
) -> LoraTable:
    """A table of `len(ranks)` residents. Its pool starts with `num_kv_pages` pages for keys and values."""
    start = num_kv_pages * shape.layout.page_elements
    size = start + sum(shape.adapter_numbers(rank) for rank in ranks)
    pool = torch.empty(-(-size // 16) * 16, dtype=dtype, device=device).normal_(0, 0.05)
    adapters = []
    for rank in ranks:
        rows, start = _rows_of(shape, rank, start)
        adapters.append(rows)
    num_chunks = sum(len(rows.chunks) for rows in adapters)
    aligned = all(n % _ALIGNMENT == 0 for i, members in shape.sites for n in (i, *members))
    parts = [members for _, members in shape.sites]
    table = LoraTable.allocate(pool, max(len(ranks), 1), 1, num_chunks, parts, _ALIGNMENT if aligned else 1)
    first_chunk = 0
    for resident, rows in enumerate(adapters):
        table.write(resident, first_chunk, rows)
        first_chunk += len(rows.chunks)
    return table


def _rows_of(shape: ModelShape, rank: int, start: int) -> tuple[AdapterRows, int]:
    """Rows of the table for one adapter that begins with number `start` of the pool, and where it ends."""
    counts: list[int] = []
    chunks: list[tuple[int, ...]] = []
    at = start
    for in_features, members in shape.sites:
        before, column = len(chunks), 0
        for out_features in members:
            for first in range(0, rank, CHUNK_RANK):
                num_rows = min(CHUNK_RANK, rank - first)
                b_offset = at + num_rows * in_features
                chunks.append((at, b_offset, num_rows, column, out_features))
                at = b_offset + num_rows * out_features
            column += out_features
        counts.append(len(chunks) - before)
    assert len(counts) == NUM_SITES, f"{len(counts)} sites"
    scales = np.full(len(chunks), 2.0, np.float32)
    return AdapterRows(np.array(counts, np.int32), np.array(chunks, np.int64).reshape(-1, CHUNK_FIELDS), scales), at
