"""The coordinator's loop: events of the cluster in, commands of the scheduler enacted.

    while not over:
        for command in scheduler.handle(next event):
            enact(command)

The coordinator decides nothing, and keeps only state that can be rebuilt: the futures of shard tasks. Every event and
command goes to `events.jsonl`, from which `scheduler/simulation/replay.py` replays the run.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future as Counting
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from distributed import Future

from ...jobs.contents import part_name
from ...jobs.errors import JobFailedError, OutputConflictError, StorageError
from ...jobs.store import JobStore
from ...scheduler.estimates.time_left import TimeLeft
from ...scheduler.messages import (
    CanaryAnswered,
    Command,
    Event,
    FailJob,
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
    ShardFailed,
    Tick,
    WorkersSeen,
)
from ...scheduler.scheduler import Scheduler
from ..cluster.connect import known_workers
from ..messages import BEGIN_LIMIT_S, EngineFailedError, ShardAbandonedError, ShardOutcome, WorkerReport
from ..migration.peers import LendRows
from ..monitoring.job_monitor import JobMonitor
from ..monitoring.topics import OUTCOMES, REPORTS
from ..worker.run_shard import run_shard
from .control import JobRun
from .limits import JobLimits
from .summary import Account

logger = logging.getLogger(__name__)
# Seconds that the loop waits for a message before it looks at the clock.
_WAIT_S = 0.5
# Seconds between two looks at the cluster's workers, each followed by a tick.
_TICK_INTERVAL_S = 2.0
# Seconds between two updates of the job's state and of `events.jsonl`.
_SHOW_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt at a shard: the command and its task on a worker."""

    command: RunShard
    future: Future[None]
    #: Seconds since the coordinator's beginning at which the task was sent, or its worker last reported it as begun.
    seen_s: float


