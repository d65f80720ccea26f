"""Random adapters of given ranks on all linear layers of one decoder layer, made on the device."""

from __future__ import annotations

import torch

from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.kernels.layouts.lora_table import CHUNK_RANK, NUM_SITES, Chunk, LoraTable, ResidentSite

_ALIGNMENT = 8


def random_table(
    shape: ModelShape, ranks: list[int], num_kv_pages: int, dtype: torch.dtype, device: torch.device
) -> LoraTable:
    """A table of `len(ranks)` residents. Its pool starts with `num_kv_pages` pages for keys and values."""
    start = num_kv_pages * shape.layout.page_elements
    size = start + sum(shape.adapter_numbers(rank) for rank in ranks)
    pool = torch.empty(-(-size // 16) * 16, dtype=dtype, device=device).normal_(0, 0.05)
    placed = [_place(shape, rank) for rank in ranks]
    num_chunks = sum(len(site.chunks) for sites, _ in placed for site in sites)
    aligned = all(n % _ALIGNMENT == 0 for i, members in shape.sites for n in (i, *members))
    parts = [members for _, members in shape.sites]
    table = LoraTable.allocate(pool, max(len(ranks), 1), 1, num_chunks, parts, _ALIGNMENT if aligned else 1)
    first_chunk = 0
    for resident, (sites, length) in enumerate(placed):
        first_chunk += table.write(resident, first_chunk, [[_moved(site, start) for site in sites]])
        start += length
    return table


def _place(shape: ModelShape, rank: int) -> tuple[list[ResidentSite], int]:
    """Chunks of one adapter from offset 0, and how many numbers they take."""
    sites, at = [], 0
    for in_features, members in shape.sites:
        chunks, column = [], 0
        for out_features in members:
            for first in range(0, rank, CHUNK_RANK):
                rows = min(CHUNK_RANK, rank - first)
                b_offset = at + rows * in_features
                chunks.append(Chunk(at, b_offset, rows, column, out_features, 2.0))
                at = b_offset + rows * out_features
            column += out_features
        sites.append(ResidentSite(tuple(chunks)))
    assert len(sites) == NUM_SITES, f"{len(sites)} sites"
    return sites, at


def _moved(site: ResidentSite, start: int) -> ResidentSite:
    return ResidentSite(
        tuple(
            Chunk(c.a_offset + start, c.b_offset + start, c.num_rows, c.column_start, c.num_columns, c.scale)
            for c in site.chunks
        )
    )
