"""Estimates how long a running job will take, and how sure that is.

The plan's prediction is corrected while the job runs: by what steps cost, by the paces of the replicas that are there,
and by the lengths of the answers that have finished. What it cannot know, such as how full batches are, is in the pace
of the run so far, which counts the more the further the job is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cost import CostModel

# Standard deviations, as shares of the seconds that are left: of costs that are a guess for this machine, were measured
# before the job, or in it; and of answers of half of `max_tokens`, of which nothing is known.
_GUESSED_COST, _KNOWN_COST, _MEASURED_COST = 0.5, 0.15, 0.1
_GUESSED_LENGTHS = 0.5
# A range is so many standard deviations to both sides: four of five jobs end within it.
_DEVIATIONS = 1.3
# Of a mean row's seconds from its first token to its last: when the last rows end, batches are not full.
_TAIL = 0.3


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of some rows. `guessed_tokens`: of those to be generated, the ones whose number nothing says."""

    num_rows: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    guessed_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds until the last part is written, and a range in which four of five jobs are."""

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
        left_s, done_s = self._priced(left, cost), self._priced(done, cost)
        # A worker that is not there yet is taken to come.
        speeds = sum(1 / slow for slow in slowness) + max(0, self.num_replicas - len(slowness))
        seconds = self.predicted_s * left_s / self._priced(self.work, self.cost) * self.num_replicas / speeds
        if done_s > 0 and elapsed_s > 0:
            share = done_s / (done_s + left_s)
            seconds = (1 - share) * seconds + share * left_s * elapsed_s / done_s
        of_costs = _MEASURED_COST if measured else _GUESSED_COST if self.is_guess else _KNOWN_COST
        of_lengths = _GUESSED_LENGTHS * left.guessed_tokens / max(1.0, left.output_tokens)
        factor = 1 + _DEVIATIONS * math.hypot(of_costs, of_lengths)
        tail_s = min(seconds / 2, _TAIL * self._tail_s(cost, min(slowness, default=1.0)))
        return TimeLeft(seconds, (seconds - tail_s) / factor, (seconds + tail_s) * factor)

    def _priced(self, work: Work, cost: CostModel) -> float:
        """Seconds of one replica whose batches are full. LoRA is left out: it counts alike in what is compared."""
        return cost.prefill_token_s * work.prompt_tokens + work.output_tokens * self._decode_s(cost)

    def _decode_s(self, cost: CostModel) -> float:
        """Per token."""
        context_tokens = (self.work.prompt_tokens + self.work.output_tokens / 2) / self.work.num_rows
        return cost.step_s / self._rows_at_once + cost.decode_row_s + cost.context_token_s * context_tokens

    @property
    def _rows_at_once(self) -> float:
        return max(1.0, min(self.batch_rows, self.work.num_rows / self.num_replicas))

    def _tail_s(self, cost: CostModel, slowness: float) -> float:
        """From the first token of a mean row to its last."""
        return slowness * self.work.output_tokens / self.work.num_rows * self._rows_at_once * self._decode_s(cost)
