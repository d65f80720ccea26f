"""The loop around the scheduler: what happens on the cluster goes in as events, its commands are enacted.

    while not over: for command in scheduler.handle(next event): enact(command)

The coordinator decides nothing. It keeps only what can be rebuilt: futures of shard tasks and which workers are there.
Every event and command goes to `events.jsonl`, so that a run can be replayed.

What hosts report, as a coordinator takes it in: the latest of each that is not stale, and the scheduler's events.

What each shard's task is told, from the plan and from what the scheduler has commanded so far. Pure bookkeeping.

A run's events and commands on their way to `events.jsonl`, from which `scheduler/simulation/replay.py` replays it.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from distributed import Client, Future

from ...jobs.errors import JobFailedError, OutputConflictError, StorageError
from ...jobs.record import JobState
from ...jobs.store import JobStore
from ...scheduler.dispatch import rows_behind
from ...scheduler.messages import (
    Command,
    Event,
    FailJob,
    FinishJob,
    LoadAdapter,
    MigrateRows,
    Progress,
    Recall,
    ReplicaJoined,
    ReplicaLost,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    Tick,
)
from ...scheduler.scheduler import Scheduler
from ...scheduler.waves import Shard
from ..messages import EngineFailedError, ShardAbandonedError, ShardOutcome, ShardTask, WorkerReport
from ..migration.peers import LendRows, Peers
from ..monitoring.job_monitor import JobMonitor
from ..monitoring.topics import REPORTS
from ..worker.run_shard import run_shard
from .control import SILENCE_LIMIT_S, JobControl, RollCall

logger = logging.getLogger(__name__)
TICK_S = 1.0
# How often workers are counted.
_WATCH_INTERVAL_S = 2.0
# A job without a single working engine for so long is not going to get one.
_NO_ENGINE_LIMIT_S = 600.0
_RESULT_TIMEOUT_S = 5.0
Observer = Callable[[JobState], None]


@dataclass(frozen=True, slots=True)
class _ShardEnded:
    """A task's future is done."""

    shard_id: int
    attempt: int
    worker: str
    future: Future[ShardOutcome]


