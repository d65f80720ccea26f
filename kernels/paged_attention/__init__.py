"""Causal attention over keys and values that lie in the page pool.

A sequence's keys and values lie in *extents*: runs of pages whose memory is laid out as
`[num_layers, 2 (key, value), num_kv_heads, capacity_tokens, head_dim]`. On CPU a sequence owns one extent that
holds it whole, so attention reads views; on a GPU every extent is a single page (`capacity_tokens` = page size).

Legend: T tokens of the step, H query heads, K key/value heads, G = H / K queries per key head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .compiled import SpanTable


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences whose extents lie evenly spaced in memory: one attention call serves all of them.

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
