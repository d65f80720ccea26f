"""The steps in flight between launch and reading, and the runner for CPUs.

A runner may let one step be launched before the one before it is read, so that the device never waits for the
host. Rows then grow by *pending* tokens, which only the device knows, and the host learns of an end one step late:
the step launched meanwhile computed one token too many, which is dropped when it is read. Its key and value went
to a place that the row still owned, and the next owner of that place writes to it in a later step. On a CPU a step is
computed when it is launched.

How long a step took is known when it is read. A step in flight therefore keeps what it computes, so that its seconds
are those of its own work and not of the step launched behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ...kernels.sampling import NO_TOKEN
from ..models.decoder import Decoder
from ..models.step_batch import StepEntry, build_step
from ..request import TopLogprobs
from ..sequence import Sequence
from .sampler import SampledTokens, sample, score_prompts, split_states
from .step_counts import StepCounts

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules

#: A sequence, its next token (None where the largest logit is no finite number), the token's log-probability, the
#: likeliest tokens, log-probabilities of the asked ones, and the likeliest tokens that are packed.
ReadToken = tuple[Sequence, int | None, float, TopLogprobs, tuple[float, ...], bytes]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is launched and not read yet: as its runner has launched it, with what the engine notes of it."""

    #: Sequences that get a token.
    sampled: tuple[Sequence, ...]
    #: Waits for the tokens and returns them.
    read: Callable[[], SampledTokens]
    #: Rows of the step; empty for a step whose tokens count for nothing.
    entries: Items[StepEntry] = ()
    #: Counts of what it computes.
    counts: StepCounts = field(default_factory=StepCounts)
    #: Tokens that it was allowed to hold.
    max_tokens: int = 0
    #: Seconds on the engine's clock when the host began to plan it.
    began_s: float = 0.0
    #: Sequences whose last hidden states it computes, so that they are done.
    pooled: tuple[Sequence, ...] = ()

    def share_filled(self, max_rows: int) -> float:
        """Share of the step that was filled, from 0 to 1: of `max_rows` rows or of `max_tokens` tokens, whichever is
        more.
        """
        return min(1.0, max(len(self.entries) / max_rows, self.counts.num_tokens / max(self.max_tokens, 1)))


class StepsInFlight:
    """Steps launched and not read, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: LaunchedStep) -> None:
        """Count the step's tokens as stored and its sampled ones as pending. One without entries is only waited for, so
        that its time is not the next one's.
        """
        for entry in step.entries:
            entry.sequence.num_scored = max(
                entry.sequence.num_scored, entry.sequence.positions_to_score(entry.num_tokens).stop
            )
            entry.sequence.num_stored += entry.num_tokens
        for sequence in (*step.sampled, *step.pooled) if step.entries else ():
            sequence.num_pending += 1
        self._steps.append(step)

    def read(self, keep: int) -> Iterator[tuple[LaunchedStep, Iterator[ReadToken]]]:
        """All steps but the `keep` latest, in the order of launching, each with its tokens once it has ended."""
        while len(self._steps) > keep:
            step = self._steps.popleft()
            tokens = step.read()
            if not step.entries:
                continue
            for sequence, logprobs, tops, teacher in tokens.prompts:
                sequence.note_scored(logprobs, tops, teacher)
            for sequence, states in tokens.states:
                sequence.add_states(states)
            for sequence in step.pooled:
                sequence.num_pending -= 1
            yield step, _read_tokens(step.sampled, tokens)


def _read_tokens(sampled: tuple[Sequence, ...], tokens: SampledTokens) -> Iterator[ReadToken]:
    """The tokens of a step, which are no longer pending."""
    teacher = tokens.teacher or [b""] * len(sampled)
    columns = sampled, tokens.ids, tokens.logprobs, tokens.tops, tokens.asked, teacher
    for sequence, token, *found in zip(*columns, strict=True):
        sequence.num_pending -= 1
        yield sequence, None if token == NO_TOKEN else token, *found


class CpuRunner:
    """Runs a decoder over `memory` (the flat pool). `announce` is called with each step before it is computed."""

    #: Steps that may be launched before the one before them is read.
    steps_ahead = 0

    def __init__(
        self,
        decoder: Decoder,
        memory: Tensor,
        layout: PageLayout,
        rules: TokenRules,
        announce: Callable[[Items[StepEntry]], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._memory = memory
        self._layout = layout
        self._rules = rules
        self._announce = announce

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """Compute a step; its tokens are known when the call returns."""
        if self._announce is not None:
            self._announce(entries)
        decoder, memory = self._decoder, self._memory
        batch = build_step(entries, decoder.model, self._layout, memory.dtype, is_exact=decoder.is_exact)
        blocks = decoder.forward_in_blocks(batch, memory)
        logits, count = next(blocks), len(batch.sampled)
        tokens = sample(logits[:count], batch.sampled, self._rules)
        prompts = score_prompts(chain([logits[count:]], blocks), batch.scored)
        tokens = tokens._replace(prompts=prompts, states=split_states(decoder.states, batch.pooled))
        return LaunchedStep(batch.sampled, lambda: tokens, pooled=finished_prompts(entries))


def finished_prompts(entries: Items[StepEntry]) -> tuple[Sequence, ...]:
    """Sequences that are classified or embedded, of whose prompts a step computes the end."""
    return tuple(entry.sequence for entry in entries if entry.pooled and entry.reaches_end)
