"""The life of a spare engine process: taken by the first engine, replaced when it is gone, ended with its worker."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import echo_engine
import psutil
import pytest
from echo_job import processes_of, wait_until

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.pipeline.cluster.connect import embedded
from lorabatch.pipeline.messages import EngineSettings, WorkerReport
from lorabatch.pipeline.supervisor.spare import SpareEngine
from lorabatch.pipeline.worker.plugin import WorkerEngines

REQUEST = Request("row", (7,), None, SamplingParams(max_tokens=2), stream_id=0)


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpareEngine]:
    monkeypatch.setenv("PYTHONPATH", str(Path(echo_engine.__file__).parent), prepend=os.pathsep)
    (tmp_path / "echo.json").write_text(json.dumps({}))
    made = SpareEngine(str(tmp_path), num_threads=1)
    yield made
    made.close()


@pytest.fixture
def answer(tmp_path: Path, spare: SpareEngine) -> Iterator[Callable[..., WorkerReport]]:
    """Has one row answered by an engine of a worker that has the spare; the report after it."""
    engines = WorkerEngines(str(tmp_path), "tcp://worker", spare)
    joined: list[str] = []

    def answer_with(num_threads: int = 1) -> WorkerReport:
        run = f"run-{len(joined)}"
        settings = EngineSettings("model", EngineConfig(num_threads=num_threads), factory="echo_engine:EchoEngine")
        reports: SimpleQueue[WorkerReport] = SimpleQueue()
        engine = engines.join(run, settings, lambda: tmp_path, reports.put)
        joined.append(run)
        shard = engine.open(0, [ExportedRow(REQUEST)], [])
        rows = [row for _ in iter(lambda: shard.num_unfinished, 0) for row in shard.take(timeout_s=60)]
        rows += shard.take(timeout_s=60) if not rows else []
        assert [row.result.text for row in rows] == [echo_engine.answer((7,), None, 2)]
        while (report := reports.get(timeout=30)).state != "ready":
            pass
        return report

    yield answer_with
    for run in joined:
        if folder := engines.leave(run, 10):
            folder.cleanup()
    assert not list(tmp_path.glob("lorabatch-engine-*"))


def test_the_first_engine_takes_the_spare_process_and_the_next_has_one_of_its_own(
    spare: SpareEngine, answer: Callable[..., WorkerReport]
) -> None:
    assert answer().engine_pid == spare.pid
    report = answer(num_threads=2)
    assert report.engine_pid not in (None, spare.pid)
    assert report.num_crashes == 0


def test_a_spare_that_was_killed_is_replaced_and_no_crash_of_the_engine(
    spare: SpareEngine, answer: Callable[..., WorkerReport]
) -> None:
    os.kill(spare.pid, signal.SIGKILL)
    os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    report = answer()
    assert report.engine_pid not in (None, spare.pid)
    assert report.num_crashes == 0


def test_a_spare_with_other_threads_than_the_job_asks_for_is_ended(
    spare: SpareEngine, answer: Callable[..., WorkerReport]
) -> None:
    assert answer(num_threads=2).engine_pid != spare.pid
    assert not psutil.pid_exists(spare.pid)


def engine_pids() -> list[int]:
    return [process.pid for process in processes_of(os.getpid(), "engine")]


@pytest.mark.long
@pytest.mark.chaos
def test_a_worker_that_is_killed_takes_its_waiting_spare_along_and_the_next_one_has_its_own() -> None:
    with embedded(1, spare_threads=1) as client:
        worker = client.submit(os.getpid).result(60)
        (spare,) = engine_pids()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(spare))
        assert client.submit(os.getpid, pure=False).result(60) != worker
        (new,) = engine_pids()
        assert new != spare
    wait_until(lambda: not psutil.pid_exists(new))


def test_a_worker_starts_no_spare_unless_it_is_asked_to() -> None:
    with embedded(1) as client:
        client.submit(os.getpid).result(60)
        assert not engine_pids()
