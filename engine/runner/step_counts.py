"""`StepCounts`: counts of what an engine computes in one step, or in several of them together."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, fields
from operator import add, attrgetter

from ...scheduler.costs.cost import StepLoad
from ...scheduler.messages import StepTotals
from ..memory.residency import ResidentAdapter
from ..models.step_batch import StepEntry

_LOAD_FIELDS = [field.name for field in fields(StepLoad)]
_numbers = attrgetter(*(field.name for field in fields(StepTotals)))


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of what one step computes, or several of them together."""

    #: Counts in the terms of the cost model.
    totals: StepTotals = field(default_factory=StepTotals)
    #: Tokens of prompts, without generated ones that are computed again.
    prompt_tokens: int = 0

    @classmethod
    def of(cls, entries: Items[StepEntry], elements_per_rank: int) -> StepCounts:
        """Counts of one step, before its tokens count as stored. `elements_per_rank`: numbers of an adapter of rank 1
        on all linear layers. Ranks count as batchers count them.
        """
        tokens_of: dict[ResidentAdapter, int] = {}
        prompt_tokens = prefill_tokens = decode_rows = context_tokens = drawn_tokens = scored_tokens = 0
        prefill_pairs = 0.0
        for entry in entries:
            sequence, num_tokens = entry.sequence, entry.num_tokens
            num_stored = sequence.num_stored
            context_tokens += num_stored + num_tokens
            prompt_tokens += max(0, min(num_tokens, sequence.prompt_tokens - num_stored))
            if entry.is_decode:
                decode_rows += 1
            else:
                prefill_tokens += num_tokens
                prefill_pairs += num_tokens * (num_stored + (num_tokens + 1) / 2)
            if entry.adapter is not None:
                tokens_of[entry.adapter] = tokens_of.get(entry.adapter, 0) + num_tokens
            if entry.minus is not None:
                tokens_of[entry.minus] = tokens_of.get(entry.minus, 0) + num_tokens
            if entry.yields_token and sequence.request.sampling.is_drawn and not sequence.is_scoring:
                drawn_tokens += 1
            scored_tokens += len(sequence.positions_to_score(num_tokens))
        rank_of = {adapter: adapter.layout.num_elements / elements_per_rank for adapter in tokens_of}
        totals = StepTotals(
            num_steps=1,
            prefill_tokens=prefill_tokens,
            decode_rows=decode_rows,
            context_tokens=context_tokens,
            num_lora_steps=int(bool(tokens_of)),
            num_adapters=len(tokens_of),
            rank_sum=sum(rank_of.values(), 0.0),
            rank_tokens=sum((rank * tokens_of[adapter] for adapter, rank in rank_of.items()), 0.0),
            prefill_pairs=prefill_pairs,
            lora_tokens=sum(tokens_of.values()),
            num_mixed_steps=int(prefill_tokens > 0 and decode_rows > 0),
            drawn_tokens=drawn_tokens,
            scored_tokens=scored_tokens,
        )
        return cls(totals, prompt_tokens)

    def __add__(self, other: StepCounts) -> StepCounts:
        """Counts of the steps of both."""
        return StepCounts(
            StepTotals(*map(add, _numbers(self.totals), _numbers(other.totals))),
            self.prompt_tokens + other.prompt_tokens,
        )

    @property
    def load(self) -> StepLoad:
        """The load of one step as the cost model takes it."""
        return StepLoad(**{name: getattr(self.totals, name) for name in _LOAD_FIELDS})

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and of rows that decode."""
        return self.totals.prefill_tokens + self.totals.decode_rows
