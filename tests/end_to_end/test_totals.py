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
    assert [facts[name] for name in names] == ["157 of 160", "3", str(totals.reused)]
    assert_dashboard_agrees(shared_client, state, shown)


def assert_never_backwards(states: list[JobState]) -> None:
    """Rows that are done do not become fewer, and phases of a run follow one another."""
    done = [state.rows_done for state in states]
    assert done == sorted(done)
    order = {phase: i for i, phase in enumerate(PHASES)}
    last_run = states[next(i for i, state in enumerate(states) if state.is_final) + 1 :]
    places = [order[state.phase] for state in last_run]
    assert places == sorted(places)
    assert {"starting", "indexing", "loading engines", "running", "done"} <= {state.phase for state in last_run}


def assert_dashboard_agrees(client: Client, state: JobState, shown: str) -> None:
    """The page's table, `/lora.json` and Prometheus."""
    server = client.dashboard_link.removesuffix("/status")
    job = next(job for job in read_json(f"{server}/lora.json")["jobs"] if job["run_id"] == state.run_id)
    names = ("rows", "rows_done", "rows_error", "rows_reused")
    assert [job["state"][name] for name in names] == [getattr(state, name) for name in names]

    def table(dask_scheduler: Any, run_id: str) -> str:
        plugins = dask_scheduler.plugins.items()
        view = next(plugin.view for name, plugin in plugins if name.startswith("lorabatch-jobs-"))
        return next(row["rows"] for row in view.job_rows() if row["job"] == run_id)  # type: ignore[no-any-return]

    assert client.run_on_scheduler(table, run_id=state.run_id) == f"{shown} (100.0% done)"
    with urllib.request.urlopen(f"{server}/lora/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    values = {
        sample.name.removeprefix("lorabatch_job_"): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("job") == state.run_id
    }
    totals = state.totals
    assert (values["rows"], values["rows_done"], values["rows_answered"]) == (totals.rows, totals.done, totals.answered)
    assert (values["rows_error"], values["rows_reused"]) == (totals.errors, totals.reused)


def read_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as reply:
        return json.loads(reply.read())  # type: ignore[no-any-return]
