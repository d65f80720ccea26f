"""`list_jobs`: lists the jobs of a cluster. It imports nothing that runs a job, so that `lorabatch list` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed import Client

from ..jobs.errors import JobRequestError
from ..jobs.options.values import TlsFiles
from .cluster.background import find_cluster
from .cluster.background_state import background_security, state_file
from .cluster.class_cluster import address_in_file
from .cluster.connect import existing
from .cluster.security import security_of
from .cluster.versions import check_scheduler
from .messages import JOB_PREFIX, job_of_run
from .monitoring.topics import STATES


def list_jobs(
    address: str | None,
    cluster_file: Path | None = None,
    tls_files: TlsFiles | None = None,
    scheduler_file: str | None = None,
) -> list[str]:
    """A line for each job of a cluster, running ones and those that it keeps; by default of the background cluster. A
    line begins with the id of the job. `scheduler_file`: file with the address, in place of `address`.

    Raises `JobRequestError` when no scheduler answers, or it refuses these files; `JobFailedError` when it has another
    version of lorabatch or none.
    """
    files = tls_files or TlsFiles()
    if address is not None and scheduler_file is not None:
        raise JobRequestError("cluster, scheduler_file: each names a cluster. Give one of them.")
    if scheduler_file is not None:
        address = address_in_file(scheduler_file)
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
        return [_line(client, run_id) for run_id in sorted(client.run_on_scheduler(_run_ids))]


def _line(client: Client, run_id: str) -> str:
    """One line for people about a job; without its output and rows before the first state was published."""
    published = STATES.published(client, run_id)
    latest = published[-1][1] if published else None
    phase, rows, output = (latest.state.phase, latest.state.totals.to_text(), latest.output) if latest else ("", "", "")
    return f"{job_of_run(run_id)}  {phase or 'waiting'}  {rows}  {output}"


def _run_ids(dask_scheduler: Any) -> list[str]:
    keys = (key for key in dask_scheduler.tasks if isinstance(key, str))
    return [key.removeprefix(JOB_PREFIX) for key in keys if key.startswith(JOB_PREFIX)]
