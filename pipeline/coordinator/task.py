"""`run_job`: the Dask task that takes one opened job to its end: index, plan, coordinate, count, finish.

It leaves the worker's thread pool at once and runs on when the user's client is gone. Each stage can be repeated: when
the task's worker is lost, Dask starts it again on another one, where it goes on from what the output holds and what
engines have open.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distributed import Reschedule, get_worker, secede

from ...jobs.contents import part_name
from ...jobs.errors import (
    DamagedRecordError,
    JobFailedError,
    OutputConflictError,
    StorageError,
    error_of_kind,
)
from ...jobs.opening.opened_job import OpenedJob
from ...jobs.parts import OF_NO_SHARD, in_words
from ...jobs.record import changed_adapters
from ...jobs.status.notes import row_notes
from ...jobs.storage.limits import expect_away
from ...jobs.storage.local_copy import is_remote
from ...jobs.storage.redaction import redacted_url
from ...jobs.updates import put_in_place
from ...scheduler.assignment.dispatch import AdapterSources
from ...scheduler.estimates.lengths import AnswerKey, AnswerLengths, LengthEstimator, lengths_by_adapter
from ...scheduler.estimates.step_costs import StepCosts
from ...scheduler.estimates.time_left import PlannedJob, Work
from ...scheduler.estimates.work_left import WorkLeft
from ...scheduler.messages import AdapterFetch
from ...scheduler.planning.bound import JobWork, work_bound
from ...scheduler.planning.waves import Shard
from ...scheduler.policies import make_scheduler
from ..cluster.connect import cluster_errors_named, count_workers, known_workers, open_client
from ..cluster.security import client_security
from ..dataset.chunk import ChunkRef, IndexJob
from ..dataset.index import IndexTotals, check_chunk, deadly_chunk, index_chunk, list_chunks
from ..dataset.reader import read_shard
from ..migration.peers import ForeseeAdapters, Peers
from ..monitoring.job_monitor import JobMonitor
from ..monitoring.reporter import JobReporter, latest_state, state_before, state_publisher
from ..monitoring.topics import WAITS
from ..planning.plan import JobPlan, plan_job, read_plan, reopen_shard, reopen_shards, serving_adapters
from ..planning.settings import RunSettings
from ..result import JobResult
from ..worker.registration import is_registered, start_engines, unregister_plugin
from ..worker.run_shard import keep_shards
from .control import JobControl, JobRun
from .driver import Coordinator
from .fan_out import FanOut
from .finishing import HISTORY_S, Coordinated, finish
from .lease import CoordinatorLease
from .limits import JobLimits
from .summary import Account, account_parts

logger = logging.getLogger(__name__)


def run_job(
    job: OpenedJob,
    run_id: str,
    began_s: float,
    settings: RunSettings,
    lease_s: float,
    opened_s: float | None = None,
    can_ask: bool = False,
) -> JobResult:
    """Run an opened job whose workers have their plugins. `began_s`: beginning of the run, in seconds since the epoch.
    `opened_s`: beginning of the command that opened the job, by default the run's. `lease_s`: seconds of silence after
    which another coordinator takes over. `can_ask`: whether a person follows the run who can be asked.

    Raises what `run.run` raises. The plugins are unregistered when it returns or raises.
    """
    secede()
    worker = get_worker()
    if has_finished(job):
        with open_client(worker.scheduler.address, security=client_security(worker)) as client:
            unregister_plugin(client, run_id)
        return finished_before(job)
    key = worker.get_current_task()
    with (
        open_client(worker.scheduler.address, security=client_security(worker)) as client,
        CoordinatorLease(client, run_id, lease_s) as lease,
        JobControl(client, worker, job.store, run_id, key, lease) as control,
    ):
        client.run_on_scheduler(_forgive, key=key)
        publish = state_publisher(client, run_id, redacted_url(job.spec.output))
        reporter = JobReporter(job.store, publish, job.spec.error_budget, state_before(job, run_id))
        reporter.phases += [("opening", min(opened_s, began_s))] if opened_s is not None else []
        reporter.phases.append(("starting", began_s))
        run = JobRun(client, job, run_id, control, reporter, Peers(worker, run_id), settings, can_ask)
        try:
            with (
                cluster_errors_named(client, redacted_url(job.store.url)),
                reporter.kept_fresh(lambda: not control.is_displaced),
                reporter.waits_shown(),
            ):
                _raise_error_of_run(job, run_id)
                WAITS.subscribe(client, run_id, reporter.waits.put)
                result = _stages(run)
            lease.end()
            return result
        except Exception as error:
            if control.is_displaced:
                logger.info("job %s goes on elsewhere", job.record.job_id)
                raise Reschedule from None
            unregister_plugin(client, run_id)
            lease.end()
            if isinstance(error, StorageError) and error.is_away:
                expect_away(job.store.url)
            if isinstance(error, OutputConflictError) or not _holds_output(job):
                raise
            # Another run of the job may have been faster, and have removed files that this one needed.
            if not has_finished(job):
                reporter.ended(error)
                if not has_finished(job):
                    raise
            return finished_before(job)


def _raise_error_of_run(job: OpenedJob, run_id: str) -> None:
    """Raise the error by which an earlier coordinator has ended the run, if it has: its worker may have been lost
    before Dask had the error, and the run has no engines any more.
    """
    state = latest_state(job.store)
    if state is not None and state.run_id == run_id and state.error:
        raise error_of_kind(state.error, state.phase)(state.message)


def has_finished(job: OpenedJob) -> bool:
    """Whether the job has all its answers, as far as storage says. Another run, or another coordinator of this run, may
    have finished it: Dask starts a coordinator again when the worker that has its result is lost.
    """
    try:
        store = job.store.settled()
        if not store.is_finished():
            return False
        frozen = store.read_record()
    except StorageError:
        return False
    return frozen.job_id == job.record.job_id and not changed_adapters(frozen, job.record)


def _holds_output(job: OpenedJob) -> bool:
    """Whether the output is still this job's, and its storage answers: each further request to a storage that is away
    would take half a minute.
    """
    try:
        job.store.settled().check_holder(job.record.job_id)
    except (OutputConflictError, StorageError):
        return False
    return True


def finished_before(job: OpenedJob) -> JobResult:
    """The result of a job that has nothing left to do.

    An attempt that was killed before it had cleaned up, or that began while another one ended and then hung, leaves
    files and the state of a running job behind: both are put right.
    """
    store = put_in_place(job.store)
    summary = store.read_summary()
    if summary is None:
        raise DamagedRecordError("summary.json: is gone, and _SUCCESS is there. Run the same command again.")
    result = JobResult.from_json(summary)
    reporter = JobReporter(store, lambda state: None, job.spec.error_budget)
    state = latest_state(store)
    if state is not None and state.phase == "done":
        reporter.clean_up()
        return result
    try:
        reporter.done(result)
    except StorageError as error:
        logger.warning("the job is done, and its state does not say so: %s", error)
    return result


def _stages(run: JobRun) -> JobResult:
    # A coordinator that Dask has started again may find a job that was started over.
    run.job.store.check_holder(run.job.record.job_id)
    indexed = index_rows(run)
    plan = plan_shards(run, indexed)
    for turn in range(_TURNS):
        done = coordinate(run, plan, indexed, turn)
        account = count_rows(run, plan, turn)
        if not account.unusable:
            break
    unregister_plugin(run.client, run.run_id)
    return finish(run, plan, account, done)


def _forgive(dask_scheduler: Any, key: Any) -> None:
    """Do not count lost workers against the task: Dask's `allowed-failures` would end it."""
    task = dask_scheduler.tasks.get(key)
    if task is not None:
        task.suspicious = 0


