"""What we rely on in Dask's dashboard, on a real scheduler with and without a page."""

from __future__ import annotations

import http.client
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browser import Browser, needs_browser
from distributed import Client, LocalCluster

from lorabatch.jobs.progress import AdapterCount
from lorabatch.jobs.record import JobState, WorkerState
from lorabatch.pipeline.cluster.late_dashboard import WITHOUT_PAGES, LateDashboard
from lorabatch.pipeline.messages import StopRun, WorkerReport
from lorabatch.pipeline.monitoring.reporter import state_publisher
from lorabatch.pipeline.monitoring.scheduler_plugin import (
    JobsPlugin,
    show_jobs,
    wanted_workers,
)
from lorabatch.pipeline.monitoring.topics import CONTROL, REPORTS

ATTACK = "<img src=x onerror='window.isHacked = true'>"
MODEL = "Bokeh.documents[0].get_model_by_name"


@pytest.fixture(params=["bokeh", "no bokeh", "late", "late, no bokeh"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A scheduler with its web server in this process. `late`: with a dashboard that waits for its first page."""
    is_late, has_bokeh = "late" in request.param, "no bokeh" not in request.param
    if not has_bokeh:
        for name in [*[n for n in sys.modules if n.startswith(("distributed.dashboard", "bokeh"))], "bokeh"]:
            monkeypatch.setitem(sys.modules, name, None)
    options = {
        "n_workers": 0,
        "processes": False,
        "protocol": "tcp",
        "dashboard_address": "127.0.0.1:0",
        "host": "127.0.0.1",
        "scheduler_kwargs": WITHOUT_PAGES if is_late else {},
    }
    with LocalCluster(**options) as cluster:
        if is_late:
            LateDashboard(cluster.scheduler)
        with Client(cluster, set_as_default=False) as client:
            client.has_bokeh = has_bokeh
            yield client


def address(client: Client, path: str) -> str:
    return f"http://127.0.0.1:{client.scheduler_info(n_workers=0)['services']['dashboard']}{path}"


def fetch(client: Client, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address(client, path), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:  # Python 3.14 warns of one that is left open
            return error.code, ""


def test_jobs_are_shown_as_page_json_and_metrics(client: Client) -> None:
    show_jobs(client)
    show_jobs(client)
    state_publisher(client, "night-1", "/out")(JobState("running", 1.0, rows=60, rows_done=30))
    REPORTS.publish(client, "night-1", WorkerReport("tcp://w0", "ready", 8, tokens_per_s=12.5))
    status, text = fetch(client, "/lora.json")
    (job,) = json.loads(text)["jobs"]
    assert (status, job["state"]["rows_done"], job["workers"][0]["worker"]) == (200, 30, "tcp://w0")
    rate = 'lorabatch_engine_tokens_per_second{job_id="night",run_id="night-1",worker="tcp://w0"} 12.5'
    assert rate in fetch(client, "/lora/metrics")[1]
    status, page = fetch(client, "/lora")
    assert status == (200 if client.has_bokeh else 404)
    if client.has_bokeh:
        # A tab on it and on the stock pages.
        assert 'href="lora"' in page
        assert 'href="lora"' in fetch(client, "/workers")[1]
    assert fetch(client, "/no-such-page")[0] == 404


@pytest.mark.parametrize("client", ["late"], indirect=True)
def test_a_late_dashboard_redirects_to_no_other_host(client: Client) -> None:
    port = client.scheduler_info(n_workers=0)["services"]["dashboard"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "//elsewhere.example/lora")
    assert connection.getresponse().headers["Location"] == "/elsewhere.example/lora"
    connection.close()


@pytest.mark.parametrize("client", ["late"], indirect=True)
def test_a_late_dashboard_opens_once_for_pages_asked_for_at_the_same_moment(client: Client) -> None:
    show_jobs(client)
    with ThreadPoolExecutor(4) as threads:
        pages = list(threads.map(lambda path: fetch(client, path), ("/lora", "/tasks", "/workers", "/lora")))
    assert [status for status, _ in pages] == [200] * 4
    assert [text.count('href="lora"') for _, text in pages] == [1] * 4


@needs_browser
@pytest.mark.long
@pytest.mark.parametrize("client", ["bokeh", "late"], indirect=True)
def test_a_browser_shows_a_curve_per_job_and_tables_as_they_change(client: Client, tmp_path: Path) -> None:
    show_jobs(client)
    workers = (WorkerState("w0 w0", resident_adapters=(ATTACK,), address="tcp://w0"),)
    for job in ("night-20261122-215343-9bf979-86b7e3", "night-2"):
        publish = state_publisher(client, job, "s3://bucket/a-folder/of-answers")
        for second in range(30):
            done = {"rows": 60, "rows_done": second, "tokens_per_s": second, "eta_s": 75.0}
            done |= {"adapter_rows": {"sql" + ATTACK: 40}, "adapters": (AdapterCount("sql" + ATTACK, 25, 0, 9),)}
            publish(JobState("running", float(second), workers=workers, worker_addresses=("tcp://w0",), **done))
        REPORTS.publish(client, job, WorkerReport("tcp://w0", "ready", 8, tokens_per_s=12.5))
    with Browser(tmp_path) as browser:
        browser.open(address(client, "/lora"))
        text = browser.text(until=ATTACK)
        assert re.search(r"job\s+time left\s+phase\s+rows done", text)
        assert text.count("about 1:15 left") == 2
        assert "29 of 60 (48.3%)" in text
        assert f"sql{ATTACK}" in text
        assert re.search(r"25 of 40 \(62\.5%\)\s+0\s+9\s+\(all others\)\s+4 of 20", text)
        assert "w0 w0" in text
        # What was published before the page was opened is there.
        samples = f"{MODEL}('night-2').data_source.data.time.length"
        assert browser.evaluate(samples) == 30
        publish(JobState("running", 31.0, rows=60, rows_done=59))
        assert "59 of 60 (98.3%)" in browser.text(until="59 of 60 (98.3%)")
        assert browser.evaluate(samples) == 31
        assert browser.evaluate("window.isHacked") is None
        page_width = "document.documentElement.scrollWidth"
        for width in (1400, 800):
            browser.change(width)
            browser.until(lambda width=width: browser.evaluate(page_width) == width)
            assert browser.evaluate(page_width) == width
            assert browser.cut_off() == []
        assert browser.pixels()[500:, :50].mean() > 200
        browser.change(1400, dark=True)
        assert browser.pixels()[500:, :50].mean() < 60


def test_events_of_other_topics_are_ignored(client: Client) -> None:
    show_jobs(client)
    CONTROL.publish(client, "x", StopRun())
    client.log_event("all", {"action": "something"})
    assert json.loads(fetch(client, "/lora.json")[1]) == {"jobs": []}


def test_the_plugin_is_registered_once_per_version() -> None:
    assert JobsPlugin.idempotent
    assert JobsPlugin.name.startswith("lorabatch-jobs-")


def test_a_worker_for_each_four_batches():
    assert wanted_workers(256, 64, 1, 4.0) == 1
    assert wanted_workers(257, 64, 1, 4.0) == 2
    assert wanted_workers(10_000, 64, 3, 4.0) == 40


def test_a_job_keeps_one_worker_to_its_end_and_no_job_needs_none():
    assert wanted_workers(0, 64, 1, 4.0) == 1
    assert wanted_workers(500, 64, 0, 4.0) == 0
