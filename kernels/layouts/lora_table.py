"""The table of resident adapters on the device: where LoRA kernels find each one's matrices in the pool.

A pair (A [rank, in_features], B transposed to [rank, out_features]) is cut into *chunks* of at most 16 rank rows.
16 is the smallest depth of a tensor core multiplication: a smaller chunk would multiply padding, a larger one
would not fit ranks like 8 and 20 any better. Only real rows are stored and read; padding exists in registers only.
Chunks of one adapter may be anywhere in the pool (no chunk crosses a page), so its pages need not be contiguous.

Per resident adapter, layer and packed site (qkv, o, gate_up, down), `sites` holds

    first_chunk, num_chunks        rows of `chunks`, in the order of their columns
    factor_offset, bias_offset     fp32 vectors over the site's packed outputs, in fp32 elements of the pool; -1: none
    end_0, begin_1, end_1, begin_2 chunks that reach the first part of the site's columns (the first end_0), the second,
                                   and the third (from begin_2 on); a pair over the whole site reaches all parts

and the operator computes, for a row x of that adapter and the base product y = W x,

    y' = factor * (y + sum over chunks: scale * sign * (x A_c^T) B_c) + base bias + adapter bias

`factor` is DoRA's magnitude over norm (Liu 2024, section 4; 1 where a member has none), `adapter bias` is
lora_bias times its scaling. `sign` is -1 for the chunks of the adapter that is merged into W when another
adapter's (or the base's) row is served beside it: mixture mode, which is this project's. A factor cannot be
taken out that way: an adapter with factors is no half of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..launch import to_device

CHUNK_RANK = 16
NUM_SITES = 4
QKV, O_PROJ, GATE_UP, DOWN = range(NUM_SITES)
SITE_FIELDS = 8
CHUNK_FIELDS = 5
# Indices of a chunk's fields that must be aligned: a_offset, b_offset, column_start, num_columns.
_PLACED_FIELDS = [0, 1, 3, 4]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of the table for one adapter, as arrays. Offsets are counted in elements of the pool."""

    #: Number of chunks of each layer's sites, one site after the other, int32 [num_layers * 4].
    counts: NDArray[np.int32]
    #: Chunks in the order of their sites and columns, int64 [num_chunks, 5]: offset of the rows of A
    #: [num_rows, in_features], offset of those of B [num_rows, num_columns], num_rows (1 to 16), first packed output to
    #: which the chunk adds, num_columns.
    chunks: NDArray[np.int64]
    #: Factor of each chunk's product, fp32 [num_chunks].
    scales: NDArray[np.float32]
    #: Offsets of each site's factor and bias, in fp32 elements of the pool, -1 for none, int64 [num_layers * 4, 2];
    #: None for an adapter without such vectors.
    vectors: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class LoraTable:
    """The table of resident adapters on the device; the docstring of this module gives its fields."""

    #: Flat memory of the pages.
    pool: Tensor
    #: Fields of each resident's sites, int64 [num_residents, num_layers, 4, 8].
    sites: Tensor
    #: Fields of each chunk, as in `AdapterRows`, int64 [num_chunks, 5].
    chunks: Tensor
    #: Scale of each chunk, fp32 [num_chunks].
    scales: Tensor
    #: The memory of `pool` viewed as fp32, for factors and biases.
    pool_fp32: Tensor = field(repr=False)
    #: Ends of the first and of the second part of each site's columns, int64 [4, 2], on the host.
    part_ends: NDArray[np.int64] = field(repr=False)
    #: Number of which all offsets, in_features and columns are multiples. With 8 elements of 2 bytes compiled kernels
    #: load 16 bytes at a time; they cannot infer this from numbers that they read from the table.
    alignment: int = 1

    @classmethod
    def allocate(
        cls,
        pool: Tensor,
        num_residents: int,
        num_layers: int,
        num_chunks: int,
        parts: Sequence[Sequence[int]],
        alignment: int = 1,
    ) -> LoraTable:
        """An empty table for adapters in `pool`, on its device. A pool of fp16 or bf16 needs an even size.

        `parts`: the columns of each packed site, as its operator splits them: queries, keys, values; all of o; gate,
        up; all of down."""
        device = pool.device
        sites = torch.zeros(num_residents, num_layers, NUM_SITES, SITE_FIELDS, dtype=torch.int64, device=device)
        chunks = torch.zeros(max(num_chunks, 1), CHUNK_FIELDS, dtype=torch.int64, device=device)
        scales = torch.zeros(max(num_chunks, 1), dtype=torch.float32, device=device)
        ends = np.array([np.cumsum([*widths, 0])[:2] for widths in parts], np.int64)
        return cls(pool, sites, chunks, scales, pool.view(torch.float32), ends, alignment)

    def write(self, resident: int, first_chunk: int, rows: AdapterRows) -> None:
        """Enter one adapter as row `resident`, its chunks from row `first_chunk` on. Steps that were launched earlier
        still read the old rows.
        """
        device, last = self.pool.device, first_chunk + len(rows.chunks)
        assert last <= len(self.chunks), f"chunks end at row {last}, the table has {len(self.chunks)}"
        uneven = rows.chunks[:, _PLACED_FIELDS] % self.alignment != 0
        assert not uneven.any(), (
            f"{rows.chunks[uneven.any(1)][:1].tolist()} is not aligned to {self.alignment} elements"
        )
        sites = np.full((len(rows.counts), SITE_FIELDS), -1, np.int64)
        sites[:, 0] = first_chunk + np.cumsum(rows.counts) - rows.counts
        sites[:, 1] = rows.counts
        if rows.vectors is not None:
            sites[:, 2:4] = rows.vectors
        site = np.repeat(np.arange(len(rows.counts)), rows.counts)
        starts, ends = rows.chunks[:, 3], rows.chunks[:, 3] + rows.chunks[:, 4]
        assert ((np.diff(starts) >= 0) | (np.diff(site) > 0)).all(), "chunks of a site are not in the order of columns"
        for part in range(2):
            part_end = self.part_ends[site % NUM_SITES, part]
            sites[:, 4 + 2 * part] = np.bincount(site, starts < part_end, len(sites))
            sites[:, 5 + 2 * part] = np.bincount(site, ends <= part_end, len(sites))
        self.sites[resident] = to_device(torch.from_numpy(sites), device).view(-1, NUM_SITES, SITE_FIELDS)
        if len(rows.chunks):
            self.chunks[first_chunk:last] = to_device(torch.from_numpy(rows.chunks), device)
            self.scales[first_chunk:last] = to_device(torch.from_numpy(rows.scales), device)