class Coordinator:
    """Runs the shards of one planned job to the end. It may have had others before it: shards that they opened and
    that engines still work on are joined.
    """

    def __init__(
        self,
        client: Client,
        store: JobStore,
        run_id: str,
        scheduler: Scheduler,
        briefing: ShardBriefing,
        monitor: JobMonitor,
        observe: Observer,
        control: JobControl,
        peers: Peers,
    ) -> None:
        self._client = client
        self._store = store
        self._run_id = run_id
        self._scheduler = scheduler
        self._briefing = briefing
        self._monitor = monitor
        self._observe = observe
        self._control = control
        self._peers = peers
        self._inbox: queue.SimpleQueue[WorkerReport | _ShardEnded] = queue.SimpleQueue()
        # (shard id, attempt) -> the task's future, and the worker it runs on.
        self._tasks: dict[tuple[int, int], tuple[Future[ShardOutcome], str]] = {}
        self._workers: set[str] = set()
        self._failed_workers: dict[str, str] = {}
        self._journal = Journal(store, scheduler.beginning() | {"coordinator": peers.address})
        self._start_s = self._watched_s = self._ticked_s = self._engine_seen_s = time.monotonic()
        self._roll = RollCall(self._start_s)
        self._outcome: Command | None = None
        self._opened_s, self._committed_s = inf, 0.0

    def run(self) -> None:
        """Go on until every shard is committed.

        Raises `JobFailedError` when the job cannot be completed, and what `control` raises when it must stop; what
        is finished is kept in all cases.
        """
        REPORTS.subscribe(self._client, self._run_id, self._inbox.put)
        try:
            # Workers that were set up earlier have reported already that they are ready.
            self._found(latest_reports(REPORTS.published(self._client, self._run_id)))
            while self._outcome is None:
                self._next_event()
        finally:
            REPORTS.unsubscribe(self._client, self._run_id)
            self._cancel(lambda shard_id, worker: True)
            self._journal.flush()
        if isinstance(self._outcome, FailJob):
            raise JobFailedError(f"{self._outcome.reason} Finished rows are kept; run the same command to go on.")

    def _found(self, reports: list[WorkerReport]) -> None:
        """Take over what is there: ready workers and the shards they have open."""
        alive = self._alive_workers()
        ready = [report for report in reports if report.state == "ready" and report.worker in alive]
        self._workers |= {report.worker for report in ready}
        found = tuple((report.worker, report.batch_rows, report.open_shards) for report in ready)
        self._handle(ReplicasFound(self._now_s(), found))
        for report in reports:
            if report.worker in alive:
                self._inbox.put(report)

    def _next_event(self) -> None:
        try:
            message = self._inbox.get(timeout=TICK_S / 2)
        except queue.Empty:
            message = None
        # First of all: who has slept and was replaced meanwhile must not enact a thing.
        self._control.check()
        match message:
            case WorkerReport():
                self._report(message)
            case _ShardEnded():
                self._ended(message)
        self._watch()
        if time.monotonic() - self._ticked_s >= TICK_S:
            self._ticked_s = time.monotonic()
            self._handle(Tick(self._now_s()))
            self._observe(self._monitor.state("running", time.time()))
            self._journal.flush()

    def _report(self, report: WorkerReport) -> None:
        self._monitor.reported(report, is_tail=not self._scheduler.num_queued)
        self._roll.heard(report.worker, time.monotonic())
        if report.state == "left":
            self._lose(report.worker, handed_over=True)
        elif report.state == "failed":
            self._engine_failed(report)
        elif report.state == "ready" and report.worker not in self._workers:
            self._workers.add(report.worker)
            self._handle(ReplicaJoined(self._now_s(), report.worker, report.batch_rows))
        if report.worker in self._workers:
            ours = {shard_id for (shard_id, _), (_, worker) in self._tasks.items() if worker == report.worker}
            self._handle(progress_of(report, self._now_s(), ours, self._monitor.adapter_name))

    def _engine_failed(self, report: WorkerReport) -> None:
        """A worker whose engine cannot be kept alive is no replica; without any other the job is over."""
        self._failed_workers[report.worker] = report.error or "its engine failed"
        self._lose(report.worker)
        alive = self._alive_workers()
        if alive and alive <= self._failed_workers.keys():
            self._outcome = FailJob(f"No engine works: {self._failed_workers[report.worker]}.")

    def _ended(self, message: _ShardEnded) -> None:
        if self._tasks.pop((message.shard_id, message.attempt), None) is None:
            return
        future = message.future
        if future.status == "finished":
            self._finished(message)
            return
        if future.status == "error":
            error = future.exception()
            if isinstance(error, EngineFailedError | ShardAbandonedError):
                return  # its worker reports that it has failed or left, which frees all its shards
            if isinstance(error, OutputConflictError):
                raise error
            reason = str(error) or type(error).__name__
        else:
            reason = f"its task was {future.status}"
        self._handle(ShardFailed(self._now_s(), message.shard_id, message.worker, reason))

    def _finished(self, message: _ShardEnded) -> None:
        """A task returned, so the part was there; its worker may have died since, with the outcome in its memory."""
        try:
            outcome = message.future.result(timeout=_RESULT_TIMEOUT_S)
        except Exception:
            if not self._store.is_committed(message.shard_id):
                reason = "its part is gone, and so is its worker"
                self._handle(ShardFailed(self._now_s(), message.shard_id, message.worker, reason))
                return
            outcome = self._monitor.unknown_outcome(message.shard_id, message.worker)
        self._committed_s = self._now_s()
        self._monitor.committed(outcome)
        self._handle(ShardCommitted(self._now_s(), message.shard_id, outcome.worker))

    def _watch(self) -> None:
        """Look for workers that are gone, and for engines at all."""
        now_s = time.monotonic()
        if now_s - self._watched_s < _WATCH_INTERVAL_S:
            return
        self._watched_s = now_s
        alive = self._alive_workers()
        for worker in (self._workers - alive) | self._roll.silent(self._workers, now_s):
            self._lose(worker)
        if self._workers:
            self._engine_seen_s = now_s
        elif now_s - self._engine_seen_s > _NO_ENGINE_LIMIT_S:
            self._outcome = FailJob(f"No engine became ready within {_NO_ENGINE_LIMIT_S:.0f} seconds.")

    def _alive_workers(self) -> set[str]:
        return set(self._client.scheduler_info(n_workers=-1)["workers"])

    def _lose(self, worker: str, *, handed_over: bool = False) -> None:
        self._monitor.lost(worker)
        if worker in self._workers:
            self._workers.discard(worker)
            self._briefing.lost(worker)
            # pinned to this worker, its tasks would wait for it for ever
            self._cancel(lambda shard_id, where: where == worker)
            self._handle(ReplicaLost(self._now_s(), worker, handed_over))

    def _handle(self, event: Event) -> None:
        """One event through the scheduler, and its commands done."""
        commands = self._scheduler.handle(event)
        if commands or not isinstance(event, Tick):
            self._journal.add(event, *commands)
        for command in commands:
            self._enact(command)

    def _enact(self, command: Command) -> None:
        match command:
            case RunShard():
                self._submit(command)
            case Recall():
                self._cancel(lambda shard_id, worker: shard_id == command.shard_id)
            case MigrateRows():
                lend = LendRows(command.shard_id, command.num_rows, command.to_replica_id)
                self._peers.send(command.from_replica_id, lend)
            case LoadAdapter():
                self._briefing.load(command)
            case FinishJob() | FailJob():
                self._outcome = command
            case _:
                raise AssertionError(f"no way to enact {command}")

    @property
    def working_s(self) -> float:
        """Seconds from the first shard opened to the last part written; what plans predict."""
        return max(0.0, self._committed_s - self._opened_s)

    def _submit(self, command: RunShard) -> None:
        self._opened_s = min(self._opened_s, self._now_s())
        # A new key per attempt and coordinator: Dask would otherwise hand out the outcome of the one before.
        attempt = f"{self._control.coordinator_id}-{command.attempt}"
        key = (f"lora_shard-{self._run_id}", command.shard_id, attempt)
        future = self._client.submit(
            run_shard,
            self._briefing.task(command),
            key=key,
            workers=[command.replica_id],
            pure=False,
        )
        self._tasks[(command.shard_id, command.attempt)] = (future, command.replica_id)
        future.add_done_callback(partial(self._hear_end, command))

    def _hear_end(self, command: RunShard, future: Future[ShardOutcome]) -> None:
        self._inbox.put(_ShardEnded(command.shard_id, command.attempt, command.replica_id, future))

    def _cancel(self, is_unwanted: Callable[[int, str], bool]) -> None:
        for key in [key for key, (_, worker) in self._tasks.items() if is_unwanted(key[0], worker)]:
            future, _ = self._tasks.pop(key)
            future.cancel()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s


