"""A job from its spec to its result.

    open ── hand to a cluster ── follow

On the cluster (`job_task`, `stages`): index ── plan ── coordinate ── count ── _SUCCESS. Every stage can be repeated:
what is in the output already is not done again.
"""

from __future__ import annotations

from distributed import Client

from ..jobs.opening import open_job
from ..jobs.spec import JobSpec
from .adapter_audits import adapter_notes
from .cluster import cluster_of, loss_told
from .hub import page_address
from .job_log import job_log
from .job_reporter import JobReporter
from .job_result import JobResult
from .job_task import finished_before
from .launch import follow, launch
from .messages import ENGINE_FACTORY
from .progress import Progress, SilentProgress


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
