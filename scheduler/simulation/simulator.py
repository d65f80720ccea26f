"""Simulates an offline job: the real Scheduler and the real batching on replicas whose time is the cost model's.

The loop is the coordinator's: events go in, commands come out and are enacted, here by a heap of future happenings.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import AdapterSource
from ..messages import (
    AdapterFetch,
    CanaryAnswered,
    Command,
    Event,
    FailJob,
    FinishedRows,
    FinishJob,
    FoundReplica,
    MigrateRows,
    Recall,
    RemoveReplica,
    ReplicaFailed,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    StepTotals,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)
from ..planning.waves import ShardPlan
from ..workload import BASE_MODEL, Workload
from .replica import ReplicaSettings, SimulatedReplica
from .timeline import Timeline

#: `Scheduler.handle`, or a function around it that measures or records.
Handle = Callable[[Event], list[Command]]
Mishap = Literal["lost", "left", "failed", "silent"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The simulated cluster: when its replicas come and go, and how long messages take."""

    #: Seconds at which each replica is ready; its worker is there from the start.
    join_s: tuple[float, ...]
    #: (seconds, replica number, mishap) of replicas that end for good: the worker is `lost` or has `left` in good
    #: order, its engine has `failed`, or nothing is heard of it any more (`silent`).
    mishaps: tuple[tuple[float, int, Mishap], ...] = ()
    #: Seconds at which another coordinator takes over.
    takeovers_s: tuple[float, ...] = ()
    #: Seconds between two reports of a replica, which also reports when a shard's last row has ended.
    progress_s: float = 1.0
    #: Seconds between two ticks.
    tick_s: float = 2.0
    #: Seconds from a shard's last row to its part file.
    commit_s: float = 0.0
    #: Seconds from a MigrateRows command until its rows are at the helper.
    hop_s: float = 0.05


@dataclass(order=True, slots=True)
class _Happening:
    #: Seconds since the start of the simulation.
    time_s: float
    #: Number of the happening; decides among those of one time.
    order: int
    #: A case of `JobSimulation._happen`.
    kind: str = field(compare=False)
    #: Replica that it happens to (-1: to none).
    replica: int = field(compare=False, default=-1)
    #: Rows that end in the step that ends, int64.
    finished: NDArray[np.int64] | None = field(compare=False, default=None)
    #: Shard that is committed (-1: none).
    shard: int = field(compare=False, default=-1)
    #: Command whose rows are at the helper.
    move: MigrateRows | None = field(compare=False, default=None)
    #: How the replica ends.
    mishap: Mishap = field(compare=False, default="lost")


