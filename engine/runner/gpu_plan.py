"""Plans one step for a GPU on the host: its entries as arrays, the buffers and scratch it needs, and its lists.

This is the host's whole work for a step; it touches no tensor on a device.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ...kernels.layouts.segments import SegmentLimits, plan_segments
from ...kernels.paged_attention.work import SEGMENT_KEYS, Span, WorkLimits, plan_attention, tile_rows_for
from ...kernels.sampling import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE
from ..models.gpu_step import StepBuffer, StepSizes
from ..models.step_batch import StepEntry
from ..request import SamplingParams
from ..sequence import Sequence

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules

SPLIT_KEYS = 512  # see kernels.paged_attention.triton
DECODE_TILE_ROWS, PREFILL_TILE_ROWS = 16, 64  # see kernels.layouts.segments
# The longest context over the mean: up to here its program ends with the others.
_ALIKE = 4
_MOST_INT32 = 2**31 - 1
_Int32s = NDArray[np.int32]
_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """Sizes that a step's lists depend on."""

    #: Most chunks of a resident in any layer, per packed site: [table rows, 4].
    chunk_counts: _Int32s
    #: Heads and pages of the pool.
    layout: PageLayout
    #: Number format of the pool.
    dtype: torch.dtype
    #: Programs that share a contraction.
    num_programs: int
    #: Decode rows whose attention fills the device; None in mode `exact`, where bits of a row must not depend on
    #: others.
    full_rows: int | None

    @property
    def is_exact(self) -> bool:
        """Whether bits of a row depend on that row alone."""
        return self.full_rows is None

    def segment_limits(self, num_rows: int, num_items: int, scratch_rows: int, tile_rows: int) -> SegmentLimits:
        """Limits of a step's LoRA. In mode `exact` no tile is expanded otherwise for having few rows."""
        limits = SegmentLimits(num_rows, rounded(num_items), scratch_rows, tile_rows)
        return replace(limits, few_rows=0) if self.is_exact else limits

    def attention_limits(self, max_items: int, max_combines: int, split_keys: int, *, is_decode: bool) -> WorkLimits:
        """Limits of a step's attention, whose tiles and segments follow from the mode."""
        tile_rows = tile_rows_for(self.layout, self.dtype, is_decode, self.is_exact)
        return WorkLimits(max_items, max_combines, tile_rows, split_keys, SEGMENT_KEYS if self.is_exact else 0)


