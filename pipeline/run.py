"""`run`: opens a job, hands it to its Dask cluster and follows it there to its result.

The coordinator's task on the cluster (`coordinator/task.py`) does the rest. Every stage can be repeated: results that
are in the output already are reused.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import nullcontext
from math import inf
from typing import Any, Protocol

import dask
from dask.utils import parse_timedelta
from distributed import Client, Future, KilledWorker, Semaphore
from distributed.scheduler import NoValidWorkerError, NoWorkerError

from ..jobs.errors import JobFailedError, JobInterruptedError, OutputConflictError, StorageError
from ..jobs.opening.opened_job import OpenedJob, open_job
from ..jobs.outcome import canary_lines
from ..jobs.record import JobState
from ..jobs.spec import JobSpec
from ..jobs.status.notes import job_notes
from ..jobs.storage.limits import expect_away
from ..jobs.storage.redaction import redacted_url
from ..jobs.store import JobStore
from ..jobs.updates import computes_rows
from ..system.long_work import listening
from .cluster.class_cluster import planned_workers
from .cluster.connect import (
    cluster_errors_named,
    connected,
    count_workers,
    known_workers,
    page_address,
    scheduler_lost,
)
from .cluster.devices import find_device, find_device_of_workers
from .cluster.suitability import check_suitability
from .coordinator.lease import keep_leases
from .coordinator.losses import count_losses
from .coordinator.task import finished_before, has_finished, run_job
from .messages import ENGINE_FACTORY, EngineSettings, StopRun, job_key
from .monitoring.logs import job_log
from .monitoring.reporter import INTERRUPTED, JobReporter, latest_state, state_before
from .monitoring.scheduler_plugin import show_jobs
from .monitoring.topics import CONTROL, STATES
from .planning.early_check import EarlyCheck
from .planning.settings import RunSettings
from .result import JobResult
from .worker.registration import register_plugin, unregister_plugin


class Progress(Protocol):
    """Display of a running job for its user."""

    def update(self, state: JobState) -> None:
        """Show the job's latest state; called about once a second and at each change of phase."""

    def note(self, text: str) -> None:
        """Show a sentence that stays on the screen."""


class SilentProgress:
    """A `Progress` that shows nothing."""

    def update(self, state: JobState) -> None:
        """Ignore the state."""

    def note(self, text: str) -> None:
        """Ignore the sentence."""


def run(
    spec: JobSpec,
    *,
    client: Client | None = None,
    progress: Progress | None = None,
    engine_factory: str = ENGINE_FACTORY,
    ask: Callable[[str], bool] | None = None,
) -> JobResult:
    """Run a job to its end, or go on with it where it stopped.

    `client`: client of the cluster to use instead of `spec.cluster`. `engine_factory`: `module:callable` that makes an
    engine, as in `EngineSettings`. `ask`: asks a person a question (`confirm`); None where there is none, so that the
    job stops after its canary.

    Raises `JobRequestError` with all problems of the request before anything is written; `ErrorBudgetError` when too
    many rows are wrong; `JobFailedError` or `StorageError` when the job cannot go on; `JobInterruptedError` on Ctrl-C
    or a request to cancel, and `JobLimitError`, one of these, when the job stops itself. Finished rows are kept:
    running the job again goes on with the others.
    """
    with listening(progress.note) if progress else nullcontext():
        return _run(spec, client, progress or SilentProgress(), engine_factory, ask)


def _run(
    spec: JobSpec,
    client: Client | None,
    watcher: Progress,
    engine_factory: str,
    ask: Callable[[str], bool] | None,
) -> JobResult:
    began_s = time.time()
    check_suitability(spec, connected, client)
    job = open_job(spec)
    if job.is_finished and not job.changed_adapters:
        since = ", and nothing has changed since" if job.spec.update else ""
        watcher.note(f"This job is done already{since}. Nothing was run.")
        return finished_before(job)
    for line in job_notes(job.record):
        watcher.note(line)
    reporter = JobReporter(job.store, watcher.update, job.spec.error_budget, state_before(job))
    reporter.phases.append(("opening", began_s))
    try:
        with reporter.ending_recorded(), job_log(job.store), reporter.kept_fresh(lambda: reporter.is_starting):
            reporter.begins("starting")
            return _run_opened(job, client, watcher, reporter, engine_factory, ask)
    except (JobFailedError, JobInterruptedError, StorageError):
        # A coordinator may have finished the job while this process recorded a failure.
        if not has_finished(job):
            raise
        return finished_before(job)


def _run_opened(
    job: OpenedJob,
    client: Client | None,
    watcher: Progress,
    reporter: JobReporter,
    engine_factory: str,
    ask: Callable[[str], bool] | None,
) -> JobResult:
    try:
        # Spare processes import the engine; other factories do not need it.
        has_spares = engine_factory == ENGINE_FACTORY and not _starts_later(job)
        connection = connected(job.spec, client, has_spares=has_spares)
        with EarlyCheck(job) as rows, connection as dask, cluster_errors_named(dask, redacted_url(job.spec.output)):
            run_id, future, notes = launch(dask, job, rows, reporter, engine_factory, can_ask=ask is not None)
            for line in notes:
                watcher.note(line)
            if page := page_address(dask):
                watcher.note(f"dashboard: {page}")
            return follow(dask, run_id, future, reporter, watcher, _CanaryDisplay(job.store, watcher, ask))
    except (JobFailedError, StorageError) as error:
        if isinstance(error, StorageError) and error.is_away:
            expect_away(job.store.url)
        # A coordinator may have finished the job although this process has lost its connection to the cluster or to
        # storage.
        if not has_finished(job):
            raise
        return finished_before(job)


