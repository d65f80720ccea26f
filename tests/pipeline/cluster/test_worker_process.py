"""GPUs counted without CUDA, and shared out among embedded workers, which leave the main module alone, and which are
replaced when they hang while they leave. Threads that the system refuses a worker are started later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster, Worker, WorkerPlugin, secede

from lorabatch.pipeline.cluster import worker_process
from lorabatch.pipeline.cluster.connect import embedded
from lorabatch.pipeline.cluster.worker_process import gpus_of_worker, let_pools_wait, revive_pools, visible_gpus


def test_every_device_file_is_a_gpu_and_control_files_are_none(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({}, tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
    ("allowed", "gpus"),
    [("2,3", ("2", "3")), ("GPU-ab, 1", ("GPU-ab", "1")), ("", ()), ("-1", ()), ("0,-1,1", ("0",)), ("none", ())],
)
def test_what_the_environment_allows_counts_more_than_what_is_there(
    allowed: str, gpus: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": allowed}, tmp_path) == gpus


def test_workers_take_gpus_in_turn() -> None:
    assert [gpus_of_worker(i, ("4", "7"), 1) for i in range(3)] == [("4",), ("7",), ("4",)]
    assert gpus_of_worker(0, (), 1) == gpus_of_worker(1, (), 2) == ()


def test_a_worker_has_a_gpu_for_each_process_of_its_engine() -> None:
    gpus = ("4", "7", "5", "6", "1")
    assert [gpus_of_worker(i, gpus, 2) for i in range(3)] == [("4", "7"), ("5", "6"), ("4", "7")]


@pytest.mark.long
def test_workers_do_not_import_the_main_module_also_when_they_start_again() -> None:
    main = sys.modules["__main__"]
    before = main.__spec__
    with embedded(2) as client:
        for _ in range(2):
            # Under this name `multiprocessing` imports it.
            found = client.run(lambda: getattr(__import__("sys").modules["__mp_main__"], "__file__", None))
            assert list(found.values()) == [None, None]
            client.restart()
    assert main.__spec__ is before


def test_embedded_workers_leave_out_what_takes_long_to_import_and_they_do_not_need() -> None:
    def heavy_modules() -> list[str]:
        pa.array(["a"])  # looks for pandas
        return [name for name in ("bokeh", "pandas", "torch") if name in sys.modules]

    with embedded(1) as client:
        assert list(client.run(heavy_modules).values()) == [[]]


# The scheduler would restart a worker that it still knows after 60 s.
_REPLACED_WITHIN_S = 50.0


def test_a_worker_that_is_stopped_while_it_leaves_is_replaced() -> None:
    class StoppedWhileItLeaves(WorkerPlugin):
        def teardown(self, worker: Worker) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

    async def leaves_within_a_second(dask_worker: Worker) -> int:
        worker_process._LEAVES_WITHIN_S = 1.0
        worker_process.leave_on_sigterm(dask_worker)
        return os.getpid()

    with embedded(1) as client:
        client.register_plugin(StoppedWhileItLeaves())
        ((address, pid),) = client.run(leaves_within_a_second).items()
        os.kill(pid, signal.SIGTERM)
        stop_s = time.monotonic() + _REPLACED_WITHIN_S
        while set(client.scheduler_info(n_workers=-1)["workers"]) <= {address}:
            assert time.monotonic() < stop_s, "the stopped worker was not replaced"
            time.sleep(0.1)
        assert not psutil.pid_exists(pid)


@pytest.fixture
def worker_of_one_thread() -> Iterator[tuple[Client, Worker]]:
    """In this process, and a client."""
    with (
        LocalCluster(1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        (worker,) = cluster.workers.values()
        assert isinstance(worker, Worker)
        yield client, worker


class Refusals:
    """Refuses threads of Dask's pools while `is_on`, as a system at its limit does."""

    is_on = False
    count = 0
    may_end = threading.Event()


def refuse() -> str:
    """A task that leaves its pool when there is no room for another thread."""
    Refusals.is_on = True
    secede()
    Refusals.may_end.wait(60)
    return "ended"


@pytest.fixture
def _refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    start = threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if Refusals.is_on and "Dask-Default-Threads" in thread.name:
            Refusals.count += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    Refusals.is_on, Refusals.count = False, 0
    yield
    Refusals.may_end.set()
    Refusals.may_end = threading.Event()


@pytest.mark.usefixtures("_refusals")
@pytest.mark.parametrize("refused", ["its own", "its task's successor"])
def test_a_worker_that_was_refused_its_thread_gets_it_later(
    worker_of_one_thread: tuple[Client, Worker], refused: str
) -> None:
    client, worker = worker_of_one_thread
    for _ in range(2):
        let_pools_wait(worker)
    if refused == "its own":
        Refusals.is_on = True
    else:
        first = client.submit(refuse, pure=False)
    waiting = client.submit(int, pure=False)
    give_up_s = time.monotonic() + 20
    while not Refusals.count:
        assert time.monotonic() < give_up_s, "no thread was refused"
        time.sleep(0.01)
    revive_pools(worker)
    assert (Refusals.count, waiting.done()) == (2, False)
    Refusals.is_on = False
    revive_pools(worker)
    assert waiting.result(60) == 0
    if refused != "its own":
        Refusals.may_end.set()
        assert first.result(60) == "ended"
    revive_pools(worker)
    assert len(worker.executor._threads) == 1
