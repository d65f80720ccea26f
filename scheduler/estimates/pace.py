"""Estimates how fast replicas are, from what their steps took and what the cost model says they should have taken.

The cost model is linear, so that sums over all steps since the last report are enough: nothing depends on which of them
were prefill. Old steps count less and less, so that a replica whose machine becomes busy is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import mul

import numpy as np

from ..costs.cost import CostModel, StepLoad
from ..messages import ReplicaReported
from ..planning.waves import Shard
from .step_costs import prices
from .time_left import Work

# Seconds of steps after which earlier ones count half.
_HALF_LIFE_S = 20.0
# Seconds of a replica's own steps after which they count for as much as those of all replicas. Measured seconds, not
# predicted ones: a cost model that was guessed may be wrong by orders of magnitude.
_PRIOR_S = 0.5
# Most seconds that a step with prompts should take: rows join and leave between steps only.
_STEP_S = 1.0
# Tokens that a step may always hold: with fewer, too much of it is reading weights. The first step holds no more.
_LEAST_STEP_TOKENS = 256
# Replicas are compared again after one report for this many of them.
_COMPARED_PART = 16
# Replicas whose slowness differs by less than this factor are taken to be alike: what a row costs varies as much.
_ALIKE = 1.15


@dataclass(slots=True)
class _Steps:
    """Steps of one replica, measured and predicted."""

    #: Seconds that all steps of its engine took, by the last report.
    engine_s: float = 0.0
    #: Steps of its engine, by the last report.
    num_steps: float = 0.0
    #: Seconds predicted for all these steps.
    all_predicted_s: float = 0.0
    #: Seconds that its steps took, later ones with more weight.
    taken_s: float = 0.0
    #: Seconds predicted for its steps, with the weights of `taken_s`.
    predicted_s: float = 0.0


def planned_work(shards: Sequence[Shard]) -> Work:
    """Work of the rows of these shards that need an engine, as planned."""
    return Work(
        sum(shard.num_rows for shard in shards if shard.has_engine_work),
        sum(shard.prompt_tokens for shard in shards if shard.has_engine_work),
        sum(shard.predicted_output_tokens for shard in shards if shard.has_engine_work),
    )


class PaceEstimator:
    """Slowness of replicas: how many times as long their steps take as `cost` says.

    It is 1 while nothing is known, and for ever without a cost model. `work`: planned work of all rows of the job.
    """

    def __init__(self, cost: CostModel | None, work: Work) -> None:
        self._cost = cost
        self._prices = None if cost is None else prices(cost)
        # Means of a row.
        self._prompt_tokens = work.prompt_tokens / max(1, work.num_rows)
        self._output_tokens = work.output_tokens / max(1, work.num_rows)
        self._steps: dict[str, _Steps] = {}
        # Sums over all replicas of `taken_s` and of `predicted_s`.
        self._taken_s, self._predicted_s = 0.0, 0.0
        # The last comparison (`compare`), and the reports since.
        self._compared: tuple[float, Mapping[str, float], float] | None = None
        self._num_since = 0

    def reported(self, report: ReplicaReported) -> None:
        """Take in a report. Totals that have become smaller are those of an engine that was started again."""
        if self._prices is None:
            return
        steps, num_steps = self._steps.setdefault(report.replica_id, _Steps()), report.steps.num_steps
        # a report is too short for NumPy
        all_predicted_s = sum(map(mul, self._prices, report.steps.values))
        taken_s, predicted_s = report.engine_s - steps.engine_s, all_predicted_s - steps.all_predicted_s
        if taken_s > 0 and num_steps > steps.num_steps:
            kept = 0.5 ** (taken_s / _HALF_LIFE_S)
            self._count(steps, kept * steps.taken_s + taken_s, kept * steps.predicted_s + predicted_s)
        steps.engine_s, steps.num_steps, steps.all_predicted_s = report.engine_s, num_steps, all_predicted_s

    def removed(self, replica_id: str) -> None:
        """Drop a replica."""
        self._steps.pop(replica_id, None)
        # Added up again, so that nothing is left of rounding when the last one is gone.
        self._taken_s = sum(steps.taken_s for steps in self._steps.values())
        self._predicted_s = sum(steps.predicted_s for steps in self._steps.values())
        self._compared = None

    def _count(self, steps: _Steps, taken_s: float, predicted_s: float) -> None:
        self._taken_s += taken_s - steps.taken_s
        self._predicted_s += predicted_s - steps.predicted_s
        steps.taken_s, steps.predicted_s = taken_s, predicted_s
        self._num_since += 1

    def is_known(self, replica_id: str) -> bool:
        """Whether the replica has worked enough for its pace to be its own; always so without a cost model."""
        steps = self._steps.get(replica_id)
        return self._cost is None or (steps is not None and steps.taken_s >= _PRIOR_S)

    def slowness(self, replica_id: str) -> float:
        """Seconds of a replica's steps per predicted second; while it has hardly worked, the mean of all replicas."""
        steps, mean = self._steps.get(replica_id), self._mean()
        if steps is None or steps.predicted_s <= 0:
            return mean
        own = steps.taken_s / (steps.taken_s + _PRIOR_S)
        return own * steps.taken_s / steps.predicted_s + (1 - own) * mean

    def compare(self, replica_ids: Set[str]) -> tuple[float, Mapping[str, float], float]:
        """Paces of these replicas beside each other: the least slowness; the slowness of each replica over the least, 1
        for those about as fast; and the speed of all replicas together, in fastest replicas.

        They are computed anew when a sixteenth of the replicas has reported, so that an event costs the same on a large
        cluster.
        """
        found = self._compared
        if found is None or self._num_since * _COMPARED_PART > len(found[1]) or found[1].keys() != replica_ids:
            slowness = {name: self.slowness(name) for name in replica_ids}
            fastest = min(slowness.values(), default=1.0)
            factors = {name: slow / fastest if slow > _ALIKE * fastest else 1.0 for name, slow in slowness.items()}
            found = fastest, factors, sum(1 / factor for factor in factors.values())
            self._compared, self._num_since = found, 0
        return found

    def relative(self, replica_ids: Iterable[str]) -> list[float]:
        """Slowness of each of these replicas over the mean of all replicas."""
        mean = self._mean()
        return [self.slowness(replica_id) / mean for replica_id in replica_ids]

    def _mean(self) -> float:
        return self._taken_s / self._predicted_s if self._predicted_s > 0 else 1.0

    @property
    def _context_tokens(self) -> float:
        """KV slots that a row reads in a decode step, on average."""
        return self._prompt_tokens + self._output_tokens / 2

    def row_seconds(self, output_tokens: float, batch_rows: int) -> tuple[float, float]:
        """Predicted seconds of a row that generates `output_tokens`; 0 without a cost model.

        The first number is the row's share of a replica whose batch is full, the second the time from its admission to
        its end.
        """
        if self._cost is None:
            return 0.0, 0.0
        each_s = float(self._cost.row_seconds(self._prompt_tokens, output_tokens, batch_rows=batch_rows))
        step = StepLoad(decode_rows=batch_rows, context_tokens=batch_rows * self._context_tokens)
        return each_s, output_tokens * float(self._cost.step_seconds(step))

    def row_weights(self, shards: Sequence[Shard], batch_rows: int) -> dict[int, float]:
        """Work of a row of each shard with engine work, in mean rows of the job, by shard id. 1 without a cost model.

        If the loads of a shard's several adapters take longer than its rows, they count instead. A shard of one adapter
        mostly finds it in its replica's memory.
        """
        shards = [shard for shard in shards if shard.has_engine_work]
        each_s, _ = self.row_seconds(self._output_tokens, batch_rows)
        if self._cost is None or not each_s:
            return dict.fromkeys((shard.shard_id for shard in shards), 1.0)
        num_rows = np.array([shard.num_rows for shard in shards])
        prompt = np.array([shard.prompt_tokens for shard in shards]) / num_rows
        output = np.array([shard.predicted_output_tokens for shard in shards]) / num_rows
        seconds = num_rows * self._cost.row_seconds(prompt, output, batch_rows=batch_rows)
        weights = {}
        for shard, rows_s in zip(shards, seconds.tolist(), strict=True):
            if len(shard.adapters) > 1:
                mean_bytes = shard.adapter_bytes / len(shard.adapters)
                rows_s = max(rows_s, len(shard.adapters) * self._cost.load_seconds(mean_bytes, "storage"))
            weights[shard.shard_id] = rows_s / (shard.num_rows * each_s)
        return weights


class StepBudget:
    """Most tokens that the next step of one engine may hold: those that take about a second, by its last full steps."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.tokens = min(max_tokens, _LEAST_STEP_TOKENS)

    def took(self, num_tokens: int, max_tokens: int, seconds: float) -> None:
        """Take in a step of `num_tokens` tokens. A step that held less than it might says nothing.

        `max_tokens`: tokens that it might have held, the value of `tokens` when it was launched.
        """
        if num_tokens >= max_tokens:
            wanted = max_tokens * min(2.0, _STEP_S / max(seconds, 1e-9))
            self.tokens = min(self._max_tokens, max(int(wanted), _LEAST_STEP_TOKENS))
