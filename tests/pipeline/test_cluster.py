"""Finding a cluster, and saying what is wrong with it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from multiprocessing import active_children
from typing import Any

import pytest

from lorabatch.jobs.errors import JobFailedError, JobRequestError
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline import cluster
from lorabatch.pipeline.cluster import connected, loss_told, threads_per_engine


def make_spec(**options: Any) -> JobSpec:
    return JobSpec(**{"model": "m", "input": "i", "output": "o"} | options)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x", "tcp://127.0.0.1"])
def test_an_address_where_nobody_answers_is_a_wrong_request(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorabatch.pipeline.cluster._CONNECT_TIMEOUT", "1s")
    with (
        pytest.raises(JobRequestError, match=r"cluster='.*no Dask scheduler answers"),
        connected(make_spec(cluster=address)),
    ):
        raise AssertionError("connected to nothing")


def test_an_embedded_cluster_shares_the_cores_and_other_clusters_decide_for_themselves() -> None:
    one, many = (threads_per_engine(make_spec(), num_workers=n) for n in (1, 10_000))
    assert one is not None
    assert one >= 1
    assert many == 1
    assert threads_per_engine(make_spec(engine_threads=3), num_workers=10) == 3
    assert threads_per_engine(make_spec(cluster="tcp://somewhere:8786"), num_workers=2) is None


def test_an_embedded_cluster_whose_worker_dies_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deaths = [RuntimeError("Nanny failed to start.")]

    class MortalCluster:
        def __init__(self) -> None:
            if deaths:
                raise deaths.pop()

    monkeypatch.setattr(cluster, "LocalCluster", MortalCluster)
    assert isinstance(cluster._start(), MortalCluster)
    deaths += [RuntimeError("Nanny failed to start.")] * 9
    with pytest.raises(JobFailedError, match=r"could not be started \(Nanny failed to start\.\)"):
        cluster._start()


@pytest.mark.chaos
def test_a_worker_that_hangs_while_it_starts_is_ended_and_another_cluster_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "_WORKER_START_LIMIT_S", 20.0)
    pause, stopped = threading.Event(), []

    def stop_the_first() -> None:
        while not (workers := active_children()):
            pause.wait(0.01)
        os.kill(workers[0].pid or 0, signal.SIGSTOP)
        stopped.append(workers[0])

    thread = threading.Thread(target=stop_the_first)
    thread.start()
    with connected(make_spec(workers=1)) as client:
        assert client.submit(os.getpid).result(timeout=60) not in (os.getpid(), stopped[0].pid)
    thread.join()
    stopped[0].join(timeout=10)
    assert not stopped[0].is_alive()
    # What is left of the first complains now if it was not closed.
    gc.collect()


class LostClient:
    status = "closed"


class RunningClient:
    status = "running"


def test_what_fails_because_the_scheduler_is_gone_says_so() -> None:
    with pytest.raises(JobFailedError, match=r"scheduler is gone \(stream closed\)"), loss_told(LostClient()):  # type: ignore[arg-type]
        raise OSError("stream closed")
    with pytest.raises(OSError, match="stream closed"), loss_told(RunningClient()):  # type: ignore[arg-type]
        raise OSError("stream closed")
    with pytest.raises(JobRequestError), loss_told(LostClient()):  # type: ignore[arg-type]
        raise JobRequestError("wrong")
