"""One forward pass on a GPU, prepared: everything the kernels read, in one int32 buffer and one copy.

Block tables are ragged: one flat list of pages, each sequence's own from a place that its attention items name.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..kernels.launch import num_persistent_programs
from ..kernels.paged_attention.work import AttentionWork, Span, WorkLimits, plan_attention
from ..kernels.segments import SegmentLimits, Segments, plan_segments, rows_of
from .device_adapters import DeviceAdapters
from .model_config import ModelConfig
from .rope import RowLengths
from .sequence import Sequence
from .step_batch import PageLayout, StepEntry

_SPLIT_KEYS = 512  # see kernels.paged_attention.triton
_DECODE_TILE_ROWS, _PREFILL_TILE_ROWS = 16, 64
_SHRINK_PROGRAMS = 4  # per multiprocessor, as in kernels.lora_shrink.triton


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Sizes of a step's lists, fixed for the engine's life. `exact`: contraction is never split, so that a row's
    sums do not depend on the rows beside it."""

    max_step_tokens: int
    scratch_rows: int
    max_partials: int
    exact: bool = False

    @classmethod
    def of(cls, max_step_tokens: int, num_pages: int, page_tokens: int, *, exact: bool = False) -> DeviceLimits:
        """For a pool of `num_pages`. Ranks up to 256 on three members of a site fill 48 chunks a tile."""
        pieces = 2 * (num_pages * page_tokens // _SPLIT_KEYS) + max_step_tokens
        return cls(max_step_tokens, 48 * max_step_tokens, pieces, exact)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views of the step's buffer on the device, int32. `token_ids`, `positions`, `slots` [T]; `sampled_rows` [S].
    `has_lora`: whether any row has an adapter. Attention items name places in `pages`."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled_rows: Tensor
    pages: Tensor
    segments: Segments
    attention: AttentionWork
    has_lora: bool
    sampled: tuple[Sequence, ...]
    row_lengths: RowLengths | None = field(default=None)

    @property
    def block_tables(self) -> Tensor:
        """Row i starts at place i of `pages`: overlapping rows over the flat list."""
        width = len(self.pages) // 2
        return self.pages.as_strided((width, width), (1, 1))


def build_device_step(
    entries: Items[StepEntry], model: ModelConfig, layout: PageLayout, adapters: DeviceAdapters, limits: DeviceLimits
) -> DeviceStep:
    """Prepare one step; entries must not be empty. Rows stay in the entries' order: kernels read a permutation."""
    device = adapters.table.pool.device
    rows = adapters.rows_of(e.adapter for e in entries if e.adapter is not None)
    plus = [rows[e.adapter.order] if e.adapter else -1 for e in entries for _ in range(e.num_tokens)]
    is_prefill = any(e.num_tokens > 1 for e in entries)
    segments = _segments(plus, adapters, limits, _PREFILL_TILE_ROWS if is_prefill else _DECODE_TILE_ROWS)
    spans, pages = _places(entries)
    group = model.num_heads // model.num_kv_heads
    tile_rows = max(_PREFILL_TILE_ROWS if is_prefill else _DECODE_TILE_ROWS, 1 << (group - 1).bit_length())
    attention = plan_attention(spans, group, WorkLimits(_num_items(spans), len(entries), tile_rows, _SPLIT_KEYS))
    positions = [p for e in entries for p in range(e.sequence.num_stored, e.sequence.num_stored + e.num_tokens)]
    last_rows = [span.row + span.num_queries - 1 for span in spans]
    yielding = [i for i, entry in enumerate(entries) if entry.yields_token]
    lists = {
        "token_ids": [t for e in entries for t in _token_ids(e)],
        "positions": positions,
        "slots": _slots(entries, layout),
        "sampled_rows": [last_rows[i] for i in yielding],
        "pages": pages * 2,  # read up to twice its length by `block_tables`
        "prompt": [e.sequence.prompt_tokens for e in entries for _ in range(e.num_tokens)],
        "known": [e.sequence.total_tokens for e in entries for _ in range(e.num_tokens)],
    }
    views = _to_device([*(torch.tensor(v, dtype=torch.int32) for v in lists.values()), segments.buffer,
                        attention.buffer], device)  # fmt: skip
    by_name = dict(zip(lists, views, strict=False))
    return DeviceStep(
        token_ids=by_name["token_ids"],
        positions=by_name["positions"],
        slots=by_name["slots"],
        sampled_rows=by_name["sampled_rows"],
        pages=by_name["pages"],
        segments=Segments(segments.limits, views[-2]),
        attention=AttentionWork(attention.limits, views[-1]),
        has_lora=any(row >= 0 for row in plus),
        sampled=tuple(entries[i].sequence for i in yielding),
        row_lengths=RowLengths(by_name["prompt"], by_name["known"]) if model.has_length_dependent_rope else None,
    )


def _segments(plus: list[int], adapters: DeviceAdapters, limits: DeviceLimits, tile_rows: int) -> Segments:
    """Lists of exactly the step's size: what is not there is not copied."""
    residents, counts = np.unique(rows_of([row for row in plus if row >= 0]), return_counts=True)
    tiles = -(-counts // tile_rows)
    num_items = int((tiles * adapters.chunk_counts[residents].max(1, initial=0)).sum())
    sizes = SegmentLimits(len(plus), num_items, limits.scratch_rows, tile_rows)
    device = adapters.table.pool.device
    num_programs = 1 if limits.exact else num_persistent_programs(device, _SHRINK_PROGRAMS)
    return plan_segments(rows_of(plus), rows_of([-1] * len(plus)), adapters.chunk_counts, sizes, num_programs)


def _num_items(spans: list[Span]) -> int:
    """Attention items at most: every query token one, and every piece of a long context."""
    return sum(span.num_queries + (span.position + 1) // _SPLIT_KEYS for span in spans)


def _places(entries: Items[StepEntry]) -> tuple[list[Span], list[int]]:
    """Each entry's rows and positions, and all pages in use one after the other."""
    spans: list[Span] = []
    pages: list[int] = []
    row = 0
    for entry in entries:
        spans.append(Span(row, entry.num_tokens, entry.sequence.num_stored, len(pages)))
        pages.extend(range(entry.run.start, entry.run.end))
        row += entry.num_tokens
    return spans, pages


def _slots(entries: Items[StepEntry], layout: PageLayout) -> list[int]:
    """A run's pages follow one another, so its slots do."""
    return [
        entry.run.start * layout.page_tokens + entry.sequence.num_stored + token
        for entry in entries
        for token in range(entry.num_tokens)
    ]


def _token_ids(entry: StepEntry) -> list[int]:
    first = entry.sequence.num_stored
    return entry.sequence.tokens(first, first + entry.num_tokens)


def _to_device(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """All tensors in one copy, pinned where there is a GPU so that nobody waits for it. Each view starts at a multiple
    of 16 bytes, so that kernels are compiled once."""
    padded = [torch.nn.functional.pad(tensor, (0, -len(tensor) % 4)) for tensor in tensors]
    buffer = torch.cat(padded)
    if device.type == "cuda":
        buffer = buffer.pin_memory().to(device, non_blocking=True)
    starts = [sum(len(p) for p in padded[:i]) for i in range(len(padded))]
    return [buffer[start : start + len(t)] for start, t in zip(starts, tensors, strict=True)]
