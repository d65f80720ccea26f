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

from ...kernels.gated_delta import DeltaRows
from ...kernels.layouts.pages import HeadShape, PageLayout
from ...kernels.paged_attention.compiled import can_attend_compiled
from ...kernels.paged_attention.types import AttentionPlan, DecodeGroup, PrefillChunk, SpanTable
from ...kernels.segment_lora import LoraSpan
from ..memory.pool import PageRange
from ..memory.residency import ResidentAdapter
from ..model_config.model import ModelConfig
from ..sequence import Sequence

#: Scored places whose logits are computed together; each takes 0.5 MB at 128k tokens.
HEAD_ROWS = 128


@dataclass(frozen=True, slots=True)
class ScoredPositions:
    """Consecutive places of a prompt and of a given completion, and the tokens that follow them."""

    #: The sequence.
    sequence: Sequence
    #: Number of the first place among the step's tokens of the sequence.
    offset: int
    #: Token behind each place.
    token_ids: tuple[int, ...]
    #: Places before the prompt's last; the others are those of a given completion's tokens.
    num_in_prompt: int


@dataclass(frozen=True, slots=True)
class StepEntry:
    """Next tokens of one sequence, which a step computes."""

    #: The sequence.
    sequence: Sequence
    #: Number of its tokens that are computed.
    num_tokens: int
    #: Pages of its own, behind `shared`.
    pages: PageRange
    #: The adapter it is served by; None: base or merged.
    adapter: ResidentAdapter | None
    #: The merged adapter, where the sequence must not see it (mixture).
    minus: ResidentAdapter | None = None
    #: Pages of the prefix cache that begin its block table.
    shared: tuple[int, ...] = ()
    #: Ranges of pages behind `pages`.
    extensions: tuple[PageRange, ...] = ()

    @property
    def is_decode(self) -> bool:
        return self.sequence.is_decoding

    @property
    def scored(self) -> ScoredPositions | None:
        """The places of prompt and given completion, among these tokens, whose log-probabilities are asked."""
        places = self.sequence.positions_to_score(self.num_tokens)
        if not places:
            return None
        following = tuple(self.sequence.tokens(places.start + 1, places.stop + 1))
        num_in_prompt = min(max(self.sequence.prompt_tokens - 1 - places.start, 0), len(places))
        return ScoredPositions(self.sequence, places.start - self.sequence.num_stored, following, num_in_prompt)

    @property
    def pooled(self) -> range:
        """The places of the prompt, among these tokens, whose hidden states are asked."""
        return self.sequence.positions_to_pool(self.num_tokens)

    @property
    def reaches_end(self) -> bool:
        """Whether the step reaches the sequence's last known token."""
        return self.sequence.num_stored + self.num_tokens == self.sequence.total_tokens

    @property
    def yields_token(self) -> bool:
        """Whether the step computes the logits that choose the sequence's next token."""
        return self.reaches_end and not self.pooled


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tensors and plans of one step."""

    #: Tokens, int64 [T].
    token_ids: Tensor
    #: Positions in their sequences, int64 [T].
    positions: Tensor
    #: Places in the pool that take the keys and values of the T tokens, as `rotate_and_store_` reads them, by group of
    #: layers (`PageLayout.groups`).
    key_places: tuple[tuple[Tensor, Tensor], ...]
    #: Rows of each adapter.
    spans: tuple[LoraSpan, ...]
    #: Attention plan by the layers' group and sliding window (None: they attend to all).
    attention: dict[tuple[int, int | None], AttentionPlan]
    #: Rows whose logits are asked, with which alone the last layer goes on once its keys and values are stored: their
    #: numbers in the step, and the layer's spans and attention, which count among them. None: it goes on with all.
    asked: tuple[Tensor, tuple[LoraSpan, ...], AttentionPlan] | None
    #: Rows that are asked for, int64, counted among the rows of `asked`: those of `sampled` and of the places of
    #: `scored`, for their logits, then those of `pooled`, for their hidden states.
    sampled_rows: Tensor
    #: Sequences that get a token.
    sampled: tuple[Sequence, ...]
    #: The rows whose recurrent states are updated, with the beginnings of their states; None without such layers.
    states: DeltaRows | None = None
    #: Lengths of the rows' sequences, as `Rope.tables` reads them; None unless rotary angles depend on them.
    row_lengths: tuple[Tensor, Tensor] | None = None
    #: Places of prompts whose log-probabilities are asked.
    scored: tuple[ScoredPositions, ...] = ()
    #: Sequences whose hidden states are asked, and the number of places of each.
    pooled: tuple[tuple[Sequence, int], ...] = ()

    @property
    def num_logits(self) -> int:
        """Rows whose logits are asked: the first ones of `sampled_rows`."""
        return len(self.sampled_rows) - sum(count for _, count in self.pooled)

    @property
    def head_rows(self) -> list[int]:
        """Rows of `sampled_rows` in each product with the head."""
        return rows_of_head(len(self.sampled), self.num_logits - len(self.sampled))


def rows_of_head(num_sampled: int, num_scored: int) -> list[int]:
    """Rows of each product with the head: all that yield tokens and the first places, then the other places."""
    first = num_sampled + min(num_scored, HEAD_ROWS)
    rest = num_sampled + num_scored - first
    return [first, *([HEAD_ROWS] * (rest // HEAD_ROWS)), *([rest % HEAD_ROWS] if rest % HEAD_ROWS else [])]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive rows of a step, from `start` on: `num_tokens` of an entry, after `num_past` of its sequence."""

    entry: StepEntry
    start: int
    num_tokens: int
    num_past: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def build_step(
    entries: Items[StepEntry], model: ModelConfig, layout: PageLayout, dtype: torch.dtype, *, is_exact: bool = False
) -> StepBatch:
    """Prepare one step. `entries` must not be empty. `is_exact`: each row's numbers depend on that row alone."""
    ordered = sorted(entries, key=lambda e: (e.minus is not None, e.adapter.order if e.adapter else -1))
    chunks = _chunks(ordered, [e.num_tokens for e in ordered])
    positions = torch.cat([torch.arange(c.num_past, c.num_past + c.num_tokens) for c in chunks])
    counts = torch.tensor([e.num_tokens for e in ordered])
    capacity = torch.tensor([layout.tokens_in(e.pages.num_pages) for e in ordered]).repeat_interleave(counts)
    first = torch.tensor([e.pages.start * layout.page_elements for e in ordered]).repeat_interleave(counts)
    scored = [e.scored for e in ordered]
    behind = [
        len(e.pooled) or (e.num_tokens - s.offset if s else int(e.yields_token))
        for e, s in zip(ordered, scored, strict=True)
    ]
    asked = _chunks(ordered, behind)
    pooled = [chunk for chunk in asked if chunk.entry.pooled]
    pooled_rows = [row for chunk in pooled for row in range(chunk.start, chunk.end)]
    yielding = [(chunk.end - 1, chunk.entry.sequence) for chunk in asked if chunk.entry.yields_token]
    scored_rows = [c.start + i for c, s in zip(asked, scored, strict=True) if s for i in range(len(s.token_ids))]
    return StepBatch(
        token_ids=torch.tensor([t for e in ordered for t in _token_ids(e)]),
        positions=positions,
        key_places=tuple(
            _key_places(shape, first + capacity * start, capacity, positions)
            for (shape, _), start in zip(layout.groups, layout.group_starts, strict=False)
        ),
        spans=_lora_spans(chunks),
        attention={
            (group, window): _attention_plan(chunks, _Group.of(model, layout, group), layout, window, dtype, is_exact)
            for group, window in model.attention_kinds
        },
        asked=None if asked[-1].end == chunks[-1].end else _asked_rows(chunks, asked, model, layout, dtype, is_exact),
        sampled_rows=torch.tensor([*(row for row, _ in yielding), *scored_rows, *pooled_rows], dtype=torch.int64),
        sampled=tuple(sequence for _, sequence in yielding),
        scored=tuple(places for places in scored if places is not None),
        pooled=tuple((chunk.entry.sequence, chunk.num_tokens) for chunk in pooled),
        states=_state_rows(chunks, layout, dtype) if model.has_recurrent_layers else None,
        row_lengths=_row_lengths(ordered, counts) if model.has_length_dependent_rope else None,
    )