_PARTS_PER_COUNT = 64
# Most times that parts are computed and counted: parts that were changed while the job ran are computed again.
_TURNS = 3


def index_rows(run: JobRun) -> IndexTotals:
    """Index every row group on the workers; chunks that are indexed already return at once.

    Small files that end the workers that index them together are then read one by one, to name those that do.
    """
    record, reporter = run.job.record, run.reporter
    rows = record.num_asked
    reporter.phase("indexing", rows)
    chunks = list_chunks(record, run.job.spec.places)
    job = IndexJob.from_record(record, run.job.spec)
    name, attempt = f"index-{run.run_id}", run.control.coordinator_id
    lost: list[ChunkRef] = []

    def give_up(chunk: ChunkRef) -> IndexTotals:
        lost.append(chunk)
        return deadly_chunk(chunk)

    indexing = FanOut(run.client, index_chunk, chunks, name, attempt, give_up, job=job, store=run.job.store)
    totals = IndexTotals()
    for summary in indexing.results(run.control):
        totals.add(summary)
        reporter.phase("indexing", rows, rows_indexed=totals.num_rows)
    together = [chunk for chunk in lost if len(chunk.row_groups) > 1]
    return _with_own_damages(run, totals, together, job) if together else totals


def _with_own_damages(run: JobRun, totals: IndexTotals, lost: Sequence[ChunkRef], job: IndexJob) -> IndexTotals:
    """The totals with damages of single files in place of those of lost chunks, where a file shows some by itself."""
    groups = [(chunk.chunk_id, group) for chunk in lost for group in chunk.row_groups]
    alone = [ChunkRef(number, (group,)) for number, (_, group) in enumerate(groups)]
    reading = FanOut(
        run.client, check_chunk, alone, f"read-{run.run_id}", run.control.coordinator_id, deadly_chunk, job=job
    )
    damages = IndexTotals.of(reading.results(run.control)).damages
    own: dict[int, tuple[str, ...]] = {}
    for number in sorted(damages):
        chunk_id = groups[number][0]
        own[chunk_id] = own.get(chunk_id, ()) + damages[number]
    return replace(totals, damages=totals.damages | own)


