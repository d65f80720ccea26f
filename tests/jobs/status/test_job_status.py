"""What storage alone says about a job."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lorabatch.console.progress import status_lines
from lorabatch.jobs import errors
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.record import BEGINNING_PHASES, JobRecord, JobState, Phase, WorkerState
from lorabatch.jobs.status.job_status import STALE_AFTER_S, read_status, wait_for_end
from lorabatch.jobs.status.logs import log_lines
from lorabatch.jobs.store import JobStore

NOW_S = 1000.0


@pytest.fixture
def store(read_place: tuple[str, dict[str, Any]], record: Callable[..., JobRecord]) -> JobStore:
    store = JobStore(*read_place)
    store.freeze(record())
    return store


def state(phase: Phase = "running", age_s: float = 1.0, **changes: Any) -> JobState:
    given: dict[str, Any] = {"rows": 200, "rows_done": 50, "rows_error": 2, "shards": 8, "tokens_per_s": 12.0}
    return JobState(phase, NOW_S - age_s, **given | changes)


def test_a_running_job_shows_its_progress_and_workers(store: JobStore) -> None:
    store.commit_part(0, b"x")
    store.write_state(
        state(eta_s=3725.0, workers=(WorkerState("tcp://w", 12.0, 30, 8, "merged", prefix_hit_rate=0.81),))
    )
    status = read_status(store, NOW_S)
    assert (status.headline, status.next_step) == ("running", None)
    lines = "\n".join(status_lines(status))
    for part in (
        "job-1",
        "48 of 200 rows answered, 2 errors (25.0% done)",
        "1 of 8",
        "12 generated tokens/s, about 1:02:05 left",
    ):
        assert part in lines
    assert "tcp://w: 12 tokens/s, 30 open rows, merged, 81% of prompt tokens reused" in lines


def test_a_job_that_has_fallen_silent_is_not_said_to_run(store: JobStore) -> None:
    store.write_state(state(age_s=STALE_AFTER_S + 1))
    status = read_status(store, NOW_S)
    assert status.headline == "stopped without a word"
    assert status.next_step is not None
    assert "lorabatch resume" in "\n".join(status_lines(status))


@pytest.mark.parametrize("phase", ["failed", "cancelled", "interrupted"])
def test_a_job_that_ended_early_says_why_and_how_to_go_on(store: JobStore, phase: Phase) -> None:
    store.write_state(state(phase, age_s=10_000.0, message="the disk is full."))
    lines = "\n".join(status_lines(read_status(store, NOW_S)))
    assert phase in lines
    assert "the disk is full." in lines
    assert "lorabatch resume" in lines


@pytest.mark.parametrize(
    ("phase", "name", "kind"),
    [
        ("failed", "ErrorBudgetError", errors.ErrorBudgetError),
        ("failed", "InputRowsError", errors.InputRowsError),
        ("failed", "StorageError", errors.StorageError),
        ("failed", "ZeroDivisionError", errors.JobFailedError),
        ("failed", "", errors.JobFailedError),
        ("cancelled", "JobCancelledError", errors.JobCancelledError),
        ("interrupted", "", errors.JobInterruptedError),
    ],
)
def test_what_ended_a_job_is_the_exception_that_was_raised(
    store: JobStore, phase: Phase, name: str, kind: type[errors.JobError]
) -> None:
    store.write_state(state(phase, message="the disk is full.", error=name))
    found = read_status(store, NOW_S)
    assert found.has_ended
    assert (type(found.error), str(found.error)) == (kind, "the disk is full.")


def test_a_job_at_work_has_no_error_and_a_silent_one_has(store: JobStore) -> None:
    for phase in ("queued", "running"):
        store.write_state(state(phase))
        assert read_status(store, NOW_S).error is None
    store.write_state(state(age_s=STALE_AFTER_S + 1))
    found = read_status(store, NOW_S)
    assert isinstance(found.error, errors.JobFailedError)
    assert "lorabatch resume" in str(found.error)
    # Another coordinator may take over.
    assert not found.has_ended


def test_states_are_shown_while_their_end_is_waited_for(store: JobStore) -> None:
    shown: list[str] = []

    def show(found: JobState) -> None:
        shown.append(found.phase)
        store.write_state(replace(found, phase="done", updated_at_s=time.time()))

    store.write_state(replace(state(), updated_at_s=time.time()))
    assert wait_for_end(store, show=show).headline == "done"
    assert shown == ["running", "done"]
    shown.clear()
    store.write_state(replace(state("finishing"), updated_at_s=time.time()))
    store.write_summary({})
    store.mark_success()
    wait_for_end(store, show=lambda found: shown.append(found.phase))
    assert shown == ["done"]


def test_resume_is_not_named_where_it_cannot_help_and_notes_are_shown(store: JobStore) -> None:
    store.write_state(
        state("failed", message="1 id appears twice.", can_resume=False, notes=("2 adapters are unused",))
    )
    status = read_status(store, NOW_S)
    assert (status.next_step, status.is_resting) == (None, True)
    lines = "\n".join(status_lines(status))
    assert "1 id appears twice." in lines
    assert "note      2 adapters are unused" in lines
    assert "lorabatch resume" not in lines
    assert "1 id appears twice." in "\n".join(log_lines(store, follow=True))


def test_a_finished_job_is_done_whatever_its_state_says(store: JobStore) -> None:
    store.write_state(state("finishing", age_s=10_000.0))
    store.write_summary({"rows": 200})
    store.mark_success()
    status = read_status(store, NOW_S)
    assert (status.headline, status.next_step, status.summary) == ("done", None, {"rows": 200})


def test_a_success_that_was_copied_from_elsewhere_is_not_believed(store: JobStore) -> None:
    store.mark_success()
    for written, outcome in ((state(), "running"), (state("failed"), "failed"), (state("done"), "done")):
        store.write_state(written)
        assert read_status(store, NOW_S).outcome == outcome
    store.write_state(state("interrupted"))
    store.write_summary({"rows": 200})
    assert read_status(store, NOW_S).outcome == "done"


@pytest.mark.parametrize(
    ("written", "outcome", "exit_code"),
    [
        (None, "waiting", 3),
        (state("queued", age_s=10_000.0), "waiting", 3),
        (state("starting"), "running", 3),
        (state("loading engines"), "running", 3),
        (state("running", age_s=STALE_AFTER_S + 1), "unknown", 4),
        (state("starting", age_s=STALE_AFTER_S + 1), "unknown", 4),
        (state("failed"), "failed", 1),
        (state("cancelled"), "stopped", 130),
        (state("interrupted"), "stopped", 130),
    ],
)
def test_a_status_has_a_word_and_an_exit_code_for_programs(
    store: JobStore, written: JobState | None, outcome: str, exit_code: int
) -> None:
    if written is not None:
        store.write_state(written)
    status = read_status(store, NOW_S)
    assert (status.outcome, status.exit_code) == (outcome, exit_code)
    assert {"outcome": outcome, "exit_code": exit_code}.items() <= status.to_json().items()
    store.write_summary({})
    store.mark_success()
    # Unless a run begins on it anew.
    is_beginning = exit_code == 3 and written is not None and written.phase in BEGINNING_PHASES
    assert read_status(store, NOW_S).exit_code == (3 if is_beginning else 0)


def test_a_run_that_begins_anew_on_a_finished_job_is_not_done(store: JobStore) -> None:
    """Its adapters have changed; `_SUCCESS` is removed when it has planned which rows it computes again."""
    store.write_summary({})
    store.mark_success()
    store.write_state(state("indexing"))
    assert read_status(store, NOW_S).outcome == "running"
    assert read_status(store, NOW_S + STALE_AFTER_S + 1).outcome == "done"


@pytest.mark.parametrize("method", ["read_state", "contents"])
def test_a_job_that_ends_while_its_status_is_read_is_not_said_to_have_stopped(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read = getattr(store, method)

    def then_end() -> Any:
        found = read()
        store.write_summary({})
        store.mark_success()
        store.write_state(state("done"))
        return found

    store.write_state(state())
    monkeypatch.setattr(store, method, then_end)
    assert read_status(store, NOW_S).outcome in ("running", "done")


def test_waiting_ends_with_the_job_or_with_patience(store: JobStore) -> None:
    store.write_state(replace(state(), updated_at_s=time.time()))
    assert wait_for_end(store, 0.0).outcome == "running"
    ending = threading.Timer(0.3, lambda: store.write_state(state("failed", message="the disk is full.")))
    ending.start()
    assert wait_for_end(store, 60.0).outcome == "failed"
    store.write_state(replace(state(), updated_at_s=time.time() - 1000))
    assert wait_for_end(store).outcome == "unknown"


def test_reused_prompts_are_shown_after_the_end_where_they_were_counted(store: JobStore) -> None:
    store.write_state(state("done", prefix_hit_rate=0.807))
    assert "prompts   80.7% of their tokens reused" in status_lines(read_status(store, NOW_S))
    store.write_state(state("done"))
    assert "tokens reused" not in "\n".join(status_lines(read_status(store, NOW_S)))


def test_a_job_that_is_asked_to_stop_says_so_until_it_has(store: JobStore) -> None:
    store.request_cancel()
    store.write_state(state())
    assert read_status(store, NOW_S).headline == "stopping"
    store.write_state(state("cancelled"))
    assert read_status(store, NOW_S).headline == "cancelled"


def test_a_job_that_never_began_can_be_started(store: JobStore) -> None:
    status = read_status(store, NOW_S)
    assert status.headline == "not started"
    assert status.next_step is not None
    assert json.loads(json.dumps(status.to_json()))["state"] is None


def test_an_output_without_a_job_is_a_wrong_request(place: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(JobRequestError, match="no job there"):
        read_status(JobStore(place[0] + "-other", place[1]), NOW_S)
