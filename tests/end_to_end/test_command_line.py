"""The command line as a process of its own: what it prints, what it exits with, and how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from echo_job import ECHO_FOLDER, EchoJob, make_rows

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]


def arguments(job: EchoJob, **more: Any) -> list[str]:
    """The job as options of `lorabatch run`."""
    options = job.options(**more)
    return ["run", *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def lorabatch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=300, check=False)


def test_a_job_runs_to_its_end_and_says_where_the_answers_are(
    echo_job: EchoJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of the user that have the names of modules, where the command is typed.
    for name in ("numbers", "queue", "msgpack", "jinja2", "numpy", "pyarrow", "distributed", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    rows = make_rows(60)
    echo_job.write_input(rows)
    done = lorabatch(*arguments(echo_job))
    assert done.returncode == 0, done.stderr
    assert f"60 rows answered in 3 parts: {echo_job.output}" in done.stdout
    assert re.search(r"answering [0-9.]+, finishing [0-9.]+\), from ", done.stdout)
    assert "running" in done.stderr
    assert done.stderr.count("1 of 4 adapters is named by no row: rank64\n") == 1
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/[\w-]{20,}/lora\n", done.stderr)
    assert "distributed" not in done.stderr + done.stdout
    echo_job.assert_answered(rows)
    assert lorabatch("cancel", str(echo_job.output)).stdout.startswith("No run to stop")
    assert not echo_job.store.is_cancel_requested()
    status = json.loads(lorabatch("status", str(echo_job.output), "--json").stdout)
    assert (status["headline"], status["state"]["rows_done"]) == ("done", 60)
    assert any(name.startswith("engine-") or name.startswith("worker-") for name in echo_job.store.read_logs())
    logs = lorabatch("logs", str(echo_job.output))
    assert logs.returncode == 0
    for part in ("60 rows, 4 adapters", "plan: 60 rows in 3 shards", "60 of 60 rows answered"):
        assert part in logs.stdout
    for name in ("w0 127.0.0.1", "w1 127.0.0.1"):
        assert re.search(rf"{name} +\| worker at 127\.0\.0\.1:\d+\n", logs.stdout)


SAYS_WHAT_IT_IMPORTED = """
import atexit, runpy, sys
atexit.register(lambda: print("imported:", [name for name in ("bokeh", "pandas", "torch") if name in sys.modules]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_the_command_of_a_job_imports_no_bokeh_pandas_or_torch(echo_job: EchoJob) -> None:
    rows = make_rows(20)
    echo_job.write_input(rows)
    command = [sys.executable, "-c", SAYS_WHAT_IT_IMPORTED, CLI[1], *arguments(echo_job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "imported: []" in done.stdout
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_wrong_rows_within_the_budget_are_named_and_over_it_the_exit_code_is_1(echo_job: EchoJob) -> None:
    rows = make_rows(20)
    rows[3]["adapter"] = "no-such-adapter"
    echo_job.write_input(rows)
    over = lorabatch(*arguments(echo_job, max_errors="0"))
    assert over.returncode == 1
    assert "1 of 20 rows cannot be answered" in over.stderr
    within = lorabatch(*arguments(echo_job))
    assert within.returncode == 0
    assert "1 error row; select" in within.stdout
    assert "adapter='no-such-adapter': not among this job's adapters" in within.stdout


def test_all_problems_of_a_request_are_listed_at_once_with_exit_code_2(echo_job: EchoJob) -> None:
    done = lorabatch(*arguments(echo_job, adapters="/nowhere", max_tokens=0, temperature=-1))
    assert done.returncode == 2
    assert "max_tokens=0" in done.stderr
    assert "temperature=-1.0" in done.stderr
    missing = lorabatch(*arguments(echo_job, adapters="/nowhere"))
    assert missing.returncode == 2
    assert "/nowhere" in missing.stderr
    assert "input.parquet" in missing.stderr
    assert not echo_job.output.exists()


@pytest.mark.long
def test_a_job_file_and_options_make_one_job(echo_job: EchoJob) -> None:
    rows = make_rows(20)
    echo_job.write_input(rows)
    job_file = echo_job.folder / "job.yaml"
    job_file.write_text(json.dumps(echo_job.options(max_tokens=9)))
    assert lorabatch("run", str(job_file), "--max-tokens", "3").returncode == 0
    echo_job.assert_answered(rows, max_tokens=3)


@pytest.mark.long
def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(echo_job: EchoJob) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1)
    running = subprocess.Popen(
        [*CLI, *arguments(echo_job)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # tests started in the background inherit an ignored Ctrl-C; a command in a terminal does not
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until_rows_are_kept(echo_job, running)
    below = psutil.Process(running.pid).children(recursive=True)
    # As a terminal does it: every process of the foreground group gets the signal.
    os.killpg(running.pid, signal.SIGINT)
    _, printed = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "run the same command again to go on" in printed
    assert "Traceback" not in printed
    assert psutil.wait_procs(below, timeout=300)[1] == []
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "interrupted"
    echo_job.set_engine()
    again = lorabatch(*arguments(echo_job))
    assert again.returncode == 0
    assert "of them were done before this run" in again.stdout
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_programs_follow_a_job_by_its_last_line_its_status_and_exit_codes(echo_job: EchoJob) -> None:
    rows = make_rows(60)
    echo_job.write_input(rows)
    output = str(echo_job.output)
    gate = echo_job.folder / "gate"
    echo_job.set_engine(gate=str(gate))
    assert lorabatch("wait", output).returncode == 2
    refused = lorabatch(*arguments(echo_job, max_tokens=0), "--json")
    assert refused.returncode == 2
    (line,) = refused.stdout.splitlines()
    said = json.loads(line)
    assert (said["outcome"], said["exit_code"]) == ("refused", 2)
    assert "max_tokens=0" in said["message"]
    words = [*CLI, *arguments(echo_job), "--json"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not echo_job.store.read_logs():
        assert running.poll() is None, running.stderr and running.stderr.read()
        time.sleep(0.1)
    status = lorabatch("status", output, "--json")
    assert (status.returncode, json.loads(status.stdout)["outcome"]) == (3, "running")
    assert lorabatch("wait", output, "--timeout", "0").returncode == 3
    waiting = subprocess.Popen([*CLI, "wait", output, "--json"], stdout=subprocess.PIPE, text=True)
    gate.touch()
    printed, shown = running.communicate(timeout=300)
    assert running.returncode == 0, shown
    (line,) = printed.splitlines()
    said = json.loads(line)
    assert (said["outcome"], said["exit_code"], said["summary"]["num_rows"]) == ("done", 0, 60)
    assert "60 rows answered in 3 parts" in shown
    waited, _ = waiting.communicate(timeout=300)
    assert (waiting.returncode, json.loads(waited)["outcome"]) == (0, "done")
    status = lorabatch("status", output, "--json")
    assert (status.returncode, json.loads(status.stdout)["summary"]) == (0, said["summary"])
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_sigterm_ends_the_run_like_ctrl_c(echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(240))
    echo_job.set_engine(step_s=0.1)
    running = subprocess.Popen([*CLI, *arguments(echo_job)], stderr=subprocess.PIPE, text=True)
    wait_until_rows_are_kept(echo_job, running)
    running.terminate()
    _, printed = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "run the same command again to go on" in printed
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "interrupted"


@pytest.mark.long
def test_two_commands_at_once_on_one_output_answer_every_row_once(echo_job: EchoJob) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.02)
    commands = [[*CLI, *arguments(echo_job, workers=count, rows_per_shard=16)] for count in (1, 2)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for words in commands]
    for process in running:
        printed, complaint = process.communicate(timeout=300)
        assert process.returncode == 0, complaint
        assert "240 rows answered" in printed
    echo_job.assert_answered(rows)
    left = {path.name for path in (echo_job.output / "_lorabatch").iterdir()}
    assert left.isdisjoint({"rows", "wip", "tmp"})


@pytest.mark.long
def test_a_request_to_cancel_ends_the_run_like_ctrl_c(echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(240))
    echo_job.set_engine(step_s=0.1)
    running = subprocess.Popen([*CLI, *arguments(echo_job)], stderr=subprocess.PIPE, text=True)
    wait_until_rows_are_kept(echo_job, running)
    echo_job.store.request_cancel()
    _, printed = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "cancelled on request" in printed


def wait_until_rows_are_kept(job: EchoJob, running: subprocess.Popen[str]) -> None:
    """Until some shard has finished rows in its journal."""
    pause, give_up_s = threading.Event(), time.monotonic() + 300
    while not list((job.output / "_lorabatch" / "wip").glob("*/*.wip")):
        assert running.poll() is None, "the job ended by itself"
        assert time.monotonic() < give_up_s, "no row was kept"
        pause.wait(0.1)
