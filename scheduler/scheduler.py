"""`Scheduler`: decides on events what a cluster does next, as commands.

The same object drives real workers and simulated ones. It owns one mutable state, has no clock and draws no random
numbers: the same events give the same commands, so that `events.jsonl` replays a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from .assignment.dispatch import (
    AdapterSources,
    DispatchRule,
    ReplicaState,
    ShardQueue,
    ShardState,
    ShardStatus,
    rows_behind,
)
from .assignment.migration import MigrationRule, TailMigration
from .assignment.shares import Share, WorkShares
from .estimates.canary import mean_lengths, with_canary
from .estimates.run_estimates import RunEstimates
from .estimates.time_left import TimeLeft
from .liveness import LivenessDetector
from .messages import (
    BEGINNING,
    EVENTS_VERSION,
    CanaryAnswered,
    Command,
    Event,
    FailJob,
    FinishJob,
    Recall,
    RemoveReplica,
    ReplicaFailed,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    Tick,
    WorkersSeen,
)
from .planning.waves import Shard
from .settings import SchedulerSettings

# Rows move away from a replica that has more than this many times its share.
_RELIEVED = 2.0


class Scheduler:
    """Decides which replica opens which shard, which replicas count as lost, and when the job is over.

    `shards`: all shards of the plan, in dispatch order. `committed`: ids of the shards whose part exists already
    (resume). `dispatch` and `migration`: rules of another policy than this project's; `dispatch` has the shards with
    engine work.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        committed: Collection[int] = (),
        settings: SchedulerSettings | None = None,
        dispatch: DispatchRule | None = None,
        migration: MigrationRule | None = None,
    ) -> None:
        self._settings = settings = settings or SchedulerSettings()
        self._shards = {shard.shard_id: ShardState(shard) for shard in shards}
        self._queue: DispatchRule = (
            ShardQueue([shard for shard in shards if shard.has_engine_work]) if dispatch is None else dispatch
        )
        # Shards of error rows only: any replica may write them beside its engine's work.
        self._idle_queue: DispatchRule = ShardQueue([shard for shard in shards if not shard.has_engine_work])
        self._rows_behind = rows_behind(shards, settings.expected_replicas)
        self._num_uncommitted = len(self._shards)
        # Shards of the canary without a part; None once the canary was counted, and in jobs without one.
        canary = {shard.shard_id for shard in shards if shard.is_canary}
        self._canary_left: set[int] | None = canary if canary and settings.canary is None else None
        # Whether the other shards wait until the canary was counted and the job goes on.
        self._is_held = settings.holds_rest and bool(canary)
        # Queued shards with engine work that failed twice; replicas that get nothing else may open them too.
        self._failing: set[int] = set()
        self._replicas: dict[str, ReplicaState] = {}
        # Replicas whose engine cannot be kept alive -> why.
        self._failed: dict[str, str] = {}
        # None until the first `WorkersSeen`.
        self._workers: frozenset[str] | None = None
        self._liveness = LivenessDetector(settings.silence_limit_s, settings.max_tick_gap_s, 0.0)
        self._replica_seen_s = 0.0
        self._sources = AdapterSources() if settings.shares_adapters else None
        there = set(committed)
        #: Estimates of the job, from the events so far.
        self.estimates = estimates = RunEstimates(
            shards, [shard for shard in shards if shard.shard_id not in there], settings.cost, settings.planned
        )
        batches, num_replicas = settings.open_batches, settings.expected_replicas
        self._shares = WorkShares(batches, num_replicas, self._queue, estimates.paces, estimates.lengths)
        self._migration = migration
        if migration is None and settings.tail and settings.cost:
            self._migration = TailMigration(settings.cost, settings.tail, estimates.lengths, estimates.paces)
        self._is_over = False
        self._rows_uncommitted = sum(shard.num_rows for shard in shards)
        self._committed_before = sorted(committed)
        for shard_id in self._committed_before:
            self._commit(self._shards[shard_id])
        if settings.canary is not None:
            self._is_held = not settings.canary.goes_on
            estimates.canary_answered(self._uncommitted(), settings.canary)

    def beginning(self) -> dict[str, Any]:
        """The line of `events.jsonl` before the first event, from which the events can be replayed (`replay.py`)."""
        return {
            "kind": BEGINNING,
            "version": EVENTS_VERSION,
            "committed": self._committed_before,
            "settings": self._settings.to_json(),
        }

    @property
    def num_queued(self) -> int:
        """Shards with engine work that no replica has opened."""
        return len(self._queue)

    @property
    def is_canary_due(self) -> bool:
        """Whether the canary has its parts, and was not counted yet: `CanaryAnswered` is expected."""
        return self._canary_left is not None and not self._canary_left

    @property
    def canary_rows_left(self) -> int:
        """Rows of the canary without a result, as far as replicas have reported."""
        opened = {shard.shard_id: num_rows for shard, num_rows in self._opened()}
        left = self._canary_left or ()
        return sum(opened.get(shard_id, self._shards[shard_id].shard.num_rows) for shard_id in left)

    @property
    def rows_left(self) -> int:
        """Rows of the job without a result, as far as replicas have reported."""
        done = sum(shard.num_rows - num_rows for shard, num_rows in self._opened() if shard.has_engine_work)
        return self._rows_uncommitted - done

    def time_left(self, now_s: float) -> TimeLeft | None:
        """Time left of the job at `now_s`, by the scheduler's clock; None when its settings have no prediction."""
        return self.estimates.time_left(now_s, self._opened(), self._num_places)

    def _opened(self) -> list[tuple[Shard, int]]:
        """Open shards and their rows without a result."""
        return [
            (self._shards[shard_id].shard, num_rows)
            for replica in self._replicas.values()
            for shard_id, num_rows in replica.rows_left.items()
        ]

    @property
    def _num_places(self) -> int:
        return sum(replica.batch_rows for replica in self._replicas.values())

    def has_replica(self, replica_id: str) -> bool:
        """Whether the replica takes part in the job."""
        return replica_id in self._replicas

    def has_failed(self, replica_id: str) -> bool:
        """Whether the replica's engine is known to have failed for good."""
        return replica_id in self._failed

    def handle(self, event: Event) -> list[Command]:
        """Take in one event; return the commands to enact now, in order; none after the job's end."""
        if self._is_over:
            return []
        commands = self._absorb(event)
        if not self._is_over:
            candidates = self._maybe_hungry(event, commands)
            shares = self._shares.of(candidates, self._replicas) if self._queue else {}
            if self._canary_left:
                # Rows that wait for a place would compete with the canary's.
                most = {replica.replica_id: replica.batch_rows for replica in candidates}
                shares = {name: replace(s, num_rows=min(s.num_rows, most[name])) for name, s in shares.items()}
            if isinstance(event, ReplicaReported) and self._queue:
                commands += self._relieve(event.replica_id, event.time_s, shares)
            commands += self._dispatch(candidates, shares)
            if isinstance(event, ReplicaJoined | ReplicaReported | ShardCommitted):
                commands += self._migrate(event.replica_id, event.time_s)
        if any(isinstance(command, RunShard) for command in commands):
            self.estimates.opened(event.time_s)
        if not self._is_over and self._num_uncommitted == 0:
            self._is_over = True
            commands.append(FinishJob())
        return commands

    def _maybe_hungry(self, event: Event, commands: list[Command]) -> list[ReplicaState]:
        """Replicas that this event may have left with too few open rows; the others need no look."""
        match event:
            case ReplicaJoined() | ShardCommitted() | ReplicaReported():
                names = {event.replica_id} | {c.replica_id for c in commands if isinstance(c, Recall)}
                return [self._replicas[name] for name in sorted(names) if name in self._replicas]
        return list(self._replicas.values())

    def _absorb(self, event: Event) -> list[Command]:
        match event:
            case WorkersSeen():
                self._workers = frozenset(event.worker_ids)
                return self._remove_lost()
            case ReplicasFound():
                return self._adopt(event)
            case ReplicaJoined():
                self._join(event.replica_id, event.batch_rows, event.time_s)
            case ReplicaLeft():
                return self._remove(event.replica_id, "its worker leaves", is_handed_over=True)
            case ReplicaFailed():
                self._failed[event.replica_id] = event.reason
                return self._remove(event.replica_id, event.reason) + self._check_engines()
            case ShardCommitted():
                return self._committed(event)
            case ShardFailed():
                return self._shard_failed(event)
            case ReplicaReported():
                return self._reported(event)
            case CanaryAnswered():
                self._canary_answered(event)
            case Tick():
                return self._tick(event.time_s)
        return []

    def _canary_answered(self, event: CanaryAnswered) -> None:
        """Predict the other shards anew, and let them run if the job goes on."""
        self._canary_left, self._is_held = None, not event.goes_on
        refreshed = with_canary([state.shard for state in self._shards.values()], event)
        self._rows_behind = rows_behind(refreshed, self._settings.expected_replicas)
        uncommitted = {shard.shard_id for shard in self._uncommitted()}
        self.estimates.canary_answered([shard for shard in refreshed if shard.shard_id in uncommitted], event)
        for adapter_id, mean in mean_lengths(event).items():
            self._queue.correct_length(adapter_id, mean)

    def _uncommitted(self) -> list[Shard]:
        return [state.shard for state in self._shards.values() if state.status is not ShardStatus.COMMITTED]

    def _join(self, replica_id: str, batch_rows: int, heard_s: float) -> ReplicaState:
        self._failed.pop(replica_id, None)
        self._liveness.heard(replica_id, heard_s)
        replica = self._replicas.setdefault(replica_id, ReplicaState(replica_id, batch_rows))
        replica.batch_rows = batch_rows
        if not self._shares.are_weighed:
            shards = [state.shard for state in self._shards.values()]
            self._shares.weigh(shards, self._queued_shards(), batch_rows)
        return replica

    def _queued_shards(self) -> list[Shard]:
        return [state.shard for state in self._shards.values() if state.status is ShardStatus.QUEUED]

    def _adopt(self, event: ReplicasFound) -> list[Command]:
        """Join replicas of a scheduler before this one; the shards that they have open go on there."""
        commands: list[Command] = []
        for found in event.replicas:
            is_gone = self._workers is not None and found.replica_id not in self._workers
            if is_gone or found.silent_s > self._settings.silence_limit_s:
                continue
            replica = self._join(found.replica_id, found.batch_rows, event.time_s - found.silent_s)
            for unfinished in found.open_shards:
                state = self._shards.get(unfinished.shard_id)
                if state is None or state.status is not ShardStatus.QUEUED:
                    continue
                self._queue_of(state).discard(unfinished.shard_id)
                commands.append(self._open(state, replica))
                if state.shard.has_engine_work:
                    self._set_rows_left(replica, unfinished.shard_id, unfinished.num_rows)
        return commands

    def _tick(self, now_s: float) -> list[Command]:
        commands = self._remove_lost()
        for replica_id in self._liveness.silent(self._replicas, now_s):
            if not self._is_over:
                commands += self._remove(replica_id, f"no report for {self._settings.silence_limit_s:.0f} seconds")
        if self._replicas:
            self._replica_seen_s = now_s
        elif not self._is_over and now_s - self._replica_seen_s > self._settings.ready_limit_s:
            commands += self._fail(f"No engine became ready within {self._settings.ready_limit_s:.0f} seconds.")
        return commands

    def _remove_lost(self) -> list[Command]:
        """Remove replicas whose workers are gone; fail the job when no other worker's engine works."""
        if self._workers is None:
            return []
        commands: list[Command] = []
        for replica_id in sorted(self._replicas.keys() - self._workers):
            if not self._is_over:
                commands += self._remove(replica_id, "its worker is gone")
        return commands if self._is_over else commands + self._check_engines()

    def _check_engines(self) -> list[Command]:
        if self._is_over or not self._workers or not self._workers <= self._failed.keys():
            return []
        reason = next(reversed([why for name, why in self._failed.items() if name in self._workers]))
        return self._fail(f"No engine works: {reason.removesuffix('.')}.")

    def _remove(self, replica_id: str, reason: str, *, is_handed_over: bool = False) -> list[Command]:
        """Queue the shards of a replica again. A shard that was handed over in good order does not count as lost."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return []
        commands: list[Command] = [RemoveReplica(replica_id, reason)]
        for shard_id in list(replica.rows_left):
            state = self._shards[shard_id]
            state.losses += not is_handed_over
            if state.losses >= self._settings.max_losses:
                lost = f"Shard {shard_id} was open on {state.losses} replicas when they were lost"
                return commands + self._fail(f"{lost}, last on {replica_id}.")
            self._requeue(state)
        del self._replicas[replica_id]
        self._liveness.forget(replica_id)
        self.estimates.removed(replica_id)
        self._queue.removed(replica_id)
        self._idle_queue.removed(replica_id)
        if self._migration is not None:
            self._migration.removed(replica_id)
        if self._sources is not None:
            self._sources.removed(replica_id)
        return commands

    def _fail(self, reason: str) -> list[Command]:
        self._is_over = True
        return [FailJob(reason)]

    def _committed(self, event: ShardCommitted) -> list[Command]:
        state = self._shards[event.shard_id]
        owner = state.owner
        if state.status is not ShardStatus.COMMITTED:
            self.estimates.committed(state.shard)
        self._commit(state)
        # An attempt that was given up has written the part after all: the newer one is wasted work.
        return [Recall(event.shard_id, owner)] if owner not in (None, event.replica_id) else []

    def _commit(self, state: ShardState) -> None:
        match state.status:
            case ShardStatus.COMMITTED:
                return
            case ShardStatus.QUEUED:
                self._queue_of(state).discard(state.shard.shard_id)
                self._shares.taken(state.shard)
                self._failing.discard(state.shard.shard_id)
            case ShardStatus.OPEN:
                self._close(state)
        state.move(ShardStatus.COMMITTED)
        if self._canary_left is not None:
            self._canary_left.discard(state.shard.shard_id)
        self._num_uncommitted -= 1
        self._rows_uncommitted -= state.shard.num_rows

    def _shard_failed(self, event: ShardFailed) -> list[Command]:
        state = self._shards[event.shard_id]
        if state.owner != event.replica_id:
            return []
        state.failures += 1
        state.failed_on |= {event.replica_id}
        if state.failures >= self._settings.max_failures:
            failed = f"Shard {event.shard_id} failed {state.failures} times"
            return self._fail(f"{failed}, last on {event.replica_id}: {event.reason}")
        self._requeue(state)
        return []

    def _requeue(self, state: ShardState) -> None:
        self._close(state)
        state.move(ShardStatus.QUEUED)
        state.attempt += 1
        self._queue_of(state).put_back(state.shard.shard_id)
        self._shares.queued(state.shard)
        if state.failures > 1 and state.shard.has_engine_work:
            self._failing.add(state.shard.shard_id)

    def _open(self, state: ShardState, replica: ReplicaState) -> RunShard:
        """Assign a shard that has left the queue; return the command to run it."""
        shard = state.shard
        state.move(ShardStatus.OPEN, replica.replica_id)
        self._shares.taken(shard)
        self._failing.discard(shard.shard_id)
        self._set_rows_left(replica, shard.shard_id, shard.num_rows if shard.has_engine_work else 0)
        self._queue_of(state).opened(shard.shard_id, replica.replica_id)
        return RunShard(
            shard.shard_id,
            replica.replica_id,
            state.attempt,
            self._sources.of_shard(replica.replica_id, shard) if self._sources is not None else (),
            self._rows_behind.get(shard.shard_id, 0),
        )

    def _close(self, state: ShardState) -> None:
        assert state.owner is not None, f"shard {state.shard.shard_id} has no owner"
        replica = self._replicas[state.owner]
        self._set_rows_left(replica, state.shard.shard_id, 0)
        replica.close(state.shard.shard_id)
        self._queue_of(state).closed(state.shard.shard_id, state.owner)

    def _queue_of(self, state: ShardState) -> DispatchRule:
        return self._queue if state.shard.has_engine_work else self._idle_queue

    def _set_rows_left(self, replica: ReplicaState, shard_id: int, rows: int) -> None:
        work = self._shares.work(self._shards[shard_id].shard, rows - replica.rows_left.get(shard_id, 0))
        self._shares.opened(work)
        replica.open_work += work
        replica.set_rows_left(shard_id, rows)

    def _reported(self, event: ReplicaReported) -> list[Command]:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            return []
        self._liveness.heard(event.replica_id, event.time_s)
        self.estimates.reported(event)
        if self._sources is not None:
            self._sources.reported(event.replica_id, event.resident_adapters)
        # Predicted lengths are corrected by what finished, so that waves of long rows are not left for the end.
        for adapter_id in dict.fromkeys(rows.adapter_id for rows in event.finished):
            measured = self.estimates.lengths.measured(adapter_id)
            if measured is not None:
                self._queue.correct_length(adapter_id, measured)
        # A scheduler before this one opened a shard there after this one had asked which are open.
        listed = [rows.shard_id for rows in event.open_shards]
        missed = [s for s in listed if s not in replica.rows_left and self._is_untouched(s)]
        for shard_id in missed:
            self._queue.discard(shard_id)
        commands: list[Command] = [self._open(self._shards[shard_id], replica) for shard_id in missed]
        # A replica may still list a shard whose attempt has just failed there.
        open_shards = tuple(rows for rows in event.open_shards if rows.shard_id in replica.rows_left)
        if self._migration is not None:
            self._migration.reported(replica, replace(event, open_shards=open_shards))
        # A shard that is not listed any more has all its answers, and is about to be committed.
        reported = {rows.shard_id: rows.num_rows for rows in open_shards}
        rows_left = dict.fromkeys(replica.reported & replica.rows_left.keys(), 0) | reported
        for shard_id, num_rows in rows_left.items():
            if self._shards[shard_id].shard.has_engine_work:
                self._set_rows_left(replica, shard_id, num_rows)
        replica.reported = frozenset(reported)
        if self.estimates.is_correction_due and (left := self.time_left(event.time_s)) is not None:
            self.estimates.correct(event.time_s, left)
        return commands

    def _is_untouched(self, shard_id: int) -> bool:
        """Whether this scheduler has never opened a shard with engine work that is queued."""
        state = self._shards[shard_id]
        return state.status is ShardStatus.QUEUED and state.attempt == 0 and state.shard.has_engine_work

    def _dispatch(self, candidates: list[ReplicaState], shares: Mapping[str, Share]) -> list[Command]:
        """Open shards until every candidate holds what it should."""
        commands: list[Command] = []
        hungry = {r.replica_id: r for r in candidates if self._has_room(r, shares)}
        while hungry and self._queue:
            replica = min(hungry.values(), key=lambda r: (self._work_at(r) / r.batch_rows, r.replica_id))
            command = self._open_next(replica, self._queue)
            commands += command
            if not command or not self._has_room(replica, shares):
                del hungry[replica.replica_id]
        for replica in candidates:
            if self._failing and replica.replica_id not in shares and not replica.rows_left:
                commands += self._open_next(replica, self._queue, self._failing)
            if self._idle_queue and not any(rows == 0 for rows in replica.rows_left.values()):
                commands += self._open_next(replica, self._idle_queue)
        return commands

    def _has_room(self, replica: ReplicaState, shares: Mapping[str, Share]) -> bool:
        share, num_rows = shares.get(replica.replica_id), self._rows_at_work(replica)
        if share is None or num_rows >= share.num_rows:
            return False
        return not num_rows or self._work_at(replica) < share.work - share.spare

    def _rows_at_work(self, replica: ReplicaState) -> int:
        """Unfinished rows that the replica works on itself: rows of its shards, and others that moved there."""
        return replica.open_rows if self._migration is None else self._migration.rows_at_work(replica)

    def _work_at(self, replica: ReplicaState) -> float:
        """`_rows_at_work` in mean rows of the job. A row that has moved there counts as one."""
        return replica.open_work + self._rows_at_work(replica) - replica.open_rows

    def _open_next(
        self, replica: ReplicaState, queue: DispatchRule, among: Collection[int] | None = None
    ) -> list[Command]:
        def is_allowed(shard_id: int) -> bool:
            state = self._shards[shard_id]
            has_failed = replica.replica_id in state.failed_on and not state.failed_on >= self._takers(state)
            is_held = self._is_held and not state.shard.is_canary
            return not (has_failed or is_held) and (among is None or shard_id in among)

        shard_id = queue.take(replica.replica_id, is_allowed)
        return [] if shard_id is None else [self._open(self._shards[shard_id], replica)]

    def _takers(self, state: ShardState) -> AbstractSet[str]:
        """Replicas that would be given this shard.

        A shard with engine work is kept from replicas that are too slow for the rest of the job until it has failed
        twice.
        """
        if not state.shard.has_engine_work or state.failures > 1:
            return self._replicas.keys()
        return self._shares.of(list(self._replicas.values()), self._replicas).keys()

    def _relieve(self, replica_id: str, time_s: float, shares: Mapping[str, Share]) -> Sequence[Command]:
        """Move rows away from a replica that turns out to be so slow that it holds more than twice its share."""
        replica = self._replicas.get(replica_id)
        if self._migration is None or replica is None or not self.estimates.paces.is_known(replica_id):
            return ()
        num_rows, share = self._rows_at_work(replica), shares.get(replica_id)
        excess = math.inf if share is None else share.excess(num_rows, self._work_at(replica))
        if not num_rows or excess <= _RELIEVED:
            return ()
        num_moved = num_rows - int(num_rows / excess)
        return self._migration.relieve(replica_id, num_moved, time_s, self._replicas, self._open_shards)

    def _migrate(self, replica_id: str, time_s: float) -> Sequence[Command]:
        """Move rows to replicas that have nothing to do, once no shard is queued."""
        if self._migration is None or replica_id not in self._replicas or self._queue:
            return []
        return self._migration.share(replica_id, time_s, self._replicas, self._open_shards)

    def _open_shards(self, replica: ReplicaState) -> list[Shard]:
        return [self._shards[shard_id].shard for shard_id in replica.rows_left]

    def check_integrity(self) -> None:
        """Raise AssertionError, with the failing sum, when the state contradicts itself."""
        owned = {s: r.replica_id for r in self._replicas.values() for s in r.rows_left}
        for shard_id, state in self._shards.items():
            assert owned.get(shard_id) == state.owner, f"shard {shard_id}: owner {state.owner}, open on {owned}"
            assert (state.owner is not None) == (state.status is ShardStatus.OPEN), f"shard {shard_id}: {state}"
            is_queued = shard_id in self._queue_of(state)
            assert is_queued == (state.status is ShardStatus.QUEUED), f"shard {shard_id}: queued {is_queued}, {state}"
        failing = {i for i in self._shards if i in self._queue and self._shards[i].failures > 1}
        assert failing == self._failing, f"failed twice and queued: {failing}, noted {self._failing}"
        uncommitted = sum(state.status is not ShardStatus.COMMITTED for state in self._shards.values())
        assert uncommitted == self._num_uncommitted, f"{uncommitted} uncommitted, counted {self._num_uncommitted}"
        for r in self._replicas.values():
            assert sum(r.rows_left.values()) == r.open_rows, f"{r.replica_id}: {r.open_rows} open rows of {r.rows_left}"
            work = sum(self._shares.work(self._shards[i].shard, num_rows) for i, num_rows in r.rows_left.items())
            assert math.isclose(work, r.open_work, abs_tol=1e-3), f"{r.replica_id}: {work} of work, counted otherwise"
        self._shares.check_integrity(self._queued_shards(), sum(r.open_work for r in self._replicas.values()))
        self._queue.check_integrity()
        self._idle_queue.check_integrity()
