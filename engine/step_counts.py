"""What an engine has computed since it started."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from .step_batch import StepEntry


@dataclass(slots=True)
class StepCounts:
    """Totals as `EngineTelemetry` tells them."""

    steps: int = 0
    step_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def launching(self, entries: Items[StepEntry]) -> None:
        """A step of these entries is about to be launched."""
        self.steps += 1
        self.step_rows += len(entries)
        for entry in entries:
            prompt_left = max(entry.sequence.prompt_tokens - entry.sequence.num_stored, 0)
            self.prompt_tokens += min(entry.num_tokens, prompt_left)
