"""Finding a cluster, and saying what is wrong with it.

A scheduler that speaks to all its clients while one connects, and what is said while one begins to listen.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from cluster_under_test import existing_cluster
from distributed import Client, LocalCluster, SchedulerPlugin
from distributed.comm.core import CommClosedError
from distributed.core import Status

from lorabatch.jobs.errors import JobFailedError, JobRequestError
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.cluster.connect import (
    cluster_errors_named,
    embedded,
    existing,
    gpus_each,
    known_workers,
    num_embedded_workers,
    open_client,
    start_local_cluster,
    threads_per_engine,
)
from lorabatch.pipeline.monitoring.topics import STATES
from lorabatch.system.long_work import listening


def make_spec(**options: Any) -> JobSpec:
    return JobSpec(**{"model": "m", "input": "i", "output": "o"} | options)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x", "tcp://127.0.0.1"])
def test_an_address_without_a_scheduler_is_a_wrong_request(address: str) -> None:
    with (
        pytest.raises(JobRequestError, match=r"cluster='.*no Dask scheduler answers"),
        existing(address, timeout="1s"),
    ):
        raise AssertionError("connected to nothing")


def test_engines_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert num_embedded_workers(make_spec(device="cuda")) == 2
    assert num_embedded_workers(make_spec(device="cuda", workers=1)) == 1
    assert num_embedded_workers(make_spec(device="cpu", workers=5)) == 5
    with pytest.raises(JobRequestError, match=r"workers=3: this machine shows 2 GPUs.*at most --workers 2"):
        num_embedded_workers(make_spec(device="cuda", workers=3))


def test_engines_of_several_processes_have_as_many_gpus_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,4,5,6")
    pairs = make_spec(device="cuda", tensor_parallel=2)
    assert (num_embedded_workers(pairs), gpus_each(pairs)) == (2, 2)
    assert gpus_each(make_spec(device="cpu", tensor_parallel=2)) == 1
    with pytest.raises(JobRequestError, match=r"workers=3: this machine shows 5 GPUs, and an engine takes 2 of them"):
        num_embedded_workers(make_spec(device="cuda", tensor_parallel=2, workers=3))
    with pytest.raises(JobRequestError, match=r"tensor_parallel=6: this machine shows 5 GPUs.*--tensor-parallel 5"):
        num_embedded_workers(make_spec(device="cuda", tensor_parallel=6))


def test_an_embedded_cluster_shares_the_cores_and_other_clusters_decide_for_themselves() -> None:
    one, many = (threads_per_engine(make_spec(), num_workers=n) for n in (1, 10_000))
    assert one is not None
    assert one >= 1
    assert many == 1
    assert threads_per_engine(make_spec(engine_threads=3), num_workers=10) == 3
    assert threads_per_engine(make_spec(cluster="tcp://somewhere:8786"), num_workers=2) is None


def test_an_embedded_cluster_whose_worker_dies_while_it_starts_is_started_again() -> None:
    deaths = [RuntimeError("Nanny failed to start.")]

    class MortalCluster(LocalCluster):
        status = Status.closed

        def __init__(self) -> None:
            if deaths:
                raise deaths.pop()

    assert isinstance(start_local_cluster(MortalCluster), MortalCluster)
    deaths += [RuntimeError("Nanny failed to start.")] * 9
    with pytest.raises(JobFailedError, match=r"could not be started \(Nanny failed to start\.\)"):
        start_local_cluster(MortalCluster)


@pytest.mark.long
@pytest.mark.chaos
def test_a_worker_that_hangs_while_it_starts_is_ended_and_another_cluster_started() -> None:
    pause, stopped, others = threading.Event(), [], active_children()

    def stop_the_first() -> None:
        while not (workers := [child for child in active_children() if child not in others]):
            pause.wait(0.01)
        os.kill(workers[0].pid or 0, signal.SIGSTOP)
        stopped.append(workers[0])

    thread = threading.Thread(target=stop_the_first)
    thread.start()
    with embedded(1, worker_start_limit_s=20.0) as client:
        assert client.submit(os.getpid).result(timeout=60) not in (os.getpid(), stopped[0].pid)
    thread.join()
    stopped[0].join(timeout=10)
    assert not stopped[0].is_alive()
    # What is left of the first complains now if it was not closed.
    gc.collect()


@pytest.mark.long
@pytest.mark.chaos
def test_a_worker_that_hangs_while_it_starts_again_keeps_no_command_from_ending() -> None:
    others = active_children()
    with embedded(1, worker_start_limit_s=20.0) as client:
        first = client.submit(os.getpid).result(timeout=60)
        os.kill(first, signal.SIGKILL)
        pause = threading.Event()
        while not (again := [child for child in active_children() if child.pid != first and child not in others]):
            pause.wait(0.01)
        os.kill(again[0].pid or 0, signal.SIGSTOP)
    again[0].join(timeout=10)
    assert not again[0].is_alive()


def test_the_scheduler_is_asked_for_its_workers_whatever_its_client_remembers() -> None:
    cluster = LocalCluster(n_workers=2, processes=False, dashboard_address="127.0.0.1:0")
    with cluster, Client(cluster, set_as_default=False) as client:
        is_done = threading.Event()

        def poll() -> None:
            while not is_done.is_set():
                client.sync(client._update_scheduler_info, n_workers=0)  # as Dask's own poll every 2 s

        polls = [threading.Thread(target=poll) for _ in range(2)]
        for thread in polls:
            thread.start()
        found = {len(known_workers(client) or ()) for _ in range(100)}
        is_done.set()
        for thread in polls:
            thread.join()
    assert found == {2}


def test_a_scheduler_that_is_gone_or_does_not_answer_has_no_known_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.cluster.connect._ANSWER_LIMIT_S", 0.5)
    with existing_cluster(tmp_path, num_workers=1) as (address, _, scheduler), existing(address) as client:
        assert len(known_workers(client) or ()) == 1
        scheduler.send_signal(signal.SIGSTOP)
        assert known_workers(client) is None
        scheduler.send_signal(signal.SIGCONT)
        scheduler.kill()
        scheduler.wait()
        assert known_workers(client) is None


def test_any_wait_for_a_scheduler_that_is_stopped_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler stopped between a client's connection and the job's first report: 90 s passed without a word."""
    monkeypatch.setattr("lorabatch.pipeline.cluster.connect._ASK_INTERVAL_S", 0.1)
    monkeypatch.setattr("lorabatch.pipeline.cluster.connect._ANSWER_LIMIT_S", 0.5)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        existing_cluster(tmp_path, num_workers=1) as (address, _, scheduler),
        listening(lines.put),
        existing(address) as client,
        ThreadPoolExecutor() as threads,
    ):
        for ask in (lambda: client.run_on_scheduler(os.getpid), lambda: STATES.subscribe(client, "run", print)):
            assert lines.empty()
            scheduler.send_signal(signal.SIGSTOP)
            asked = threads.submit(ask)
            assert re.match(r"The Dask scheduler at tcp://127\S+ does not answer", lines.get(timeout=60))
            assert not asked.done()
            scheduler.send_signal(signal.SIGCONT)
            assert lines.get(timeout=60) == "The Dask scheduler answers again."
            asked.result(timeout=60)