def _key_places(shape: HeadShape, first: Tensor, capacity: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the tokens' keys and values in one group of layers, which begins at `first` in each token's run."""
    heads = torch.arange(2 * shape.num_kv_heads)[None, :]
    rows = (first // shape.head_dim + positions)[:, None] + heads * capacity[:, None]
    return rows, capacity[:, None] * (2 * shape.num_kv_heads)


def _state_rows(chunks: Items[_Chunk], layout: PageLayout, dtype: torch.dtype) -> DeltaRows:
    """Rows of the step, each with the beginning of its state: behind the pages of its tokens, in numbers of fp32."""
    page_states = layout.page_elements * dtype.itemsize // torch.float32.itemsize
    return DeltaRows(
        torch.tensor([0, *(chunk.end for chunk in chunks)]),
        torch.tensor([(chunk.entry.pages.end - layout.row_pages) * page_states for chunk in chunks]),
        torch.tensor([chunk.num_past == 0 for chunk in chunks]),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers whose keys are stored side by side, as attention reads them."""

    #: Shape of their heads.
    shape: HeadShape
    #: Query heads that share a key head.
    queries_per_key: int
    #: Numbers of a token before the group's.
    start: int

    @classmethod
    def of(cls, model: ModelConfig, layout: PageLayout, number: int) -> _Group:
        """Group `number` of a layout."""
        shape, _ = layout.groups[number]
        return cls(shape, model.heads_of_group(number) // shape.num_kv_heads, layout.group_starts[number])

    def place(self, run: PageRange, layout: PageLayout) -> tuple[int, int]:
        """Offset of the group's keys in the pool, and the tokens that a run holds."""
        capacity = layout.tokens_in(run.num_pages)
        return run.start * layout.page_elements + capacity * self.start, capacity


def _chunks(ordered: Items[StepEntry], counts: Items[int]) -> list[_Chunk]:
    """The last `counts` tokens of each entry, one after the other."""
    chunks, start = [], 0
    for entry, count in zip(ordered, counts, strict=True):
        chunks.append(_Chunk(entry, start, count, entry.sequence.num_stored + entry.num_tokens - count))
        start += count
    return chunks


def _asked_rows(
    chunks: Items[_Chunk],
    asked: Items[_Chunk],
    model: ModelConfig,
    layout: PageLayout,
    dtype: torch.dtype,
    is_exact: bool,
) -> tuple[Tensor, tuple[LoraSpan, ...], AttentionPlan]:
    rows = torch.cat([torch.arange(c.end - a.num_tokens, c.end) for c, a in zip(chunks, asked, strict=True)])
    present = [chunk for chunk in asked if chunk.num_tokens]
    keys, last = model.key_places[-1], model.layers[-1].attention
    plan = AttentionPlan()
    if present and keys is not None and last is not None:
        group = _Group.of(model, layout, keys[0])
        plan = _attention_plan(present, group, layout, last.window, dtype, is_exact)
    return rows, _lora_spans(present), plan


def _token_ids(entry: StepEntry) -> list[int]:
    first = entry.sequence.num_stored
    return entry.sequence.tokens(first, first + entry.num_tokens)


def _row_lengths(ordered: Items[StepEntry], counts: Tensor) -> tuple[Tensor, Tensor]:
    prompt = torch.tensor([e.sequence.prompt_tokens for e in ordered])
    known = torch.tensor([e.sequence.total_tokens for e in ordered])
    return prompt.repeat_interleave(counts), known.repeat_interleave(counts)


def _lora_spans(chunks: Items[_Chunk]) -> tuple[LoraSpan, ...]:
    spans: list[LoraSpan] = []
    for chunk in chunks:
        if chunk.entry.adapter is None:
            continue
        adapter = chunk.entry.adapter.all_sites
        if spans and spans[-1].adapter is adapter:
            spans[-1] = spans[-1]._replace(end=chunk.end)
        else:
            spans.append(LoraSpan(chunk.start, chunk.end, adapter))
    for chunk in chunks:
        if chunk.entry.minus is not None:
            spans.append(LoraSpan(chunk.start, chunks[-1].end, chunk.entry.minus.negative.all_sites))
            break
    return tuple(spans)


def _attention_plan(
    chunks: Items[_Chunk],
    group: _Group,
    layout: PageLayout,
    window: int | None,
    dtype: torch.dtype,
    is_exact: bool,
) -> AttentionPlan:
    """The attention plan of a group's layers with this sliding window."""
    if can_attend_compiled(group.shape.head_dim, dtype):
        spans = SpanTable.of([_attention_span(c, group, layout) for c in chunks], group.queries_per_key)
        return AttentionPlan(spans=spans, window=window)
    decoding = sorted(
        (c for c in chunks if c.entry.is_decode and not is_exact),
        key=lambda chunk: (chunk.entry.pages.num_pages, chunk.entry.pages.start),
    )
    rows = torch.tensor([chunk.start for chunk in decoding], dtype=torch.int64) if decoding else None
    groups, start = [], 0
    for members in _evenly_spaced([chunk.entry for chunk in decoding]):
        groups.append(_decode_group(members, start, group, layout, window, dtype))
        start += len(members)
    filling = [
        _prefill_chunk(c, group, layout, window, dtype, is_exact) for c in chunks if is_exact or not c.entry.is_decode
    ]
    return AttentionPlan(rows, groups, filling, window=window, is_exact=is_exact)


def _attention_span(chunk: _Chunk, group: _Group, layout: PageLayout) -> tuple[int, int, int, int, int]:
    return chunk.start, chunk.num_tokens, chunk.num_past, *group.place(chunk.entry.pages, layout)


def _evenly_spaced(decoding: Items[StepEntry]) -> list[list[StepEntry]]:
    """Split entries, sorted by run size and place, into stretches of equal size and even spacing."""
    groups: list[list[StepEntry]] = []
    for entry in decoding:
        group = groups[-1] if groups else None
        if group and group[-1].pages.num_pages == entry.pages.num_pages:
            step = entry.pages.start - group[-1].pages.start
            if len(group) == 1 or step == group[-1].pages.start - group[-2].pages.start:
                group.append(entry)
                continue
        groups.append([entry])
    return groups


def _decode_group(
    members: Items[StepEntry],
    start: int,
    group: _Group,
    layout: PageLayout,
    window: int | None,
    dtype: torch.dtype,
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
    spacing = members[1].pages.start - members[0].pages.start if len(members) > 1 else 0
    offset, capacity = group.place(members[0].pages, layout)
    return DecodeGroup(
        start=start,
        end=start + len(members),
        offset=offset,
        stride=spacing * layout.page_elements,
        capacity_tokens=capacity,
        max_context=longest,
        mask=mask,
    )


def _prefill_chunk(
    chunk: _Chunk, group: _Group, layout: PageLayout, window: int | None, dtype: torch.dtype, is_exact: bool
) -> PrefillChunk:
    num_past, num_new = chunk.num_past, chunk.num_tokens
    offset, capacity = group.place(chunk.entry.pages, layout)
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
        start=chunk.start,
        end=chunk.end,
        offset=offset,
        capacity_tokens=capacity,
        num_past=num_past,
        mask=mask,
    )