class JobSimulation:
    """One simulated run of a job. `replicas[i]` must have number `i`; `run` may be called once.

    `handle`: takes in an event and returns the commands that it gives. `successor`: makes the `handle` of a coordinator
    that takes over, from the ids of the shards with a part.
    """

    def __init__(
        self,
        workload: Workload,
        plan: ShardPlan,
        handle: Handle,
        replicas: Sequence[SimulatedReplica],
        cluster: Cluster,
        timeline: Timeline,
        settings: ReplicaSettings,
        successor: Callable[[Collection[int]], Handle] | None = None,
    ) -> None:
        assert len(replicas) == len(cluster.join_s), f"{len(replicas)} replicas, {len(cluster.join_s)} joins"
        self._workload, self._plan, self._handle = workload, plan, handle
        self._replicas, self._cluster, self._settings, self._successor = replicas, cluster, settings, successor
        #: Times of every row, and counts of every replica.
        self.timeline = timeline
        #: Rows that moved to another replica.
        self.num_migrated = 0
        #: Reason of FailJob (None: the job was not given up).
        self.failure: str | None = None
        # Events count their time from the start of their scheduler.
        self._began_s = 0.0
        self._workers = [str(number) for number in range(len(replicas))]
        self._committed: set[int] = set()
        # Shards of the canary that are not committed; their answers are told with the last of them.
        self._canary_left = {shard.shard_id for shard in plan.shards if shard.is_canary}
        self._shard_of = np.empty(workload.num_rows, np.int64)
        self._shard_of[plan.row_order] = np.repeat(np.arange(len(plan.shards)), np.diff(plan.shard_offsets))
        self._rows_left: list[dict[int, int]] = [{} for _ in replicas]
        self._finished: list[Counter[tuple[int, int]]] = [Counter() for _ in replicas]
        self._number: dict[str | None, int] = {None: BASE_MODEL}
        self._number |= {adapter.adapter_id: number for number, adapter in enumerate(workload.adapters)}
        self._is_stepping = [False] * len(replicas)
        self._step_end_s = [0.0] * len(replicas)
        self._is_alive = [False] * len(replicas)
        self._heap: list[_Happening] = []
        self._order = 0
        # Rows on loan -> (the replica that owns their shard, the one that runs them).
        self._loans: dict[int, tuple[int, int]] = {}
        # By replica: seconds of its last report, and tokens it had generated by then.
        self._reported = [(join_s, 0) for join_s in cluster.join_s]
        # By replica, at the end of its last step: seconds in steps, work of these steps, tokens generated.
        self._totals: list[tuple[float, StepTotals, int]] = [(0.0, StepTotals(), 0)] * len(replicas)
        self._end_s: float | None = None

    def run(self) -> float:
        """Play the job until FinishJob or FailJob; returns the seconds from 0 to the last part.

        The scheduler gives one of them at the latest when no replica is left.
        """
        self._tell(WorkersSeen(0.0, tuple(self._workers)))
        for replica, join_s in enumerate(self._cluster.join_s):
            self._later(join_s, "join", replica=replica)
        for time_s, replica, mishap in self._cluster.mishaps:
            self._later(time_s, "mishap", replica=replica, mishap=mishap)
        for time_s in self._cluster.takeovers_s:
            self._later(time_s, "take over")
        self._later(self._cluster.tick_s, "tick")
        while self._end_s is None:
            happening = heapq.heappop(self._heap)
            self._happen(happening.time_s, happening)
        return self._end_s

    def _later(
        self,
        time_s: float,
        kind: str,
        *,
        replica: int = -1,
        finished: NDArray[np.int64] | None = None,
        shard: int = -1,
        move: MigrateRows | None = None,
        mishap: Mishap = "lost",
    ) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Happening(time_s, self._order, kind, replica, finished, shard, move, mishap))

    def _happen(self, now: float, happening: _Happening) -> None:
        replica = happening.replica
        match happening.kind:
            case "join":
                self._is_alive[replica] = True
                self._tell(ReplicaJoined(self._event_s(now), str(replica), self._settings.max_batch_rows))
                self._later(now + self._cluster.progress_s, "progress", replica=replica)
            case "tick":
                self._tell(Tick(self._event_s(now)))
                self._later(now + self._cluster.tick_s, "tick")
            case "mishap" if self._is_alive[replica]:
                self._end_replica(now, replica, happening.mishap)
            case "take over":
                self._take_over(now)
            case "progress" if self._is_alive[replica]:
                self._report(now, replica)
                self._later(now + self._cluster.progress_s, "progress", replica=replica)
            case "commit" if self._is_alive[replica] and happening.shard in self._rows_left[replica]:
                del self._rows_left[replica][happening.shard]
                self._committed.add(happening.shard)
                self._tell(ShardCommitted(self._event_s(now), happening.shard, str(replica)))
                self._count_canary(now, (happening.shard,))
            case "migrate":
                assert happening.move is not None, f"{happening} moves no rows"
                self._migrate(now, happening.move)
            case "stepped" if self._is_alive[replica]:
                assert happening.finished is not None, f"{happening} says of no row that it finished"
                self._is_stepping[replica] = False
                generated = int(self.timeline.row_steps[replica])
                self._totals[replica] = self.timeline.computing_s(replica), self._replicas[replica].totals, generated
                owners = self._book(now, replica, happening.finished)
                self._start_step(now, replica)
                if not self._replicas[replica].num_rows:
                    owners.add(replica)
                for owner in sorted(owners):
                    self._report(now, owner)

    def _tell(self, event: Event) -> None:
        for command in self._handle(event):
            self._enact(self._began_s + event.time_s, command)

    def _count_canary(self, now: float, committed: Collection[int]) -> None:
        """Tell the lengths of the canary's answers if these shards were its last to be committed."""
        if not self._canary_left:
            return
        self._canary_left.difference_update(committed)
        if not self._canary_left:
            answers: Counter[tuple[int, int]] = Counter()
            for shard in (shard for shard in self._plan.shards if shard.is_canary):
                rows = self._plan.rows_of(shard.shard_id)
                assert self._workload.output_tokens is not None, f"{self._workload.num_rows} rows without lengths"
                pairs = self._workload.adapter_index[rows], self._workload.output_tokens[rows]
                answers.update(zip(*(values.tolist() for values in pairs), strict=True))
            self._tell(CanaryAnswered(self._event_s(now), self._as_finished(answers)))

    def _as_finished(self, rows: Mapping[tuple[int, int], int]) -> tuple[FinishedRows, ...]:
        """Counts of rows by adapter's number and tokens, as events have them."""
        adapters = self._workload.adapters
        return tuple(
            FinishedRows(None if number == BASE_MODEL else adapters[number].adapter_id, count, count * tokens)
            for (number, tokens), count in rows.items()
        )

    def _event_s(self, now: float) -> float:
        return now - self._began_s

    def _enact(self, now: float, command: Command) -> None:
        match command:
            case RunShard():
                self._open(now, command)
            case RemoveReplica():
                self._remove(now, int(command.replica_id))
            case Recall():
                self._rows_left[int(command.replica_id)].pop(command.shard_id, None)
            case MigrateRows():
                # Rows leave between two steps.
                leave_s = max(now, self._step_end_s[int(command.from_replica_id)])
                self._later(leave_s + self._cluster.hop_s, "migrate", move=command)
            case FinishJob():
                self._end_s = now
            case FailJob():
                self._end_s, self.failure = now, command.reason

    def _fetch(self, now: float, replica: int, fetch: AdapterFetch) -> None:
        """Begin to fetch an adapter.

        It comes from the replica's own host memory if `adapter_source` is `host`, else from the source that the
        scheduler names.
        """
        source: AdapterSource = "storage" if fetch.from_replica_id is None else "peer"
        if self._settings.adapter_source == "host":
            source = "host"
        self._replicas[replica].fetch(self._number[fetch.adapter_id], now, source)

    def _open(self, now: float, command: RunShard) -> None:
        replica, shard_id = int(command.replica_id), command.shard_id
        if shard_id in self._rows_left[replica]:
            return  # opened for the coordinator before this one
        for fetch in command.adapter_fetches:
            self._fetch(now, replica, fetch)
        rows = self._plan.rows_of(shard_id)
        rows = rows[self._workload.max_tokens[rows] > 0]
        self._rows_left[replica][shard_id] = len(rows)
        if len(rows) == 0:
            self._later(now + self._cluster.commit_s, "commit", replica=replica, shard=shard_id)
            return
        adapters = self._plan.shards[shard_id].adapters
        if len(adapters) == 1:
            self._replicas[replica].expected[self._number[adapters[0]]] = command.rows_behind
        self._replicas[replica].add(rows)
        if not self._is_stepping[replica]:
            self._start_step(now, replica)

    def _migrate(self, now: float, move: MigrateRows) -> None:
        """Move rows to a helper. The owner keeps the shard: rows that finish at the helper count for the owner."""
        owner, helper = int(move.from_replica_id), int(move.to_replica_id)
        if not (self._is_alive[owner] and self._is_alive[helper] and move.shard_id in self._rows_left[owner]):
            return
        rows = self._plan.rows_of(move.shard_id)
        if move.is_selective:
            rows = rows[self._workload.adapter_index[rows] == self._number[move.adapter_id]]
        handed = self._replicas[owner].hand_over(rows, move.num_rows)
        self._loans |= dict.fromkeys(handed, (owner, helper))
        if handed:
            self._replicas[helper].take_over(handed)
            self.num_migrated += len(handed)
            if not self._is_stepping[helper]:
                self._start_step(now, helper)
            self._report(now, helper)

    def _start_step(self, now: float, replica: int) -> None:
        if self._replicas[replica].num_rows:
            end_s, finished = self._replicas[replica].step(now)
            self._is_stepping[replica], self._step_end_s[replica] = True, end_s
            self._later(end_s, "stepped", replica=replica, finished=finished)

    def _book(self, now: float, replica: int, finished: NDArray[np.int64]) -> set[int]:
        """Count finished rows for the owner of their shard; return the owners of shards whose last row this was.

        Rows that were lost and started again meanwhile do not count.
        """
        finished = finished[np.isfinite(self.timeline.finish_s[finished])]
        assert self._workload.output_tokens is not None, f"{self._workload.num_rows} rows without lengths"
        done: set[int] = set()
        for row in finished.tolist():
            adapter, tokens = int(self._workload.adapter_index[row]), int(self._workload.output_tokens[row])
            self._finished[replica][adapter, tokens] += 1
            owner, _ = self._loans.pop(row, (replica, replica))
            shard, rows_left = int(self._shard_of[row]), self._rows_left[owner]
            if shard in rows_left:
                rows_left[shard] -= 1
                if rows_left[shard] == 0:
                    done.add(owner)
                    self._later(now + self._cluster.commit_s, "commit", replica=owner, shard=shard)
        return done

    def _report(self, now: float, replica: int) -> None:
        adapters = self._workload.adapters
        finished = self._as_finished(self._finished[replica])
        self._finished[replica].clear()
        engine = self._replicas[replica]
        rows_left = self._rows_left[replica]
        resident = tuple(adapters[number].adapter_id for number in engine.resident)
        before_s, before = self._reported[replica]
        engine_s, steps, generated = self._totals[replica]
        self._reported[replica] = (now, generated)
        lent = Counter(int(self._shard_of[row]) for row, (owner, _) in self._loans.items() if owner == replica)
        self._tell(
            ReplicaReported(
                self._event_s(now),
                str(replica),
                sum(rows_left.values()),
                len(engine.running),
                (generated - before) / (now - before_s) if now > before_s else 0.0,
                resident,
                _unfinished(rows_left),
                finished,
                running_tokens=engine.running_tokens,
                lent_shards=_unfinished(lent),
                incoming_rows=sum(helper == replica for _, helper in self._loans.values()),
                engine_s=engine_s,
                steps=steps,
                prefilling_rows=engine.num_prefilling,
                prefill_tokens_left=engine.prefill_tokens_left,
            )
        )

    def _end_replica(self, now: float, replica: int, mishap: Mishap) -> None:
        """Stop a replica for good; the scheduler decides what becomes of its rows."""
        self._is_alive[replica] = False
        match mishap:
            case "lost":
                self._workers.remove(str(replica))
                self._tell(WorkersSeen(self._event_s(now), tuple(self._workers)))
            case "left":
                self._tell(ReplicaLeft(self._event_s(now), str(replica)))
            case "failed":
                self._tell(ReplicaFailed(self._event_s(now), str(replica), "its engine failed"))

    def _remove(self, now: float, replica: int) -> None:
        """Clear a replica.

        Rows of its own shards start again elsewhere; rows that it had for others start again at their owner.
        """
        self._replicas[replica].clear()
        for shard_id in self._rows_left[replica]:
            self.timeline.forget(self._plan.rows_of(shard_id))
        self._rows_left[replica].clear()
        for row, (owner, helper) in list(self._loans.items()):
            if owner == replica:
                self._replicas[helper].drop(row)
            if helper == replica:
                self.timeline.forget(np.array([row]))
                self._replicas[owner].add(np.array([row]))
            if replica in (owner, helper):
                del self._loans[row]
        for other, is_alive in enumerate(self._is_alive):
            if is_alive and not self._is_stepping[other]:
                self._start_step(now, other)

    def _take_over(self, now: float) -> None:
        """Let another coordinator take over.

        Its scheduler finds the replicas with the shards that they have open.
        """
        assert self._successor is not None, "nothing makes the scheduler of the next coordinator"
        self._handle, self._began_s = self._successor(frozenset(self._committed)), now
        self._tell(WorkersSeen(0.0, tuple(self._workers)))
        batch_rows = self._settings.max_batch_rows
        found = [
            FoundReplica(str(n), batch_rows, _unfinished(self._rows_left[n]), now - self._reported[n][0])
            for n, join_s in enumerate(self._cluster.join_s)
            if join_s <= now and (self._is_alive[n] or self._rows_left[n])
        ]
        self._tell(ReplicasFound(0.0, tuple(found)))
        self._canary_left = {shard.shard_id for shard in self._plan.shards if shard.is_canary}
        self._count_canary(now, self._committed)


def _unfinished(rows_of_shards: Mapping[int, int]) -> tuple[UnfinishedRows, ...]:
    return tuple(UnfinishedRows(shard_id, num_rows) for shard_id, num_rows in rows_of_shards.items())