class _CanaryDisplay:
    """Shows the canary of a job, once it is counted, and asks whether the job goes on; called with each state."""

    def __init__(self, store: JobStore, shown: Progress, ask: Callable[[str], bool] | None) -> None:
        self._store, self._shown, self._ask = store, shown, ask
        # Whether the state before had a canary that was not counted, and whether the question was asked.
        self._is_awaited = self._is_asked = False

    def __call__(self, state: JobState) -> None:
        is_new = state.is_canary_counted and self._is_awaited
        self._is_awaited = bool(state.canary_rows) and not state.is_canary_counted
        if state.phase == "confirming" and self._ask is not None and not self._is_asked:
            self._is_asked = is_new = True
        if not is_new or (facts := self._store.settled().read_canary()) is None:
            return
        first, *others = canary_lines(facts)
        for line in (f"canary: {first}", *others):
            self._shown.note(line)
        if state.phase == "confirming" and self._ask is not None:
            agreed = self._ask("Go on with the other rows?")
            self._store.settled().write_canary(facts | {"confirmed": agreed})


_JOB_PRIORITY = 100
# Seconds that a job may take to stop on Ctrl-C: finished rows are flushed and engines stopped.
_STOP_PATIENCE_S = 45.0
_POLL_S = 0.5
# Seconds without a report after which the coordinator counts as silent; one that runs reports every second.
_SILENCE_S = 10.0
_NO_WORKERS = "The cluster has no workers. The job waits for one."
_NOT_BEGUN = "No worker has begun the job yet. It waits for a worker with a free thread: other tasks may have them."
_ENDING_S, _ENDING_POLL_S = 15.0, 0.1
_ARRIVAL_POLL_S = 0.01
# Key in Dask's configuration of the process that starts the job: time for which a coordinator may be silent.
LEASE_SETTING = "lorabatch.coordinator-lease"
_LEASE = "20s"


def launch(
    client: Client,
    job: OpenedJob,
    rows: EarlyCheck,
    reporter: JobReporter,
    engine_factory: str,
    *,
    can_ask: bool = False,
) -> tuple[str, Future[JobResult], tuple[str, ...]]:
    """Start engines for an opened job, and the task that coordinates it. Returns the id of the run, the future of the
    task, and sentences for the user about device and engines. When no client holds the future any more, the job stops.
    `can_ask`: whether a person follows the run who can be asked.

    Raises `OutputConflictError` when the job runs on this cluster already, and what `rows` raises.
    """
    # One command at a time: the second of two at the same moment finds the task of the first.
    with Semaphore(1, f"lorabatch-{job.record.job_id}", client.scheduler, client.loop):
        _refuse_running(client, job)
        reporter.takes_over()
        opened_s = reporter.phases[0][1] if reporter.phases else None
        return _launch(client, job, rows, engine_factory, opened_s, can_ask)


def _starts_later(job: OpenedJob) -> bool:
    """Whether the coordinator starts the engines once the plan has rows for them: those of an update that may compute
    none.
    """
    try:
        before = [job.store.source(name).read_record() for name in job.record.sources]
    except StorageError:
        return False
    return bool(before) and not computes_rows(job.record, before)


def _launch(
    client: Client, job: OpenedJob, rows: EarlyCheck, engine_factory: str, opened_s: float | None, can_ask: bool
) -> tuple[str, Future[JobResult], tuple[str, ...]]:
    show_jobs(client)
    keep_leases(client)
    count_losses(client)
    spec = job.spec
    # A cluster of a class may still grow to what was asked for.
    num_workers = max(count_workers(client), planned_workers(spec) if spec.is_cluster_class else 1)
    device = (
        find_device(spec.device, spec.tensor_parallel)
        if spec.is_embedded
        else find_device_of_workers(client, spec.device, spec.tensor_parallel)
    )
    settings = RunSettings.of(job, num_workers, device)
    model_sha256 = job.record.model.sha256
    engines = EngineSettings(
        spec.model, settings.engine, engine_factory, spec.storage_options, model_sha256, verify=spec.verify
    )
    rows.raise_problems()
    run_id = register_plugin(client, job.record.job_id, engines, job.store, starts_later=_starts_later(job))
    lease_s = parse_timedelta(dask.config.get(LEASE_SETTING, default=_LEASE))
    arguments = (job, run_id, time.time(), settings, lease_s, opened_s, can_ask)
    future = client.submit(run_job, *arguments, key=job_key(run_id), priority=_JOB_PRIORITY, pure=False)
    # Dask sends tasks in batches, after the requests that follow them: the next command must find this one's task.
    while not (future.done() or client.run_on_scheduler(_is_known, key=future.key)):
        time.sleep(_ARRIVAL_POLL_S)
    return run_id, future, (*device.notes, *settings.notes)


