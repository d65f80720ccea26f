"""An offline job on simulated replicas: the real Scheduler, the real batching, time from the cost model.

The loop is the cluster's: events go in, commands come out and are enacted, here by a heap of future happenings.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .commands import Command, FailJob, FinishJob, Recall, RunShard
from .events import Event, Progress, ReplicaJoined, ReplicaLost, ShardCommitted
from .simulated_replica import ReplicaSettings, SimulatedReplica, StepOutcome
from .timeline import Timeline
from .waves import ShardPlan
from .workload import Workload


class Decider(Protocol):
    """The scheduler, or anything that wraps it (to measure or to record)."""

    def handle(self, event: Event) -> list[Command]:
        """One event in, commands out."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`join_s`: when each replica is ready. `losses`: (seconds, replica number) at which one disappears for good.

    `progress_s`: between two reports of a replica. `commit_s`: from a shard's last row to its part file.
    """

    join_s: tuple[float, ...]
    losses: tuple[tuple[float, int], ...] = ()
    progress_s: float = 1.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class JobOutcome:
    """`makespan_s`: from 0 to the last part. `failure`: FailJob's reason. `num_events`: the scheduler was asked."""

    makespan_s: float
    timeline: Timeline
    num_events: int
    num_commands: int
    failure: str | None = None


@dataclass(order=True, slots=True)
class _Happening:
    time_s: float
    order: int
    kind: str = field(compare=False)
    replica: int = field(compare=False, default=-1)
    outcome: StepOutcome | None = field(compare=False, default=None)
    shard: int = field(compare=False, default=-1)


