"""Estimates how long a running job will take, and how sure that is.

The plan's prediction is corrected while the job runs: by what steps cost, by the paces of the replicas that are there,
and by the lengths of the answers that have finished. What it cannot know, such as how full batches are, is in the pace
of the run so far, which counts the more the further the job is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..costs.cost import CostModel
from .lengths import AnswerLengths

# Standard deviations. Costs deviate by a share of the seconds that are left: guessed for this machine, measured before
# the job, measured in it. The ends of workers and the last batches deviate by a share of the whole job.
_GUESSED_COST, _KNOWN_COST, _MEASURED_COST = 0.5, 0.15, 0.1
_WHOLE = 0.05
# By how much answers of which nothing is known are shorter or longer than half of `max_tokens`; most are shorter.
_SHORTER, _LONGER = 1.5, 0.3
# A range extends by these standard deviations to both sides, and by the seconds between two reports.
_DEVIATIONS = 1.3
_REPORT_S = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """Work of engines for some rows."""

    #: Rows.
    num_rows: float = 0.0
    #: Tokens of their prompts.
    prompt_tokens: float = 0.0
    #: Tokens to be generated.
    output_tokens: float = 0.0
    #: Tokens among `output_tokens` of answers whose lengths are mere guesses.
    guessed_tokens: float = 0.0
    #: Forward passes of each engine until the last row has ended.
    num_steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Work for the rows of both."""
        return Work(
            self.num_rows + other.num_rows,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.guessed_tokens + other.guessed_tokens,
            self.num_steps + other.num_steps,
        )


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds until the last part is written, and a rough range of them."""

    seconds: float
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job as its plan predicts it."""

    #: Seconds of the whole job.
    predicted_s: float
    #: Work of all rows.
    work: Work
    #: Costs with which the seconds were predicted.
    cost: CostModel
    #: Replicas for which they were predicted.
    num_replicas: int
    #: Whether the costs were not measured on this machine.
    is_guess: bool
    #: Rows that the replicas together run at once.
    num_places: int = 1
    #: Adapter id (None: base model) -> lengths of its answers in earlier jobs, as the plan knew them. None instead of a
    #: mapping when the plan knew all lengths exactly.
    known_lengths: Mapping[str | None, AnswerLengths] | None = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every field; `known_lengths` is a list of pairs."""
        lengths = self.known_lengths
        pairs = None if lengths is None else [[adapter_id, known.to_json()] for adapter_id, known in lengths.items()]
        return asdict(replace(self, known_lengths=None)) | {"known_lengths": pairs}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PlannedJob:
        """The job that `to_json` wrote."""
        pairs = raw["known_lengths"]
        return cls(
            **{
                **raw,
                "work": Work(**raw["work"]),
                "cost": CostModel.from_json(raw["cost"]),
                "known_lengths": None if pairs is None else {a: AnswerLengths.from_json(known) for a, known in pairs},
            }
        )

    def time_left(
        self, left: Work, done: Work, elapsed_s: float, slowness: Sequence[float], measured: CostModel | None
    ) -> TimeLeft:
        """Estimate the time left at one moment of the job.

        `left`: work of rows that have no answer yet, less what was computed for them. `done`: work that engines have
        computed in `elapsed_s`. `slowness`: seconds of steps over those of `measured` or of the plan's costs, for each
        replica that is there. `measured`: costs of steps as measured (None: too few steps were seen).
        """
        if self.work.num_rows <= 0 or left.num_rows <= 0 or self.predicted_s <= 0:
            return TimeLeft(0.0, 0.0, 0.0)
        cost = measured or self.cost
        left_s = self._ideal_s(left, cost)
        # A worker that is not there yet is expected to come.
        speeds = sum(1 / slow for slow in slowness) + max(0, self.num_replicas - len(slowness))
        seconds = self.predicted_s * left_s / self._ideal_s(self.work, self.cost) * self.num_replicas / speeds
        done_s = self._ideal_s(done, cost)
        if done_s > 0 and elapsed_s > 0:
            share = done_s / (done_s + left_s)
            seconds = (1 - share) * seconds + share * left_s * elapsed_s / done_s
        of_costs = _MEASURED_COST if measured else _GUESSED_COST if self.is_guess else _KNOWN_COST
        guessed = _DEVIATIONS * math.sqrt(left.guessed_tokens / max(1.0, left.output_tokens))
        around_s = _DEVIATIONS * math.hypot(of_costs * seconds, _WHOLE * (elapsed_s + seconds)) + _REPORT_S
        least_s = max(0.0, seconds - around_s) / (1 + _SHORTER * guessed)
        return TimeLeft(seconds, least_s, (seconds + around_s) * (1 + _LONGER * guessed))

    def _ideal_s(self, work: Work, cost: CostModel) -> float:
        """Seconds of the steps of all replicas together. LoRA is left out: it counts alike in what is compared."""
        context_tokens = (self.work.prompt_tokens + self.work.output_tokens / 2) / self.work.num_rows
        token_s = cost.decode_row_s + cost.context_token_s * context_tokens
        computed_s = cost.prefill_token_s * work.prompt_tokens + token_s * work.output_tokens
        return computed_s / self.num_replicas + cost.step_s * work.num_steps