def plan_shards(run: JobRun, indexed: IndexTotals) -> JobPlan:
    """Cut the rows into shards, once: a resumed job keeps its shards. Parts with rows of changed adapters reopen."""
    job = run.job
    run.reporter.phase("planning", job.record.num_asked)
    if not job.store.has_plan():
        plan = plan_job(
            job.store,
            job.record,
            indexed,
            num_replicas=count_workers(run.client),
            settings=run.settings,
        )
    else:
        # The record is read again: an earlier coordinator may have reopened the parts of changed adapters.
        changed = changed_adapters(job.store.read_record(), job.record)
        if changed - job.changed_adapters:
            job.store.check_current(job.record)  # raises: a newer run has changed the record since this one was opened
        plan = reopen_shards(
            job.store,
            job.record,
            read_plan(job.store),
            changed | indexed.cured,
            length_share=run.settings.length_share,
            check=run.control.check_displaced,
        )
    of_rows = row_notes(job.record, indexed.rows_per_adapter, indexed.peculiar_rows)
    of_update = [plan.update.to_text()] if plan.update else []
    run.reporter.notes = (*of_update, *run.settings.device.notes, *of_rows)
    # This process may have been stopped, and the output be another job's or another coordinator's by now.
    run.control.check_displaced()
    job.store.check_holder(job.record.job_id)
    # The record is replaced last: the run after one that is killed before must find the adapters changed again.
    job.store.replace_record(job.record)
    return plan