class PlannedStep:
    """One step before its lists are written.

    `plus`, `minus` [num_entries]: table rows of the adapter that an entry is served by and of the merged one that it
    must not see, -1 for none. `rules`: as in `GpuRunner`.
    """

    def __init__(
        self,
        entries: Items[StepEntry],
        plus: _Int32s,
        minus: _Int32s,
        geometry: StepGeometry,
        rules: TokenRules | None,
    ) -> None:
        self.entries = entries
        self._geometry = geometry
        count = len(entries)
        self._num_tokens = np.fromiter((e.num_tokens for e in entries), np.int64, count)
        self._stored = np.fromiter((e.sequence.num_stored for e in entries), np.int64, count)
        self._total = np.fromiter((e.sequence.total_tokens for e in entries), np.int64, count)
        self._plus, self._minus = plus, minus
        self._context = self._stored + self._num_tokens
        self._num_pages = -(-self._context // geometry.layout.page_tokens)
        #: Entries of prompts whose hidden states are asked, and their numbers of places.
        self.pooled = [(i, len(e.pooled)) for i, e in enumerate(entries) if e.pooled]
        self.num_pooled = sum(num_places for _, num_places in self.pooled)
        yields = np.fromiter((e.yields_token for e in entries), bool, count)
        self._yielding = np.flatnonzero(yields)
        self.sampled: tuple[Sequence, ...] = tuple(entries[i].sequence for i in self._yielding.tolist())
        #: Places of prompts whose log-probabilities are asked, each with its entry.
        self.scored = [(i, found) for i, e in enumerate(entries) if (found := e.scored) is not None]
        #: Token behind each of these places.
        self.scored_tokens = [token for _, places in self.scored for token in places.token_ids]
        self.num_scored = len(self.scored_tokens)
        self._withheld = [
            ()
            if rules is None or s.request.sampling.has_rules or s.num_generated >= s.request.sampling.min_tokens
            else rules.stop_tokens(s)
            for s in self.sampled
        ]
        #: Places, among those that are sampled, of rows whose logits the host changes.
        self.ruled = [i for i, s in enumerate(self.sampled) if s.request.sampling.has_rules]
        #: Most of the likeliest tokens that a row asks for.
        self.num_top = max(
            (max(s.request.sampling.top_logprobs, s.request.sampling.teacher_top_k) for s in self.sampled), default=0
        )
        #: Pairs of such a place and a token whose log-probability is asked there.
        self.asked = [(i, token) for i, s in enumerate(self.sampled) for token in s.asked_tokens]
        self.wants_logprobs = bool(self.asked or self.scored) or any(
            s.request.sampling.wants_logprobs for s in self.sampled
        )
        self.draws = any(s.request.sampling.temperature for s in self.sampled)
        self.has_lora = bool((plus >= 0).any() or (minus >= 0).any())
        self.num_rows = int(self._num_tokens.sum())
        self.num_pages = int(self._num_pages.sum())
        self.is_decode = self.num_rows == count
        self.split_keys = split_keys_of(self._context[self._num_tokens == 1], geometry.full_rows)
        self.num_lora_items, self.scratch_rows = self._lora_needs(self._num_tokens, self.tile_rows)
        #: Rows of each entry whose logits are asked. If most rows are others, the last layer goes on without them.
        self._num_sampled = yields.astype(np.int64)
        for i, places in self.scored:
            self._num_sampled[i] += len(places.token_ids)
        for i, num_places in self.pooled:
            self._num_sampled[i] += num_places
        self.cuts_last_layer = not self.is_decode and 2 * int(self._num_sampled.sum()) <= self.num_rows

    @property
    def tile_rows(self) -> int:
        """Rows of a LoRA tile: small segments waste least in small tiles. A tile of another height is multiplied by
        another instruction, which may round otherwise: in mode `exact` all are small."""
        return DECODE_TILE_ROWS if self.is_decode or self._geometry.is_exact else PREFILL_TILE_ROWS

    @property
    def needs_host(self) -> bool:
        """Whether some row asks of its logits what no graph computes."""
        return bool(self.ruled or self.num_top or self.asked)

    @property
    def num_withheld(self) -> int:
        """Most tokens that are withheld from one row."""
        return max(map(len, self._withheld), default=0)

    @property
    def num_attention_items(self) -> int:
        """Upper bound of the attention items: one for every query token and for every piece of a long context."""
        pieces = self._context // self.split_keys if self.split_keys else 0
        return int((self._num_tokens + pieces).sum())

    @property
    def num_partials(self) -> int:
        """Pieces of contexts that are split."""
        if not self.split_keys:
            return 0
        pieces = -(-self._context // self.split_keys)
        return int(pieces[(self._num_tokens == 1) & (pieces > 1)].sum())

    def _lora_needs(self, num_rows: _Int64s, tile_rows: int) -> tuple[int, int]:
        """Shrink items of a site, and rows of scratch for one plane, when each entry has `num_rows` rows."""
        pairs, where = np.unique(np.stack((self._plus, self._minus)), axis=1, return_inverse=True)
        rows = np.bincount(where, weights=num_rows, minlength=pairs.shape[1]).astype(np.int64)
        most_chunks = self._geometry.chunk_counts.max(1, initial=0)
        chunks = np.where(pairs >= 0, most_chunks[pairs], 0).sum(0)
        return int((-(-rows // tile_rows) * chunks).sum()), int((rows * chunks).sum())

    def exact_sizes(self, scratch_rows: int) -> StepSizes:
        """Lengths of exactly the step's lists: what is not there is not copied."""
        sampled = None
        if self.cuts_last_layer:
            num_items, _ = self._lora_needs(self._num_sampled, DECODE_TILE_ROWS)
            num_rows = rounded(int(self._num_sampled.sum()))
            sampled = self._geometry.segment_limits(num_rows, num_items, scratch_rows, DECODE_TILE_ROWS)
        return StepSizes(
            rows=self.num_rows,
            sampled=len(self.sampled) + self.num_scored + self.num_pooled,
            withheld=self.num_withheld,
            pages=self.num_pages,
            segments=self._geometry.segment_limits(
                rounded(self.num_rows), self.num_lora_items, scratch_rows, self.tile_rows
            ),
            attention=self._geometry.attention_limits(
                rounded(self.num_attention_items), len(self.entries), self.split_keys, is_decode=self.is_decode
            ),
            sampled_segments=sampled,
        )

    def write(self, host: StepBuffer, places: dict[int, int]) -> None:
        """Fill a buffer on the host. `places`: places where the step before left pending tokens, by the id() of their
        sequences.
        """
        num_rows, geometry = self.num_rows, self._geometry
        row_starts = np.cumsum(self._num_tokens) - self._num_tokens
        entry_of_row = np.repeat(np.arange(len(self.entries)), self._num_tokens)
        positions = np.arange(num_rows) + (self._stored - row_starts)[entry_of_row]
        counts = self._num_pages.tolist()
        pages = np.concatenate([_pages(entry, count) for entry, count in zip(self.entries, counts, strict=True)])
        page_starts = np.cumsum(self._num_pages) - self._num_pages
        pages_of_rows = pages[page_starts[entry_of_row] + positions // geometry.layout.page_tokens]
        prompts = np.fromiter((e.sequence.prompt_tokens for e in self.entries), np.int64, len(self.entries))
        sources = np.full(num_rows, -1)
        for i in np.flatnonzero([e.sequence.num_pending > 0 for e in self.entries]).tolist():
            # the pending token is the sequence's last, which only a row that yields the next one needs
            if self._context[i] == self._total[i]:
                sources[row_starts[i] + self._num_tokens[i] - 1] = places[id(self.entries[i].sequence)]
        sampled_rows = np.concatenate(
            [
                (row_starts + self._num_tokens - 1)[self._yielding],
                *(row_starts[i] + p.offset + np.arange(len(p.token_ids)) for i, p in self.scored),
                *(row_starts[i] + self._num_tokens[i] - n + np.arange(n) for i, n in self.pooled),
            ]
        )
        columns: dict[str, NDArray[np.generic]] = {
            "token_ids": np.fromiter((t for e in self.entries for t in _token_ids(e)), np.int32, num_rows),
            "sources": sources,
            "positions": positions,
            "slots": pages_of_rows * geometry.layout.page_tokens + positions % geometry.layout.page_tokens,
            "prompt_tokens": prompts[entry_of_row],
            "total_tokens": self._total[entry_of_row],
            "sampled_rows": sampled_rows,
            **_sampling_columns(self.sampled),
            "withheld": _filled_up(self._withheld, host.sizes.sampled, host.sizes.withheld),
            "pages": pages,
        }
        for name, values in columns.items():
            array = host.array(name)
            array[: len(values)] = values
            # padding reads row 0 and is greedy; nothing names its pages
            if name != "pages":
                array[len(values) :] = 0
        self._plan_lora(entry_of_row, host.sizes.segments, host.view("segments"))
        if host.sizes.sampled_segments is not None:
            self._plan_lora(entry_of_row[sampled_rows], host.sizes.sampled_segments, host.view("sampled_segments"))
        columns_of_spans = (row_starts, self._num_tokens, self._stored, page_starts)
        spans = [Span(*numbers) for numbers in zip(*(c.tolist() for c in columns_of_spans), strict=True)]
        plan_attention(spans, geometry.layout.queries_per_key_head, host.sizes.attention, into=host.view("attention"))

    def spans(self) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Sequences as `PromptAttention` takes them: new tokens, all tokens, and pages."""
        counts = self._num_pages.tolist()
        pages = [_pages(entry, count) for entry, count in zip(self.entries, counts, strict=True)]
        return self._num_tokens, self._context, np.concatenate(pages)

    def _plan_lora(self, entry_of_row: _Int64s, limits: SegmentLimits, into: Tensor) -> None:
        plus, minus, geometry = self._plus[entry_of_row], self._minus[entry_of_row], self._geometry
        plan_segments(plus, minus, geometry.chunk_counts, limits, geometry.num_programs, into)


def rounded(length: int) -> int:
    """`length` rounded up to a multiple of 16, so that lists start at multiples of 16 bytes: Triton compiles a kernel
    anew for a pointer that does not."""
    return -(-length // 16) * 16


def split_keys_of(contexts: _Int64s, full_rows: int | None) -> int:
    """Keys of one item of attention at most, for decode rows of these contexts; 0: they are not split.

    Splitting pays where rows are few or one context is much longer than the others. Where it must not change bits
    (`full_rows` None), contexts are cut between the segments that each query sums by itself.
    """
    longest = int(contexts.max(initial=0))
    if full_rows is None:
        return SEGMENT_KEYS if longest > SEGMENT_KEYS else 0
    if longest <= SPLIT_KEYS:
        return 0
    are_alike = longest <= _ALIKE * contexts.mean()
    return 0 if len(contexts) >= full_rows and are_alike else SPLIT_KEYS


def _pages(entry: StepEntry, count: int) -> _Int64s:
    """The first `count` pages of a row's block table."""
    own = np.arange(entry.pages.start, entry.pages.start + count - len(entry.shared))
    if not entry.shared and not entry.extensions:
        return own
    runs = [np.arange(run.start, run.end) for run in (entry.pages, *entry.extensions)]
    return np.concatenate([np.array(entry.shared, np.int64), *runs])[:count]


def _token_ids(entry: StepEntry) -> list[int]:
    """Tokens of an entry; zeros stand for pending ones."""
    first = entry.sequence.num_stored
    known = entry.sequence.tokens(first, first + entry.num_tokens)
    return known + [0] * (entry.num_tokens - len(known))


def _filled_up(lists: Items[Items[int]], num_rows: int, width: int) -> _Int32s:
    """Lists as rows of equal length, one after the other; -1 stands where there is nothing."""
    filled = np.full((num_rows, width), -1, np.int32)
    for row, numbers in zip(filled, lists, strict=False):
        row[: len(numbers)] = numbers
    return filled.ravel()


def _temperature(sampling: SamplingParams) -> float:
    """The temperature within what the kernel takes; beyond these bounds nothing changes."""
    return min(max(sampling.temperature, SMALLEST_TEMPERATURE), LARGEST_TEMPERATURE) if sampling.temperature else 0.0


def _sampling_columns(sampled: tuple[Sequence, ...]) -> dict[str, NDArray[np.generic]]:
    settings = [s.request.sampling for s in sampled]
    return {
        "temperature": np.array([_temperature(p) for p in settings], np.float32),
        # what exceeds the vocabulary cuts nothing
        "top_k": np.array([min(p.top_k, _MOST_INT32) for p in settings], np.int32),
        "top_p": np.array([p.top_p for p in settings], np.float64),
        "seeds": np.array([p.seed for p in settings], np.int64),
        "streams": np.array([s.request.stream_id for s in sampled], np.uint64).view(np.int64),
        "draws": np.array([s.num_generated for s in sampled], np.int64),
    }
