"""`lorabatch logs` of a job on a cluster of one's own that loses a worker, and of one in the background."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from cluster_under_test import own_cluster
from echo_job import ECHO_FOLDER, EchoJob, Watcher, kill_one, make_rows

from lorabatch.console.progress import status_lines
from lorabatch.jobs.report.page import write_report
from lorabatch.jobs.status.job_status import read_status

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]


def logs(job: EchoJob) -> str:
    done = subprocess.run([*CLI, "logs", str(job.output)], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


@pytest.mark.long
@pytest.mark.chaos
def test_logs_tell_of_a_lost_worker_by_the_name_that_it_has_everywhere(echo_job: EchoJob) -> None:
    rows = make_rows(160)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1)
    shown: list[str] = []

    def kill() -> None:
        status = read_status(echo_job.store)
        shown.extend(status_lines(status))
        server = client.dashboard_link.removesuffix("/status")
        with urllib.request.urlopen(f"{server}/lora.json") as reply:
            (job,) = json.loads(reply.read())["jobs"]
        shown.extend(job["worker_names"].values())
        kill_one("worker")

    with own_cluster() as client:
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        watcher = Watcher(lambda state: state.rows_done > 40 and len(state.workers) == 2, kill)
        echo_job.run(client, watcher)
    echo_job.assert_answered(rows)
    done = [state.rows_done for state in watcher.states]
    assert done == sorted(done)
    text = logs(echo_job)
    for i, address in enumerate(addresses):
        name = f"w{i} 127.0.0.1"
        assert re.search(rf"{name} +\| worker at {address.removeprefix('tcp://')}\n", text)
        assert any(line.startswith(f"worker    {name}: ") for line in shown)
        assert name in shown
        assert name in write_report(echo_job.store)
    (lost,) = re.findall(r"(w[01]) 127\.0\.0\.1 +\| (?:lost: .*|has left the cluster)\n", text)[:1]
    assert re.search(r"w[0-9]+ 127\.0\.0\.1 +\| opens shard \d+ again, attempt 2\n", text), text
    assert re.search(r"plan: 160 rows in \d+ shards, about ", text)
    assert text.splitlines()[-1].endswith("done: 160 of 160 rows answered")
    assert lost in ("w0", "w1")
    assert echo_job.store.read_summary()["num_reused"] == 0  # type: ignore[index]


@pytest.mark.long
def test_logs_of_a_submitted_job_are_not_empty(
    echo_job: EchoJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = make_rows(40)
    echo_job.write_input(rows)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in echo_job.options().items()]
    try:
        subprocess.run([*CLI, "submit", *words], check=True, capture_output=True, timeout=300)
        done = subprocess.run([*CLI, "wait", str(echo_job.output)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout
        text = logs(echo_job)
        for part in ("plan: 40 rows", "w0 127.0.0.1", "engine ready, 8 rows at once", "done: 40 of 40 rows answered"):
            assert part in text
    finally:
        for state in (tmp_path / "cache").rglob("clusters/*.json"):
            psutil.Process(json.loads(state.read_text())["pid"]).terminate()