def follow(
    client: Client,
    run_id: str,
    future: Future[JobResult],
    reporter: JobReporter,
    watcher: Progress,
    received: Callable[[JobState], None] = lambda state: None,
) -> JobResult:
    """Report the job's states until it ends, and return its result. Raises the error that the job raised. `received`:
    called with each state after it was reported.

    The watcher gets a note when the cluster has no workers any more. Ctrl-C stops the job, waits until finished rows
    are kept, and raises `JobInterruptedError`.
    """
    states: queue.SimpleQueue[JobState | None] = queue.SimpleQueue()
    STATES.subscribe(client, run_id, lambda message: states.put(message.state))
    future.add_done_callback(lambda _: states.put(None))
    try:
        try:
            _report_until_done(client, future, states, reporter, watcher, received)
        except KeyboardInterrupt:
            CONTROL.publish(client, run_id, StopRun())
            _report_until_done(client, future, states, reporter, watcher, patience_s=_STOP_PATIENCE_S)
            if not future.done():
                # No worker runs the coordinator, or its worker hangs.
                future.cancel()
                unregister_plugin(client, run_id)
                raise JobInterruptedError(INTERRUPTED) from None
        return _result(future, reporter.output)
    finally:
        STATES.unsubscribe(client, run_id)


def _report_until_done(
    client: Client,
    future: Future[JobResult],
    states: queue.SimpleQueue[JobState | None],
    reporter: JobReporter,
    watcher: Progress,
    received: Callable[[JobState], None] = lambda state: None,
    *,
    patience_s: float = inf,
) -> None:
    """Report states until the coordinator's task is done and none is left, or `patience_s` have passed."""
    # A job that is to stop gets no note about missing workers: it does not go on when a worker joins.
    silent_since_s, has_said = time.monotonic(), patience_s < inf
    give_up_s, heard_s = silent_since_s + patience_s, silent_since_s
    while time.monotonic() < give_up_s:
        try:
            state = states.get(timeout=_POLL_S)
        except queue.Empty:
            if future.done():
                return
            if client.status == "closed":
                raise scheduler_lost(reporter.output) from None
            is_due = not has_said and time.monotonic() - silent_since_s > _SILENCE_S
            # A scheduler that does not answer is said already.
            if is_due and (workers := known_workers(client)) is not None:
                has_said = not workers or reporter.is_starting
                if not workers:
                    watcher.note(_NO_WORKERS)
                elif reporter.is_starting:
                    watcher.note(_NOT_BEGUN)
                else:
                    silent_since_s = time.monotonic()
            if time.monotonic() - heard_s > _SILENCE_S:
                watcher.update(reporter.latest)  # the display shows the time since this state
            continue
        heard_s = time.monotonic()
        silent_since_s, has_said = time.monotonic(), patience_s < inf
        if state is not None:
            reporter.received(state)
            received(state)


def _result(future: Future[JobResult], output: str) -> JobResult:
    try:
        return future.result()
    except KilledWorker as error:
        raise JobFailedError(
            f"The workers that coordinated the job died again and again ({error}). Finished rows are kept; see the "
            "workers' logs, and run the same command to go on."
        ) from None
    except (NoWorkerError, NoValidWorkerError) as error:
        raise JobFailedError(
            f"The cluster had no worker for {error.timeout:g} s (`distributed.scheduler.no-workers-timeout` in Dask's "
            "configuration). Finished rows are kept; start workers, and run the same command to go on."
        ) from None
    except CancelledError as error:
        if "scheduler-connection-lost" in str(error):
            raise scheduler_lost(output) from None
        raise JobFailedError(
            f"The cluster has lost the job ({error}). Finished rows are kept; run the same command to go on."
        ) from None


def _refuse_running(client: Client, job: OpenedJob) -> None:
    """Raise `OutputConflictError` when this job runs on the cluster already.

    A run records its end before its task leaves the cluster. If the latest state is an end, or this command's own, the
    function waits for the task to leave.
    """
    patience_s = time.monotonic() + _ENDING_S
    while client.run_on_scheduler(_unfinished, job_id=job.record.job_id):
        state = latest_state(job.store)
        has_ended = state is not None and (state.is_final or state.is_of_command)
        if not has_ended or time.monotonic() >= patience_s:
            raise OutputConflictError(
                f"output={redacted_url(job.spec.output)!r}: this job runs on the cluster already. Follow it with "
                "`lorabatch status` or `lorabatch logs -f`, or stop it with `lorabatch cancel`."
            )
        time.sleep(_ENDING_POLL_S)


def _is_known(dask_scheduler: Any, key: str) -> bool:
    return key in dask_scheduler.tasks


def _unfinished(dask_scheduler: Any, job_id: str) -> bool:
    return any(
        str(key).startswith(job_key(job_id) + "-") and task.state not in ("memory", "erred", "released")
        for key, task in dask_scheduler.tasks.items()
    )
