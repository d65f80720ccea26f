"""Lists the attention work of one step on a GPU in one int32 buffer that persistent kernels read.

    header [4]                 num_items, num_combines
    items [max_items, 7]       row, num_queries, position, sequence, key_begin, key_end, partial
    combines [max_combines, 3] row, first_partial, num_partials

An item is queries of one sequence, step rows `row` onwards at positions `position` onwards, over its keys
`key_begin:key_end` (causal, so a query sees no key behind itself). A decoding sequence with a long context is cut
into several items (flash-decoding, Dao 2023): each leaves a partial result, and a combine joins them. `partial` is
-1 where an item is whole and writes its output itself.

Prefill chunks become items of as many tokens as fill the kernel's tile; keys stored before (a cached prefix, an
earlier chunk) are nothing special: `position` starts behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..layouts.pages import PageLayout

HEADER_LENGTH = 4
ITEM_FIELDS = 7
COMBINE_FIELDS = 3
#: Keys of a segment of a context when bits are fixed, see `invariant.py`. Not tuned.
SEGMENT_KEYS = 2048


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence of a step."""

    #: First step row.
    row: int
    #: New tokens.
    num_queries: int
    #: Position of the first new token in its sequence.
    position: int
    #: Row of the block tables with the sequence's pages.
    sequence: int


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """The sizes of the buffer, and the sizes into which work is cut."""

    #: Most items of a step.
    max_items: int
    #: Most combines of a step.
    max_combines: int
    #: Rows of a tile, the kernel's BLOCK_M: query tokens times heads of a group.
    tile_rows: int
    #: Most keys of one decode item; 0: contexts are not cut, and nothing is combined.
    split_keys: int
    #: Keys that are summed by themselves, and at whose multiples contexts are cut, so that a query's bits depend on its
    #: sequence alone (`invariant.py`); 0: the bits need not be fixed.
    segment_keys: int = 0

    @property
    def length(self) -> int:
        """int32 elements of the buffer."""
        return HEADER_LENGTH + self.max_items * ITEM_FIELDS + self.max_combines * COMBINE_FIELDS


@dataclass(frozen=True)
class AttentionWork:
    """Views of the buffer, on the host or the device, each made once. `num_partials` is at most `max_items`."""

    #: Sizes of the buffer.
    limits: WorkLimits
    #: The buffer, int32 [`limits.length`].
    buffer: Tensor

    @cached_property
    def header(self) -> Tensor:
        return self.buffer[:HEADER_LENGTH]

    @cached_property
    def items(self) -> Tensor:
        end = HEADER_LENGTH + self.limits.max_items * ITEM_FIELDS
        return self.buffer[HEADER_LENGTH:end].view(-1, ITEM_FIELDS)

    @cached_property
    def combines(self) -> Tensor:
        return self.buffer[HEADER_LENGTH + self.limits.max_items * ITEM_FIELDS :].view(-1, COMBINE_FIELDS)


def tile_rows_for(layout: PageLayout, dtype: torch.dtype, is_decode: bool, is_exact: bool = False) -> int:
    """Rows of an attention tile in a step of decoding rows alone, or in one with prompts: at least the query heads of a
    token that share a key head. `triton.py` and `invariant.py` explain the sizes."""
    in_prefill = 32 if is_exact else 128 if layout.head_dim <= 128 and dtype.itemsize == 2 else 64
    return max(16 if is_decode else in_prefill, 1 << (layout.queries_per_key_head - 1).bit_length())


def plan_attention(
    spans: Iterable[Span], queries_per_key_head: int, limits: WorkLimits, into: Tensor | None = None
) -> AttentionWork:
    """List the work of a step, on the host, longest items first, in a new buffer or in `into`, which is overwritten.
    Raises ValueError when the buffer is too small."""
    if limits.segment_keys:
        assert limits.split_keys in (0, limits.segment_keys), f"items of {limits.split_keys} keys are no segments"
    tile_tokens = limits.tile_rows // queries_per_key_head
    if tile_tokens < 1:
        raise ValueError(f"tile_rows={limits.tile_rows}: must hold a group of {queries_per_key_head} query heads")
    items: list[tuple[int, ...]] = []
    combines: list[tuple[int, int, int]] = []
    num_partials = 0
    for span in spans:
        if span.num_queries > 1:
            items.extend(_prefill_items(span, tile_tokens))
            continue
        context = span.position + 1
        pieces = -(-context // limits.split_keys) if limits.split_keys else 1
        # equal pieces, so that no item is a short rest
        length = limits.segment_keys if limits.segment_keys and pieces > 1 else -(-context // pieces)
        for piece in range(pieces):
            keys = (piece * length, min((piece + 1) * length, context))
            partial = -1 if pieces == 1 else num_partials + piece
            items.append((span.row, 1, span.position, span.sequence, *keys, partial))
        if pieces > 1:
            combines.append((span.row, num_partials, pieces))
            num_partials += pieces
    for what, found, room in (("items", items, limits.max_items), ("combines", combines, limits.max_combines)):
        if len(found) > room:
            raise ValueError(f"attention needs {len(found)} {what}, its buffer has room for {room}")
    items.sort(key=lambda item: item[4] - item[5])
    work = AttentionWork(limits, torch.zeros(limits.length, dtype=torch.int32) if into is None else into)
    work.header[0], work.header[1] = len(items), len(combines)
    if items:
        work.items[: len(items)] = torch.from_numpy(np.array(items, np.int32))
    if combines:
        work.combines[: len(combines)] = torch.from_numpy(np.array(combines, np.int32))
    return work


def _prefill_items(span: Span, tile_tokens: int) -> Iterable[tuple[int, ...]]:
    for first in range(0, span.num_queries, tile_tokens):
        count = min(tile_tokens, span.num_queries - first)
        position = span.position + first
        yield (span.row + first, count, position, span.sequence, 0, position + count, -1)
