"""What the dashboard says of jobs, and that it forgets."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import lorabatch
from lorabatch.engine.adapter_use import AdapterUse
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.jobs.progress import AdapterCount
from lorabatch.jobs.record import JobState, WorkerState
from lorabatch.pipeline.messages import PublishedState, WorkerReport
from lorabatch.pipeline.monitoring.views import ADAPTER_USE_METRICS, History, JobsView
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


RUN = "night-a1b2c3"
COUNTS: dict[str, Any] = {"eta_s": 90.0, "eta_range_s": (60.0, 130.0), "completion_tokens": 123_456_789}


def running(rows_done: int = 30) -> JobState:
    workers = (WorkerState("w1 w0", resident_adapters=("<pirate>",), address="tcp://w0"),)
    seen = ("tcp://gone", "tcp://w0")
    given = {"rows": 60, "rows_done": rows_done, "shards": 6, "workers": workers, "worker_addresses": seen}
    adapters = {
        "adapter_rows": {"": 20, 'a"b\\': 30},
        "adapters": (AdapterCount("", 6, 0, 5), AdapterCount('a"b\\', 20, 1, 70)),
    }
    return JobState("running", 1.0, **given | COUNTS | adapters)


def make_view() -> JobsView:
    view = JobsView()
    view.state_published(RUN, PublishedState("s3://bucket/out", running()))
    view.reported(RUN, REPORT)
    return view


def test_programs_get_everything() -> None:
    (job,) = make_view().to_json()["jobs"]
    assert (job["run_id"], job["output"], job["state"]["rows_done"]) == (RUN, "s3://bucket/out", 30)
    assert job["workers"][0]["open_shards"] == ({"shard_id": 3, "num_rows": 5},)


def families_of(view: JobsView) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(view.to_prometheus())}


def test_prometheus_can_read_it() -> None:
    view = make_view()
    for _ in range(3):
        view.coordinator_started(RUN)
    families = families_of(view)
    labels = {"job_id": "night", "run_id": RUN}
    (rows,) = families["lorabatch_job_done_rows"].samples
    assert (rows.labels, rows.value) == (labels, 30.0)
    (speed,) = families["lorabatch_engine_tokens_per_second"].samples
    assert (speed.labels, speed.value) == ({**labels, "worker": "tcp://w0"}, 12.5)
    (phase,) = families["lorabatch_job_phase"].samples
    assert (phase.labels, phase.value) == ({**labels, "phase": "running"}, 1.0)
    (output,) = families["lorabatch_job_info"].samples
    assert output.labels == {**labels, "output": "s3://bucket/out"}
    assert families["lorabatch_job_left_seconds"].samples[0].value == 90.0
    tokens = families["lorabatch_job_completion_tokens"]
    assert (tokens.type, tokens.samples[0].value) == ("counter", 123_456_789.0)
    assert families["lorabatch_job_coordinator_restarts"].samples[0].value == 2.0
    of_adapters = {name: family for name, family in families.items() if name.startswith("lorabatch_adapter_")}
    assert {name: [(s.labels["adapter"], s.value) for s in family.samples] for name, family in of_adapters.items()} == {
        "lorabatch_adapter_rows": [("", 20.0), ('a"b\\', 30.0)],
        "lorabatch_adapter_done_rows": [("", 6.0), ('a"b\\', 20.0)],
        "lorabatch_adapter_error_rows": [("", 0.0), ('a"b\\', 1.0)],
        "lorabatch_adapter_completion_tokens": [("", 5.0), ('a"b\\', 70.0)],
    }


def test_names_of_metrics_collide_with_nothing_and_end_in_their_unit() -> None:
    view = make_view()
    view.state_published("day-1", PublishedState("out", running()))
    view.reported("day-1", REPORT)
    units = ("rows", "parts", "pages", "bytes", "seconds", "second", "info", "phase")
    for name, family in families_of(view).items():
        assert name.startswith("lorabatch_")
        assert family.type == "counter" or name.endswith(units), name
        labels = [tuple(sample.labels.items()) for sample in family.samples]
        assert len(set(labels)) == len(labels)
        for sample in family.samples:
            # Prometheus sets these for the process that it asks, and renames them where they are there.
            assert not {"job", "instance"} & sample.labels.keys()
            assert {"job_id", "run_id"} <= sample.labels.keys()
        assert {sample.labels["run_id"] for sample in family.samples} == {RUN, "day-1"}, name


def test_the_reference_lists_all_metrics_with_their_labels() -> None:
    text = (Path(lorabatch.__file__).parent / "docs/reference/metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(lorabatch_\w+)` \| (gauge|counter) \| ([^|]+) \|", text, re.MULTILINE)
    of_all = ("job_id", "run_id")
    assert listed == [
        (family.name + ("_total" if family.type == "counter" else ""), family.type, shown_labels)
        for family in families_of(make_view()).values()
        for shown_labels in [", ".join(f"`{n}`" for n in family.samples[0].labels if n not in of_all) or "—"]
    ]


def test_what_is_not_known_is_no_sample() -> None:
    view = JobsView()
    view.state_published(RUN, PublishedState("out", JobState("indexing", 1.0)))
    families = families_of(view)
    assert families["lorabatch_job_left_seconds"].samples == []
    assert families["lorabatch_adapter_rows"].samples == []


def test_tables_have_a_row_per_job_and_per_worker() -> None:
    view = make_view()
    (job,), (worker,) = view.job_rows(), view.worker_rows()
    assert list(job)[:3] == ["job", "time left", "phase"]
    assert (job["rows done"], job["phase"]) == ("30 of 60 (50.0%)", "running")
    assert job["time left"] == "about 1:30 left (1:00 to 2:10)"
    assert worker["worker"] == "w1 w0"
    assert (worker["batch"], worker["prompt reused"], worker["adapters"]) == ("4 of 8", "37%", "<pirate>")


def test_a_table_has_a_row_per_adapter_and_one_for_adapters_that_are_not_counted() -> None:
    view = make_view()
    state = replace(running(), workers=(WorkerState("w1 w0", resident_adapters=('a"b\\',), address="tcp://w0"),))
    view.state_published(RUN, PublishedState("s3://bucket/out", replace(state, rows_error=3)))
    rows = [tuple(row.values()) for row in view.adapter_rows()]
    assert rows == [
        ("(base model)", "6 of 20 (30.0%)", 0, 5, "", RUN),
        ('a"b\\', "20 of 30 (66.7%)", 1, 70, "w1", RUN),
        ("(all others)", "4 of 10 (40.0%)", 2, 123_456_714, "", RUN),
    ]
    view.state_published(RUN, PublishedState("s3://bucket/out", replace(state, rows=50)))
    assert [row["adapter"] for row in view.adapter_rows()] == ["(base model)", 'a"b\\']


def test_adapters_and_workers_are_of_running_jobs_or_of_the_latest_one() -> None:
    view = make_view()
    over = replace(running(), phase="done")
    view.state_published("evening-1", PublishedState("out", over))
    assert {row["job"] for row in view.adapter_rows()} == {RUN}
    view.state_published(RUN, PublishedState("out", over))
    assert {row["job"] for row in view.adapter_rows()} == {"evening-1"}
    assert len(view.job_rows()) == 2


def test_workers_are_in_the_order_of_their_names() -> None:
    view = JobsView()
    seen = tuple(f"tcp://w{i}:1" for i in range(12))
    view.state_published(RUN, PublishedState("out", JobState("running", 1.0, worker_addresses=seen)))
    for worker in ("tcp://unseen:1", *reversed(seen)):
        view.reported(RUN, replace(REPORT, worker=worker))
    assert [row["worker"] for row in view.worker_rows()] == [*(f"w{i} w{i}" for i in range(12)), "unseen:1"]


def test_a_lost_worker_and_an_ended_job_show_no_engines() -> None:
    view = make_view()
    view.lost("tcp://w0", 7.0)
    assert view.runs[0].reports == {}
    view.state_published(RUN, PublishedState("out", JobState("done", 2.0, rows=60, rows_done=60)))
    view.reported(RUN, REPORT)
    assert view.runs[0].reports == {}
    # The cluster is closed after the job.
    view.lost("tcp://w0", 9.0)
    assert view.runs[0].history.losses == [(7.0, "tcp://w0")]


def test_a_worker_that_leaves_in_good_order_is_not_lost() -> None:
    view = make_view()
    view.reported(RUN, replace(REPORT, state="left"))
    view.lost("tcp://w0", 7.0)
    assert view.job_rows()[0]["lost"] == ""


def test_engines_that_crashed_count_when_their_worker_is_gone() -> None:
    view = make_view()
    view.reported(RUN, replace(REPORT, num_crashes=2))
    view.lost("tcp://w0", 7.0)
    view.reported(RUN, replace(REPORT, worker="tcp://w1", num_crashes=1))
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
    assert view.runs[-1].run_id == RUN


def test_every_count_of_adapters_is_a_metric() -> None:
    view = JobsView()
    names = [each.name for each in fields(AdapterUse)]
    assert list(ADAPTER_USE_METRICS) == names
    use = AdapterUse(*range(1, len(names) + 1))
    view.state_published(RUN, PublishedState("out", running()))
    view.reported(RUN, replace(REPORT, telemetry=EngineTelemetry(adapters=use), fetches=AdapterUse(peer_fetches=100)))
    text = view.to_prometheus()
    assert re.search(r"^lorabatch_engine_adapter_pool_hits_total\{.*\} 1$", text, re.M)
    assert re.search(r"^lorabatch_engine_adapter_peer_fetches_total\{.*\} 105$", text, re.M)
    assert re.search(r"^lorabatch_engine_adapter_stall_seconds_total\{.*\} 8$", text, re.M)
