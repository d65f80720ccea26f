"""Telling where a job stands, and how it ended."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lorabatch.jobs.errors import (
    ErrorBudgetError,
    InputRowsError,
    JobCancelledError,
    JobFailedError,
    JobInterruptedError,
    StorageError,
)
from lorabatch.jobs.options.values import ErrorBudget
from lorabatch.jobs.record import JobState, WorkerState
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.monitoring.reporter import JobReporter
from lorabatch.pipeline.result import JobResult

RESULT = JobResult("/out", "job-1", 10, 0, 1, 400, 90, errors=(), adapters=(), seconds=2.0, num_reused=0)


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(str(tmp_path / "output"))


def make_reporter(store: JobStore, budget: str = "10%") -> JobReporter:
    return JobReporter(store, lambda state: None, ErrorBudget.parse(budget))


def test_every_state_is_written_down(store: JobStore) -> None:
    state = JobState("running", 1.0, rows=10, rows_done=3)
    make_reporter(store)(state)
    assert store.read_state() == state


def test_what_is_known_of_prompts_outlives_the_run(store: JobStore) -> None:
    make_reporter(store).done(replace(RESULT, prefix_hit_rate=0.6))
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.workers, state.prefix_hit_rate) == ("done", (), 0.6)


def test_a_finished_job_is_tidy_before_its_end_is_shown(store: JobStore) -> None:
    """States are published by the Dask scheduler, which may hang until it is killed, and the coordinator with it."""
    left: list[list[str]] = []

    def show(state: JobState) -> None:
        left.append(sorted(name for name in ("rows", "wip", "tmp") if store.location.list(f"_lorabatch/{name}")))

    store.location.write("_lorabatch/rows/chunk-00000.arrow", b"rows")
    store.location.write("_lorabatch/wip/shard-00000.arrow", b"answers")
    reporter = JobReporter(store, show, ErrorBudget.parse("10%"))
    reporter(JobState("finishing", 1.0))
    reporter.done(RESULT)
    assert left == [["rows", "wip"], []]
    state = store.read_state()
    assert state is not None
    assert state.phase == "done"
    assert not list(Path(store.url).glob("_lorabatch/*/"))


def test_a_stage_of_many_small_steps_is_not_reported_step_by_step(store: JobStore) -> None:
    """Every state is a write to storage; the first and the last of a stage are always reported."""
    shown: list[int] = []
    reporter = JobReporter(store, lambda state: shown.append(state.rows_indexed), ErrorBudget.parse("10%"))
    for done in range(1001):
        reporter.phase("indexing", 1000, rows_indexed=done)
    assert (shown[0], shown[-1]) == (0, 1000)
    assert len(shown) < 500
    reporter.phase("planning", 1000)
    assert len(shown) == len(set(shown)) + 1


def test_a_phase_goes_on_from_the_counters_of_the_run_before(store: JobStore) -> None:
    before = JobState("starting", 1.0, rows=10, rows_done=6, rows_error=1, shards=2, completion_tokens=50)
    reporter = JobReporter(store, lambda state: None, ErrorBudget.parse("10%"), before)
    reporter.begins("starting")
    begun = store.read_state()
    assert begun is not None
    assert (begun.phase, begun.rows_done) == ("starting", 6)
    reporter.phase("indexing", 10, rows_indexed=4)
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.rows_indexed, state.rows_done, state.rows_error) == ("indexing", 4, 6, 1)
    assert (state.shards, state.completion_tokens) == (2, 50)


def test_the_last_phase_has_all_rows_and_nothing_left_to_do(store: JobStore) -> None:
    reporter = make_reporter(store)
    reporter(JobState("running", 1.0, rows=10, rows_done=6, shards=2, shards_done=1, eta_s=3.0, tokens_per_s=9.0))
    reporter.phase("finishing", 10, rows_done=10)
    state = store.read_state()
    assert state is not None
    assert (state.rows_done, state.shards_done, state.time_left, state.tokens_per_s) == (10, 2, "", 0.0)


def test_a_run_that_cannot_begin_beside_another_one_leaves_its_state_alone(store: JobStore) -> None:
    at_work = JobState("running", time.time(), rows=10, rows_done=3)
    store.write_state(at_work)
    reporter = make_reporter(store)
    reporter.begins("starting")
    reporter.ended(JobFailedError("no scheduler answers"))
    assert store.read_state() == at_work
    store.write_state(replace(at_work, updated_at_s=time.time() - 100))
    reporter.begins("starting")
    reporter.ended(JobFailedError("no scheduler answers"))
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.message) == ("failed", "no scheduler answers")


def test_a_job_that_is_handed_over_is_queued_unless_its_coordinator_reports_already(store: JobStore) -> None:
    reporter = make_reporter(store)
    reporter.begins("starting")
    reporter.handed_over()
    state = store.read_state()
    assert state is not None
    assert state.phase == "queued"
    for phase in ("starting", "running"):
        at_work = JobState(phase, time.time(), rows=10, run_id="run-1")
        store.write_state(at_work)
        reporter.handed_over()
        assert store.read_state() == at_work


def test_a_state_does_not_grow_old_while_a_command_starts_its_run(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.monitoring.reporter._REFRESH_INTERVAL_S", 0.01)
    reporter = make_reporter(store)
    reporter.begins("starting")
    begun = store.read_state()
    refreshed = threading.Event()
    written = store.write_state
    monkeypatch.setattr(store, "write_state", lambda state: (written(state), refreshed.set()))
    with reporter.kept_fresh(lambda: reporter.is_starting):
        assert refreshed.wait(60)
        reporter(JobState("running", time.time(), rows=10))
    state = store.read_state()
    assert state is not None
    assert begun is not None
    assert (begun.phase, state.phase) == ("starting", "running")


def test_a_state_does_not_grow_old_in_a_stage_that_has_nothing_to_report(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.monitoring.reporter._REFRESH_INTERVAL_S", 0.01)
    reporter = make_reporter(store)
    refreshed, is_displaced = threading.Event(), threading.Event()
    written = store.write_state
    with reporter.kept_fresh(lambda: not is_displaced.is_set()):
        reporter.phase("planning", 10)
        monkeypatch.setattr(store, "write_state", lambda state: (written(state), refreshed.set()))
        assert refreshed.wait(60)
        state = store.read_state()
        assert state is not None
        assert state.phase == "planning"
        # Another coordinator reports by now.
        is_displaced.set()
        threading.Event().wait(0.1)
        refreshed.clear()
        assert not refreshed.wait(0.3)


def test_a_request_to_cancel_is_of_the_run_at_work_not_of_one_that_begins_after_it(store: JobStore) -> None:
    at_work = JobState("running", time.time(), rows=10, run_id="run-1")
    store.write_state(at_work)
    store.request_cancel()
    second = make_reporter(store)
    second.begins("starting")
    assert store.is_cancel_requested()
    reported = replace(at_work, rows_done=3)
    store.write_state(reported)
    second.takes_over()
    assert store.read_state() == reported
    assert store.is_cancel_requested()
    store.write_state(replace(at_work, phase="cancelled"))
    second.takes_over()
    assert not store.is_cancel_requested()
    state = store.read_state()
    assert state is not None
    assert state.phase == "starting"


def test_a_run_that_is_slow_to_end_does_not_write_over_the_next_one(store: JobStore) -> None:
    slow = JobReporter(store, lambda state: None, ErrorBudget.parse("0"), JobState("starting", 1.0, run_id="run-1"))
    slow.phase("running", 10)
    after = JobState("running", time.time() + 1, rows=10, run_id="run-2")
    store.write_state(after)
    slow.ended(JobInterruptedError("stopped"))
    assert store.read_state() == after


def test_a_run_none_of_whose_states_could_be_written_still_records_its_end(store: JobStore) -> None:
    store.write_state(JobState("running", time.time() - 60, rows=10, run_id="run-1"))
    run = JobReporter(store, lambda state: None, ErrorBudget.parse("0"), JobState("starting", time.time(), run_id="2"))
    run.ended(JobFailedError("the disk is full"))
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.message) == ("failed", "the disk is full")


def test_an_end_that_cannot_be_written_is_an_error_for_whoever_has_storage(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state: JobState) -> None:
        raise StorageError("no reply")

    monkeypatch.setattr(store, "write_last_state", refuse)
    with pytest.raises(StorageError, match="no reply"):
        make_reporter(store).done(RESULT)


def test_a_job_is_done_though_storage_removes_nothing(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise StorageError("cannot remove: access was refused")

    monkeypatch.setattr(store, "clean_up", refuse)
    make_reporter(store).done(RESULT)
    state = store.read_state()
    assert state is not None
    assert state.phase == "done"


def test_more_errors_than_allowed_end_the_job(store: JobStore) -> None:
    reporter = make_reporter(store, "2")
    reporter(JobState("running", 1.0, rows=10, rows_error=2))
    with pytest.raises(ErrorBudgetError, match="3 of 10 rows"):
        reporter(JobState("running", 2.0, rows=10, rows_error=3))


@pytest.mark.parametrize(
    ("error", "raised", "phase"),
    [
        (InputRowsError("an id stands in two rows"), InputRowsError, "failed"),
        (KeyboardInterrupt(), JobInterruptedError, "interrupted"),
        (JobCancelledError("cancelled on request"), JobCancelledError, "cancelled"),
        (JobInterruptedError("stopped"), JobInterruptedError, "interrupted"),
        (JobFailedError("no engine works"), JobFailedError, "failed"),
        (ZeroDivisionError("a defect"), ZeroDivisionError, "failed"),
    ],
)
def test_the_last_state_says_how_it_ended(
    store: JobStore, error: BaseException, raised: type[BaseException], phase: str
) -> None:
    reporter = make_reporter(store)
    reporter(JobState("running", 1.0, rows=10, rows_done=3))
    with pytest.raises(raised), reporter.ending_recorded():
        raise error
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.rows_done) == (phase, 3)
    assert state.message
    assert state.can_resume == (raised is not InputRowsError)


def test_notes_are_part_of_every_state_from_then_on(store: JobStore) -> None:
    reporter = make_reporter(store)
    reporter.notes = ("2 adapters are unused",)
    reporter(JobState("running", 1.0, rows=10))
    reporter.ended(JobFailedError("no engine works"))
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.notes) == ("failed", ("2 adapters are unused",))


def test_storage_that_fails_for_a_moment_costs_one_update(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = make_reporter(store)
    with monkeypatch.context() as broken:

        def refuse(state: JobState) -> None:
            raise StorageError("the network is down")

        broken.setattr(store, "write_state", refuse)
        reporter(JobState("running", 1.0, rows=10, rows_done=3))
    reporter(JobState("running", 2.0, rows=10, rows_done=4))
    state = store.read_state()
    assert state is not None
    assert state.rows_done == 4


def test_the_last_state_is_written_on_a_full_disk(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reporter = make_reporter(store)
    reporter(JobState("running", 1.0, rows=10, rows_done=3, workers=(WorkerState("w" * 2000, 2.5),)))
    monkeypatch.setattr(os, "fsync", refuse)
    reporter(JobState("running", 2.0, rows=10, rows_done=4))
    reporter.ended(StorageError("cannot append: the disk is full. Free some space, then resume."))
    state = store.read_state()
    assert state is not None
    assert (state.phase, state.rows_done) == ("failed", 4)
    assert "Free some space" in state.message
