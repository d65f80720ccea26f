"""`RunEstimates`: estimates of one running job, from the events that its scheduler handles.

There is one account of lengths, paces, costs of steps and work left. The scheduler decides by it, the time left that
the job shows comes from it, and a replayed event log gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..costs.cost import CostModel
from ..messages import CanaryAnswered, ReplicaReported
from ..planning.waves import Shard
from .canary import answer_lengths
from .lengths import PRIOR_SHARE, LengthEstimator
from .pace import PaceEstimator, planned_work
from .step_costs import StepCosts
from .time_left import PlannedJob, TimeLeft, Work
from .work_left import WorkLeft

# Seconds of steps, on average over the replicas, after which a prediction that rested on a guess is made again.
_FIRST_STEPS_S = 2.0


class RunEstimates:
    """Lengths of answers, paces of replicas, costs of steps, work left and time left of one running job.

    `uncommitted`: those of the job's `shards` that have no part yet. `cost`: costs against which paces are measured
    (None: all replicas count as alike). `planned`: the job as its plan predicts it (None: no costs, work or time left
    are estimated).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        uncommitted: Sequence[Shard],
        cost: CostModel | None,
        planned: PlannedJob | None,
    ) -> None:
        work = planned_work(shards)
        #: Lengths of this run's answers so far.
        self.lengths = LengthEstimator()
        self.lengths.asked(round(work.output_tokens / PRIOR_SHARE), round(work.num_rows))
        #: Slowness of the replicas that are there.
        self.paces = PaceEstimator(cost, work)
        #: Seconds of the run as predicted from its first steps. None until they were seen, and when the plan's costs of
        #: steps were no guess.
        self.corrected_s: float | None = None
        self._planned = planned
        self._opened_s: float | None = None
        # Time at which the job began to wait for a person's word after its canary; None while it does not.
        self._paused_s: float | None = None
        # Shards as the canary's answers predict them; empty before.
        self._refreshed: dict[int, Shard] = {}
        self._reports: dict[str, ReplicaReported] = {}
        if planned is not None:
            #: Costs of steps, measured from the reports of this run's engines.
            self.costs = StepCosts(planned.cost)
            self._work = WorkLeft(uncommitted, planned.known_lengths, self.lengths)

    def opened(self, time_s: float) -> None:
        """Note that a shard was opened. The first one begins the time that plans predict."""
        if self._opened_s is None:
            self._opened_s = time_s

    def reported(self, event: ReplicaReported) -> None:
        """Take in a replica's report."""
        self.paces.reported(event)
        for rows in event.finished:
            self.lengths.finished(rows.output_tokens, rows.num_rows, rows.adapter_id)
        if self._planned is not None:
            self._reports[event.replica_id] = event
            self.costs.reported(event.replica_id, event.steps, event.engine_s)

    def canary_answered(self, uncommitted: Sequence[Shard], answered: CanaryAnswered) -> None:
        """Estimate the work left from the lengths that the canary has measured. `uncommitted`: shards without a part,
        as these lengths predict them.
        """
        # Seconds in which the job waits for a person's word are none of its pace.
        if self._paused_s is not None and self._opened_s is not None:
            self._opened_s += answered.time_s - self._paused_s
        self._paused_s = None if answered.goes_on else answered.time_s
        self._refreshed = {shard.shard_id: shard for shard in uncommitted}
        if self._planned is not None and self._planned.known_lengths is not None:
            canary = answer_lengths(answered)
            known = {**self._planned.known_lengths, **canary}
            rows = {adapter_id: round(found.num_rows) for adapter_id, found in canary.items()}
            self._work = WorkLeft(uncommitted, known, self.lengths, rows)

    def committed(self, shard: Shard) -> None:
        """Subtract the work of a shard whose part is written."""
        if self._planned is not None:
            self._work.committed(self._refreshed.get(shard.shard_id, shard))

    def removed(self, replica_id: str) -> None:
        """Drop a replica."""
        self.paces.removed(replica_id)
        self._reports.pop(replica_id, None)

    def time_left(self, now_s: float, opened: Iterable[tuple[Shard, int]], num_places: int) -> TimeLeft | None:
        """Time left at `now_s` seconds since the scheduler started; None without a plan's prediction.

        `opened`: open shards and their numbers of rows without a result. `num_places`: rows that all replicas together
        run at once, at least.
        """
        planned = self._planned
        if planned is None:
            return None
        reports = self._reports.values()
        num_running, running_tokens = sum(r.running_rows for r in reports), sum(r.running_tokens for r in reports)
        done = self._done
        opened = [(self._refreshed.get(shard.shard_id, shard), num_rows) for shard, num_rows in opened]
        left = self._work.now(max(num_places, planned.num_places), done, opened, num_running, running_tokens)
        measured = self.costs.measured() if self.costs.is_known else None
        return planned.time_left(left, done, self._elapsed_s(now_s), self.paces.relative(self._reports), measured)

    @property
    def is_correction_due(self) -> bool:
        """Whether the plan's costs were a guess, and the first steps have been seen just now."""
        if self._planned is None or not self._planned.is_guess or self.corrected_s is not None:
            return False
        return self.costs.seconds >= _FIRST_STEPS_S * max(1, self.costs.num_replicas)

    def correct(self, now_s: float, left: TimeLeft) -> None:
        """Predict the run's seconds again."""
        self.corrected_s = self._elapsed_s(now_s) + left.seconds

    def _elapsed_s(self, now_s: float) -> float:
        now_s = now_s if self._paused_s is None else self._paused_s
        return 0.0 if self._opened_s is None else max(0.0, now_s - self._opened_s)

    @property
    def _done(self) -> Work:
        """Work that engines have done so far. Prompt tokens are counted as plans count them: with the reused ones."""
        total = self.costs.total()
        shares = [report.reused_share for report in self._reports.values()]
        computed_share = 1.0 - sum(shares) / max(1, len(shares))
        return Work(
            prompt_tokens=total.prefill_tokens / max(computed_share, 0.01),
            output_tokens=total.decode_rows,
            num_steps=total.num_steps / max(1, self.costs.num_replicas),
        )
