"""The cluster's head: events in, commands out.

The same object drives real workers and simulated ones. It owns one mutable state, asks nobody for the time
and draws no random numbers: the same events give the same commands (`events.jsonl` replays a run).

How the scheduler decides: limits and, where they are wanted, lending and adapter traffic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .dispatch import AdapterTraffic, Backlog, ReplicaState, ShardState, TrafficSettings
from .messages import (
    Command,
    Event,
    FailJob,
    FinishJob,
    Progress,
    Recall,
    ReplicaJoined,
    ReplicaLost,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
)
from .migration import Lender, TailSettings
from .waves import Shard

# Kind of the line with which a scheduler's journal begins.
BEGINNING = "SchedulerStarted"


class Scheduler:
    """Decides which replica opens which shard, and when the job is over.

    `shards`: all of the plan's, in dispatch order. `committed`: ids of those whose part exists already
    (resume).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        committed: Collection[int] = (),
        settings: SchedulerSettings | None = None,
    ) -> None:
        self._settings = settings or SchedulerSettings()
        self._shards = {shard.shard_id: ShardState(shard) for shard in shards}
        self._replicas: dict[str, ReplicaState] = {}
        self._backlog = Backlog([shard for shard in shards if shard.has_engine_work])
        # Error rows only: any replica may write them beside its engine's work.
        self._idle_backlog = Backlog([shard for shard in shards if not shard.has_engine_work])
        traffic = self._settings.traffic
        self._traffic = AdapterTraffic(shards, traffic) if traffic is not None else None
        self._is_over = False
        self._num_open = len(self._shards)
        self._open_rows = 0
        self._lender = Lender(shards, self._settings.tail) if self._settings.tail else None
        # Adapter -> rows finished so far and their output tokens.
        self._finished: dict[str, tuple[int, int]] = {}
        self._committed_before = sorted(committed)
        for shard_id in self._committed_before:
            self._commit(self._shards[shard_id])

    def beginning(self) -> dict[str, Any]:
        """What a journal says before the first event, so that it can be replayed (`replay.py`)."""
        return {"kind": BEGINNING, "committed": self._committed_before, "settings": asdict(self._settings)}

    @property
    def num_uncommitted(self) -> int:
        """Shards without a part."""
        return self._num_open

    @property
    def num_queued(self) -> int:
        """Shards with engine work that no replica has opened."""
        return len(self._backlog)

    @property
    def is_over(self) -> bool:
        """Whether FinishJob or FailJob was commanded."""
        return self._is_over

    def handle(self, event: Event) -> list[Command]:
        """Take in one event; return what must be done now, in order. After the job's end: nothing."""
        if self._is_over:
            return []
        commands = self._absorb(event)
        if not self._is_over:
            commands += self._dispatch(self._maybe_hungry(event, commands))
            if isinstance(event, ReplicaJoined | Progress | ShardCommitted):
                commands += self._share_tail(event.replica_id, event.time_s)
        if not self._is_over and self._num_open == 0:
            self._is_over = True
            commands.append(FinishJob())
        return commands

    def _maybe_hungry(self, event: Event, commands: list[Command]) -> list[ReplicaState]:
        """Replicas that this event may have left with too few open rows; the others need no look."""
        match event:
            case ReplicaJoined() | ShardCommitted() | Progress():
                names = {event.replica_id} | {c.replica_id for c in commands if isinstance(c, Recall)}
                return [self._replicas[name] for name in sorted(names) if name in self._replicas]
        return list(self._replicas.values())

    def _absorb(self, event: Event) -> list[Command]:
        match event:
            case ReplicaJoined():
                self._join(event.replica_id, event.batch_rows)
            case ReplicasFound():
                return self._adopt(event)
            case ReplicaLost():
                return self._lose(event)
            case ShardCommitted():
                return self._committed(event)
            case ShardFailed():
                return self._failed(event)
            case Progress():
                self._progress(event)
        return []

    def _join(self, replica_id: str, batch_rows: int) -> ReplicaState:
        replica = self._replicas.setdefault(replica_id, ReplicaState(replica_id, batch_rows))
        replica.batch_rows = batch_rows
        return replica

    def _adopt(self, event: ReplicasFound) -> list[Command]:
        """Shards opened by a scheduler before this one go on where they are: a replica joins what it has open."""
        commands: list[Command] = []
        for replica_id, batch_rows, open_shards in event.replicas:
            replica = self._join(replica_id, batch_rows)
            for shard_id, rows_left in open_shards:
                state = self._shards.get(shard_id)
                if state is None or state.is_committed or state.owner is not None:
                    continue
                self._backlog_of(state).discard(shard_id)
                self._assign(state, replica)
                if state.shard.has_engine_work:
                    self._set_rows_left(replica, shard_id, rows_left)
                commands.append(RunShard(shard_id, replica_id, state.attempt))
        return commands

    def _committed(self, event: ShardCommitted) -> list[Command]:
        state = self._shards[event.shard_id]
        owner = state.owner
        self._commit(state)
        # An attempt we had given up made it after all: the newer one is wasted work.
        return [Recall(event.shard_id, owner)] if owner not in (None, event.replica_id) else []

    def _commit(self, state: ShardState) -> None:
        if not state.is_committed:
            state.is_committed = True
            self._num_open -= 1
        if state.shard.shard_id in self._backlog_of(state):
            self._backlog_of(state).discard(state.shard.shard_id)
        self._release(state)

    def _backlog_of(self, state: ShardState) -> Backlog:
        return self._backlog if state.shard.has_engine_work else self._idle_backlog

    def _release(self, state: ShardState) -> None:
        if state.owner is not None:
            replica = self._replicas[state.owner]
            self._open_rows -= replica.rows_left[state.shard.shard_id]
            replica.close(state.shard.shard_id)
            self._backlog_of(state).closed(state.shard.shard_id, state.owner)
            if self._traffic is not None:
                self._traffic.closed(state.owner, state.shard, is_pending=not state.is_committed)
            state.owner = None

    def _failed(self, event: ShardFailed) -> list[Command]:
        state = self._shards[event.shard_id]
        if state.owner != event.replica_id:
            return []
        state.failures += 1
        state.failed_on |= {event.replica_id}
        if state.failures >= self._settings.max_failures:
            return self._fail(
                f"Shard {event.shard_id} failed {state.failures} times, last on {event.replica_id}: {event.reason}"
            )
        self._requeue(state)
        return []

    def _lose(self, event: ReplicaLost) -> list[Command]:
        replica_id = event.replica_id
        replica = self._replicas.get(replica_id)
        if replica is None:
            return []
        for shard_id in list(replica.rows_left):
            state = self._shards[shard_id]
            # A shard whose workers leave in good order is not the reason.
            state.losses += not event.handed_over
            if state.losses >= self._settings.max_losses:
                return self._fail(
                    f"Shard {shard_id} was open on {state.losses} replicas when they were lost, last on {replica_id}."
                )
            self._requeue(state)
        del self._replicas[replica_id]
        if self._lender is not None:
            self._lender.lost(replica_id)
        if self._traffic is not None:
            self._traffic.lost(replica_id)
        return []

    def _requeue(self, state: ShardState) -> None:
        self._release(state)
        state.attempt += 1
        self._backlog_of(state).put_back(state.shard.shard_id)

    def _fail(self, reason: str) -> list[Command]:
        self._is_over = True
        return [FailJob(reason)]

    def _progress(self, event: Progress) -> None:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            return
        replica.resident = frozenset(event.resident_adapters)
        if self._traffic is not None:
            self._traffic.reported(event.replica_id, event.resident_adapters)
        if self._lender is not None:
            self._lender.hear(replica, event)
        self._learn(event)
        for shard_id, rows_left in event.open_shards:
            state = self._shards.get(shard_id)
            if state is not None and state.owner == event.replica_id and state.shard.has_engine_work:
                self._set_rows_left(replica, shard_id, rows_left)

    def _learn(self, event: Progress) -> None:
        """Correct predicted lengths by what finished, so that waves of long rows are not left for the end."""
        for adapter, num_rows, output_tokens in event.finished:
            rows, tokens = self._finished.get(adapter, (0, 0))
            self._finished[adapter] = (rows + num_rows, tokens + output_tokens)
        for adapter in sorted({name for name, _, _ in event.finished}):
            rows, tokens = self._finished[adapter]
            if rows >= self._settings.learn_rows:
                self._backlog.correct_length(adapter, tokens / rows)

    def _set_rows_left(self, replica: ReplicaState, shard_id: int, rows: int) -> None:
        self._open_rows += rows - replica.rows_left.get(shard_id, 0)
        replica.set_rows_left(shard_id, rows)

    def _assign(self, state: ShardState, replica: ReplicaState) -> None:
        state.owner = replica.replica_id
        rows = state.shard.num_rows if state.shard.has_engine_work else 0
        self._set_rows_left(replica, state.shard.shard_id, rows)
        self._backlog_of(state).opened(state.shard.shard_id, replica.replica_id)

    def _dispatch(self, candidates: list[ReplicaState]) -> list[Command]:
        """Open shards until every candidate holds its share: two batches, or less when little is left."""
        commands: list[Command] = []
        num_replicas = max(len(self._replicas), self._settings.expected_replicas)
        share = -(-(self._backlog.num_rows + self._open_rows) // num_replicas)
        hungry = {r.replica_id: r for r in candidates if r.open_rows < self._wanted_rows(r, share)}
        while hungry and self._backlog:
            replica = min(hungry.values(), key=lambda r: (r.open_rows / r.batch_rows, r.replica_id))
            command = self._open_next(replica, self._backlog)
            commands += command
            if not command or replica.open_rows >= self._wanted_rows(replica, share):
                del hungry[replica.replica_id]
        for replica in candidates:
            if self._idle_backlog and not any(rows == 0 for rows in replica.rows_left.values()):
                commands += self._open_next(replica, self._idle_backlog)
        return commands

    def _share_tail(self, replica_id: str, time_s: float) -> Sequence[Command]:
        """Nothing is pending: have rows lent to replicas that have nothing to do."""
        if self._lender is None or replica_id not in self._replicas or self._backlog:
            return []
        return self._lender.share(replica_id, time_s, self._replicas, self._open_shards)

    def _open_shards(self, replica: ReplicaState) -> list[Shard]:
        return [self._shards[shard_id].shard for shard_id in replica.rows_left]

    def _wanted_rows(self, replica: ReplicaState, share: int) -> int:
        # At least one: an idle replica always opens something.
        return max(1, min(round(self._settings.open_batches * replica.batch_rows), share))

    def _open_next(self, replica: ReplicaState, backlog: Backlog) -> list[Command]:
        def is_allowed(shard_id: int) -> bool:
            failed_on = self._shards[shard_id].failed_on
            return replica.replica_id not in failed_on or failed_on >= set(self._replicas)

        shard_id = backlog.take(replica.replica_id, is_allowed)
        if shard_id is None:
            return []
        state = self._shards[shard_id]
        self._assign(state, replica)
        loads = self._traffic.opened(replica.replica_id, state.shard) if self._traffic is not None else []
        return [*loads, RunShard(shard_id, replica.replica_id, state.attempt)]

    def check_integrity(self) -> None:
        """Raise AssertionError, with the failing sum, when the state contradicts itself."""
        owned = {s: r.replica_id for r in self._replicas.values() for s in r.rows_left}
        for shard_id, state in self._shards.items():
            assert owned.get(shard_id) == state.owner, f"shard {shard_id}: owner {state.owner}, open on {owned}"
            places = state.is_committed + (state.owner is not None) + (shard_id in self._backlog_of(state))
            assert places == 1 or self._is_over, f"shard {shard_id} is in {places} places, expected 1"
        uncommitted = sum(not s.is_committed for s in self._shards.values())
        assert uncommitted == self._num_open, f"{uncommitted} uncommitted shards, counted {self._num_open}"
        open_rows = [sum(r.rows_left.values()) for r in self._replicas.values()]
        assert open_rows == [r.open_rows for r in self._replicas.values()], f"open rows are {open_rows}"
        assert sum(open_rows) == self._open_rows, f"{sum(open_rows)} open rows, counted {self._open_rows}"
        self._backlog.check_integrity()
        self._idle_backlog.check_integrity()


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`open_batches`: full batches of unfinished rows kept open per replica, so that no batch drains at a
    shard's end. `max_failures`, `max_losses`: attempts of one shard that may fail, or die with their
    replica, before the job fails. `learn_rows`: finished rows of an adapter from which its predicted length is
    corrected. `expected_replicas`: replicas still to join count as present when a short job is shared out. `tail`:
    when to lend running rows to idle replicas (None: never). `traffic`: adapters' bytes, to load them before their
    rows need them (None: replicas look after their adapters themselves).
    """

    open_batches: float = 2.0
    max_failures: int = 4
    max_losses: int = 8
    learn_rows: int = 8
    expected_replicas: int = 1
    tail: TailSettings | None = None
    traffic: TrafficSettings | None = None
