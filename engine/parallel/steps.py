"""The form in which the members of a group get a step: encoded by the leader, decoded by each member.

Pages have the same numbers on all members, so that a member builds the same `StepBatch` from the same few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar, cast

import numpy as np
from torch import Tensor

from ..memory.pool import PageRange
from ..memory.residency import ResidentAdapter
from ..models.step_batch import StepEntry
from ..request import Request, SamplingParams
from ..sequence import Sequence
from .messages import PlaceAdapter, Step

# The order of no adapter, and the place of no pending token.
_NONE = -1
#: Numbers that encode an entry.
COLUMNS = 15
#: Places of pending tokens where every step is read before the next one.
NO_PLACES: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class _MirroredRow:
    """A row as a member plans it: the part of `Sequence` that planning reads, under the same names. Only the leader
    knows how tokens are chosen.
    """

    #: Stands for the row's own request: greedy, without options.
    request: ClassVar[Request] = Request("", (0,), None, SamplingParams())
    #: Empty: only the leader reads log-probabilities.
    asked_tokens: ClassVar[tuple[int, ...]] = ()

    #: Tokens whose keys and values are in the pool.
    num_stored: int
    #: Tokens of the prompt.
    prompt_tokens: int
    #: Tokens generated, a pending one included.
    num_generated: int
    #: Tokens that only the devices know yet: 1 or 0.
    num_pending: int
    #: Tokens of the step; 0 stands for a pending one.
    new_tokens: list[int]
    #: Places of the prompt whose log-probabilities are asked.
    scored: range
    #: Places of the prompt whose hidden states are asked.
    pooled: range

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.num_generated

    @property
    def is_decoding(self) -> bool:
        return self.num_stored == self.total_tokens - 1 and self.num_generated > 0

    def positions_to_score(self, num_tokens: int) -> range:
        """Places of the prompt, among the tokens of the step, whose log-probabilities are asked."""
        assert num_tokens == len(self.new_tokens), f"{num_tokens} tokens of {self}"
        return self.scored

    def positions_to_pool(self, num_tokens: int) -> range:
        """Places of the prompt, among the tokens of the step, whose hidden states are asked."""
        assert num_tokens == len(self.new_tokens), f"{num_tokens} tokens of {self}"
        return self.pooled

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of the step. Zeros stand for tokens behind it, such as the one that follows the last scored place:
        only the leader knows it, and members need only the count.
        """
        known = self.new_tokens[start - self.num_stored : end - self.num_stored]
        return known + [0] * (end - start - len(known))


def encode_step(entries: Items[StepEntry], places: Mapping[int, int] = NO_PLACES) -> Step:
    """A step's message. `places`: places where the step before left pending tokens on the devices, by the id() of their
    sequences.

    Pages of an entry's block table beside its run: those of the prefix cache, then start and length of each run by
    which its run was extended.
    """
    rows, token_ids, pages = [], [], []
    for entry in entries:
        sequence, first = entry.sequence, entry.sequence.num_stored
        known = sequence.tokens(first, first + entry.num_tokens)
        token_ids += known + [0] * (entry.num_tokens - len(known))
        pages += [*entry.shared, *chain.from_iterable((run.start, run.num_pages) for run in entry.extensions)]
        scored = sequence.positions_to_score(entry.num_tokens)
        rows.append(
            (
                entry.num_tokens,
                first,
                sequence.prompt_tokens,
                sequence.num_generated,
                entry.pages.start,
                entry.pages.num_pages,
                _NONE if entry.adapter is None else entry.adapter.order,
                _NONE if entry.minus is None else entry.minus.order,
                scored.start,
                scored.stop,
                entry.pooled.start,
                entry.pooled.stop,
                places[id(sequence)] if sequence.num_pending else _NONE,
                len(entry.shared),
                len(entry.extensions),
            )
        )
    return Step(*(np.array(numbers, np.int64).tobytes() for numbers in (rows, token_ids, pages)))


def place_adapter(message: PlaceAdapter, memory: Tensor, residents: dict[int, ResidentAdapter]) -> None:
    """Enter an adapter in `memory`, a member's pool (flat), in `residents`, and take out adapters that are gone."""
    for order in message.gone:
        residents.pop(order, None)
    pages = np.array(message.pages, np.int64)
    residents[message.order] = ResidentAdapter("", message.order, memory, pages, message.layout)


def _ranges(bounds: Items[int]) -> tuple[range, range]:
    """The places that are scored and those that are pooled, from their four bounds."""
    return range(*bounds[:2]), range(*bounds[2:])


def decode_step(step: Step, residents: Mapping[int, ResidentAdapter]) -> tuple[list[StepEntry], dict[int, int]]:
    """The entries and the places that `encode_step` was given, as far as planning asks. `residents`: the adapters that
    were placed, by their order.
    """
    token_ids = iter(np.frombuffer(step.token_ids, np.int64).tolist())
    pages = iter(np.frombuffer(step.pages, np.int64).tolist())
    entries, places = [], {}
    for num_tokens, num_stored, prompt, generated, start, length, order, minus, *asked, place, shared, runs in (
        np.frombuffer(step.rows, np.int64).reshape(-1, COLUMNS).tolist()
    ):
        new_tokens = list(islice(token_ids, num_tokens))
        row = _MirroredRow(num_stored, prompt, generated, int(place != _NONE), new_tokens, *_ranges(asked))
        if place != _NONE:
            places[id(row)] = place
        entries.append(
            StepEntry(
                cast("Sequence", row),
                num_tokens,
                PageRange(start, length),
                None if order == _NONE else residents[order],
                None if minus == _NONE else residents[minus],
                tuple(islice(pages, shared)),
                tuple(PageRange(next(pages), next(pages)) for _ in range(runs)),
            )
        )
    return entries, places
