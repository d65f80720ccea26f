"""What the dashboard says of jobs, and that it forgets."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lorabatch.engine.request import EngineTelemetry
from lorabatch.jobs.record import JobState, WorkerState
from lorabatch.pipeline.messages import PublishedState, WorkerReport
from lorabatch.pipeline.monitoring.views import JobsView

REPORT = WorkerReport(
    "tcp://w0",
    "ready",
    8,
    open_shards=((3, 5),),
    incoming_rows=2,
    telemetry=EngineTelemetry(num_running=4, prompt_tokens=63, reused_prompt_tokens=37),
    tokens_per_s=12.5,
)


def running(rows_done: int = 30) -> JobState:
    workers = (WorkerState("tcp://w0", resident_adapters=("<pirate>",)),)
    return JobState("running", 1.0, rows=60, rows_done=rows_done, shards=6, workers=workers)


def make_view() -> JobsView:
    view = JobsView()
    view.state_published("night-1", PublishedState("s3://bucket/out", running()))
    view.reported("night-1", REPORT)
    return view


def test_programs_get_everything() -> None:
    (job,) = make_view().to_json()["jobs"]
    assert (job["run_id"], job["output"], job["state"]["rows_done"]) == ("night-1", "s3://bucket/out", 30)
    assert job["workers"][0]["open_shards"] == ((3, 5),)


def test_prometheus_can_read_it() -> None:
    families = {family.name: family for family in text_string_to_metric_families(make_view().to_prometheus())}
    (rows,) = families["lorabatch_job_rows_done"].samples
    assert (rows.labels, rows.value) == ({"job": "night-1"}, 30.0)
    (speed,) = families["lorabatch_engine_tokens_per_s"].samples
    assert (speed.labels, speed.value) == ({"job": "night-1", "worker": "tcp://w0"}, 12.5)


def test_names_are_text_and_never_markup() -> None:
    page = make_view().to_html()
    assert "&lt;pirate&gt;" in page
    assert "<pirate>" not in page
    assert "4 of 8" in page
    assert "37%" in page


def test_a_lost_worker_and_an_ended_job_show_no_engines() -> None:
    view = make_view()
    view.lost("tcp://w0")
    assert view.runs[0].reports == {}
    view.state_published("night-1", PublishedState("out", JobState("done", 2.0, rows=60, rows_done=60)))
    view.reported("night-1", REPORT)
    assert view.runs[0].reports == {}


def test_of_ended_runs_a_few_are_kept_and_running_ones_always() -> None:
    view = make_view()
    for number in range(50):
        view.state_published(f"day-{number}", PublishedState("out", JobState("done", 2.0)))
    assert len(view.runs) == 20
    assert view.runs[-1].run_id == "night-1"
