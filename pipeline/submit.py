"""`submit`: hands a job to a cluster that runs it without its client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distributed import Client

from ..jobs.errors import JobRequestError
from ..jobs.opening.opened_job import open_job
from ..jobs.spec import JobSpec
from ..jobs.storage.redaction import redacted_url
from .cluster.background import background_client
from .cluster.background_state import state_file
from .cluster.connect import cluster_errors_named, connected, gpus_each, num_embedded_workers
from .cluster.suitability import check_suitability
from .cluster.versions import check_versions
from .coordinator.task import finished_before, has_finished
from .messages import ENGINE_FACTORY
from .monitoring.reporter import JobReporter, state_before
from .planning.early_check import EarlyCheck
from .run import launch


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job and the cluster that runs it."""

    #: Id of the job.
    job_id: str
    #: URL of the output, without secrets.
    output: str
    #: Address of the cluster; "" when the job had finished before.
    cluster: str = ""
    #: Address of the dashboard's page about jobs; "" when it is not known.
    dashboard: str = ""

    def to_text(self) -> str:
        """A few lines for people."""
        if not self.cluster:
            return f"{self.job_id} is done already: {self.output}"
        lines = [f"{self.job_id} runs on {self.cluster}", f"answers: {self.output}"]
        lines += [f"dashboard: {self.dashboard}"] if self.dashboard else []
        return "\n".join([*lines, f"lorabatch status {self.output}"])


def submit(
    spec: JobSpec,
    engine_factory: str = ENGINE_FACTORY,
    cluster_file: Path | None = None,
    *,
    client: Client | None = None,
) -> SubmittedJob:
    """Check and open a job, hand it to its cluster and return; `local` is the background cluster. `client`: client of
    the cluster to use instead of `spec.cluster`.

    Raises the errors that `run.run` raises before work starts, and `JobRequestError` for a cluster class, whose cluster
    ends with this process. Later errors are in the job's state.
    """
    if client is None and spec.is_cluster_class:
        raise JobRequestError(
            f"cluster={spec.cluster!r}: a cluster that is started from its class ends with this command. Use "
            "`lorabatch run`, or start the cluster yourself and give its address, or its --scheduler-file."
        )
    began_s = time.time()
    check_suitability(spec, connected, client)
    job = open_job(spec)
    shown = redacted_url(job.spec.output)
    if job.is_finished and not job.changed_adapters:
        return SubmittedJob(job.record.job_id, shown)
    reporter = JobReporter(job.store, lambda state: None, job.spec.error_budget, state_before(job))
    reporter.phases.append(("opening", began_s))
    reporter.begins("starting")
    with (
        reporter.ending_recorded(),
        reporter.kept_fresh(lambda: reporter.is_starting),
        EarlyCheck(job) as rows,
        _cluster_of(job.spec, cluster_file or state_file(), client) as (own, address, dashboard),
        cluster_errors_named(own, shown),
    ):
        _, future, _ = launch(own, job, rows, reporter, engine_factory)
        # The scheduler keeps a published future when this client is gone.
        own.publish_dataset(future, name=f"lora/{job.record.job_id}", override=True)
    reporter.handed_over()
    if has_finished(job):
        finished_before(job)  # the job has finished before `handed_over` was written
    return SubmittedJob(job.record.job_id, shown, address, dashboard)


@contextmanager
def _cluster_of(spec: JobSpec, cluster_file: Path, client: Client | None) -> Iterator[tuple[Client, str, str]]:
    """A client of its own, the cluster's address, and the address of its dashboard; "" when that is not known."""
    if client is None and spec.is_embedded:
        with background_client(cluster_file, num_embedded_workers(spec), gpus_each(spec)) as (found, own):
            check_versions(own)
            yield own, found.address, found.dashboard
        return
    with connected(spec, client) as own:
        yield own, own.scheduler_info(n_workers=0)["address"], ""
