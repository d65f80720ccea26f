"""Divides the work that is left among the replicas: how much each of them should have open.

Work is counted in mean rows of the job: a row of a shard counts as much as its seconds by the cost model, over those of
a row of mean prompt and answer (`PaceEstimator.row_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..estimates.lengths import LengthEstimator
from ..estimates.pace import PaceEstimator
from ..planning.waves import Shard
from .dispatch import DispatchRule, ReplicaState

# Seconds in which replicas report what their first steps took, with a margin.
_KNOWN_AFTER_S = 2.0
# Work left, in mean rows, that a job counts with when it has none: no share is 0.
_LEAST_WORK = 1e-6


@dataclass(frozen=True, slots=True)
class Share:
    """Most rows and work that a replica should have open."""

    #: Unfinished rows.
    num_rows: int
    #: Work, in mean rows of the job.
    work: float = math.inf
    #: Work below `work` that must be free before the replica opens a second shard.
    spare: float = 0.0

    def excess(self, num_rows: int, work: float) -> float:
        """Ratio of a replica's rows, or of its work, to this share, whichever ratio is larger."""
        return max(num_rows / self.num_rows, work / self.work)


class WorkShares:
    """Counts the work of queued and of open shards, and shares it out by pace.

    `open_batches`, `expected_replicas`: see `SchedulerSettings`.
    """

    def __init__(
        self,
        open_batches: float,
        expected_replicas: int,
        queue: DispatchRule,
        paces: PaceEstimator,
        lengths: LengthEstimator,
    ) -> None:
        self._open_batches, self._expected_replicas = open_batches, expected_replicas
        self._queue, self._paces, self._lengths = queue, paces, lengths
        # By shard with engine work, what a row counts; None until `weigh`.
        self._weights: Mapping[int, float] | None = None
        self._queued = self._open = 0.0

    @property
    def are_weighed(self) -> bool:
        """Whether `weigh` was called; nothing counts before."""
        return self._weights is not None

    def weigh(self, shards: Sequence[Shard], queued: Iterable[Shard], batch_rows: int) -> None:
        """Begin to count, before a shard is open. `batch_rows`: sequences a replica decodes together."""
        self._weights = self._paces.row_weights(shards, batch_rows)
        self._queued = sum(self.work(shard, shard.num_rows) for shard in queued)

    def work(self, shard: Shard, num_rows: int) -> float:
        """Work of `num_rows` rows of a shard, in mean rows of the job; 0 of a shard without engine work."""
        return num_rows * (self._weights or {}).get(shard.shard_id, 0.0)

    def queued(self, shard: Shard) -> None:
        """Note that a shard is in the queue again."""
        self._queued += self.work(shard, shard.num_rows)

    def taken(self, shard: Shard) -> None:
        """Note that a shard is in the queue no more."""
        self._queued -= self.work(shard, shard.num_rows)

    def opened(self, work: float) -> None:
        """Add `work` to the open work; negative once rows have finished or left."""
        self._open += work

    def of(self, candidates: Sequence[ReplicaState], replicas: Mapping[str, ReplicaState]) -> dict[str, Share]:
        """Share of each candidate: `open_batches` batches, but not more than its part, by pace, of the work left.

        A replica that would not finish a row begun now before faster ones have finished the job gets none. Until its
        pace is known it counts as like the others, and gets one batch if that lasts `_KNOWN_AFTER_S`: a slow one would
        have to give back the second. Shards that were dealt out to replicas are not shared by pace.
        """
        if not self._queue.is_shared:
            return {r.replica_id: Share(max(1, round(self._open_batches * r.batch_rows))) for r in candidates}
        _, factors, speed = self._paces.compare(replicas.keys())
        num_missing = max(0, self._expected_replicas - len(replicas))
        speed += num_missing
        work_left = max(self._queued + self._open, _LEAST_WORK)
        # While others are to come, a shard is left to them that would be half above the share.
        spare = self._queued / max(1, len(self._queue)) / 2 if num_missing else 0.0
        shares = {}
        for replica in candidates:
            factor = factors[replica.replica_id]
            each_s, alone_s = self._paces.row_seconds(self._lengths.mean(), replica.batch_rows)
            if factor > 1.0 and factor * alone_s > work_left * each_s / speed + alone_s:
                continue
            lasts = each_s * replica.batch_rows >= _KNOWN_AFTER_S
            batches = 1.0 if lasts and not self._paces.is_known(replica.replica_id) else self._open_batches
            num_rows = max(1, round(batches * replica.batch_rows))
            shares[replica.replica_id] = Share(num_rows, work_left / (speed * factor), spare)
        return shares

    def check_integrity(self, queued: Iterable[Shard], of_open: float) -> None:
        """Raise AssertionError, with the failing sum, when the counted work is not that of these shards.

        `of_open`: work of the shards that are open.
        """
        of_queue = sum(self.work(shard, shard.num_rows) for shard in queued)
        assert math.isclose(of_queue, self._queued, abs_tol=1e-3), f"{of_queue} queued, counted {self._queued}"
        assert math.isclose(of_open, self._open, abs_tol=1e-3), f"{of_open} open, counted {self._open}"
