"""Real processes killed with -9 in the middle of jobs: no row is lost, none is there twice, none is wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from cluster_under_test import existing_cluster
from distributed import Client, secede
from echo_job import ECHO_FACTORY, ECHO_FOLDER, EchoJob, Watcher, kill_one, make_rows, processes_of

from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.engine.config import EngineConfig
from lorabatch.jobs.errors import JobFailedError
from lorabatch.jobs.record import JobState
from lorabatch.pipeline.messages import EngineSettings
from lorabatch.pipeline.worker.registration import register_plugin, unregister_plugin

Process = subprocess.Popen[bytes]

pytestmark = pytest.mark.chaos


def half_done(state: JobState) -> bool:
    return state.phase == "running" and 0 < state.rows_done < state.rows


@pytest.mark.parametrize("victim", ["engine", pytest.param("worker", marks=pytest.mark.long)])
def test_a_process_killed_mid_job_loses_and_repeats_nothing(echo_job: EchoJob, victim: str) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.03)
    watcher = Watcher(half_done, lambda: kill_one(victim))
    echo_job.run(progress=watcher)
    assert watcher.has_acted
    echo_job.assert_answered(rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_lose_and_repeat_nothing(echo_job: EchoJob, seed: int) -> None:
    rows = make_rows(400)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.03)
    with killing_at_random(seed) as kills:
        echo_job.run()
    echo_job.assert_answered(rows)
    assert kills


@contextmanager
def killing_at_random(seed: int) -> Iterator[list[str]]:
    """Kill an engine or a worker every second or so, from a thread, while the block runs."""
    luck = random.Random(seed)
    is_over = threading.Event()
    kills: list[str] = []

    def kill() -> None:
        while not is_over.wait(luck.uniform(0.3, 2.0)) and len(kills) < 6:
            kind = luck.choice(["engine", "engine", "worker"])
            with suppress(psutil.NoSuchProcess):
                # Before there are engines, there is no job to disturb yet.
                if processes_of(os.getpid(), "engine"):
                    luck.choice(processes_of(os.getpid(), kind)).kill()
                    kills.append(kind)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield kills
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
def test_a_killed_client_leaves_no_process_behind_and_the_next_run_goes_on(
    echo_job: EchoJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    scratch = echo_job.folder / f"lorabatch-{os.getuid()}"
    monkeypatch.setenv("TMPDIR", str(echo_job.folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    echo_job.set_engine(step_s=0.05)
    client = start_client(echo_job)
    wait_for_parts(echo_job, client, 2)
    below = psutil.Process(client.pid).children(recursive=True)
    client.kill()
    client.wait()
    _, alive = psutil.wait_procs(below, timeout=300)
    assert alive == []
    committed = echo_job.parts()
    assert 2 <= len(committed) < 15
    assert list(scratch.glob("process-*"))
    result = echo_job.run()
    assert list(scratch.rglob("*")) == []
    echo_job.assert_answered(rows)
    assert {name: echo_job.parts()[name] for name in committed} == committed
    assert result.num_reused >= 16 * len(committed)


@pytest.mark.long
def test_a_client_stopped_at_the_very_end_leaves_no_working_files_behind(echo_job: EchoJob) -> None:
    """The scheduler is in its process, so that no message says that the job is done."""
    rows = make_rows(64)
    echo_job.write_input(rows)
    client = start_client(echo_job)
    ours, waiting = echo_job.output / "_lorabatch", threading.Event()
    while not (echo_job.output / "_SUCCESS").exists():
        assert client.poll() is None, "the client ended by itself"
        waiting.wait(0.0005)
    client.send_signal(signal.SIGSTOP)
    try:
        give_up_s = time.monotonic() + 300
        while (left := [n for n in ("rows", "wip", "tmp") if (ours / n).exists()]) and time.monotonic() < give_up_s:
            waiting.wait(0.05)
        assert left == []
    finally:
        client.kill()
        client.wait()
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "done"
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_a_killed_scheduler_ends_the_run_and_the_next_one_goes_on(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.03)
    with existing_cluster(tmp_path, num_workers=2) as (address, _, scheduler):
        watcher = Watcher(half_done, scheduler.kill)
        with pytest.raises(JobFailedError, match="scheduler"):
            echo_job.run(progress=watcher, cluster=address)
    echo_job.run()
    echo_job.assert_answered(rows)


def start_client(job: EchoJob) -> subprocess.Popen[bytes]:
    """The job in a process of its own."""
    options = job.folder / "options.json"
    options.write_text(json.dumps(job.options()))
    return subprocess.Popen([sys.executable, str(ECHO_FOLDER / "echo_run.py"), str(options)])


def wait_for_parts(job: EchoJob, client: subprocess.Popen[bytes], num_parts: int) -> None:
    """Until so many parts are committed."""
    waiting = threading.Event()
    while len(job.parts()) < num_parts:
        assert client.poll() is None, "the client ended by itself"
        waiting.wait(0.05)


@pytest.mark.long
def test_a_nanny_killed_on_an_existing_cluster_costs_its_worker_and_no_row(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.03)
    with existing_cluster(tmp_path, num_workers=2) as (address, nannies, _):
        watcher = Watcher(half_done, lambda: os.kill(nannies[0].pid, signal.SIGKILL))
        echo_job.run(progress=watcher, cluster=address)
        assert watcher.has_acted
        with Client(address, set_as_default=False) as client:
            assert len(client.scheduler_info(n_workers=-1)["workers"]) == 1
        assert processes_of(nannies[1].pid, "engine") == []
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_a_worker_lost_while_it_is_asked_to_start_an_engine_costs_no_job(echo_job: EchoJob, tmp_path: Path) -> None:
    """It hangs when it is asked, and its nanny is killed before it could answer."""
    rows = make_rows(48)
    echo_job.write_input(rows)
    with existing_cluster(tmp_path, num_workers=2) as (address, nannies, _):
        victim = processes_of(nannies[0].pid, "worker")[0]
        with Client(address, set_as_default=False) as client:
            settings = EngineSettings(str(echo_job.model), EngineConfig(), ECHO_FACTORY)
            victim.suspend()
            threading.Timer(2.0, victim.kill).start()
            run_id = register_plugin(client, "job-1", settings, echo_job.store)
            unregister_plugin(client, run_id)
        echo_job.run(cluster=address)
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_shards_of_a_worker_whose_thread_is_taken_go_to_others(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.05)
    with (
        existing_cluster(tmp_path, num_workers=2) as (address, _, _),
        Client(address, set_as_default=False) as client,
    ):
        taken = []

        def take_a_thread() -> None:
            begun = next(e for e in echo_job.store.read_events() if e["kind"] == "SchedulerStarted")
            other = next(w for w in client.scheduler_info(n_workers=-1)["workers"] if w != begun["coordinator"])
            # Another user's task, which ends with the cluster.
            taken.append(client.submit(time.sleep, 600, workers=[other], priority=1000, pure=False))

        watcher = Watcher(lambda state: len(echo_job.parts()) > 0, take_a_thread)
        began_s = time.monotonic()
        echo_job.run(client=client, progress=watcher, cluster=address)
        assert time.monotonic() - began_s < 200
        assert [task.done() for task in taken] == [False]
    echo_job.assert_answered(rows)
    assert any("has not begun part-" in note for state in watcher.states for note in state.notes)


@pytest.mark.long
def test_a_job_begins_elsewhere_than_on_a_worker_whose_thread_is_taken(echo_job: EchoJob, tmp_path: Path) -> None:
    # More rows than the client indexes itself.
    rows = make_rows(5000)
    echo_job.write_input(rows, rows_per_group=250)
    with (
        existing_cluster(tmp_path, num_workers=2) as (address, _, _),
        Client(address, set_as_default=False) as client,
    ):
        busy, free = client.scheduler_info(n_workers=-1)["workers"]
        tasks = [
            client.submit(time.sleep, seconds, workers=[worker], priority=1000, pure=False)
            for worker, seconds in ((busy, 600), (free, 30))
        ]
        began_s = time.monotonic()
        watcher = Watcher(lambda state: False, lambda: None)
        echo_job.run(client=client, progress=watcher, cluster=address, rows_per_shard=250)
        assert time.monotonic() - began_s < 200
        assert [task.done() for task in tasks] == [False, True]
    echo_job.assert_answered(rows)
    assert any("No worker has begun the job yet." in note for note in watcher.notes), watcher.notes


def refuse_threads(seconds: float) -> None:
    """On a worker: no thread can be started for tasks."""
    import threading
    import time

    start, until_s = threading.Thread.start, time.monotonic() + seconds

    def start_or_refuse(thread: threading.Thread) -> None:
        if time.monotonic() < until_s and "Dask-Default-Threads" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_or_refuse  # type: ignore[method-assign]


@pytest.mark.long
def test_a_job_whose_first_task_is_refused_a_thread_begins_when_there_is_room(
    echo_job: EchoJob, tmp_path: Path
) -> None:
    rows = make_rows(60)
    echo_job.write_input(rows)
    with (
        existing_cluster(tmp_path, num_workers=2) as (address, _, _),
        Client(address, set_as_default=False) as client,
    ):
        client.run(refuse_threads, 8.0)
        echo_job.run(client=client, cluster=address)
    echo_job.assert_answered(rows)


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "by"), [(8.0, "our task"), (8.0, "another task"), (60.0, "our task")])
def test_a_worker_that_is_refused_its_only_thread_goes_on_when_there_is_room_again(
    echo_job: EchoJob, tmp_path: Path, seconds: float, by: str
) -> None:
    rows = make_rows(480 if seconds > 30 else 240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1)
    others: list[str] = []

    def refuse() -> None:
        begun = next(e for e in echo_job.store.read_events() if e["kind"] == "SchedulerStarted")
        others.extend(w for w in client.scheduler_info(n_workers=-1)["workers"] if w != begun["coordinator"])
        client.run(refuse_threads, seconds, workers=others)
        if by == "another task":
            client.submit(secede, workers=others, priority=1000, pure=False)

    with (
        existing_cluster(tmp_path, num_workers=2) as (address, _, _),
        Client(address, set_as_default=False) as client,
    ):
        watcher = Watcher(lambda state: len(echo_job.parts()) > 0, refuse)
        began_s = time.monotonic()
        echo_job.run(client=client, progress=watcher, cluster=address)
        assert time.monotonic() - began_s < 200
        threads = client.run(lambda dask_worker: len(dask_worker.executor._threads), workers=others)
        assert client.submit(int, workers=others, pure=False).result(60) == 0
    echo_job.assert_answered(rows)
    assert list(threads.values()) == [1]
    has_waited = any("has not begun part-" in note for state in watcher.states for note in state.notes)
    assert has_waited == (seconds > 30)


@pytest.mark.long
def test_a_hung_worker_costs_seconds_and_no_row(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.03)
    hung: list[int] = []
    # With Dask's own settings, which give a silent worker five minutes.
    with existing_cluster(tmp_path, num_workers=2) as (address, _, _):
        try:
            with Client(address, set_as_default=False) as client:
                watcher = Watcher(half_done, lambda: hung.append(hang_one_worker(client)))
                echo_job.run(progress=watcher, cluster=address)
            echo_job.assert_answered(rows)
            assert psutil.Process(hung[0]).status() == psutil.STATUS_STOPPED
            removed = [event for event in echo_job.store.read_events() if event["kind"] == "RemoveReplica"]
            assert [event["reason"] for event in removed] == ["no report for 20 seconds"]
            assert replay_job(echo_job.store).first_difference is None
        finally:
            for pid in hung:
                os.kill(pid, signal.SIGKILL)


def hang_one_worker(client: Client) -> int:
    """Stop a worker that does not coordinate the job; its process id."""
    coordinators = [address for address, keys in client.processing().items() if "lora_job-" in str(keys)]
    pids = client.run(os.getpid)
    pid = next(pid for address, pid in pids.items() if address not in coordinators)
    os.kill(pid, signal.SIGSTOP)
    return int(pid)
