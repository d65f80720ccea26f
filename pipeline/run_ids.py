"""Names of a job's runs: the job's own name, and some letters that no other run has."""

from __future__ import annotations

import uuid


def new_run_id(job_id: str) -> str:
    """A name for one more run of the job."""
    return f"{job_id}-{uuid.uuid4().hex[:6]}"


def job_of_run(run_id: str) -> str:
    """The id of the job that a run belongs to."""
    return run_id.rpartition("-")[0]