def coordinate(run: JobRun, plan: JobPlan, indexed: IndexTotals, turn: int = 0) -> Coordinated:
    """Run every shard that has no part, or whose part is not what it should be. Errors in existing parts count against
    the job's budget too. `turn`: number of calls before this one in this run.
    """
    job = run.job
    if job.record.sources and not any(shard.has_engine_work for shard in plan.shards):
        _keep_all(run, plan, turn)
    # A job without shards may have an empty part, if an earlier run was killed right after it had written the part.
    there = job.store.committed_parts() if plan.shards else {}
    strange = {shard_id: OF_NO_SHARD for shard_id in there if shard_id >= len(plan.shards)}
    found = _count(run, sorted(there.keys() - strange.keys()), f"errors{turn}", reopens=True)
    _take_away(run, found.unusable | strange, found.curable)
    rows_of_part = {shard_id: plan.shards[shard_id].num_rows for shard_id in found.parts}
    run.reporter.check_budget(found.num_errors, plan.num_rows)
    if len(rows_of_part) < len(plan.shards):
        if job.record.is_wide:
            job.store.keep_files({})  # files with answers that are computed again
        _need_engines(run)
        _foresee(run, [shard for shard in plan.shards if shard.shard_id not in rows_of_part])
    names = {adapter.sha256: adapter.name for adapter in job.record.adapters if not adapter.is_refused}
    known_lengths = None if job.spec.sampling.ignore_eos else _known_lengths(run, indexed.rows_per_task)
    before = replace(
        run.reporter.latest,
        rows_error=found.num_errors,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
    )
    done = [outcome.count for outcome in found.adapter_outcomes()]
    limits = JobLimits(run, plan, rows_of_part, done)
    monitor = JobMonitor(plan.shards, rows_of_part, names, before, found.num_reused, indexed.rows_per_adapter, done)
    num_workers = count_workers(run.client)
    settings = replace(
        run.settings.scheduler(num_workers, serving_adapters(job.record)),
        planned=_planned(run.settings, plan, num_workers, known_lengths),
        holds_rest=limits.is_to_confirm,
        canary=limits.answered,
    )
    scheduler = make_scheduler(plan.shards, committed=rows_of_part, settings=settings)
    if len(rows_of_part) < len(plan.shards) or not job.record.sources:
        run.reporter.phase("loading engines", plan.num_rows, rows_done=sum(rows_of_part.values()))
    coordinator, estimates = Coordinator(run, scheduler, monitor, limits), scheduler.estimates
    coordinator.run()
    is_whole = not coordinator.has_adopted and found.num_reused == found.num_rows
    bound_s = _bound_s(run, coordinator, estimates.costs, monitor.work) if is_whole else None
    measured = estimates.costs.measured() if estimates.costs.seconds >= HISTORY_S else None
    return Coordinated(
        coordinator.working_s if is_whole else None,
        bound_s,
        estimates.corrected_s,
        measured,
        monitor.batch_fill,
        monitor.prefix_hit_rate,
        monitor.adapter_use,
    )


def _need_engines(run: JobRun) -> None:
    """Start the engines of an update; those of other jobs load already. Raises `JobFailedError` if the run is over."""
    if not is_registered(run.client, run.run_id):
        raise JobFailedError(
            "The worker that coordinated the job was lost while the run ended. Finished rows are kept; run the same "
            "command to go on."
        )
    if run.job.record.sources:
        start_engines(run.client, run.run_id)


def _foresee(run: JobRun, shards: Sequence[Shard]) -> None:
    """Tell the workers which adapters their shards will need, so that these come while engines load. A worker of which
    the plan knows nothing gets its share of the shards that have no place.
    """
    workers = sorted(known_workers(run.client) or ())
    if not workers or not any(is_remote(adapter.url) for adapter in run.job.record.adapters):
        return
    sources = AdapterSources()
    needed: list[dict[str, AdapterFetch]] = [{} for _ in workers]
    for place, shard in enumerate(shards):
        number = (place if shard.replica is None else shard.replica) % len(workers)
        for fetch in sources.of_shard(workers[number], shard):
            needed[number].setdefault(fetch.adapter_id, fetch)
    for worker, fetches in zip(workers, needed, strict=True):
        run.peers.send(worker, ForeseeAdapters(tuple(fetches.values())))


def _known_lengths(run: JobRun, rows_per_task: Mapping[AnswerKey, int]) -> dict[str | None, AnswerLengths]:
    """Lengths of the answers of each of the job's adapters in earlier jobs, by content hash."""
    ids: dict[str | None, str | None] = {adapter.name: adapter.sha256 for adapter in run.job.record.adapters}
    ids[None] = None
    rows = {(ids[name], task): count for (name, task), count in rows_per_task.items() if name in ids}
    return lengths_by_adapter(run.settings.lengths, rows)


