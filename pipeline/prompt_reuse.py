"""How much of all prompts engines found computed. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from .row_answer import RowAnswer


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Prompt tokens of some rows, and those among them that were not computed, as rows before began alike."""

    prompt_tokens: int = 0
    reused_tokens: int = 0

    @classmethod
    def of_answers(cls, answers: Iterable[RowAnswer]) -> Self:
        """Counts the rows of which an engine has told it."""
        told = [(a.prompt_tokens, a.reused_prompt_tokens) for a in answers if a.reused_prompt_tokens is not None]
        return cls(sum(prompt for prompt, _ in told), sum(reused for _, reused in told))

    @classmethod
    def total(cls, parts: Iterable[PromptReuse]) -> Self:
        """All of them together."""
        counts = [(part.prompt_tokens, part.reused_tokens) for part in parts]
        return cls(sum(prompt for prompt, _ in counts), sum(reused for _, reused in counts))

    @property
    def share(self) -> float | None:
        """Reused tokens of all prompt tokens, from 0 to 1; None without any."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else None
