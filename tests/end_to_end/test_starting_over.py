"""`--overwrite` on an output whose job runs, or whose workers have not heard of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.jobs.errors import ErrorBudgetError, OutputConflictError
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.record import JobRecord, JobState
from lorabatch.jobs.spec import JobSpec

pytestmark = pytest.mark.long


def half_done(state: JobState) -> bool:
    return state.phase == "running" and state.rows // 4 < state.rows_done < state.rows


def test_a_running_job_is_not_started_over_by_another_command(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(160)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1)
    refusals: list[str] = []

    def start_over() -> None:
        with pytest.raises(OutputConflictError) as caught:
            echo_job.run(shared_client, overwrite=True, max_tokens=7)
        refusals.append(str(caught.value))

    watcher = Watcher(half_done, start_over)
    assert echo_job.run(shared_client, watcher).num_rows == 160
    assert len(refusals) == 1
    assert "lorabatch cancel" in refusals[0]
    echo_job.assert_answered(rows)


def of_another_job(record: JobRecord) -> JobRecord:
    return record.model_copy(update={"job_id": "another-job"})


def with_another_adapter(record: JobRecord) -> JobRecord:
    changed = record.adapters[0].model_copy(update={"sha256": "d" * 64})
    return record.model_copy(update={"adapters": (changed, *record.adapters[1:])})


@pytest.mark.parametrize(
    ("replaced", "said"),
    [(of_another_job, "started over there"), (with_another_adapter, "goes on with other adapters")],
)
def test_a_run_whose_output_is_another_jobs_by_now_stops_and_writes_nothing(
    shared_client: Any, echo_job: EchoJob, replaced: Callable[[JobRecord], JobRecord], said: str
) -> None:
    # As if it had hung while another client found it silent and started over.
    echo_job.write_input(make_rows(160))
    echo_job.set_engine(step_s=0.1)
    left: dict[str, Any] = {}

    def replace_job() -> None:
        echo_job.store.replace_record(replaced(echo_job.record))
        for shard_id in echo_job.store.committed_parts():
            echo_job.store.remove_part(shard_id)
        left["state"] = echo_job.store.read_state()

    with pytest.raises(OutputConflictError, match=said):
        echo_job.run(shared_client, Watcher(half_done, replace_job))
    assert not echo_job.store.is_finished()
    # what shards were at its first look has been written by then, at most
    assert len(echo_job.parts()) <= 2
    state = echo_job.store.read_state()
    assert state is not None
    assert not state.is_final


def test_errors_of_an_adapter_that_are_still_there_fail_the_job_again(shared_client: Any, echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(64))
    content = open_job(JobSpec(**echo_job.options())).record.adapters[0].sha256
    echo_job.set_engine(refuse_adapters=[content])
    with pytest.raises(ErrorBudgetError):
        echo_job.run(shared_client, max_errors="5")
    parts = echo_job.parts()
    with pytest.raises(ErrorBudgetError, match="16 of 64 rows ended in errors, 5 are allowed"):
        echo_job.run(shared_client, max_errors="5")
    found = echo_job.parts()
    changed = [name for name, written_ns in parts.items() if found.get(name) != written_ns]
    assert len(changed) <= 1, f"only the part of the adapter, which might be right now, is computed again: {changed}"
    assert echo_job.run(shared_client, max_errors="16").num_errors == 16