def _keep_all(run: JobRun, plan: JobPlan, turn: int) -> None:
    """Write the parts of an update in which no row is computed. Shards of which that is not true after all are left for
    engines; nothing else waits for one.
    """
    groups = _in_groups([shard.shard_id for shard in plan.shards])
    given = {"store": run.job.store, "record": run.job.record, "spec": run.job.spec, "run_id": run.run_id}
    name, attempt = f"keep{turn}-{run.run_id}", run.control.coordinator_id
    writing = FanOut(run.client, keep_shards, groups, name, attempt, lambda shard_ids: 0, **given)
    num_done = 0
    for num_written in writing.results(run.control):
        num_done += num_written
        run.reporter.phase("running", plan.num_rows, rows_done=plan.num_rows * num_done // len(plan.shards))


def _in_groups(shard_ids: Sequence[int]) -> list[Sequence[int]]:
    return [shard_ids[start : start + _PARTS_PER_COUNT] for start in range(0, len(shard_ids), _PARTS_PER_COUNT)]


def _take_away(run: JobRun, bad: Mapping[int, str], curable: Mapping[int, str]) -> None:
    """Remove parts, so that their shards are computed again; each has a clause that says why. Answers of `curable`
    parts are kept.
    """
    if not bad and not curable:
        return
    run.control.check_displaced()
    logger.warning("parts that are computed again: %s", in_words({**bad, **curable}))
    for shard_id in bad:
        run.job.store.remove_part(shard_id)
    for shard_id in curable:
        reopen_shard(run.job.store, run.job.record, read_shard(run.job.store, run.job.record, shard_id))


def _planned(
    settings: RunSettings, plan: JobPlan, num_workers: int, known_lengths: Mapping[str | None, AnswerLengths] | None
) -> PlannedJob:
    num_places = settings.limits.batch_rows * num_workers
    work = WorkLeft(plan.shards, known_lengths, LengthEstimator()).now(num_places, Work())
    return PlannedJob(
        plan.predicted_s, work, settings.step_prices, num_workers, settings.is_guess, num_places, known_lengths
    )


def _bound_s(run: JobRun, coordinator: Coordinator, costs: StepCosts, work: JobWork | None) -> float | None:
    """Lower bound, in seconds, of the time in which these engines could have answered these rows, by the measured costs
    of their steps. None when too few steps were seen, or when the bound is above the measured time.
    """
    if work is None or not work.adapters or not costs.is_known:
        return None
    measured = costs.measured()
    bound_s = work_bound(
        work,
        {adapter.sha256: float(max(adapter.rank, 1)) for adapter in run.job.record.adapters if adapter.sha256},
        measured,
        batch_rows=coordinator.batch_rows,
        step_tokens=run.settings.limits.step_tokens,
        slowness=list(costs.slowness(measured).values()),
    ).seconds
    if bound_s > coordinator.working_s:
        logger.info("no lower bound: it would be %.2f s of %.2f s measured", bound_s, coordinator.working_s)
        return None
    return bound_s


def count_rows(run: JobRun, plan: JobPlan, turn: int = 0) -> Account:
    """Compare the parts with the plan and count their rows, on the workers."""
    run.reporter.phase("finishing", plan.num_rows, rows_done=plan.num_rows)
    # The lengths that plans expect are no costs, and may be many.
    settings = replace(run.settings, lengths={})
    shard_ids = [shard.shard_id for shard in plan.shards]
    return _count(run, shard_ids, f"count{turn}", settings=settings, spec=run.job.spec)


def _count(run: JobRun, shard_ids: Sequence[int], name: str, **options: Any) -> Account:
    """Run `account_parts` with these `options` on the workers and add its accounts up. `name`: unique name of this
    count within the run; Dask keeps results by name.
    """
    groups = _in_groups(shard_ids)
    total = Account()
    key, attempt = f"{name}-{run.run_id}", run.control.coordinator_id
    given = {"store": run.job.store, "record": run.job.record, "run_id": run.run_id}
    counting = FanOut(run.client, account_parts, groups, key, attempt, _refuse_deadly, **given | options)
    for account in counting.results(run.control):
        total.add(account)
    return total


def _refuse_deadly(shard_ids: Sequence[int]) -> Any:
    parts = f"{part_name(shard_ids[0])} to {part_name(shard_ids[-1])}"
    raise JobFailedError(
        f"output: two workers or more were lost while they counted {parts}. The workers' logs may say more; run the "
        "same command to go on."
    )
