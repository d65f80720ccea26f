"""A job from its spec to its result.

    open ── hand to a cluster ── follow

On the cluster (`job_task`, `stages`): index ── plan ── coordinate ── count ── _SUCCESS. Every stage can be repeated:
what is in the output already is not done again.

A job handed to a cluster, and a client that follows it there.
"""

from __future__ import annotations

import logging
import queue
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Client, Future, KilledWorker

from ..jobs.adapters import adapter_notes
from ..jobs.errors import JobFailedError, JobInterruptedError, JobRequestError
from ..jobs.opening import OpenedJob, open_job
from ..jobs.spec import JobSpec
from ..jobs.storage.redaction import redacted_url
from .cluster.connect import cluster_of, count_workers, loss_told, page_address, subscribe
from .coordinator.control import ask_to_stop
from .coordinator.lease import keep_leases
from .coordinator.task import finished_before, run_job
from .messages import ENGINE_FACTORY, job_key
from .monitoring.logs import job_log
from .monitoring.reporter import INTERRUPTED, JobReporter, Progress, SilentProgress, state_of, state_topic
from .monitoring.scheduler_plugin import show_jobs
from .planning.forecast import Forecaster
from .result import JobResult
from .worker.registration import engine_settings, start_hosts, stop_hosts

logger = logging.getLogger(__name__)


def run(
    spec: JobSpec,
    *,
    client: Client | None = None,
    progress: Progress | None = None,
    engine_factory: str = ENGINE_FACTORY,
) -> JobResult:
    """Run a job to its end, or go on with it where it stopped.

    `client`: of the cluster to use instead of `spec.cluster`. `engine_factory`: see `EngineSettings`.

    Raises `JobRequestError` with all problems of the request before anything is written; `ErrorBudgetError` when too
    many rows are wrong; `JobFailedError` or `StorageError` when the job cannot go on; `JobInterruptedError` on Ctrl-C
    or a request to cancel. Whatever is finished by then is kept: running the job again goes on from there.
    """
    job = open_job(spec)
    watcher = progress or SilentProgress()
    if job.is_finished and not job.changed_adapters:
        watcher.note("This job is done already. Nothing was run.")
        return finished_before(job)
    job.store.clear_cancel()
    for line in adapter_notes(job.record.adapters):
        watcher.note(line)
    reporter = JobReporter(job.store, watcher, job.spec.error_budget)
    with (
        reporter.ending_recorded(),
        job_log(job.store),
        cluster_of(job.spec, client) as dask,
        loss_told(dask),
    ):
        launched = launch(dask, job, engine_factory)
        if page := page_address(dask):
            watcher.note(f"dashboard: {page}")
        return follow(dask, launched, reporter)


_JOB_PRIORITY = 100
# Finished rows are flushed and engines stopped meanwhile.
_STOP_PATIENCE_S = 45.0
_POLL_S = 0.5
# In Dask's configuration of whoever starts the job: how long a coordinator may be silent.
LEASE_SETTING = "lorabatch.coordinator-lease"
_LEASE = "20s"


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A job that a cluster runs. `future`: of its coordinator; without anybody who holds it, the job stops."""

    job: OpenedJob
    run_id: str
    future: Future[JobResult]


def launch(client: Client, job: OpenedJob, engine_factory: str) -> LaunchedJob:
    """Start engines for an opened job, and the task that coordinates it.

    Raises `JobRequestError` when the job runs on this cluster already.
    """
    _refuse_running(client, job)
    show_jobs(client)
    keep_leases(client)
    num_workers = count_workers(client)
    forecaster = Forecaster.of(job, num_workers)
    settings = engine_settings(job, num_workers, engine_factory, forecaster.cost.cost)
    run_id = start_hosts(client, job.record.job_id, settings, job.store)
    lease_s = parse_timedelta(dask.config.get(LEASE_SETTING, default=_LEASE))
    asked = (job, run_id, time.time(), forecaster, lease_s)
    future = client.submit(run_job, *asked, key=job_key(run_id), priority=_JOB_PRIORITY, pure=False)
    return LaunchedJob(job, run_id, future)


def follow(client: Client, launched: LaunchedJob, reporter: JobReporter) -> JobResult:
    """Pass the job's states on until it ends; its result. Raises what the job raised.

    Ctrl-C stops the job, waits until finished rows are kept, and raises `JobInterruptedError`.
    """
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    topic = state_topic(launched.run_id)
    subscribe(client, topic, lambda event: inbox.put(event[1]))
    launched.future.add_done_callback(lambda _: inbox.put(None))
    hear = partial(_hear_until_done, client, launched.future, inbox, reporter)
    try:
        try:
            hear(None)
        except KeyboardInterrupt:
            _stop(client, launched, hear)
        return _result(launched.future)
    finally:
        client.unsubscribe_topic(topic)


def _hear_until_done(
    client: Client,
    future: Future[JobResult],
    inbox: queue.SimpleQueue[dict[str, Any] | None],
    reporter: JobReporter,
    patience_s: float | None,
) -> None:
    """Report states until the job's task is done and nothing is left to hear, or `patience_s` have passed."""
    give_up_s = None if patience_s is None else time.monotonic() + patience_s
    while give_up_s is None or time.monotonic() < give_up_s:
        try:
            message = inbox.get(timeout=_POLL_S)
        except queue.Empty:
            if future.done():
                return
            if client.status == "closed":
                raise JobFailedError(
                    "The Dask scheduler is gone. Finished rows are kept; run the same command to go on."
                ) from None
            continue
        state = state_of(message) if message else None
        if state is not None:
            reporter.heard(state)


def _stop(client: Client, launched: LaunchedJob, hear: Any) -> None:
    """Ask the job to stop and wait until it has."""
    ask_to_stop(client, launched.run_id)
    hear(_STOP_PATIENCE_S)
    if not launched.future.done():
        # No worker runs the coordinator, or the one that does hangs.
        launched.future.cancel()
        stop_hosts(client, launched.run_id)
        raise JobInterruptedError(INTERRUPTED)


def _result(future: Future[JobResult]) -> JobResult:
    try:
        return future.result()
    except KilledWorker as error:
        raise JobFailedError(
            f"The workers that coordinated the job died again and again ({error}). Finished rows are kept; see the "
            "workers' logs, and run the same command to go on."
        ) from None
    except CancelledError as error:
        raise JobFailedError(
            f"The cluster has lost the job ({error}). Finished rows are kept; run the same command to go on."
        ) from None


def _refuse_running(client: Client, job: OpenedJob) -> None:
    """Raise `JobRequestError` when this job runs on the cluster already."""
    running = client.run_on_scheduler(_unfinished, job_id=job.record.job_id)
    if running:
        raise JobRequestError(
            f"output={redacted_url(job.spec.output)!r}: this job runs on the cluster already. Follow it with "
            "`lorabatch status` or `lorabatch logs -f`, or stop it with `lorabatch cancel`."
        )


def _unfinished(dask_scheduler: Any, job_id: str) -> bool:
    return any(
        str(key).startswith(f"lora_job-{job_id}-") and task.state not in ("memory", "erred", "released")
        for key, task in dask_scheduler.tasks.items()
    )
