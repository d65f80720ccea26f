"""How one step attends: plans over extents for CPUs, the rule and the scratch of the paged operator.

A sequence's keys and values are stored in *extents*: runs of pages whose memory is laid out as
`[num_layers, 2 (key, value), num_kv_heads, capacity_tokens, head_dim]`. On CPU a sequence owns one extent that
holds it whole, so attention reads views; on a GPU every extent is a single page (`capacity_tokens` = page size).

Legend: T tokens of the step, H query heads, K key/value heads, G = H / K queries per key head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Queries of a block in the compiled kernel: tokens times query heads that share a key head.
BLOCK_ROWS = 64
LEAST_BLOCK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SpanTable:
    """New tokens of each sequence of a step.

    `rows` int64 [num_spans, 5]: first step row, number of tokens, tokens stored before, offset of the sequence's
    extent in elements of the pool, its capacity in tokens. `block_tokens`: new tokens of a block, the unit of work.
    `block_starts` [num_spans + 1]: blocks before each span.
    """

    rows: NDArray[np.int64]
    block_tokens: int
    block_starts: NDArray[np.int64]

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int, int, int]], queries_per_key: int) -> SpanTable:
        """From the rows as tuples. `queries_per_key`: query heads that share a key head."""
        rows = np.array(spans, dtype=np.int64)
        block_tokens = min(max(LEAST_BLOCK_TOKENS, BLOCK_ROWS // queries_per_key), int(rows[:, 1].max()))
        blocks = -(-rows[:, 1] // block_tokens)
        return cls(rows, block_tokens, np.concatenate([[0], np.cumsum(blocks)]))


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences whose extents are evenly spaced in memory: one attention call serves all of them.

    `rows`: positions in the permuted decode order, `start:end`. `offset`, `stride`: first extent and distance
    between extents, in elements of the pool. `mask`: additive, [rows, 1, 1, max_context], or None if all
    contexts are equally long.
    """

    start: int
    end: int
    offset: int
    stride: int
    capacity_tokens: int
    max_context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive new tokens of one sequence: step rows `start:end`, after `num_past` tokens already stored.

    `mask`: additive, [end - start, context or more], or None when plain causal masking from position 0 is meant.
    """

    start: int
    end: int
    offset: int
    capacity_tokens: int
    num_past: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step attends. `decode_rows` [S]: step rows of decoding sequences, in the order of the groups.

    Where the compiled kernel serves, `spans` says it all and the rest is empty. `is_exact`: all rows come as chunks
    with masks, and a token's result has the same bits in whatever chunk it stands.
    """

    decode_rows: Tensor | None = None
    groups: Sequence[DecodeGroup] = ()
    chunks: Sequence[PrefillChunk] = ()
    spans: SpanTable | None = None
    window: int | None = None
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores become weights in one layer. `window`: latest tokens seen, None for all; `softcap`: None for none."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of decode items that share a sequence: `values` fp32 [max_items, H, head_dim] (sums, not divided),
    `stats` fp32 [max_items, H, 2] (largest score in units of log2, sum of weights)."""

    values: Tensor
    stats: Tensor

    @classmethod
    def allocate(cls, max_items: int, num_heads: int, head_dim: int, device: torch.device) -> Partials:
        """Scratch that needs no clearing."""
        values = torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device)
        return cls(values, torch.empty(max_items, num_heads, 2, dtype=torch.float32, device=device))
