"""`Sequence`: a request while an engine works on it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import isnan

import numpy as np
from numpy.typing import NDArray

from .request import ExportedRow, FinishReason, Request, Result, ServedMode, TopLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while an engine works on it, with its tokens and what the engine stores of them.

    The tokens of a given completion are known from the start, but for the last one, which its last step yields as any
    other row's. What is asked of them arrives as their places are computed.
    """

    #: The row that is served.
    request: Request
    #: Generated tokens that are known; a sequence from another engine may begin with some.
    token_ids: list[int] = field(default_factory=list)
    #: Log-probability of each of `token_ids`; empty where they are not asked.
    token_logprobs: list[float] = field(default_factory=list)
    #: Likeliest tokens in place of each of `token_ids`; empty where they are not asked.
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    #: Likeliest tokens in place of each of `token_ids`, packed (`teacher`); empty where they are not asked.
    teacher: bytearray = field(default_factory=bytearray)
    #: Tokens (prompt first, then generated) whose keys and values are in the pool.
    num_stored: int = 0
    #: Tokens behind `token_ids` whose steps are launched and not read yet. They count, but only the device knows them.
    num_pending: int = 0
    #: Mode in which it was served so far; None before its first step.
    mode: ServedMode | None = None
    #: Whether it keeps its adapter in the pool.
    holds_adapter: bool = False
    #: Prompt tokens that another row had computed for it.
    num_reused: int = 0
    #: Steps that it sat out, holding memory.
    num_paused: int = 0
    #: Tokens for which it holds memory.
    held_tokens: int = 0
    #: Tokens whose log-probabilities are asked at the next place, beside that of the token chosen there.
    asked_tokens: tuple[int, ...] = ()
    #: Whether its answer is complete and it goes on only to score the other texts of its choice.
    is_scoring: bool = False
    #: Number of `token_ids` with which another engine goes on, so that it asks at the same places; None: all.
    answer_start: int | None = None
    #: Tokens that it may store beyond prompt and `max_tokens`.
    spare_tokens: int = 0
    #: Places of the prompt, or of a given completion, whose log-probabilities are computed or on their way.
    num_scored: int = 0
    #: Log-probability of the token behind each scored place, as far as they have arrived.
    prompt_logprobs: list[float] = field(default_factory=list)
    #: Likeliest tokens behind each scored place, as far as they have arrived.
    prompt_tops: list[TopLogprobs] = field(default_factory=list)
    #: Sum of the hidden states of the prompt that are pooled, as far as they have arrived; None before the first.
    pooled: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, row: ExportedRow, spare_tokens: int = 0) -> Sequence:
        """The sequence that goes on where `row` stopped; nothing of it is stored yet."""
        columns = list(row.token_ids), list(row.token_logprobs), list(row.top_logprobs), bytearray(row.teacher)
        sequence = cls(row.request, *columns, spare_tokens=spare_tokens)
        sampling = row.request.sampling
        if sampling.is_given:
            sequence.token_ids = list(sampling.continuation_token_ids[:-1])
            if row.token_ids:
                sequence.num_scored = sequence.prompt_tokens - 1 + len(row.token_ids)
        return sequence

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def total_tokens(self) -> int:
        """Tokens so far, prompt and generated."""
        return self.prompt_tokens + self.num_generated

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values the sequence may have to store: the last one is never read back."""
        return self.prompt_tokens + self.request.sampling.max_tokens - 1 + self.spare_tokens

    @property
    def next_asked(self) -> int:
        """First place whose logits are asked and not computed yet."""
        sampling, last_of_prompt = self.request.sampling, self.prompt_tokens - 1
        if sampling.wants_prompt_logprobs and self.num_scored < last_of_prompt:
            return self.num_scored
        return max(self.num_scored, last_of_prompt) if sampling.is_given else self.total_tokens - 1

    def positions_to_score(self, num_tokens: int) -> range:
        """Places of the prompt, or of a given completion, among the next `num_tokens`, whose log-probabilities are
        asked and not computed yet. The place of the last known token, which yields the next one, is none of them.
        """
        end = self.total_tokens if self.request.sampling.is_given else self.prompt_tokens
        places = range(max(self.num_stored, self.next_asked), min(self.num_stored + num_tokens, end - 1))
        return places if places else range(0)

    def note_scored(self, logprobs: Items[float], tops: Items[TopLogprobs], teacher: bytes) -> None:
        """Keep the log-probabilities of the next places that were scored: of the prompt first, then of a given
        completion, to which `teacher` belongs. `tops` and `teacher` as far as they are asked.
        """
        sampling = self.request.sampling
        num_left = self.prompt_tokens - 1 - len(self.prompt_logprobs) if sampling.wants_prompt_logprobs else 0
        in_prompt = min(num_left, len(logprobs))
        self.prompt_logprobs += logprobs[:in_prompt]
        self.token_logprobs += logprobs[in_prompt:]
        if sampling.prompt_top_logprobs:
            self.prompt_tops += tops[:in_prompt]
        if sampling.top_logprobs:
            self.top_logprobs += tops[in_prompt:]
        self.teacher += teacher

    @property
    def has_unsound_scores(self) -> bool:
        """Whether the logits of a given completion's place were no finite numbers."""
        return self.request.sampling.is_given and any(map(isnan, self.token_logprobs))

    def positions_to_pool(self, num_tokens: int) -> range:
        """Places of the prompt, among the next `num_tokens`, whose hidden states are asked: of a row that is classified
        or embedded its last one, or all.
        """
        sampling, end = self.request.sampling, self.num_stored + num_tokens
        if not sampling.is_pooled:
            return range(0)
        return range(self.num_stored if self.pools_all else max(self.num_stored, self.prompt_tokens - 1), end)

    @property
    def needs_all_places(self) -> bool:
        """Whether every place of the prompt must be computed for this row, although another row may have its keys."""
        return self.next_asked < self.prompt_tokens - 1 or self.pools_all

    @property
    def pools_all(self) -> bool:
        """Whether the hidden states of all tokens of the prompt are asked."""
        return self.request.sampling.task == "embed" and self.request.sampling.pooling == "mean"

    def add_states(self, states: NDArray[np.float32]) -> None:
        """Add hidden states of the prompt, [num_places, hidden_size], token by token: the sum does not depend on how
        the prompt was cut into steps.
        """
        start = np.zeros((1, states.shape[1])) if self.pooled is None else self.pooled[None]
        self.pooled = np.add.reduce(np.concatenate([start, states.astype(np.float64)]), axis=0)

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to compute, which yields the next one."""
        return self.num_stored == self.total_tokens - 1 and self.num_generated > 0

    @property
    def awaits_end(self) -> bool:
        """Whether its last token is pending, so that nothing is left to launch."""
        return self.num_pending > 0 and self.num_generated >= self.request.sampling.max_tokens

    @property
    def awaits_token(self) -> bool:
        """Whether nothing can be launched until a pending token is known: it is the last, or it decides what may
        follow.
        """
        return self.awaits_end or (self.num_pending > 0 and self.request.sampling.has_rules)

    def served(self, mode: ServedMode) -> None:
        """Count a step's mode; a row that saw more than one was served by a mixture."""
        self.mode = mode if self.mode in (None, mode) else "mixture"

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions `start:end` of prompt and completion together."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return list(prompt[start:end])
        generated = self.token_ids[max(start - len(prompt), 0) : end - len(prompt)]
        return [*prompt[start:], *generated]

    def preempted(self) -> Sequence:
        """The sequence that goes on with its tokens once there is memory for it again; nothing of it is stored."""
        again = Sequence.of(self.exported(), self.spare_tokens)
        again.mode, again.num_paused = self.mode, self.num_paused
        return again

    def go_to(self, token_ids: Items[int], *, from_start: bool = False) -> None:
        """Continue behind other tokens than those generated, with what is stored of those that are the same.
        `from_start`: of none, since what is stored is a state behind all of them.
        """
        same = next(
            (i for i, (new, old) in enumerate(zip(token_ids, self.token_ids, strict=False)) if new != old),
            min(len(token_ids), len(self.token_ids)),
        )
        self.token_ids, self.is_scoring = list(token_ids), True
        is_same = 0 if from_start else self.prompt_tokens + same
        self.num_stored = min(self.num_stored, is_same, self.total_tokens - 1)

    def exported(self) -> ExportedRow:
        """The request and its tokens, from which another engine can go on. A given completion goes on behind the places
        that are computed; with its prompt's log-probabilities, which do not move, it begins again.
        """
        sampling = self.request.sampling
        if sampling.is_given and sampling.wants_prompt_logprobs:
            return ExportedRow(self.request)
        kept = slice(len(self.token_logprobs) if sampling.is_given else self.answer_start)
        logprobs, tops = self.token_logprobs[kept], self.top_logprobs[kept]
        return ExportedRow(self.request, tuple(self.token_ids[kept]), tuple(logprobs), tuple(tops), bytes(self.teacher))

    def result(self, text: str, finish_reason: FinishReason) -> Result:
        """The outcome, once nothing more will be generated."""
        assert self.mode is not None, f"row {self.request.request_id} ended before its first step"
        sampling = self.request.sampling
        return Result(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            mode=self.mode,
            token_logprobs=tuple(self.token_logprobs) if sampling.wants_logprobs else None,
            top_logprobs=tuple(self.top_logprobs) if sampling.top_logprobs else None,
            reused_prompt_tokens=self.num_reused,
            prompt_logprobs=tuple(self.prompt_logprobs) if sampling.wants_prompt_logprobs else None,
            prompt_top_logprobs=tuple(self.prompt_tops) if sampling.prompt_top_logprobs else None,
            teacher=bytes(self.teacher) if sampling.teacher_top_k else None,
        )
