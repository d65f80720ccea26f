"""A job from its spec to its result.

    open ── index ── plan ── coordinate ── count ── _SUCCESS

Every stage can be repeated: what is in the output already is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from distributed import Client, as_completed

from ..jobs.opening import OpenedJob, open_job
from ..jobs.spec import JobSpec
from ..scheduler.scheduler import Scheduler, SchedulerSettings
from .account import Account, account_parts
from .adapter_audits import adapter_notes
from .cluster import cluster_of, count_workers, loss_told
from .coordinator import Coordinator
from .hosts import engine_hosts, engine_settings
from .index import ChunkSummary, index_chunk, list_chunks
from .index_job import IndexJob
from .job_log import job_log
from .job_monitor import JobMonitor
from .job_reporter import JobReporter
from .job_result import JobResult
from .messages import ENGINE_FACTORY
from .planning import JobPlan, plan_job, read_plan
from .progress import Progress, SilentProgress
from .reopening import reopen_shards

_PARTS_PER_COUNT = 64
_INDEX_RETRIES = 3


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
    began_s = time.monotonic()
    job = open_job(spec)
    if job.is_finished and not job.changed_adapters:
        return _finished_before(job)
    job.store.clear_cancel()
    watcher = progress or SilentProgress()
    for line in adapter_notes(job.record.adapters):
        watcher.note(line)
    reporter = JobReporter(job.store, watcher, job.spec.error_budget)
    with reporter.ending_recorded():
        with job_log(job.store), cluster_of(job.spec, client) as dask, loss_told(dask):
            settings = engine_settings(job, count_workers(dask), engine_factory)
            with engine_hosts(dask, job.record.job_id, settings, job.store) as run_id:
                plan = _plan(dask, job, _index(dask, job, run_id, reporter), reporter)
                num_reused = _coordinate(dask, job, run_id, plan, reporter)
            account = _count(dask, job, plan, reporter)
        return _finish(job, plan, account, num_reused, time.monotonic() - began_s, reporter)


def _finished_before(job: OpenedJob) -> JobResult:
    summary = job.store.read_summary()
    assert summary is not None, "_SUCCESS is there, summary.json is not"
    return JobResult.from_json(summary)


def _index(dask: Client, job: OpenedJob, run_id: str, reporter: JobReporter) -> list[ChunkSummary]:
    """Index every row group on the workers; chunks that are indexed already answer at once."""
    rows = job.record.input.num_rows
    reporter.phase("indexing", rows)
    futures = dask.map(
        index_chunk,
        list_chunks(job.record),
        job=IndexJob.from_record(job.record, job.spec),
        store=job.store,
        key=f"lora_index-{run_id}",
        retries=_INDEX_RETRIES,
        pure=False,
    )
    summaries: list[ChunkSummary] = []
    try:
        for _, summary in as_completed(futures, loop=dask.loop, with_results=True):
            summaries.append(summary)
            reporter.phase("indexing", rows, sum(done.num_rows for done in summaries))
    finally:
        dask.cancel(futures)
    return sorted(summaries, key=lambda summary: summary.chunk_id)


def _plan(dask: Client, job: OpenedJob, summaries: Sequence[ChunkSummary], reporter: JobReporter) -> JobPlan:
    """Cut the rows into shards, once: a resumed job keeps its shards. Parts with rows of changed adapters reopen."""
    reporter.phase("planning", job.record.input.num_rows)
    if not job.store.has_plan():
        plan = plan_job(
            job.store,
            job.record,
            summaries,
            batch_rows=job.spec.batch_rows,
            num_replicas=count_workers(dask),
        )
    else:
        plan, _ = reopen_shards(job.store, job.record, read_plan(job.store), job.changed_adapters)
    # Only now: a run that is killed before must find the adapters changed again.
    job.store.replace_record(job.record)
    return plan


def _coordinate(dask: Client, job: OpenedJob, run_id: str, plan: JobPlan, reporter: JobReporter) -> int:
    """Run every shard that has no part; the number of rows that were done before."""
    rows_of_part = {shard_id: plan.shards[shard_id].num_rows for shard_id in job.store.committed_parts()}
    names = {adapter.sha256: adapter.name for adapter in job.record.adapters if not adapter.is_refused}
    monitor = JobMonitor(plan.shards, rows_of_part, names)
    settings = SchedulerSettings(expected_replicas=count_workers(dask))
    scheduler = Scheduler(plan.shards, committed=rows_of_part, settings=settings)
    reporter.phase("running", plan.num_rows, sum(rows_of_part.values()))
    Coordinator(dask, job.store, run_id, scheduler, monitor, reporter).run()
    return sum(rows_of_part.values()) + sum(outcome.num_reused for outcome in monitor.outcomes)


def _count(dask: Client, job: OpenedJob, plan: JobPlan, reporter: JobReporter) -> Account:
    """Count what the parts hold, on the workers."""
    reporter.phase("finishing", plan.num_rows, plan.num_rows)
    shard_ids = [shard.shard_id for shard in plan.shards]
    groups = [shard_ids[start : start + _PARTS_PER_COUNT] for start in range(0, len(shard_ids), _PARTS_PER_COUNT)]
    total = Account()
    futures = dask.map(partial(account_parts, job.store, job.record), groups, pure=False)
    for account in dask.gather(futures):
        total.add(account)
    return total


def _finish(
    job: OpenedJob, plan: JobPlan, account: Account, num_reused: int, seconds: float, reporter: JobReporter
) -> JobResult:
    """Check that the parts hold every row, write the summary, and say that the job is done."""
    account.check_complete(plan)
    result = JobResult(
        output=job.spec.output,
        job_id=job.record.job_id,
        num_rows=account.num_rows,
        num_errors=account.num_errors,
        num_parts=account.num_parts,
        prompt_tokens=account.prompt_tokens,
        completion_tokens=account.completion_tokens,
        errors=(*plan.errors, *account.engine_error_kind()),
        adapters=account.adapter_counts(),
        seconds=seconds,
        num_reused=num_reused,
    )
    reporter.check_budget(account.num_errors, account.num_rows)
    job.store.write_summary(result.to_json())
    reporter.done(result)
    job.store.mark_success()
    job.store.clean_up()
    return result
