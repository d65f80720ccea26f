"""Prepares one forward pass on a CPU: its tokens, where their keys and values go, attention plans, adapters.

The tokens of a step are sorted by adapter, so that each adapter owns one run of rows; rows that must not see the merged
adapter come last, covered by one more run over the others. Decoding sequences are also grouped by the place of their
pages: evenly spaced runs of equal size share one attention call.

Legend: T tokens of the step, S decoding sequences, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.paged_attention.compiled import can_attend_compiled
from ...kernels.paged_attention.types import AttentionPlan, DecodeGroup, PrefillChunk, SpanTable
from ..memory.pool import PageLayout, PageRun
from ..memory.residency import MergedShare, ResidentAdapter
from ..model_config.model import ModelConfig
from ..sequence import Sequence
from .rope import RowLengths


@dataclass(frozen=True, slots=True)
class ScoredPlaces:
    """Consecutive places of a prompt, the first at `offset` of the step's tokens, and the tokens that follow them."""

    sequence: Sequence
    offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEntry:
    """`num_tokens` next tokens of one sequence, with the adapter it is served by (None: base or merged).

    `minus`: the merged adapter, where the sequence must not see it (mixture). `shared`: pages of the prefix cache that
    begin its block table; `run` goes on behind them, and `extensions` behind that.
    """

    sequence: Sequence
    num_tokens: int
    run: PageRun
    adapter: ResidentAdapter | None
    minus: MergedShare | None = None
    shared: tuple[int, ...] = ()
    extensions: tuple[PageRun, ...] = ()

    @property
    def is_decode(self) -> bool:
        return self.sequence.is_decoding

    @property
    def scored(self) -> ScoredPlaces | None:
        """The places of the prompt, among these tokens, whose log-probabilities are asked."""
        places = self.sequence.places_to_score(self.num_tokens)
        if not places:
            return None
        following = tuple(self.sequence.tokens(places.start + 1, places.stop + 1))
        return ScoredPlaces(self.sequence, places.start - self.sequence.num_stored, following)

    @property
    def yields_token(self) -> bool:
        """Whether the step reaches the sequence's last known token, whose logits choose the next one."""
        return self.sequence.num_stored + self.num_tokens == self.sequence.total_tokens


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Rows `start:end` of the step belong to `adapter`."""

    start: int
    end: int
    adapter: ResidentAdapter


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tensors and plans of one step. `kv_rows` [T, 2K]: rows of D elements in the pool for layer 0;
    `kv_layer_stride` [T, 1]: distance to the next layer, in rows. `row_lengths`: only where angles depend on them.
    `sampled_rows`: of `sampled`, then of the places of `scored`.
    """

    token_ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    kv_layer_stride: Tensor
    spans: tuple[AdapterSpan, ...]
    attention: dict[int | None, AttentionPlan]
    sampled_rows: Tensor
    sampled: tuple[Sequence, ...]
    row_lengths: RowLengths | None = None
    scored: tuple[ScoredPlaces, ...] = ()


