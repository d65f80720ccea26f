"""Several jobs at once on one cluster: one engine per worker for all that need the same base, shared fairly."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from cluster_under_test import own_cluster
from echo_job import EchoJob, Watcher, make_rows, processes_of, wait_until

from lorabatch.jobs.errors import JobInterruptedError
from lorabatch.jobs.record import JobState
from lorabatch.pipeline.result import JobResult

JOB = {"max_tokens": 4, "batch_rows": 8, "rows_per_shard": 8}


@pytest.fixture
def second_job(echo_job: EchoJob) -> EchoJob:
    """A job of its own over the same base and the same adapters."""
    folder = echo_job.folder / "second"
    folder.mkdir()
    for name in ("model", "adapters"):
        (folder / name).symlink_to(echo_job.folder / name)
    return EchoJob(folder)


@contextmanager
def running(client: Any, *jobs: tuple[EchoJob, Watcher | None, dict[str, Any]]) -> Iterator[list[Future[JobResult]]]:
    """Run jobs beside each other; each by a client and a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        yield [pool.submit(job.run, client, progress=watcher, **JOB | options) for job, watcher, options in jobs]


def num_engines() -> int:
    return len(processes_of(os.getpid(), "engine"))


def rows_done(watcher: Watcher) -> int:
    return max((state.rows_done for state in watcher.states), default=0)


def is_at_work(watcher: Watcher) -> bool:
    """Whether both workers have open rows of the job."""
    return any(sum(worker.open_rows > 0 for worker in state.workers) == 2 for state in watcher.states)


@pytest.mark.long
def test_jobs_of_one_base_share_engines_and_get_on_alike(echo_job: EchoJob, second_job: EchoJob) -> None:
    rows = make_rows(240)
    gate = echo_job.folder / "gate"
    for job in (echo_job, second_job):
        job.write_input(rows)
    echo_job.set_engine(step_s=0.05, gate=str(gate))
    never: Callable[[JobState], bool] = lambda state: False  # noqa: E731
    first, second = (Watcher(never, lambda: None) for _ in range(2))
    with own_cluster() as client, running(client, (echo_job, first, {}), (second_job, second, {})) as futures:
        wait_until(lambda: is_at_work(first) and is_at_work(second))
        assert num_engines() == 2
        gate.touch()
        wait_until(lambda: any(future.done() for future in futures))
        done = sorted((rows_done(first), rows_done(second)))
        results = [future.result(60) for future in futures]
    assert done[1] == 240
    # Equal service: when one is through, the other is not far from it.
    assert done[0] > 140
    for job, result in zip((echo_job, second_job), results, strict=True):
        job.assert_answered(rows)
        assert (result.num_rows, result.num_errors) == (240, 0)


@pytest.mark.long
def test_a_small_job_that_comes_late_does_not_wait_for_the_big_one(echo_job: EchoJob, second_job: EchoJob) -> None:
    echo_job.write_input(make_rows(600))
    second_job.write_input(make_rows(24))
    echo_job.set_engine(step_s=0.05)
    second: list[JobResult] = []
    at_work: list[int] = []

    def run_the_small_one() -> None:
        second.append(second_job.run(client, **JOB))
        at_work.append(len(echo_job.parts()))

    thread = threading.Thread(target=run_the_small_one)
    with own_cluster() as client:
        # One shard holds more than both engines' batches: the small job must not wait until it is through.
        watcher = Watcher(lambda state: state.rows_done > 0, thread.start)
        echo_job.run(client, progress=watcher, **JOB | {"rows_per_shard": 150})
        thread.join()
    assert at_work[0] < 4
    echo_job.assert_answered(make_rows(600))
    second_job.assert_answered(make_rows(24))


@pytest.mark.long
def test_a_job_that_is_stopped_leaves_the_engines_to_the_other(echo_job: EchoJob, second_job: EchoJob) -> None:
    rows = make_rows(160)
    gate = echo_job.folder / "gate"
    echo_job.write_input(rows)
    second_job.write_input(rows)
    echo_job.set_engine(step_s=0.03, gate=str(gate))
    cancelled = Watcher(lambda state: bool(state.workers), echo_job.store.request_cancel)
    other = Watcher(lambda state: False, lambda: None)
    with own_cluster() as client, running(client, (second_job, other, {}), (echo_job, cancelled, {})) as futures:
        with pytest.raises(JobInterruptedError, match="cancelled"):
            futures[1].result(60)
        pids = {process.pid for process in processes_of(os.getpid(), "engine")}
        assert len(pids) == 2
        gate.touch()
        futures[0].result(60)
        wait_until(lambda: num_engines() == 0)
    second_job.assert_answered(rows)
    echo_job.run(**JOB)
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_jobs_that_ask_for_different_engines_do_not_share_them(echo_job: EchoJob, second_job: EchoJob) -> None:
    rows = make_rows(16)
    gate = echo_job.folder / "gate"
    for job in (echo_job, second_job):
        job.write_input(rows)
    echo_job.set_engine(gate=str(gate))
    jobs = ((echo_job, None, {}), (second_job, None, {"mode": "exact"}))
    with own_cluster(1) as client, running(client, *jobs) as futures:
        wait_until(lambda: num_engines() == 2)
        gate.touch()
        for future in futures:
            future.result(60)
    for job in (echo_job, second_job):
        job.assert_answered(rows)


@pytest.mark.long
def test_a_worker_killed_under_two_jobs_costs_neither_a_row(echo_job: EchoJob, second_job: EchoJob) -> None:
    rows = make_rows(160)
    for job in (echo_job, second_job):
        job.write_input(rows)
    echo_job.set_engine(step_s=0.05)

    def kill() -> None:
        processes_of(os.getpid(), "worker")[0].kill()

    watcher = Watcher(lambda state: state.rows_done > 40, kill)
    with own_cluster() as client, running(client, (echo_job, watcher, {}), (second_job, None, {})) as futures:
        for future in futures:
            future.result(120)
    assert watcher.has_acted
    for job in (echo_job, second_job):
        job.assert_answered(rows)
