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

from .commands import Command, EvictAdapter, FailJob, FinishJob, LoadAdapter, MigrateRows, Recall, RunShard
from .cost import AdapterSource
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
    `hop_s`: from a MigrateRows command until its rows are at the helper.
    """

    join_s: tuple[float, ...]
    losses: tuple[tuple[float, int], ...] = ()
    progress_s: float = 1.0
    commit_s: float = 0.0
    hop_s: float = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class JobOutcome:
    """`makespan_s`: from 0 to the last part. `failure`: FailJob's reason. `num_events`: the scheduler was asked."""

    makespan_s: float
    timeline: Timeline
    num_events: int
    num_commands: int
    num_migrated: int = 0
    failure: str | None = None


@dataclass(order=True, slots=True)
class _Happening:
    time_s: float
    order: int
    kind: str = field(compare=False)
    replica: int = field(compare=False, default=-1)
    outcome: StepOutcome | None = field(compare=False, default=None)
    shard: int = field(compare=False, default=-1)
    move: MigrateRows | None = field(compare=False, default=None)


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
        self._number = {adapter.name: number for number, adapter in enumerate(workload.adapters)}
        self._is_stepping = [False] * len(replicas)
        self._is_alive = [False] * len(replicas)
        self._heap: list[_Happening] = []
        self._order = self._num_events = self._num_commands = self._num_migrated = 0
        # Rows on loan -> (the replica that owns their shard, the one that runs them).
        self._loans: dict[int, tuple[int, int]] = {}
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
        return JobOutcome(end, self._timeline, self._num_events, self._num_commands, self._num_migrated, self._failure)

    def _later(
        self,
        time_s: float,
        kind: str,
        *,
        replica: int = -1,
        outcome: StepOutcome | None = None,
        shard: int = -1,
        move: MigrateRows | None = None,
    ) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Happening(time_s, self._order, kind, replica, outcome, shard, move))

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
            case "migrate":
                assert happening.move is not None
                self._migrate(now, happening.move)
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
            case LoadAdapter():
                source = self._source_of(command)
                self._replicas[int(command.replica_id)].fetch(self._number[command.adapter], now, source)
            case EvictAdapter():
                self._replicas[int(command.replica_id)].drop_adapter(self._number[command.adapter])
            case MigrateRows():
                self._later(now + self._cluster.hop_s, "migrate", move=command)
            case FinishJob():
                self._end_s = now
            case FailJob():
                self._end_s, self._failure = now, command.reason

    def _source_of(self, command: LoadAdapter) -> AdapterSource:
        """Its own host memory where that is said to hold every adapter, else the peer that the scheduler names."""
        if self._settings.adapter_source == "host":
            return "host"
        return "peer" if command.source_replica_id else "storage"

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

    def _migrate(self, now: float, move: MigrateRows) -> None:
        """The owner keeps the shard: what its guests finish elsewhere is counted there."""
        owner, helper = int(move.from_replica_id), int(move.to_replica_id)
        if not (self._is_alive[owner] and self._is_alive[helper] and move.shard_id in self._rows_left[owner]):
            return
        handed = self._replicas[owner].hand_over(self._plan.rows_of(move.shard_id), move.num_rows)
        self._loans |= dict.fromkeys(handed, (owner, helper))
        if handed:
            self._replicas[helper].take_over(handed)
            self._num_migrated += len(handed)
            if not self._is_stepping[helper]:
                self._start_step(now, helper)

    def _start_step(self, now: float, replica: int) -> None:
        if self._replicas[replica].num_rows:
            outcome = self._replicas[replica].step(now)
            self._is_stepping[replica] = True
            self._later(outcome.end_s, "stepped", replica=replica, outcome=outcome)

    def _book(self, now: float, replica: int, finished: NDArray[np.int64]) -> None:
        """Count finished rows for the owner of their shard; rows whose loss made them start again do not count."""
        finished = finished[np.isfinite(self._timeline.finish_s[finished])]
        assert self._workload.output_tokens is not None
        for row in finished.tolist():
            adapter, tokens = int(self._workload.adapter_index[row]), int(self._workload.output_tokens[row])
            self._finished[replica][adapter, tokens] += 1
            owner, _ = self._loans.pop(row, (replica, replica))
            shard, rows_left = int(self._shard_of[row]), self._rows_left[owner]
            if shard in rows_left:
                rows_left[shard] -= 1
                if rows_left[shard] == 0:
                    self._later(now + self._cluster.commit_s, "commit", replica=owner, shard=shard)

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
                now,
                str(replica),
                sum(rows_left.values()),
                len(engine.running),
                0.0,
                resident,
                open_shards,
                finished,
                lent_rows=sum(owner == replica for owner, _ in self._loans.values()),
                guest_rows=sum(helper == replica for _, helper in self._loans.values()),
            )
        )

    def _lose(self, now: float, replica: int) -> None:
        """What it owned starts again elsewhere; what it had on loan starts again at the owner."""
        self._is_alive[replica] = False
        self._replicas[replica].clear()
        for shard_id in self._rows_left[replica]:
            self._timeline.forget(self._plan.rows_of(shard_id))
        self._rows_left[replica].clear()
        for row, (owner, helper) in list(self._loans.items()):
            if owner == replica:
                self._replicas[helper].drop(row)
            if helper == replica:
                self._timeline.forget(np.array([row]))
                self._replicas[owner].add(np.array([row]))
            if replica in (owner, helper):
                del self._loans[row]
        self._tell(ReplicaLost(now, str(replica)))
        for other, is_alive in enumerate(self._is_alive):
            if is_alive and not self._is_stepping[other]:
                self._start_step(now, other)
