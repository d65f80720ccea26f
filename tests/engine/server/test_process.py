"""The engine process, as its supervisor sees it: messages in, messages out, and a reason for its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgpack
import pytest
import torch

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.errors import RUN_AGAIN
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.server.frames import (
    FROM_ENGINE,
    TO_ENGINE,
    AbortRows,
    AddRows,
    ExpectRows,
    Exported,
    ExportRows,
    Fatal,
    FromEngine,
    Heartbeat,
    Ready,
    RegisterAdapter,
    Results,
    RowTokens,
    Start,
    Stop,
    ToEngine,
    read_frame,
    write_frame,
)
from lorabatch.engine.server.process import is_out_of_memory, kernel_kills
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M

ENGINE_SOURCE = '''
import os, sys, time
from lorabatch.engine.errors import AdapterRefusedError, ModelFilesError
from lorabatch.engine.request import ExportedRow
from lorabatch.engine.request import Result
from lorabatch.engine.telemetry import EngineTelemetry


class Engine:
    """Answers a row with the sum of its prompt; prints to spoil the stream if it can."""

    hung_process = None

    def __init__(self, model_folder, config):
        if model_folder.name == "missing":
            raise ModelFilesError("config.json: missing")
        print("loading on standard output")
        os.write(1, b"raw bytes on descriptor 1")
        self.rows = []
        self.folder = model_folder
        self.config = config
        self.expected = {}

    def register_adapter(self, adapter_id, folder, name, content_sha256=""):
        if adapter_id == "bad":
            raise AdapterRefusedError("adapter bad: no weights")

    def expect_rows(self, adapter_id, num_rows):
        self.expected[adapter_id] = num_rows

    def import_rows(self, rows):
        self.rows += [row.request for row in rows]

    def export_rows(self, request_ids):
        taken = [row for row in self.rows if row.request_id in request_ids]
        self.abort(request_ids)
        return [ExportedRow(row, (7, 8)) for row in taken]

    def abort(self, request_ids):
        self.rows = [row for row in self.rows if row.request_id not in request_ids]

    def step(self):
        row = self.rows.pop(0)
        total = sum(row.prompt_token_ids)
        if total == 666:
            raise RuntimeError("device lost")
        if total == 444:
            return [Result(row.request_id, (), f"{self.config} {self.expected}", "length", 1, "base")]
        if total == 777:
            time.sleep(3600)
        if total == 888:
            raise MemoryError("no room for the batch")
        if total == 555:
            while not (self.folder / "go").exists():
                time.sleep(0.05)
            time.sleep(0.5)  # what was sent before is read by now, on a busy machine too
        return [Result(row.request_id, (total,), str(total), "length", len(row.prompt_token_ids), "base")]

    @property
    def num_unfinished(self):
        return len(self.rows)

    def telemetry(self):
        return EngineTelemetry(len(self.rows), (), "base", 0, 1, 0, 0, 0)
'''


MessageT = TypeVar("MessageT", bound=FromEngine)


def encoded(plain: object) -> bytes:
    """A frame of any content."""
    body = msgpack.packb(plain)
    return len(body).to_bytes(4, "little") + body


class Child:
    """A running engine process with the two ends of its pipes."""

    def __init__(self, folder: Path) -> None:
        (folder / "summing_engine.py").write_text(ENGINE_SOURCE)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lorabatch.engine.server.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def send(self, message: ToEngine) -> None:
        assert self.process.stdin is not None
        write_frame(self.process.stdin, TO_ENGINE, message)

    def start(self, model: str = "model") -> None:
        self.send(Start(model, "summing_engine:Engine", EngineConfig(mode="exact", cost=CPU_SMOLLM2_135M)))

    def add(self, *rows: tuple[str, tuple[int, ...], str | None]) -> None:
        requests = [Request(name, prompt, adapter, SamplingParams()) for name, prompt, adapter in rows]
        self.send(AddRows(tuple(map(ExportedRow, requests))))

    def next(self, kind: type[MessageT]) -> MessageT:
        assert self.process.stdout is not None
        while (message := read_frame(self.process.stdout, FROM_ENGINE)) is not None:
            if isinstance(message, kind):
                return message
        raise AssertionError(f"the process ended before {kind.__name__}")

    def result(self) -> Result:
        """The next result, the only one of its message."""
        (result,) = self.next(Results).results
        return result

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=300)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path)
    yield child
    child.close()


def test_rows_come_back_as_they_finish_and_prints_do_not_spoil_the_stream(child: Child) -> None:
    child.start()
    ready = child.next(Ready)
    assert ready.pid == child.process.pid
    assert (ready.batch_rows, ready.step_tokens) == (64, 512), "the limits that the engine has chosen"
    child.add(("a", (1, 2), None), ("b", (3, 4), None))
    answers = [child.result() for _ in range(2)]
    assert [(answer.request_id, answer.text) for answer in answers] == [("a", "3"), ("b", "7")]
    assert child.next(EngineTelemetry).num_running == 0


def test_rows_of_an_adapter_that_cannot_be_registered_become_errors(
    child: Child,
) -> None:
    child.start()
    child.send(RegisterAdapter("bad", "somewhere", "bad"))
    child.add(("a", (1,), "bad"), ("b", (2,), None))
    first, second = (child.result() for _ in range(2))
    assert (first.finish_reason, first.error) == ("error", f"adapter bad: no weights. {RUN_AGAIN}")
    assert (second.request_id, second.error) == ("b", None)


def test_a_model_that_cannot_be_loaded_is_a_permanent_failure_in_one_sentence(child: Child) -> None:
    child.start(model="missing")
    fatal = child.next(Fatal)
    assert (fatal.error, fatal.is_permanent) == ("config.json: missing", True)
    assert child.process.wait(timeout=300) == 1


def test_a_failing_step_is_reported_and_ends_the_process(child: Child) -> None:
    child.start()
    child.add(("a", (666,), None))
    fatal = child.next(Fatal)
    assert (fatal.error, fatal.is_permanent) == ("RuntimeError: device lost", False)
    assert not fatal.is_out_of_memory
    assert child.process.wait(timeout=300) == 1


def test_a_step_that_runs_out_of_memory_says_so(child: Child) -> None:
    child.start()
    child.add(("a", (888,), None))
    assert child.next(Fatal).is_out_of_memory


def test_heartbeats_go_on_in_a_long_step_and_say_how_long_it_is(child: Child) -> None:
    child.start()
    assert child.next(Heartbeat).step_s == 0.0
    child.next(Ready)
    child.add(("a", (777,), None))
    while child.next(Heartbeat).step_s == 0.0:
        pass
    assert child.next(Heartbeat).step_s > 0.0


def test_aborted_rows_send_nothing(child: Child, tmp_path: Path) -> None:
    child.start(model=str(tmp_path))
    child.add(("busy", (555,), None))
    child.add(("a", (1,), None))
    child.send(AbortRows(("a",)))
    child.add(("b", (2,), None))
    (tmp_path / "go").touch()
    names = [child.result().request_id for _ in range(2)]
    assert names == ["busy", "b"]
    child.send(Stop())
    assert child.process.wait(timeout=300) == 0


def test_exported_rows_can_be_given_back_and_finished_ones_are_not_among_them(child: Child, tmp_path: Path) -> None:
    child.start(model=str(tmp_path))
    child.add(("a", (1,), None))
    assert child.result().request_id == "a"
    child.add(("busy", (555,), None), ("b", (2,), None))
    child.send(ExportRows(("b", "a", "unknown")))
    (tmp_path / "go").touch()
    assert child.next(Exported).rows == (RowTokens("b", (7, 8), ()),)
    child.send(AddRows((ExportedRow(Request("b", (2,), None, SamplingParams()), (7, 8)),)))
    while child.result().request_id != "b":
        pass


def test_the_process_ends_with_its_supervisor_even_in_a_long_step(child: Child) -> None:
    child.start()
    child.next(Ready)
    child.add(("a", (777,), None))
    assert child.close() == 0


def test_configuration_with_its_cost_model_and_announced_rows_reach_the_engine(child: Child) -> None:
    child.start()
    child.send(ExpectRows("a", 70))
    child.add(("row", (444,), None))
    said = child.result().text
    assert said == f"{EngineConfig(mode='exact', cost=CPU_SMOLLM2_135M)} {{'a': 70}}"


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1", "a frame of 4 bytes is no msgpack"),
        (encoded({"type": "Dance"}), "type='Dance': expected one of Start, RegisterAdapter"),
        (encoded({"type": "AbortRows"}), r"AbortRows: missing fields \['request_ids'\]"),
        (encoded({"op": "abort"}), "expected a message with its type"),
    ],
)
def test_a_malformed_frame_ends_the_process_with_a_sentence(child: Child, frame: bytes, error: str) -> None:
    child.start()
    child.next(Ready)
    assert child.process.stdin is not None
    child.process.stdin.write(frame)
    child.process.stdin.flush()
    assert re.search(error, child.next(Fatal).error)
    assert child.process.wait(timeout=300) == 1


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory of what was said"), False),
    ],
)
def test_what_allocators_raise_is_recognised(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_torch_itself_raises_what_is_recognised() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_kernels_count_is_read_where_there_is_one(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert kernel_kills(vmstat) == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 7\npgfault 3\n")
    assert kernel_kills(vmstat) == 7
    vmstat.write_text("nr_free_pages 12\n")
    assert kernel_kills(vmstat) == 0
