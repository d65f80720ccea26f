"""What the members of a group must know of a step: encoded by the leader, decoded by each member.

Pages have the same numbers on all members, so that a member builds the same `StepBatch` from the same few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import cast

import numpy as np
from torch import Tensor

from ..memory.pool import PageRun
from ..memory.residency import MergedShare, ResidentAdapter
from ..models.step_batch import StepEntry
from ..sequence import Sequence
from .messages import PlaceAdapter, Step

# Order of an adapter where there is none.
_NONE = -1


@dataclass(frozen=True, slots=True)
class MirroredRow:
    """A row as `build_step` sees it: what `Sequence` has of the same names. `new_tokens`: those of the step. `scored`:
    places of its prompt whose log-probabilities are asked.
    """

    num_stored: int
    prompt_tokens: int
    num_generated: int
    new_tokens: list[int]
    scored: range

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.num_generated

    @property
    def is_decoding(self) -> bool:
        return self.num_stored == self.total_tokens - 1 and self.num_generated > 0

    def places_to_score(self, num_tokens: int) -> range:
        """See `Sequence.places_to_score`."""
        assert num_tokens == len(self.new_tokens), f"{num_tokens} tokens of {self}"
        return self.scored

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of the step; of those that follow scored places the leader alone knows the last one, and members
        need only how many they are.
        """
        known = self.new_tokens[start - self.num_stored : end - self.num_stored]
        return known + [0] * (end - start - len(known))


def encode_step(entries: Items[StepEntry]) -> Step:
    """A step's message."""
    rows, token_ids = [], []
    for entry in entries:
        sequence, first = entry.sequence, entry.sequence.num_stored
        assert not entry.shared, "no block tables here: shared pages are copied"
        assert not entry.extensions, "no block tables here: runs are not extended"
        token_ids += sequence.tokens(first, first + entry.num_tokens)
        scored = sequence.places_to_score(entry.num_tokens)
        rows.append(
            (
                entry.num_tokens,
                first,
                sequence.prompt_tokens,
                sequence.num_generated,
                entry.run.start,
                entry.run.num_pages,
                _NONE if entry.adapter is None else entry.adapter.order,
                _NONE if entry.minus is None else entry.minus.resident.order,
                scored.start,
                scored.stop,
            )
        )
    return Step(np.array(rows, np.int64).tobytes(), np.array(token_ids, np.int64).tobytes())


class StepDecoder:
    """Decodes steps over `memory`, a member's pool (flat)."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._residents: dict[int, ResidentAdapter] = {}
        self._shares: dict[int, MergedShare] = {}

    def place(self, message: PlaceAdapter) -> None:
        """Learn where an adapter lies."""
        for order in message.gone:
            self._residents.pop(order, None)
            self._shares.pop(order, None)
        numbers = self._memory[message.start : message.start + message.num_elements]
        self._residents[message.order] = ResidentAdapter("", message.order, numbers, message.layout)

    def entries(self, step: Step) -> list[StepEntry]:
        """The entries that `encode_step` was given, as far as `build_step` asks."""
        token_ids = np.frombuffer(step.token_ids, np.int64).tolist()
        entries, start = [], 0
        for num_tokens, num_stored, prompt, generated, page, pages, order, minus, *scored in (
            np.frombuffer(step.rows, np.int64).reshape(-1, 10).tolist()
        ):
            row = MirroredRow(num_stored, prompt, generated, token_ids[start : start + num_tokens], range(*scored))
            start += num_tokens
            entries.append(
                StepEntry(
                    cast("Sequence", row),
                    num_tokens,
                    PageRun(page, pages),
                    None if order == _NONE else self._residents[order],
                    None if minus == _NONE else self._share(minus),
                )
            )
        return entries

    def _share(self, order: int) -> MergedShare:
        """The same object in every step: what is prepared for one step serves the next."""
        if order not in self._shares:
            self._shares[order] = MergedShare.of(self._residents[order])
        return self._shares[order]