class Coordinator:
    """Runs the shards of one planned job to the end.

    Earlier coordinators of the run may have opened shards that engines still work on; it takes these over.
    """

    def __init__(self, run: JobRun, scheduler: Scheduler, monitor: JobMonitor, limits: JobLimits) -> None:
        self._run = run
        self._limits = limits
        self._client = run.client
        self._scheduler = scheduler
        self._monitor = monitor
        whose: dict[str, Any] = {"run_id": run.run_id, "coordinator": run.peers.address}
        whose["workers"] = run.reporter.latest.worker_addresses
        when = {"at_s": time.time(), "phases": run.reporter.phases}
        self._events = EventLog(run.job.store, scheduler.beginning() | whose | when)
        self._inbox: queue.SimpleQueue[WorkerReport | ShardOutcome | _Attempt | Counting[Any]] = queue.SimpleQueue()
        # Counts the canary beside the loop.
        self._counter = ThreadPoolExecutor(1, "canary")
        self._counting: Counting[Any] | None = None
        # Attempts in flight by shard id; a shard has one attempt at a time.
        self._attempts: dict[int, _Attempt] = {}
        # Outcomes of shards whose tasks have not ended yet, by shard id.
        self._outcomes: dict[int, ShardOutcome] = {}
        # Worker -> task that ends once one of the worker's threads takes tasks again.
        self._probes: dict[str, Future[None]] = {}
        self._workers: tuple[str, ...] = ()
        self._start_s = time.monotonic()
        self._ticked_s = self._shown_s = 0.0
        self._opened_s, self._committed_s = inf, 0.0
        self._reported_s = self._asked_s = 0.0
        #: Most rows that an engine of this run takes into a step.
        self.batch_rows = run.settings.limits.batch_rows
        #: Whether shards were open already when this coordinator began, so that it sees a part of the run only.
        self.has_adopted = False
        self._outcome: FinishJob | FailJob | None = None

    @property
    def working_s(self) -> float:
        """Seconds from the first shard opened to the last part written: the time that plans predict."""
        return max(0.0, self._committed_s - self._opened_s)

    def run(self) -> None:
        """Handle events until every shard is committed.

        Raises `JobFailedError` when the job cannot be completed, and what `JobControl.check` raises when it must stop.
        Finished rows are kept in all cases.
        """
        run_id = self._run.run_id
        # A job that has stopped itself begins no row before its limits are higher.
        self._limits.check(0, None)
        REPORTS.subscribe(self._client, run_id, self._inbox.put)
        OUTCOMES.subscribe(self._client, run_id, self._inbox.put)
        try:
            self._see_workers()
            # Workers that were set up earlier have reported already.
            self._find_replicas(latest_reports(REPORTS.published(self._client, run_id)))
            while self._outcome is None:
                self._take_messages()
                self._count_canary()
                self._keep_time()
            if isinstance(self._outcome, FinishJob) and self._limits.is_uncounted:
                self._keep_account(self._limits.count_canary())
        finally:
            self._counter.shutdown(wait=False)
            REPORTS.unsubscribe(self._client, run_id)
            OUTCOMES.unsubscribe(self._client, run_id)
            self._cancel(lambda attempt: True)
            self._client.cancel([*self._probes.values()])
            # A coordinator that was replaced meanwhile would write into its successor's events.
            if not self._run.control.is_replaced:
                self._events.flush()
        if isinstance(self._outcome, FailJob):
            raise JobFailedError(f"{self._outcome.reason} Finished rows are kept; run the same command to go on.")

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _see_workers(self) -> None:
        known = known_workers(self._client)
        workers = self._workers if known is None else tuple(sorted(known))
        if workers != self._workers:
            self._workers = workers
            self._handle(WorkersSeen(self._now_s(), workers))

    def _find_replicas(self, reports: list[tuple[WorkerReport, float]]) -> None:
        """Take over replicas that are ready, with the shards they have open."""
        found = tuple(
            FoundReplica(report.worker, report.batch_rows, report.open_shards, age_s)
            for report, age_s in reports
            if report.state == "ready"
        )
        self.has_adopted = any(replica.open_shards for replica in found)
        self._handle(ReplicasFound(self._now_s(), found))
        for report, _ in reports:
            if report.state == "failed" or self._scheduler.has_replica(report.worker):
                self._report(report)

    def _take_messages(self) -> None:
        """Handle all messages that have come, before the loop writes to storage: a write may take longer than the next
        message, and messages would pile up.
        """
        messages = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=_WAIT_S))
            messages += [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        self._run.control.check()
        for message in messages:
            match message:
                case WorkerReport():
                    self._report(message)
                case ShardOutcome():
                    self._outcomes[message.shard_id] = message
                case _Attempt():
                    self._ended(message)
                case Counting():
                    self._counted_canary(message.result())
            if self._outcome is not None:
                return

    def _report(self, report: WorkerReport) -> None:
        self._monitor.reported(report, is_tail=not self._scheduler.num_queued)
        self.batch_rows = max(self.batch_rows, report.batch_rows)
        worker, takes_part = report.worker, self._scheduler.has_replica(report.worker)
        if report.state == "ready" and self._begins_nothing(report):
            return  # the worker counts as silent
        match report.state:
            case "ready" if not takes_part:
                self._handle(ReplicaJoined(self._now_s(), worker, report.batch_rows))
            case "left":
                self._monitor.lost(worker)
                if takes_part:
                    self._handle(ReplicaLeft(self._now_s(), worker))
            case "failed":
                self._monitor.lost(worker)
                if not self._scheduler.has_failed(worker):
                    self._handle(ReplicaFailed(self._now_s(), worker, report.error or "its engine failed"))
        if self._scheduler.has_replica(worker):
            self._handle(event_of(report, self._now_s()))

    def _begins_nothing(self, report: WorkerReport) -> bool:
        """Whether a worker reports but does not begin its shards: its threads have other users' tasks, or are gone, or
        Dask has paused it because it is out of memory.
        """
        worker = report.worker
        attempts = [attempt for attempt in self._attempts.values() if attempt.command.replica_id == worker]
        for attempt in attempts:
            if attempt.command.shard_id in report.begun_shards:
                attempt.seen_s = self._now_s()
        if (probe := self._probes.get(worker)) is not None:
            if probe.done():
                del self._probes[worker]
            return not probe.done()
        late = [a.command.shard_id for a in attempts if self._now_s() - a.seen_s > BEGIN_LIMIT_S]
        if not late:
            return False
        note = (
            f"worker {worker} has not begun {part_name(late[0])} within {BEGIN_LIMIT_S:.0f} s: other tasks have its "
            "threads, or Dask has paused it. Its shards go to other workers"
        )
        logger.warning(note)
        if note not in self._run.reporter.notes:
            self._run.reporter.notes += (note,)
        key = f"lora_probe-{self._run.run_id}-{worker}-{late[0]}-{self._now_s():.0f}"
        self._probes[worker] = self._client.submit(_nothing, key=key, workers=[worker], pure=False)
        return True

    def _ended(self, attempt: _Attempt) -> None:
        """Handle the end of an attempt's task, unless the attempt was recalled meanwhile."""
        command, future = attempt.command, attempt.future
        if self._attempts.get(command.shard_id) is not attempt:
            return
        error = future.exception() if future.status == "error" else None
        if isinstance(error, OutputConflictError):
            raise error
        if isinstance(error, EngineFailedError | ShardAbandonedError):
            return  # its worker reports that it has failed or leaves, or is gone: each ends all of its attempts
        del self._attempts[command.shard_id]
        if future.status == "finished":
            self._finished(attempt)
        else:
            reason = f"its task was {future.status}" if error is None else str(error) or type(error).__name__
            self._handle(ShardFailed(self._now_s(), command.shard_id, command.replica_id, reason))

    def _finished(self, attempt: _Attempt) -> None:
        """Handle a task that has returned, so that its part was written. The outcome comes before the end of the task,
        unless this client was connected anew in between.
        """
        shard_id, worker = attempt.command.shard_id, attempt.command.replica_id
        outcome = self._outcomes.pop(shard_id, None)
        if outcome is None:
            if not self._run.job.store.is_committed(shard_id):
                reason = "its part is gone, and so is its worker"
                self._handle(ShardFailed(self._now_s(), shard_id, worker, reason))
                return
            outcome = self._monitor.unknown_outcome(shard_id, worker)
        self._committed_s = self._now_s()
        self._monitor.committed(outcome)
        self._limits.committed(outcome.adapters)
        self._handle(ShardCommitted(self._now_s(), shard_id, outcome.worker))

    def _keep_time(self) -> None:
        if self._now_s() - self._ticked_s >= _TICK_INTERVAL_S:
            self._ticked_s = self._now_s()
            self._see_workers()
            self._handle(Tick(self._now_s()))
        if self._now_s() - self._shown_s >= _SHOW_INTERVAL_S:
            # A coordinator that was replaced must not write among its successor's events: flush right after the check.
            self._run.control.check_displaced()
            self._events.flush()
            self._shown_s = self._now_s()
            left = self._report_state()
            is_sure = self._limits.is_settled and self._scheduler.estimates.costs.is_known
            self._limits.check(len(self._workers), left if is_sure else None)
            self._hear_answer()

    def _report_state(self) -> TimeLeft | None:
        """Report the job's state; returns the time left."""
        now_s, limits = self._now_s(), self._limits
        limits.worker_s += len(self._workers) * (now_s - self._reported_s)
        self._reported_s = now_s
        left = self._scheduler.time_left(now_s)
        state = self._monitor.state(time.time(), self._scheduler.rows_left, left)
        if limits.shard_ids and state.phase == "running" and not limits.is_settled:
            state = replace(state, phase="canary" if limits.canary is None else "confirming")
        rows_left = self._scheduler.canary_rows_left
        self._run.reporter(
            replace(
                state,
                canary_rows=limits.canary_rows,
                canary_left=rows_left,
                is_canary_counted=limits.canary is not None,
                worker_s=limits.worker_s,
            )
        )
        return left

    def _count_canary(self) -> None:
        """Have the canary counted, once it has its parts."""
        if self._scheduler.is_canary_due and self._counting is None:
            self._counting = self._counter.submit(self._limits.count_canary)
            self._counting.add_done_callback(self._inbox.put)

    def _hear_answer(self) -> None:
        """Let other rows run once a person has agreed."""
        if self._limits.canary is not None and self._limits.is_to_confirm and self._limits.check_answer():
            self._limits.canary |= {"confirmed": True}
            event = CanaryAnswered.from_json(self._limits.canary["event"])
            self._opened_s += self._now_s() - self._asked_s
            self._handle(replace(event, time_s=self._now_s(), goes_on=True))

    def _counted_canary(self, account: Account) -> None:
        """Take in the account of the canary: predict the other rows by its lengths, and stop the job where it says
        so.
        """
        self._limits.check_canary(self._keep_account(account))

    def _keep_account(self, account: Account) -> CanaryAnswered:
        """Keep and report the account of the canary; returns the scheduler's event for it."""
        now_s, num_workers = self._now_s(), len(self._workers)
        event = self._limits.event_of(account, num_workers, now_s)
        self._handle(event)
        left = self._scheduler.time_left(now_s) if self._outcome is None else None
        self._limits.counted(account, event, max(0.0, now_s - self._opened_s), left, num_workers)
        self._asked_s = now_s
        self._report_state()
        return event

    def _handle(self, event: Event) -> None:
        # Checked before anything is enacted: this process may have been stopped, and another coordinator have taken
        # over.
        self._run.control.check_displaced()
        match event:
            case WorkersSeen(worker_ids=workers):
                self._monitor.saw(workers)
            case ReplicaJoined(replica_id=worker):
                self._monitor.saw([worker])
        commands = self._scheduler.handle(event)
        self._events.add(event, *commands)
        for command in commands:
            self._enact(command)

    def _enact(self, command: Command) -> None:
        match command:
            case RunShard():
                self._submit(command)
            case Recall():
                self._cancel(lambda attempt: attempt.command.shard_id == command.shard_id)
            case RemoveReplica():
                # Tasks pinned to this worker would wait for it for ever.
                self._cancel(lambda attempt: attempt.command.replica_id == command.replica_id)
                self._monitor.lost(command.replica_id)
            case MigrateRows():
                what = (command.shard_id, command.num_rows, command.to_replica_id)
                lend = LendRows(*what, command.is_selective, command.adapter_id)
                self._run.peers.send(command.from_replica_id, lend)
            case FinishJob() | FailJob():
                self._outcome = command
            case _:
                raise AssertionError(f"no way to enact {command}")

    def _submit(self, command: RunShard) -> None:
        if self._opened_s == inf:
            # The state is due at once: a short job is over before the next one.
            self._opened_s, self._shown_s = self._now_s(), -inf
        self._outcomes.pop(command.shard_id, None)
        # Each attempt of each coordinator has a key of its own: otherwise Dask would return the previous outcome.
        number = f"{self._run.control.coordinator_id}-{command.attempt}"
        key = (f"lora_shard-{self._run.run_id}", command.shard_id, number)
        arguments = (self._run.run_id, command)
        future = self._client.submit(run_shard, *arguments, key=key, workers=[command.replica_id], pure=False)
        attempt = self._attempts[command.shard_id] = _Attempt(command, future, self._now_s())
        future.add_done_callback(lambda _: self._inbox.put(attempt))

    def _cancel(self, is_unwanted: Callable[[_Attempt], bool]) -> None:
        for attempt in [attempt for attempt in self._attempts.values() if is_unwanted(attempt)]:
            del self._attempts[attempt.command.shard_id]
            attempt.future.cancel()


def _nothing() -> None:
    """A task that ends as soon as it begins."""


def latest_reports(published: Iterable[tuple[float, WorkerReport]]) -> list[tuple[WorkerReport, float]]:
    """The last report of each worker, and the seconds by which it is older than the latest report of all workers.

    `published`: reports with their times by the Dask scheduler's clock in seconds.
    """
    latest = {report.worker: (sent_s, report) for sent_s, report in published}
    newest_s = max((sent_s for sent_s, _ in latest.values()), default=0.0)
    return [(report, newest_s - sent_s) for sent_s, report in latest.values()]


def event_of(report: WorkerReport, time_s: float) -> ReplicaReported:
    """The scheduler's event for a worker's report."""
    return ReplicaReported(
        time_s=time_s,
        replica_id=report.worker,
        open_rows=report.open_rows,
        running_rows=report.telemetry.num_running,
        prefilling_rows=report.telemetry.num_prefilling,
        prefill_tokens_left=report.telemetry.prefill_tokens_left,
        tokens_per_s=report.tokens_per_s,
        resident_adapters=report.telemetry.resident_adapter_ids,
        open_shards=report.open_shards,
        finished=report.finished,
        mode=report.telemetry.mode,
        running_tokens=report.telemetry.running_tokens,
        lent_shards=report.lent_shards,
        incoming_rows=report.incoming_rows,
        engine_s=report.telemetry.computing_s,
        steps=report.telemetry.steps,
        reused_share=report.telemetry.prefix_hit_rate or 0.0,
    )


class EventLog:
    """Writes events and commands to `events.jsonl`; keeps them while storage refuses.

    `beginning`: the scheduler's line before its first event.
    """

    def __init__(self, store: JobStore, beginning: Mapping[str, Any]) -> None:
        self._store = store
        self._lines = [json.dumps(beginning)]

    def add(self, *records: Event | Command) -> None:
        """Append an event and the commands that it gave, in order."""
        self._lines += [json.dumps(record.to_json()) for record in records]

    def flush(self) -> None:
        """Write the lines that are not written yet. Raises `StorageError` when the store is away: rows would not be
        kept either.
        """
        if not self._lines:
            return
        try:
            self._store.append_events(("\n".join(self._lines) + "\n").encode())
        except StorageError as error:
            if error.is_away:
                raise
            logger.warning("events are kept for the next attempt: %s", error)
        else:
            self._lines.clear()