class JobSimulation:
    """One run. `replicas[i]` must have number `i`; `run` may be called once."""

    def __init__(
        self,
        workload: Workload,
        plan: ShardPlan,
        decider: Decider,
        replicas: Sequence[SimulatedReplica],
        cluster: Cluster,
        timeline: Timeline,
        settings: ReplicaSettings,
    ) -> None:
        assert len(replicas) == len(cluster.join_s), f"{len(replicas)} replicas, {len(cluster.join_s)} joins"
        self._workload, self._plan, self._decider, self._timeline = workload, plan, decider, timeline
        self._replicas, self._cluster, self._settings = replicas, cluster, settings
        self._shard_of = np.empty(workload.num_rows, np.int64)
        self._shard_of[plan.row_order] = np.repeat(np.arange(len(plan.shards)), np.diff(plan.shard_offsets))
        self._rows_left: list[dict[int, int]] = [{} for _ in replicas]
        self._finished: list[Counter[tuple[int, int]]] = [Counter() for _ in replicas]
        self._is_stepping = [False] * len(replicas)
        self._is_alive = [False] * len(replicas)
        self._heap: list[_Happening] = []
        self._order = self._num_events = self._num_commands = 0
        self._end_s: float | None = None
        self._failure: str | None = None

    def run(self) -> JobOutcome:
        """Until FinishJob, FailJob, or nothing can happen any more (then `failure` says so)."""
        for replica, join_s in enumerate(self._cluster.join_s):
            self._later(join_s, "join", replica=replica)
        for lost_s, replica in self._cluster.losses:
            self._later(lost_s, "lose", replica=replica)
        now = 0.0
        while self._heap and self._end_s is None:
            happening = heapq.heappop(self._heap)
            now = happening.time_s
            self._happen(now, happening)
        if self._end_s is None:
            self._failure = "Nothing is left that could happen, but shards are uncommitted: no replica remains."
        end = now if self._end_s is None else self._end_s
        return JobOutcome(end, self._timeline, self._num_events, self._num_commands, self._failure)

    def _later(
        self, time_s: float, kind: str, *, replica: int = -1, outcome: StepOutcome | None = None, shard: int = -1
    ) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Happening(time_s, self._order, kind, replica, outcome, shard))

    def _happen(self, now: float, happening: _Happening) -> None:
        replica = happening.replica
        match happening.kind:
            case "join":
                self._is_alive[replica] = True
                self._tell(ReplicaJoined(now, str(replica), self._settings.max_batch_rows))
                self._later(now + self._cluster.progress_s, "progress", replica=replica)
            case "lose":
                self._lose(now, replica)
            case "progress" if self._is_alive[replica]:
                self._report(now, replica)
                self._later(now + self._cluster.progress_s, "progress", replica=replica)
            case "commit" if self._is_alive[replica] and happening.shard in self._rows_left[replica]:
                del self._rows_left[replica][happening.shard]
                self._tell(ShardCommitted(now, happening.shard, str(replica)))
            case "stepped" if self._is_alive[replica]:
                assert happening.outcome is not None
                self._is_stepping[replica] = False
                self._book(now, replica, happening.outcome.finished)
                self._start_step(now, replica)

    def _tell(self, event: Event) -> None:
        self._num_events += 1
        for command in self._decider.handle(event):
            self._num_commands += 1
            self._enact(event.time_s, command)

    def _enact(self, now: float, command: Command) -> None:
        match command:
            case RunShard():
                self._open(now, int(command.replica_id), command.shard_id)
            case Recall():
                self._rows_left[int(command.replica_id)].pop(command.shard_id, None)
            case FinishJob():
                self._end_s = now
            case FailJob():
                self._end_s, self._failure = now, command.reason

    def _open(self, now: float, replica: int, shard_id: int) -> None:
        rows = self._plan.rows_of(shard_id)
        rows = rows[self._workload.max_tokens[rows] > 0]
        self._rows_left[replica][shard_id] = len(rows)
        if len(rows) == 0:
            self._later(now + self._cluster.commit_s, "commit", replica=replica, shard=shard_id)
            return
        self._replicas[replica].add(rows)
        if not self._is_stepping[replica]:
            self._start_step(now, replica)

    def _start_step(self, now: float, replica: int) -> None:
        if self._replicas[replica].num_rows:
            outcome = self._replicas[replica].step(now)
            self._is_stepping[replica] = True
            self._later(outcome.end_s, "stepped", replica=replica, outcome=outcome)

    def _book(self, now: float, replica: int, finished: NDArray[np.int64]) -> None:
        if len(finished) == 0:
            return
        assert self._workload.output_tokens is not None
        for adapter, tokens in zip(
            self._workload.adapter_index[finished].tolist(),
            self._workload.output_tokens[finished].tolist(),
            strict=True,
        ):
            self._finished[replica][adapter, tokens] += 1
        shards, counts = np.unique(self._shard_of[finished], return_counts=True)
        rows_left = self._rows_left[replica]
        for shard, count in zip(shards.tolist(), counts.tolist(), strict=True):
            if shard in rows_left:
                rows_left[shard] -= count
                if rows_left[shard] == 0:
                    self._later(now + self._cluster.commit_s, "commit", replica=replica, shard=shard)

    def _report(self, now: float, replica: int) -> None:
        names = self._workload.adapters
        finished = tuple(
            (names[adapter].name if adapter >= 0 else "", count, count * tokens)
            for (adapter, tokens), count in self._finished[replica].items()
        )
        self._finished[replica].clear()
        engine = self._replicas[replica]
        rows_left = self._rows_left[replica]
        resident = tuple(names[adapter].name for adapter in engine.resident)
        open_shards = tuple(rows_left.items())
        self._tell(
            Progress(
                now, str(replica), sum(rows_left.values()), len(engine.running), 0.0, resident, open_shards, finished
            )
        )

    def _lose(self, now: float, replica: int) -> None:
        self._is_alive[replica] = False
        self._replicas[replica].clear()
        for shard_id in self._rows_left[replica]:
            self._timeline.forget(self._plan.rows_of(shard_id))
        self._rows_left[replica].clear()
        self._tell(ReplicaLost(now, str(replica)))
