"""Estimates how long a running job will take, and how sure that is.

The plan's prediction is corrected while the job runs: by what steps cost, by the paces of the replicas that are there,
and by the lengths of the answers that have finished. What it cannot know, such as how full batches are, is in the pace
of the run so far, which counts the more the further the job is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..cost import CostModel

# Standard deviations, as shares of the seconds that are left: of costs that are a guess for this machine, were measured
# before the job, or in it; and of answers of half of `max_tokens`, of which nothing is known.
_GUESSED_COST, _KNOWN_COST, _MEASURED_COST = 0.5, 0.15, 0.1
_GUESSED_LENGTHS = 0.5
# A range is so many standard deviations to both sides. It is rough: see docs/planning.md for how often it holds.
_DEVIATIONS = 1.3
# Of the seconds of a mean row, when the last rows end: batches are not full then.
_TAIL = 0.3


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of some rows. `guessed_tokens`: of those to be generated, the ones whose number nothing says.
    `longest_tokens`: that the longest row generates.
    """

    num_rows: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    guessed_tokens: float = 0.0
    longest_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds until the last part is written, and a rough range of them."""

    seconds: float
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What a plan says. `work`: of all rows. `cost`: with which it was predicted for so many replicas with batches of
    `batch_rows`. `is_guess`: the costs were not measured on this machine.
    """

    predicted_s: float
    work: Work
    cost: CostModel
    batch_rows: int
    num_replicas: int
    is_guess: bool

    def time_left(
        self, left: Work, done: Work, elapsed_s: float, slowness: Sequence[float], measured: CostModel | None
    ) -> TimeLeft:
        """At one time. `left`: rows that have no answer yet, less what was computed for them. `done`: what engines have
        computed in `elapsed_s`. `measured`: what steps cost (None: too few were seen). `slowness`: of the replicas that
        are there, over `measured` or the plan's costs.
        """
        if self.work.num_rows <= 0 or left.num_rows <= 0 or self.predicted_s <= 0:
            return TimeLeft(0.0, 0.0, 0.0)
        cost = measured or self.cost
        left_s, planned_s = self._ideal_s(left, cost), self._ideal_s(self.work, self.cost)
        # A worker that is not there yet is taken to come.
        speeds = sum(1 / slow for slow in slowness) + max(0, self.num_replicas - len(slowness))
        seconds = self.predicted_s * left_s / planned_s * self.num_replicas / speeds
        both = Work(
            left.num_rows,
            left.prompt_tokens + done.prompt_tokens,
            left.output_tokens + done.output_tokens,
            longest_tokens=max(left.longest_tokens, self.work.longest_tokens),
        )
        all_s = self._ideal_s(both, cost)
        if all_s > left_s and elapsed_s > 0:
            share = 1 - left_s / all_s
            seconds = (1 - share) * seconds + share * left_s * elapsed_s / (all_s - left_s)
        of_costs = _MEASURED_COST if measured else _GUESSED_COST if self.is_guess else _KNOWN_COST
        of_lengths = _GUESSED_LENGTHS * left.guessed_tokens / max(1.0, left.output_tokens)
        factor = 1 + _DEVIATIONS * math.hypot(of_costs, of_lengths)
        alone_s = cost.step_s * min(slowness, default=1.0) * self.work.output_tokens / self.work.num_rows
        tail_s = min(seconds / 2, _TAIL * alone_s)
        return TimeLeft(seconds, (seconds - tail_s) / factor, (seconds + tail_s) * factor)

    def _ideal_s(self, work: Work, cost: CostModel) -> float:
        """Seconds in which all replicas together could do it, in batches as full as they may be: at least a step for
        each token of the longest row. LoRA is left out: it counts alike in what is compared.
        """
        context_tokens = (self.work.prompt_tokens + self.work.output_tokens / 2) / self.work.num_rows
        token_s = cost.decode_row_s + cost.context_token_s * context_tokens
        num_steps = max(work.longest_tokens, work.output_tokens / (self.num_replicas * self.batch_rows))
        computed_s = cost.prefill_token_s * work.prompt_tokens + token_s * work.output_tokens
        return computed_s / self.num_replicas + cost.step_s * num_steps
