"""`StepCounts`: what an engine's steps have computed in total."""

from __future__ import annotations

from collections.abc import Sequence as Items

from ...scheduler.messages import StepTotals
from ..memory.residency import ResidentAdapter
from ..models.step_batch import StepEntry


class StepCounts:
    """Counts what `EngineTelemetry` reports in total. `elements_per_rank`: of an adapter on all linear layers; ranks
    count as batchers count them.
    """

    def __init__(self, elements_per_rank: int) -> None:
        self.generated_tokens = self.prompt_tokens = self.step_rows = self.num_steps = 0
        self._elements_per_rank = elements_per_rank
        self._prefill_tokens = self._decode_rows = self._context_tokens = 0
        self._num_lora_steps = self._num_adapters = self._lora_tokens = self._num_mixed_steps = 0
        self._drawn_tokens = self._scored_tokens = 0
        self._rank_sum = self._rank_tokens = self._prefill_pairs = 0.0

    def launching(self, entries: Items[StepEntry]) -> None:
        """Count a step of these entries, before it is launched."""
        self.num_steps += 1
        self.step_rows += len(entries)
        tokens_of: dict[ResidentAdapter, int] = {}
        prompt_tokens = prefill_tokens = decode_rows = context_tokens = drawn_tokens = scored_tokens = 0
        prefill_pairs = 0.0
        for entry in entries:
            sequence, num_tokens = entry.sequence, entry.num_tokens
            num_stored = sequence.num_stored
            context_tokens += num_stored + num_tokens
            prompt_left = sequence.prompt_tokens - num_stored
            if prompt_left > 0:
                prompt_tokens += min(num_tokens, prompt_left)
            # The last token of a row that computes its own tokens again looks the same, and costs the same.
            if num_tokens == 1 and prompt_left <= 0:
                decode_rows += 1
            else:
                prefill_tokens += num_tokens
                prefill_pairs += num_tokens * (num_stored + (num_tokens + 1) / 2)
            if entry.adapter is not None:
                tokens_of[entry.adapter] = tokens_of.get(entry.adapter, 0) + num_tokens
            if entry.minus is not None:
                subtracted = entry.minus.resident
                tokens_of[subtracted] = tokens_of.get(subtracted, 0) + num_tokens
            if entry.yields_token and sequence.request.sampling.is_drawn and not sequence.is_scoring:
                drawn_tokens += 1
            scored_tokens += len(sequence.places_to_score(num_tokens))
        self.prompt_tokens += prompt_tokens
        self._prefill_tokens += prefill_tokens
        self._decode_rows += decode_rows
        self._context_tokens += context_tokens
        self._prefill_pairs += prefill_pairs
        self._drawn_tokens += drawn_tokens
        self._scored_tokens += scored_tokens
        self._num_lora_steps += bool(tokens_of)
        self._num_mixed_steps += prefill_tokens > 0 and decode_rows > 0
        self._num_adapters += len(tokens_of)
        for adapter, num_tokens in tokens_of.items():
            rank = adapter.numbers.numel() / self._elements_per_rank
            self._rank_sum += rank
            self._rank_tokens += rank * num_tokens
            self._lora_tokens += num_tokens

    def totals(self) -> StepTotals:
        """Of all steps so far."""
        return StepTotals(
            self.num_steps,
            self._prefill_tokens,
            self._decode_rows,
            self._context_tokens,
            self._num_lora_steps,
            self._num_adapters,
            self._rank_sum,
            self._rank_tokens,
            self._prefill_pairs,
            self._lora_tokens,
            self._num_mixed_steps,
            self._drawn_tokens,
            self._scored_tokens,
        )
