"""One job, interrupted and resumed: its totals are the same wherever they are shown, and never run backwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from distributed import Client
from echo_job import ECHO_FOLDER, EchoJob, Watcher, make_rows
from prometheus_client.parser import text_string_to_metric_families

from lorabatch.console.progress import job_line
from lorabatch.jobs.errors import JobInterruptedError
from lorabatch.jobs.record import JobState
from lorabatch.jobs.report.page import write_report
from lorabatch.pipeline.result import JobResult

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]
PHASES = ["starting", "indexing", "planning", "loading engines", "running", "finishing", "done"]


@pytest.mark.long
def test_totals_of_a_resumed_job_agree_everywhere(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(160)
    for i in (3, 90, 150):
        rows[i]["adapter"] = "no-such-adapter"
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    first = Watcher(lambda state: state.rows_done > 70 and state.shards_done > 1, interrupt)
    with pytest.raises(JobInterruptedError):
        echo_job.run(shared_client, first)
    kept = echo_job.store.read_state()
    assert kept is not None
    echo_job.set_engine()
    second = Watcher(lambda state: False, lambda: None)
    result = echo_job.run(shared_client, second)

    assert_never_backwards([*first.states, *second.states])
    totals = result.totals
    assert (totals.rows, totals.answered, totals.errors, totals.done) == (160, 157, 3, 160)
    # Rows were finished and journalled, but not reported any more, while the first run stopped.
    assert kept.rows_done - 1 <= totals.reused < 160
    shown = totals.to_text()

    (summary, state) = echo_job.store.read_summary(), echo_job.store.read_state()
    assert summary is not None
    assert state is not None
    assert (summary["num_rows"], summary["num_errors"], summary["num_reused"]) == (160, 3, totals.reused)
    assert state.totals == totals
    assert shown in job_line(second.states[-1], 1.0, 0.0)
    command = [*CLI, "status", str(echo_job.output)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"rows      {shown} (100.0% done)" in text
    status = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert status["rows"] == totals.to_json()
    assert "157 of 160 rows answered" in result.to_text()
    assert f"{totals.reused} of them were done before this run" in result.to_text()
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", write_report(echo_job.store)))
    names = ("rows answered", "error rows", "rows from an earlier run")
    assert [facts[name] for name in names] == ["157 of 160, 3 errors", "3", str(totals.reused)]
    assert_dashboard_agrees(shared_client, state)
    assert_adapters_agree(second.states, result)


def assert_never_backwards(states: list[JobState]) -> None:
    """Rows that are done do not become fewer, and phases of a run follow one another."""
    done = [state.rows_done for state in states]
    assert done == sorted(done)
    order = {phase: i for i, phase in enumerate(PHASES)}
    last_run = states[next(i for i, state in enumerate(states) if state.is_final) + 1 :]
    places = [order[state.phase] for state in last_run]
    assert places == sorted(places)
    assert {"starting", "indexing", "loading engines", "running", "done"} <= {state.phase for state in last_run}


def assert_dashboard_agrees(client: Client, state: JobState) -> None:
    """The page's table, `/lora.json` and Prometheus."""
    server = client.dashboard_link.removesuffix("/status")
    job = next(job for job in read_json(f"{server}/lora.json")["jobs"] if job["run_id"] == state.run_id)
    names = ("rows", "rows_done", "rows_error", "rows_reused")
    assert [job["state"][name] for name in names] == [getattr(state, name) for name in names]

    def table(dask_scheduler: Any, run_id: str) -> str:
        plugins = dask_scheduler.plugins.items()
        view = next(plugin.view for name, plugin in plugins if name.startswith("lorabatch-jobs-"))
        return next(row["rows done"] for row in view.job_rows() if row["job"] == run_id)  # type: ignore[no-any-return]

    assert client.run_on_scheduler(table, run_id=state.run_id) == "160 of 160 (100.0%)"
    with urllib.request.urlopen(f"{server}/lora/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    values = {
        sample.name.removeprefix("lorabatch_job_"): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("run_id") == state.run_id
    }
    totals = state.totals
    assert (values["rows"], values["done_rows"], values["answered_rows"]) == (totals.rows, totals.done, totals.answered)
    assert (values["error_rows"], values["reused_rows"]) == (totals.errors, totals.reused)


def assert_adapters_agree(states: list[JobState], result: JobResult) -> None:
    """Rows by adapter, while the resumed job runs and at its end."""
    counted = [state for state in states if state.adapters and not state.is_final]
    whole = tuple(count.count for count in result.adapters)
    assert states[-1].adapters == whole
    rows = {count.adapter: count.num_rows for count in result.adapters}
    assert rows["no-such-adapter"] == 3
    for state in counted:
        assert state.adapter_rows == rows
        assert all(0 <= count.num_rows <= rows[count.adapter] for count in state.adapters)
    begun, last = (sum(count.num_rows for count in state.adapters) for state in (counted[0], counted[-1]))
    assert 0 < begun <= last <= 160, "rows in parts of the run before count"
    ended = [state for state in states if state.phase == "running" and state.shards_done == state.shards]
    for state in ended:
        assert state.adapters == whole


def read_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as reply:
        return json.loads(reply.read())  # type: ignore[no-any-return]