def test_workers_with_nothing_left_to_do_are_ended_at_once_and_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = active_children()
    with embedded(2) as client:
        assert client.submit(os.getpid).result(timeout=60) != os.getpid()
        workers = [child for child in active_children() if child not in others]
        found = client.scheduler_info(n_workers=-1)["workers"].values()
        folders = [Path(worker["local_directory"]) for worker in found]
        assert [folder.is_dir() for folder in folders] == [True, True]
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2
    assert not any(folder.exists() for folder in folders)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_workers_of_a_job_that_failed_end_in_order() -> None:
    others, workers = active_children(), []

    def fail() -> None:
        with embedded(1) as client:
            client.submit(os.getpid).result(timeout=60)
            workers.extend(child for child in active_children() if child not in others)
            raise JobFailedError("the job")

    with pytest.raises(JobFailedError, match="the job"):
        fail()
    assert [worker.exitcode for worker in workers] == [0]


class LostClient:
    status = "closed"


class RunningClient:
    status = "running"


def test_what_fails_because_the_scheduler_is_gone_says_so() -> None:
    lost: Any = LostClient()
    running: Any = RunningClient()
    with (
        pytest.raises(JobFailedError, match=r"scheduler is gone \(stream closed\)"),
        cluster_errors_named(lost, "out"),
    ):
        raise OSError("stream closed")
    with pytest.raises(OSError, match="stream closed"), cluster_errors_named(running, "out"):
        raise OSError("stream closed")
    with pytest.raises(JobFailedError, match="scheduler is gone"), cluster_errors_named(running, "out"):
        raise CommClosedError("timed out, while the client has not noticed yet")
    with pytest.raises(JobRequestError), cluster_errors_named(lost, "out"):
        raise JobRequestError("wrong")


def test_a_thread_that_the_system_refuses_is_said_with_what_to_do() -> None:
    running: Any = RunningClient()
    with pytest.raises(JobFailedError, match="ulimit -u"), cluster_errors_named(running, "out"):
        raise RuntimeError("can't start new thread")
    with pytest.raises(RuntimeError, match="another"), cluster_errors_named(running, "out"):
        raise RuntimeError("another")


class Talkative(SchedulerPlugin):
    """Sends the next clients a message as soon as they are connected."""

    def __init__(self, num_clients: int) -> None:
        self._left = num_clients

    def add_client(self, scheduler: Any, client: str) -> None:
        if self._left:
            self._left -= 1
            scheduler.loop.add_callback(lambda: scheduler.client_comms[client].send({"op": "lost-data", "key": "k"}))


@pytest.fixture
def scheduler() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster:
        yield cluster


def _register(scheduler: LocalCluster, plugin: SchedulerPlugin) -> None:
    scheduler.scheduler.add_plugin(plugin, name="talkative")


def test_a_scheduler_that_says_more_than_its_greeting_is_asked_again(scheduler: LocalCluster) -> None:
    _register(scheduler, Talkative(2))
    with open_client(scheduler.scheduler_address) as client:
        assert client.status == "running"
        assert client.run_on_scheduler(lambda: "answered") == "answered"


def test_one_that_never_stops_talking_is_given_up(scheduler: LocalCluster) -> None:
    _register(scheduler, Talkative(10**6))
    with pytest.raises(AssertionError):
        open_client(scheduler.scheduler_address)


@pytest.mark.parametrize("address", ["carrier-pigeon://127.0.0.1:1", "tls://127.0.0.1:1", "tcp://127.0.0.1:1"])
def test_one_that_could_not_connect_is_closed_and_not_left_to_its_finaliser(address: str) -> None:
    before = all_clients()
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        open_client(address, timeout="1s")
    assert [client.status for client in all_clients() if client not in before] == ["closed"], caught


def all_clients() -> list[Client]:
    # not isinstance: torch has an object that warns when asked for its class
    return [found for found in gc.get_objects() if type(found) is Client]
