"""Why a coordinator stops when its worker has lost its task: on real workers of a real scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from distributed import Client, Future, LocalCluster, Reschedule, get_worker, secede

from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.coordinator.control import JobControl
from lorabatch.pipeline.coordinator.lease import CoordinatorLease
from lorabatch.pipeline.messages import StopRun, new_run_id
from lorabatch.pipeline.monitoring.topics import CONTROL

KEY = "lora_job-run"


@pytest.fixture
def client() -> Iterator[Client]:
    """Two workers in this process."""
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


def coordinate(address: str, folder: Path, output: str, run_id: str) -> str:
    """The first attempt goes on until its control stops it, and leaves why; the second returns where it is."""
    secede()
    worker: Any = get_worker()
    try:
        (folder / "first").touch(exist_ok=False)
    except FileExistsError:
        return str(worker.address)
    with (
        Client(address, set_as_default=False) as own,
        CoordinatorLease(own, run_id, 60.0) as lease,
        JobControl(own, worker, JobStore(output), run_id, KEY, lease) as control,
    ):
        (folder / "first").write_text(str(worker.address))
        try:
            while True:
                control.check()
                threading.Event().wait(0.02)
        except Exception as error:
            (folder / "why").write_text(f"{type(error).__name__} {control.is_displaced}")
            raise Reschedule from None


@pytest.fixture
def job(prepare_job: Callable[..., Any]) -> Any:
    """Frozen in its output."""
    return prepare_job(pa.table({"id": [1], "prompt": ["a"]}))


def start(client: Client, folder: Path, job: Any, run_id: str) -> Future[str]:
    asked = (client.scheduler_info()["address"], folder, job.store.url, run_id)
    return client.submit(coordinate, *asked, key=KEY, pure=False)


def wait_for(path: Path) -> str:
    pause = threading.Event()
    while not path.exists() or not path.read_text():
        pause.wait(0.02)
    return path.read_text()


def move(dask_scheduler: Any, away_from: str) -> None:
    """As Dask does when it has found a better worker."""
    task = dask_scheduler.tasks[KEY]
    task.worker_restrictions = set(dask_scheduler.workers) - {away_from}
    dask_scheduler._reschedule(KEY, away_from, stimulus_id="test")


def test_a_coordinator_whose_task_was_moved_leaves_the_job_to_the_next(
    client: Client, job: Any, tmp_path: Path
) -> None:
    future = start(client, tmp_path, job, new_run_id(job.record.job_id))
    first = wait_for(tmp_path / "first")
    client.run_on_scheduler(move, away_from=first)
    assert wait_for(tmp_path / "why") == f"{Reschedule.__name__} True"
    assert future.result(timeout=30) != first


def test_a_coordinator_whose_task_is_no_longer_wanted_ends_the_job(client: Client, job: Any, tmp_path: Path) -> None:
    future = start(client, tmp_path, job, new_run_id(job.record.job_id))
    wait_for(tmp_path / "first")
    future.cancel()
    assert wait_for(tmp_path / "why") == "JobInterruptedError False"


def test_a_coordinator_that_is_asked_to_stop_ends_the_job(client: Client, job: Any, tmp_path: Path) -> None:
    run_id = new_run_id(job.record.job_id)
    future = start(client, tmp_path, job, run_id)
    wait_for(tmp_path / "first")
    CONTROL.publish(client, run_id, StopRun())
    assert wait_for(tmp_path / "why") == "JobInterruptedError False"
    with suppress(Exception):
        future.result(timeout=30)


def test_a_coordinator_whose_output_was_started_over_leaves_it_alone(client: Client, job: Any, tmp_path: Path) -> None:
    future = start(client, tmp_path, job, new_run_id(job.record.job_id))
    wait_for(tmp_path / "first")
    job.store.replace_record(job.record.model_copy(update={"job_id": "another"}))
    assert wait_for(tmp_path / "why") == "OutputConflictError False"
    with suppress(Exception):
        future.result(timeout=30)
