"""Estimates how fast replicas are, from what their steps took and what the cost model says they should have taken.

The cost model is linear, so that sums over all steps since the last report are enough: nothing depends on which of them
were prefill. Old steps count less and less, so that a replica whose machine becomes busy is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..cost import CostModel, StepLoad
from ..messages import Progress
from ..planning.waves import Shard

# Seconds of steps after which earlier ones count half.
_HALF_LIFE_S = 20.0
# A replica's own steps count for as much as all others' once they have taken so long. Not: once they should have, for a
# cost model that was guessed may be wrong by orders of magnitude.
_PRIOR_S = 0.5
# A step with prompts should not take longer: rows join and leave between steps only.
_STEP_S = 1.0
# Tokens of a step that are never too many: with fewer, too much of it is reading weights. The first has no more.
_LEAST_STEP_TOKENS = 256
# Replicas that differ by less are taken to be alike: what a row costs varies as much.
_ALIKE = 1.15


@dataclass(slots=True)
class _Steps:
    """Of one replica: its totals in the last report, and seconds of its steps, as they were and as predicted."""

    engine_s: float = 0.0
    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    taken_s: float = 0.0
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MeanRow:
    """Mean tokens of a job's rows that need an engine. `output_tokens`: predicted."""

    num_rows: int
    prompt_tokens: float
    output_tokens: float


def mean_row(shards: Sequence[Shard]) -> MeanRow:
    """Of all rows of these shards."""
    num_rows = sum(shard.num_rows for shard in shards if shard.has_engine_work)
    prompt = sum(shard.prompt_tokens for shard in shards if shard.has_engine_work)
    output = sum(shard.predicted_output_tokens for shard in shards if shard.has_engine_work)
    return MeanRow(num_rows, prompt / max(1, num_rows), output / max(1, num_rows))


class PaceEstimator:
    """Slowness of replicas: how many times as long their steps take as `cost` says. 1 while nothing is known, and for
    ever without a cost model.
    """

    def __init__(self, cost: CostModel | None, row: MeanRow) -> None:
        self._cost = cost
        self._row = row
        self._steps: dict[str, _Steps] = {}
        # Of all replicas; None when a report has changed it. Every event asks for each replica's pace.
        self._known_mean: float | None = None

    def reported(self, report: Progress) -> None:
        """Take in a report. Totals that have become smaller are those of an engine that was started again."""
        if self._cost is None:
            return
        steps = self._steps.setdefault(report.replica_id, _Steps())
        since = report.num_steps - steps.num_steps
        if since > 0 and report.engine_s > steps.engine_s:
            taken_s = report.engine_s - steps.engine_s
            prompt_tokens = report.prompt_tokens - steps.prompt_tokens
            generated_tokens = report.generated_tokens - steps.generated_tokens
            predicted_s = (
                self._cost.step_s * since
                + self._cost.prefill_token_s * prompt_tokens
                + (self._cost.decode_row_s + self._cost.context_token_s * self._context_tokens) * generated_tokens
            )
            kept = 0.5 ** (taken_s / _HALF_LIFE_S)
            steps.taken_s = kept * steps.taken_s + taken_s
            steps.predicted_s = kept * steps.predicted_s + predicted_s
        self._known_mean = None
        steps.engine_s, steps.num_steps = report.engine_s, report.num_steps
        steps.prompt_tokens, steps.generated_tokens = report.prompt_tokens, report.generated_tokens

    def removed(self, replica_id: str) -> None:
        """Drop a replica."""
        self._steps.pop(replica_id, None)
        self._known_mean = None

    def is_known(self, replica_id: str) -> bool:
        """Whether the replica has worked enough for its pace to be its own; always so without a cost model."""
        steps = self._steps.get(replica_id)
        return self._cost is None or (steps is not None and steps.taken_s >= _PRIOR_S)

    def slowness(self, replica_id: str) -> float:
        """Seconds per predicted second of its steps; as of all others while it has hardly worked."""
        steps, mean = self._steps.get(replica_id), self._mean()
        if steps is None or steps.predicted_s <= 0:
            return mean
        own = steps.taken_s / (steps.taken_s + _PRIOR_S)
        return own * steps.taken_s / steps.predicted_s + (1 - own) * mean

    def over_fastest(self, replica_ids: Collection[str]) -> dict[str, float]:
        """Slowness of these replicas over that of the fastest of them; 1 for those about as fast."""
        slowness = {name: self.slowness(name) for name in replica_ids}
        fastest = min(slowness.values(), default=1.0)
        return {name: slow / fastest if slow > _ALIKE * fastest else 1.0 for name, slow in slowness.items()}

    def _mean(self) -> float:
        if self._known_mean is None:
            taken_s = sum(steps.taken_s for steps in self._steps.values())
            predicted_s = sum(steps.predicted_s for steps in self._steps.values())
            self._known_mean = taken_s / predicted_s if predicted_s > 0 else 1.0
        return self._known_mean

    @property
    def _context_tokens(self) -> float:
        """That a row reads in a decode step, on average."""
        return self._row.prompt_tokens + self._row.output_tokens / 2

    def row_seconds(self, output_tokens: float, batch_rows: int) -> tuple[float, float]:
        """Predicted seconds of a row of so many tokens: its share of a replica whose batch is full, and from its
        admission to its end. 0 without a cost model.
        """
        if self._cost is None:
            return 0.0, 0.0
        each_s = float(self._cost.row_seconds(self._row.prompt_tokens, output_tokens, batch_rows=batch_rows))
        step = StepLoad(decode_rows=batch_rows, context_tokens=batch_rows * self._context_tokens)
        return each_s, output_tokens * float(self._cost.step_seconds(step))

    def load_weights(self, shards: Sequence[Shard], batch_rows: int) -> dict[int, float]:
        """By shard of several adapters whose loads take longer than its rows: how many times as long.

        A replica finds the adapter of other shards in its memory, most of the time.
        """
        if self._cost is None:
            return {}
        each_s, _ = self.row_seconds(self._row.output_tokens, batch_rows)
        weights = {}
        for shard in shards:
            if len(shard.adapters) > 1:
                mean_bytes = shard.adapter_bytes / len(shard.adapters)
                load_s = len(shard.adapters) * self._cost.load_seconds(mean_bytes, "storage")
                if load_s > shard.num_rows * each_s:
                    weights[shard.shard_id] = load_s / (shard.num_rows * each_s)
        return weights


class StepBudget:
    """Tokens that the next step of one engine may hold: as many as take it about a second by its last full steps."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.tokens = min(max_tokens, _LEAST_STEP_TOKENS)

    def took(self, num_tokens: int, seconds: float) -> None:
        """Take in a step; one that held less than it might have says nothing."""
        if num_tokens >= self.tokens:
            wanted = self.tokens * min(2.0, _STEP_S / max(seconds, 1e-9))
            self.tokens = min(self._max_tokens, max(int(wanted), _LEAST_STEP_TOKENS))
