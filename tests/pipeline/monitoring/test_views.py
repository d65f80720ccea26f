"""What the dashboard says of jobs, and that it forgets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.jobs.record import JobState, WorkerState
from lorabatch.pipeline.messages import PublishedState, WorkerReport
from lorabatch.pipeline.monitoring.views import History, JobsView
from lorabatch.tests.scheduler.unfinished import unfinished

REPORT = WorkerReport(
    "tcp://w0",
    "ready",
    8,
    open_shards=unfinished((3, 5)),
    incoming_rows=2,
    telemetry=EngineTelemetry(num_running=4, prompt_tokens=63, reused_prompt_tokens=37),
    tokens_per_s=12.5,
)


COUNTS: dict[str, Any] = {"eta_s": 90.0, "completion_tokens": 123_456_789}


def running(rows_done: int = 30) -> JobState:
    workers = (WorkerState("w1 w0", resident_adapters=("<pirate>",), address="tcp://w0"),)
    seen = ("tcp://gone", "tcp://w0")
    given = {"rows": 60, "rows_done": rows_done, "shards": 6, "workers": workers, "worker_addresses": seen}
    return JobState("running", 1.0, **given | COUNTS)


def make_view() -> JobsView:
    view = JobsView()
    view.state_published("night-1", PublishedState("s3://bucket/out", running()))
    view.reported("night-1", REPORT)
    return view


def test_programs_get_everything() -> None:
    (job,) = make_view().to_json()["jobs"]
    assert (job["run_id"], job["output"], job["state"]["rows_done"]) == ("night-1", "s3://bucket/out", 30)
    assert job["workers"][0]["open_shards"] == ({"shard_id": 3, "num_rows": 5},)


def test_prometheus_can_read_it() -> None:
    view = make_view()
    for _ in range(3):
        view.coordinator_started("night-1")
    families = {family.name: family for family in text_string_to_metric_families(view.to_prometheus())}
    (rows,) = families["lorabatch_job_rows_done"].samples
    assert (rows.labels, rows.value) == ({"job": "night-1"}, 30.0)
    (speed,) = families["lorabatch_engine_tokens_per_s"].samples
    assert (speed.labels, speed.value) == ({"job": "night-1", "worker": "tcp://w0"}, 12.5)
    (phase,) = families["lorabatch_job_phase"].samples
    assert (phase.labels, phase.value) == ({"job": "night-1", "phase": "running"}, 1.0)
    assert families["lorabatch_job_seconds_left"].samples[0].value == 90.0
    tokens = families["lorabatch_job_completion_tokens"]
    assert (tokens.type, tokens.samples[0].value) == ("counter", 123_456_789.0)
    assert families["lorabatch_job_coordinator_restarts"].samples[0].value == 2.0


def test_what_is_not_known_is_no_sample() -> None:
    view = JobsView()
    view.state_published("night-1", PublishedState("out", JobState("indexing", 1.0)))
    families = {family.name: family for family in text_string_to_metric_families(view.to_prometheus())}
    assert families["lorabatch_job_seconds_left"].samples == []


def test_tables_have_a_row_per_job_and_per_worker() -> None:
    view = make_view()
    (job,), (worker,) = view.job_rows(), view.worker_rows()
    assert (job["rows"], job["left"], job["phase"]) == (
        "30 of 60 rows answered (50.0% done)",
        "about 1:30 left",
        "running",
    )
    assert worker["worker"] == "w1 w0"
    assert (worker["batch"], worker["prompt reused"], worker["adapters"]) == ("4 of 8", "37%", "<pirate>")


def test_a_lost_worker_and_an_ended_job_show_no_engines() -> None:
    view = make_view()
    view.lost("tcp://w0", 7.0)
    assert view.runs[0].reports == {}
    view.state_published("night-1", PublishedState("out", JobState("done", 2.0, rows=60, rows_done=60)))
    view.reported("night-1", REPORT)
    assert view.runs[0].reports == {}
    # The cluster is closed after the job.
    view.lost("tcp://w0", 9.0)
    assert view.runs[0].history.losses == [(7.0, "tcp://w0")]


def test_a_worker_that_leaves_in_good_order_is_not_lost() -> None:
    view = make_view()
    view.reported("night-1", replace(REPORT, state="left"))
    view.lost("tcp://w0", 7.0)
    assert view.job_rows()[0]["lost"] == ""


def test_engines_that_crashed_count_when_their_worker_is_gone() -> None:
    view = make_view()
    view.reported("night-1", replace(REPORT, num_crashes=2))
    view.lost("tcp://w0", 7.0)
    view.reported("night-1", replace(REPORT, worker="tcp://w1", num_crashes=1))
    assert view.job_rows()[0]["lost"] == "workers: 1, engines: 3"


def test_a_history_goes_back_to_the_beginning_and_is_bounded() -> None:
    history = History()
    for second in range(100_000):
        history.add(float(second), second / 10)
    assert 400 < len(history.samples) <= 1000
    assert history.samples[0] == (0.0, 0.0)
    assert history.samples[-1][0] > 99_000
    assert (history.at(-1.0), history.at(50_000.0)) == (0.0, pytest.approx(5000.0, rel=0.01))
    gaps = {b - a for (a, _), (b, _) in pairwise(history.samples)}
    assert max(gaps) <= 4 * min(gaps)


def test_of_ended_runs_a_few_are_kept_and_running_ones_always() -> None:
    view = make_view()
    for number in range(50):
        view.state_published(f"day-{number}", PublishedState("out", JobState("done", 2.0)))
    assert len(view.runs) == 20
    assert view.runs[-1].run_id == "night-1"
