"""Jobs without their client: submitted, followed from storage and from the cluster, and ended on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from echo_job import ECHO_FOLDER, EchoJob, make_rows, wait_until

from lorabatch.jobs.status.job_status import STALE_AFTER_S, read_status
from lorabatch.jobs.store import JobStore
from lorabatch.system.local_cache import file_lock

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]
SHORT_LIVED = "from lorabatch.pipeline.cluster import background as b; b.serve(b.Path({!r}), 1, idle_limit_s=1.0)"


def lorabatch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=300, check=False)


def submit(job: EchoJob) -> subprocess.CompletedProcess[str]:
    options = job.options()
    return lorabatch("submit", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()))


def kill_before_a_cluster_has_the_job(job: EchoJob, background: Path) -> None:
    """Leave a job whose command was killed, and what it then says of itself."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in job.options().items()]
    # held by whoever starts the background cluster
    with file_lock(background.with_suffix(".lock")):
        killed = subprocess.Popen([*CLI, "submit", *options])
        wait_until(lambda: job.output.exists() and job.store.read_state() is not None)
        killed.kill()
        killed.wait(60)
    state = job.store.read_state()
    assert state is not None
    assert read_status(job.store, state.updated_at_s).headline == "starting"
    left = read_status(job.store, state.updated_at_s + STALE_AFTER_S + 1)
    assert (left.headline, left.outcome) == ("not started, its command ended", "unknown")
    assert left.next_step == f"lorabatch resume {job.output}"


@pytest.mark.long
def test_a_submitted_job_goes_on_when_its_command_has_ended_and_after_one_that_was_killed(
    echo_job: EchoJob, background: Path
) -> None:
    rows = make_rows(160)
    echo_job.write_input(rows)
    gate = echo_job.folder / "gate"
    echo_job.set_engine(step_s=0.1, gate=str(gate))
    kill_before_a_cluster_has_the_job(echo_job, background)
    done = submit(echo_job)
    assert done.returncode == 0, done.stderr
    job_id = echo_job.record.job_id
    assert f"{job_id} runs on tls://127.0.0.1" in done.stdout
    assert not echo_job.store.is_finished()
    assert submit(echo_job).returncode == 2
    assert job_id in lorabatch("list").stdout
    address = json.loads(background.read_text())["address"]
    assert job_id in lorabatch("list", "--cluster", address).stdout
    gate.touch()
    followed = lorabatch("logs", str(echo_job.output), "-f")
    assert "engine process" in followed.stdout
    wait_until(echo_job.store.is_finished)
    echo_job.assert_answered(rows)
    assert "done" in lorabatch("list").stdout
    assert "is done already" in submit(echo_job).stdout


@pytest.mark.long
def test_jobs_submitted_at_the_same_moment_share_one_background_cluster(
    echo_job: EchoJob, background: Path, tmp_path: Path
) -> None:
    rows = make_rows(40)
    echo_job.write_input(rows)
    outputs = [str(tmp_path / f"output-{number}") for number in range(2)]
    options = [echo_job.options(output=output, workers=1) for output in outputs]
    words = [[f"--{name.replace('_', '-')}={value}" for name, value in given.items()] for given in options]
    running = [
        subprocess.Popen([*CLI, "submit", *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for given in words
    ]
    printed = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    address = json.loads(background.read_text())["address"]
    assert [f" runs on {address}\n" in text for text, _ in printed] == [True, True]
    listed = lorabatch("list").stdout
    wait_until(lambda: all(JobStore(output).is_finished() for output in outputs))
    assert [JobStore(output).read_record().job_id in listed for output in outputs] == [True, True]
    assert sorted(path.name for path in background.parent.iterdir()) == [
        background.name,
        background.with_suffix(".log").name,
    ]


@pytest.mark.long
def test_a_submitted_job_is_cancelled_from_its_output_and_resumed(echo_job: EchoJob, background: Path) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    gate = echo_job.folder / "gate"
    gate.touch()
    echo_job.set_engine(step_s=0.1, gate=str(gate))
    assert submit(echo_job).returncode == 0
    wait_until(lambda: bool(echo_job.parts()))
    gate.unlink()  # however long the command takes to start, the job does not end before
    assert lorabatch("cancel", str(echo_job.output)).returncode == 0
    wait_until(lambda: (state := echo_job.store.read_state()) is not None and state.phase == "cancelled")
    kept = echo_job.parts()
    echo_job.set_engine()
    assert submit(echo_job).returncode == 0
    wait_until(echo_job.store.is_finished)
    echo_job.assert_answered(rows)
    assert {name: echo_job.parts()[name] for name in kept} == kept


@pytest.mark.long
def test_an_idle_background_cluster_ends_itself(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    process = subprocess.Popen([sys.executable, "-c", SHORT_LIVED.format(str(path))], env=dict(os.environ))
    wait_until(path.exists)
    assert json.loads(path.read_text())["pid"] == process.pid
    assert process.wait(timeout=300) == 0
    assert not path.exists()


@pytest.mark.long
def test_a_background_cluster_that_another_has_replaced_leaves_the_others_state_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    process = subprocess.Popen([sys.executable, "-c", SHORT_LIVED.format(str(path))], env=dict(os.environ))
    wait_until(path.exists)
    other = json.loads(path.read_text()) | {"address": "tcp://127.0.0.1:1", "pid": 1}
    path.write_text(json.dumps(other))
    assert process.wait(timeout=300) == 0
    assert json.loads(path.read_text()) == other
