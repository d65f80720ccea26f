"""`run_job`: the Dask task that takes one opened job to its end.

It leaves the worker's thread pool at once and needs no client: when its worker is lost, Dask starts it again on
another, where it goes on from what the output holds and from what the engines still have open.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from distributed import Reschedule, get_worker, secede

from ..jobs.errors import OutputConflictError
from ..jobs.opening import OpenedJob, changed_adapters
from ..jobs.secrets import redacted_url
from .cluster import client_security, loss_told
from .coordinator_lease import CoordinatorLease
from .dask_client import open_client
from .hosts import stop_hosts
from .job_control import JobControl
from .job_forecast import Forecaster
from .job_reporter import JobReporter
from .job_result import JobResult
from .peers import Peers
from .progress import SilentProgress
from .stages import JobRun, coordinate, count_rows, finish, index_rows, plan_shards
from .told_progress import ToldProgress

logger = logging.getLogger(__name__)


def run_job(job: OpenedJob, run_id: str, began_s: float, forecaster: Forecaster, lease_s: float) -> JobResult:
    """Run an opened job whose engine hosts are set up. `began_s`: when, in seconds since the epoch. `lease_s`: another
    coordinator takes over when this one has been silent for so long.

    Raises what `run.run` says. The hosts are gone when it returns or raises.
    """
    secede()
    worker = get_worker()
    if _is_finished(job):
        return finished_before(job)
    key = worker.get_current_task()
    with (
        open_client(worker.scheduler.address, security=client_security(worker)) as client,
        CoordinatorLease(client, run_id, lease_s) as lease,
        JobControl(client, worker, job.store, run_id, key, lease) as control,
    ):
        client.run_on_scheduler(_forgive, key=key)
        told = ToldProgress(client, run_id, redacted_url(job.spec.output))
        reporter = JobReporter(job.store, told, job.spec.error_budget)
        run = JobRun(client, job, run_id, control, reporter, Peers(worker, run_id), forecaster)
        try:
            with loss_told(client):
                result = _stages(run, began_s)
            lease.end()
            return result
        except Exception as error:
            if control.is_displaced:
                logger.info("job %s goes on elsewhere", job.record.job_id)
                raise Reschedule from None
            stop_hosts(client, run_id)
            lease.end()
            if isinstance(error, OutputConflictError):
                raise  # what lies there, and its state, is another job's
            if _is_finished(job):
                return finished_before(job)  # another run of the job was faster, and has removed what this one needed
            reporter.ended(error)
            raise


def _is_finished(job: OpenedJob) -> bool:
    """Whether an attempt before this one has done it all: Dask asks again when a result's worker is lost."""
    return job.store.is_finished() and not changed_adapters(job.store.read_record(), job.record)


def finished_before(job: OpenedJob) -> JobResult:
    """The result of a job that has nothing left to do.

    An attempt that was killed before it had cleaned up, or began while another one ended and then hung, leaves files
    of a running job behind and a state that says so: both are put right.
    """
    summary = job.store.read_summary()
    assert summary is not None, "_SUCCESS is there, summary.json is not"
    result = JobResult.from_json(summary)
    state = job.store.read_state()
    if state is None or state.phase != "done":
        JobReporter(job.store, SilentProgress(), job.spec.error_budget).done(result)
    else:
        job.store.clean_up()
    return result


def _stages(run: JobRun, began_s: float) -> JobResult:
    # A coordinator that Dask has started again may find a job that was started over.
    run.job.store.check_holder(run.job.record.job_id)
    plan = plan_shards(run, index_rows(run))
    done = coordinate(run, plan)
    stop_hosts(run.client, run.run_id)
    account = count_rows(run, plan)
    return finish(run, plan, account, done, time.time() - began_s)


def _forgive(dask_scheduler: Any, key: Any) -> None:
    """Deaths of workers that this task was on do not count against it: `allowed-failures` would end it for them."""
    task = dask_scheduler.tasks.get(key)
    if task is not None:
        task.suspicious = 0
