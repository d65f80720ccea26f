"""`list_jobs`: lists the jobs of a cluster. It imports nothing that runs a job, so that `lorabatch list` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

from ..jobs.errors import JobRequestError
from ..jobs.option_values import TlsFiles
from ..jobs.record import JobState
from .cluster.background import find_cluster
from .cluster.background_state import background_security, state_file
from .cluster.connect import existing
from .cluster.security import security_of
from .cluster.versions import check_scheduler
from .messages import JOB_PREFIX, job_of_run
from .monitoring.topics import STATES


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job that a cluster knows."""

    #: Id of the job.
    job_id: str
    #: URL of the output, without secrets; "" before the first state.
    output: str
    #: Address of the worker that runs the job's coordinator; "" when the job has ended or waits.
    worker: str
    #: Latest state published; None before the first one.
    state: JobState | None

    def to_text(self) -> str:
        """One line for people."""
        phase, rows = (self.state.phase, self.state.totals.to_text()) if self.state else ("", "")
        return f"{self.job_id}  {phase or 'waiting'}  {rows}  {self.output}"


def list_jobs(
    address: str | None, cluster_file: Path | None = None, tls_files: TlsFiles | None = None
) -> list[ListedJob]:
    """Jobs of a cluster, running ones and those that it keeps; by default of the background cluster.

    Raises `JobRequestError` when no scheduler answers, or it refuses these files; `JobFailedError` when it has another
    version of lorabatch or none.
    """
    files = tls_files or TlsFiles()
    problems = files.problems(address or "local")
    if problems:
        raise JobRequestError(*problems)
    security = security_of(files)
    if address is None:
        found = find_cluster(cluster_file or state_file())
        if found is None:
            return []
        address, security = found.address, found.security
    with existing(address, security or background_security(address)) as client:
        check_scheduler(client)
        workers: dict[str, str] = client.run_on_scheduler(_coordinators)
        return [_listed(client, run_id, worker) for run_id, worker in sorted(workers.items())]


def _listed(client: Client, run_id: str, worker: str) -> ListedJob:
    published = STATES.published(client, run_id)
    latest = published[-1][1] if published else None
    output, state = (latest.output, latest.state) if latest else ("", None)
    return ListedJob(job_of_run(run_id), output, worker, state)


def _coordinators(dask_scheduler: Any) -> dict[str, str]:
    """Run id -> address of its coordinator's worker; "" when no worker runs it."""
    found = {}
    for key, task in dask_scheduler.tasks.items():
        if isinstance(key, str) and key.startswith(JOB_PREFIX):
            found[key.removeprefix(JOB_PREFIX)] = task.processing_on.address if task.processing_on else ""
    return found