def latest_reports(published: Iterable[tuple[float, WorkerReport]]) -> list[WorkerReport]:
    """The last report of each worker, of reports with their times by the Dask scheduler's clock in seconds.

    Workers that have been silent for long while others reported are left out: one that is adopted with its shards would
    keep them until it is found to be silent.
    """
    latest = {report.worker: (time_s, report) for time_s, report in published}
    newest_s = max((time_s for time_s, _ in latest.values()), default=0.0)
    return [report for time_s, report in latest.values() if newest_s - time_s <= SILENCE_LIMIT_S]


def progress_of(
    report: WorkerReport, time_s: float, shard_ids: Collection[int], adapter_name: Callable[[str], str]
) -> Progress:
    """A report as the scheduler's event. `shard_ids`: of the shards that the worker has tasks of; a host may still list
    one whose task has just failed, which is not to be adopted as running.
    """
    return Progress(
        time_s=time_s,
        replica_id=report.worker,
        open_rows=report.open_rows,
        running_rows=report.telemetry.num_running,
        tokens_per_s=report.tokens_per_s,
        resident_adapters=tuple(map(adapter_name, report.telemetry.resident_adapter_ids)),
        open_shards=tuple((shard_id, rows) for shard_id, rows in report.open_shards if shard_id in shard_ids),
        finished=tuple(
            (adapter_name(f.adapter_id) if f.adapter_id else "", f.num_rows, f.output_tokens) for f in report.finished
        ),
        mode=report.telemetry.mode,
        running_tokens=report.telemetry.running_tokens,
        lent_shards=report.lent_shards,
        guest_rows=report.incoming_rows,
    )


class ShardBriefing:
    """Commanded loads travel with the shards that need them: a shard is opened well before its rows run, and one
    message cannot overtake the other.
    """

    def __init__(self, run_id: str, shards: Iterable[Shard], num_workers: int) -> None:
        self._run_id = run_id
        self._shards = {shard.shard_id: shard for shard in shards}
        self._rows_behind = rows_behind(tuple(self._shards.values()), num_workers)
        # Worker -> adapter -> the worker that has it.
        self._sources: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def load(self, command: LoadAdapter) -> None:
        """A worker shall get an adapter, from now on, where the command says."""
        if command.source_replica_id:
            self._sources[command.replica_id][command.adapter] = command.source_replica_id

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._sources.pop(worker, None)

    def task(self, command: RunShard) -> ShardTask:
        """What the shard's task is told."""
        shard, sources = self._shards[command.shard_id], self._sources[command.replica_id]
        return ShardTask(
            self._run_id,
            command.shard_id,
            command.attempt,
            self._rows_behind.get(command.shard_id, 0),
            {name: sources[name] for name in shard.adapters if name in sources},
        )


class Journal:
    """Keeps lines until storage has them. `beginning`: what the scheduler says before its first event."""

    def __init__(self, store: JobStore, beginning: Mapping[str, Any]) -> None:
        self._store = store
        self._lines = [json.dumps(beginning)]

    def add(self, *records: Event | Command) -> None:
        """An event and the commands it gave, in order."""
        self._lines += [json.dumps(record.to_json()) for record in records]

    def flush(self) -> None:
        """Write what is kept; when storage refuses, it is kept for the next attempt."""
        if not self._lines:
            return
        try:
            self._store.append_events(("\n".join(self._lines) + "\n").encode())
        except StorageError as error:
            logger.warning("events are kept for the next attempt: %s", error)
        else:
            self._lines.clear()
