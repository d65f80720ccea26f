"""An engine serves no row before it is proven that it has loaded the job's base model, at each of its starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import echo_engine
import pytest

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.jobs.storage.local_copy import model_sha256
from lorabatch.pipeline.messages import EngineFailedError, EngineSettings, WorkerReport
from lorabatch.pipeline.supervisor.open_shard import OpenShard
from lorabatch.pipeline.supervisor.supervisor import EngineHandle, EngineSupervisor


class Engine:
    """An engine without a model, over a folder that has files of one."""

    def __init__(self, folder: Path, sha256: str) -> None:
        settings = EngineSettings("model", EngineConfig(num_threads=1), "echo_engine:EchoEngine", model_sha256=sha256)
        self.supervisor = EngineSupervisor(settings, lambda: folder, folder.parent, "tcp://worker")
        self._latest: WorkerReport | None = None
        self._changed = threading.Condition()
        self.handle: EngineHandle = self.supervisor.join("run", self._report)

    def _report(self, report: WorkerReport) -> None:
        with self._changed:
            self._latest = report
            self._changed.notify_all()

    def wait_for(self, state: str) -> WorkerReport:
        with self._changed:
            assert self._changed.wait_for(lambda: self._latest is not None and self._latest.state == state, 60)
            assert self._latest is not None
            return self._latest

    def ask(self) -> OpenShard:
        request = Request("row", (1,), None, SamplingParams(max_tokens=2), stream_id=0)
        return self.handle.open(0, [ExportedRow(request)], [])


def answers(shard: OpenShard) -> int:
    found = 0
    while shard.num_unfinished:
        found += len(shard.take(timeout_s=60))
    return found + len(shard.take(timeout_s=1))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def start(base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Engine]]:
    """Start an engine for the model that the folder holds at first."""
    monkeypatch.setenv("PYTHONPATH", str(Path(echo_engine.__file__).parent), prepend=os.pathsep)
    expected, made = model_sha256(base), list[Engine]()

    def start_one() -> Engine:
        made.append(Engine(base, expected))
        return made[-1]

    yield start_one
    for engine in made:
        engine.supervisor.close(10)


def replace(path: Path, content: str) -> None:
    path.with_suffix(".new").write_text(content)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_engine_with_another_model_answers_nothing(start: Callable[[], Engine], base: Path, name: str) -> None:
    replace(base / name, '{"other": 1}')
    engine = start()
    with pytest.raises(EngineFailedError, match=r"holds content .*, expected .*: its files have changed since the job"):
        answers(engine.ask())
    assert "holds content" in (engine.wait_for("failed").error or "")


def test_an_engine_with_the_job_s_model_answers_until_a_start_with_another_one(
    start: Callable[[], Engine], base: Path
) -> None:
    engine = start()
    assert answers(engine.ask()) == 1
    first = engine.wait_for("ready")
    replace(base / "model.safetensors", "other")
    assert answers(engine.ask()) == 1, "what was loaded is still right"
    engine.handle.check_model()
    assert first.engine_pid is not None
    os.kill(first.engine_pid, signal.SIGKILL)
    assert "holds content" in (engine.wait_for("failed").error or "")


def test_weights_written_to_in_place_end_the_engine(start: Callable[[], Engine], base: Path) -> None:
    engine = start()
    engine.wait_for("ready")
    (base / "model.safetensors").write_text("written in place")
    with pytest.raises(EngineFailedError, match=r"model\.safetensors was written to while an engine used it"):
        engine.handle.check_model()
    assert "was written to" in (engine.wait_for("failed").error or "")
