"""Plans of a step's attention over extents, for CPUs; the rule and the scratch of the paged operator.

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

#: Queries of a block in the compiled kernel: tokens times query heads that share a key head. Their weights of a tile of
#: 64 keys are 16 KiB, half a first-level cache (ADR 90).
BLOCK_ROWS = 64
#: Least tokens of a block, where many heads share a key head. Not tuned.
LEAST_BLOCK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The new tokens of each sequence of a step, a span each, cut into blocks of work."""

    #: First step row, number of tokens, tokens stored before, offset of the sequence's extent in elements of the pool,
    #: and its capacity in tokens; int64 [num_spans, 5].
    rows: NDArray[np.int64]
    #: New tokens of a block, the unit of work.
    block_tokens: int
    #: Blocks before each span, and all blocks; int64 [num_spans + 1].
    block_starts: NDArray[np.int64]

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int, int, int]], queries_per_key: int) -> SpanTable:
        """The table of spans, each a tuple as in `rows`. `queries_per_key`: query heads that share a key head."""
        rows = np.array(spans, dtype=np.int64)
        block_tokens = min(max(LEAST_BLOCK_TOKENS, BLOCK_ROWS // queries_per_key), int(rows[:, 1].max()))
        blocks = -(-rows[:, 1] // block_tokens)
        return cls(rows, block_tokens, np.concatenate([[0], np.cumsum(blocks)]))


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences whose extents are evenly spaced in memory: one attention call serves all of them."""

    #: First of the group's rows in `AttentionPlan.decode_rows`.
    start: int
    #: End of the group's rows there.
    end: int
    #: Offset of the first extent, in elements of the pool.
    offset: int
    #: Distance between extents, in elements of the pool.
    stride: int
    #: Tokens of an extent.
    capacity_tokens: int
    #: Keys of the longest context.
    max_context: int
    #: Additive mask, [rows, 1, 1, max_context]; None if all contexts are equally long.
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive new tokens of one sequence: step rows `start:end`."""

    #: First step row.
    start: int
    #: End of the step rows.
    end: int
    #: Offset of the sequence's extent, in elements of the pool.
    offset: int
    #: Tokens of the extent.
    capacity_tokens: int
    #: Tokens of the sequence that are stored already.
    num_past: int
    #: Additive mask, [end - start, context or more]; None for plain causal masking from position 0.
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention of one step on a CPU: `spans` for the compiled kernel, or groups and chunks for torch."""

    #: Step rows of decoding sequences, [S], in the order of the groups; None without any, or with `spans`.
    decode_rows: Tensor | None = None
    #: Groups of decoding sequences; empty with `spans`.
    groups: Sequence[DecodeGroup] = ()
    #: Chunks of new tokens of other sequences; empty with `spans`.
    chunks: Sequence[PrefillChunk] = ()
    #: All sequences, for the compiled kernel; None when torch computes.
    spans: SpanTable | None = None
    #: Latest tokens that a token sees; None for all.
    window: int | None = None
    #: Whether all rows are chunks with masks, so that a token's result has the same bits in every chunk.
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The constants by which scores become weights in one layer."""

    #: Factor of scores.
    scale: float
    #: Latest tokens that a token sees; None for all.
    window: int | None = None
    #: Cap of scores; None for no cap.
    softcap: float | None = None


def allocate_partials(max_items: int, num_heads: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scratch for results of decode items that share a sequence, which needs no clearing: weighted sums of values, not
    divided, fp32 [max_items, H, head_dim]; largest score in units of log2, and sum of weights, fp32 [max_items, H, 2].
    """
    values = torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device)
    return values, torch.empty(max_items, num_heads, 2, dtype=torch.float32, device=device)
