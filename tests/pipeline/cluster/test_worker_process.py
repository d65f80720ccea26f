"""GPUs counted without CUDA, and shared out among embedded workers, which leave the main module alone, and which are
replaced when they hang while they leave.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from distributed import Worker, WorkerPlugin

from lorabatch.pipeline.cluster import worker_process
from lorabatch.pipeline.cluster.connect import embedded
from lorabatch.pipeline.cluster.worker_process import gpus_of_worker, visible_gpus


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