def build_step(
    entries: Items[StepEntry], model: ModelConfig, layout: PageLayout, dtype: torch.dtype, *, is_exact: bool = False
) -> StepBatch:
    """Prepare one step. `entries` must not be empty. `is_exact`: what a row computes depends on that row alone."""
    ordered = sorted(entries, key=lambda e: (e.minus is not None, e.adapter.order if e.adapter else -1))
    starts = [0]
    for entry in ordered:
        starts.append(starts[-1] + entry.num_tokens)
    positions = torch.cat([_positions(e) for e in ordered])
    counts = torch.tensor([e.num_tokens for e in ordered])
    capacities = torch.tensor([e.run.num_pages * layout.page_tokens for e in ordered])
    offsets = torch.tensor([e.run.start * layout.page_elements // model.head_dim for e in ordered])
    capacity = capacities.repeat_interleave(counts)[:, None]
    heads = torch.arange(2 * model.num_kv_heads)[None, :]
    kv_rows = (offsets.repeat_interleave(counts) + positions)[:, None] + heads * capacity
    yielding = [
        (start + e.num_tokens - 1, e.sequence) for start, e in zip(starts, ordered, strict=False) if e.yields_token
    ]
    scored = [(start, found) for start, e in zip(starts, ordered, strict=False) if (found := e.scored) is not None]
    scored_rows = [start + places.offset + i for start, places in scored for i in range(len(places.token_ids))]
    return StepBatch(
        token_ids=torch.tensor([t for e in ordered for t in _token_ids(e)]),
        positions=positions,
        kv_rows=kv_rows,
        kv_layer_stride=capacity * (2 * model.num_kv_heads),
        spans=_adapter_spans(ordered, starts),
        attention=_attention_plans(ordered, starts, model, layout, dtype, is_exact),
        sampled_rows=torch.tensor([*(row for row, _ in yielding), *scored_rows], dtype=torch.int64),
        sampled=tuple(sequence for _, sequence in yielding),
        scored=tuple(places for _, places in scored),
        row_lengths=_row_lengths(ordered, counts) if model.has_length_dependent_rope else None,
    )


def _positions(entry: StepEntry) -> Tensor:
    first = entry.sequence.num_stored
    return torch.arange(first, first + entry.num_tokens)


def _token_ids(entry: StepEntry) -> list[int]:
    first = entry.sequence.num_stored
    return entry.sequence.tokens(first, first + entry.num_tokens)


def _row_lengths(ordered: Items[StepEntry], counts: Tensor) -> RowLengths:
    prompt = torch.tensor([e.sequence.prompt_tokens for e in ordered])
    known = torch.tensor([e.sequence.total_tokens for e in ordered])
    return RowLengths(prompt.repeat_interleave(counts), known.repeat_interleave(counts))


def _adapter_spans(ordered: Items[StepEntry], starts: Items[int]) -> tuple[AdapterSpan, ...]:
    spans: list[AdapterSpan] = []
    for entry, start in zip(ordered, starts, strict=False):
        if entry.adapter is None:
            continue
        end = start + entry.num_tokens
        if spans and spans[-1].adapter is entry.adapter:
            spans[-1] = AdapterSpan(spans[-1].start, end, entry.adapter)
        else:
            spans.append(AdapterSpan(start, end, entry.adapter))
    for entry, start in zip(ordered, starts, strict=False):
        if entry.minus is not None:
            spans.append(AdapterSpan(start, starts[-1], entry.minus.negative))
            break
    return tuple(spans)


def _attention_plans(
    ordered: Items[StepEntry],
    starts: Items[int],
    model: ModelConfig,
    layout: PageLayout,
    dtype: torch.dtype,
    is_exact: bool,
) -> dict[int | None, AttentionPlan]:
    """One plan per distinct sliding window of the model's layers."""
    if can_attend_compiled(model.head_dim, dtype):
        found = [_attention_span(e, start, layout) for e, start in zip(ordered, starts, strict=False)]
        spans = SpanTable.of(found, model.num_heads // model.num_kv_heads)
        return {window: AttentionPlan(spans=spans, window=window) for window in set(model.sliding_windows)}
    decoding = sorted(
        ((e, start) for e, start in zip(ordered, starts, strict=False) if e.is_decode and not is_exact),
        key=lambda pair: (pair[0].run.num_pages, pair[0].run.start),
    )
    filling = [(e, start) for e, start in zip(ordered, starts, strict=False) if is_exact or not e.is_decode]
    rows = torch.tensor([start for _, start in decoding], dtype=torch.int64) if decoding else None
    runs_of_entries = _evenly_spaced([e for e, _ in decoding])
    plans = {}
    for window in set(model.sliding_windows):
        groups, start = [], 0
        for members in runs_of_entries:
            groups.append(_decode_group(members, start, layout, window, dtype))
            start += len(members)
        chunks = [_prefill_chunk(e, row, layout, window, dtype, is_exact) for e, row in filling]
        plans[window] = AttentionPlan(rows, groups, chunks, window=window, is_exact=is_exact)
    return plans


def _attention_span(entry: StepEntry, start: int, layout: PageLayout) -> tuple[int, int, int, int, int]:
    offset, capacity = entry.run.start * layout.page_elements, entry.run.num_pages * layout.page_tokens
    return start, entry.num_tokens, entry.sequence.num_stored, offset, capacity


def _evenly_spaced(decoding: Items[StepEntry]) -> list[list[StepEntry]]:
    """Split entries, sorted by run size and place, into stretches of equal size and even spacing."""
    groups: list[list[StepEntry]] = []
    for entry in decoding:
        group = groups[-1] if groups else None
        if group and group[-1].run.num_pages == entry.run.num_pages:
            step = entry.run.start - group[-1].run.start
            if len(group) == 1 or step == group[-1].run.start - group[-2].run.start:
                group.append(entry)
                continue
        groups.append([entry])
    return groups


def _decode_group(
    members: Items[StepEntry], start: int, layout: PageLayout, window: int | None, dtype: torch.dtype
) -> DecodeGroup:
    contexts = torch.tensor([e.sequence.total_tokens for e in members])
    longest = int(contexts.max())
    mask = None
    is_windowed = window is not None and longest > window
    if is_windowed or int(contexts.min()) != longest:
        keys = torch.arange(longest)[None, :]
        hidden = keys >= contexts[:, None]
        if window is not None:
            hidden |= keys < contexts[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None, :]
    spacing = members[1].run.start - members[0].run.start if len(members) > 1 else 0
    return DecodeGroup(
        start=start,
        end=start + len(members),
        offset=members[0].run.start * layout.page_elements,
        stride=spacing * layout.page_elements,
        capacity_tokens=members[0].run.num_pages * layout.page_tokens,
        max_context=longest,
        mask=mask,
    )


def _prefill_chunk(
    entry: StepEntry, start: int, layout: PageLayout, window: int | None, dtype: torch.dtype, is_exact: bool
) -> PrefillChunk:
    num_past, num_new = entry.sequence.num_stored, entry.num_tokens
    mask = None
    if is_exact or num_past > 0 or (window is not None and num_new > window):
        queries = torch.arange(num_past, num_past + num_new)[:, None]
        # pages are the grain of exact attention: a masked key adds nothing, a vector's tail would round otherwise
        width = layout.pages_for_tokens(num_past + num_new) * layout.page_tokens if is_exact else num_past + num_new
        keys = torch.arange(width)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return PrefillChunk(
        start=start,
        end=start + num_new,
        offset=entry.run.start * layout.page_elements,
        capacity_tokens=entry.run.num_pages * layout.page_tokens,
        num_past=num_past,
        mask=mask,
    )
