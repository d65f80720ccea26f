"""One engine process under its supervisor: answers, crashes, restarts, poison rows, failure, shared by runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_engine
import pytest

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.errors import RUN_AGAIN
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.server.frames import RegisterAdapter
from lorabatch.pipeline.messages import (
    EngineFailedError,
    EngineSettings,
    ShardAbandonedError,
    WorkerReport,
)
from lorabatch.pipeline.supervisor.health import SILENCE_S
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow
from lorabatch.pipeline.supervisor.queue import EngineQueue
from lorabatch.pipeline.supervisor.supervisor import EngineHandle, EngineSupervisor
from lorabatch.tests.scheduler.unfinished import unfinished

POISON = 13
IMPATIENT_S = 2.5


class Reports:
    """What the supervisor reports, and a way to wait for a report."""

    def __init__(self) -> None:
        self.all: list[WorkerReport] = []
        self._changed = threading.Condition()

    def __call__(self, report: WorkerReport) -> None:
        with self._changed:
            self.all.append(report)
            self._changed.notify_all()

    def wait_for(self, claim: Callable[[WorkerReport], bool]) -> WorkerReport:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(claim, self.all)), timeout=30)
            return next(report for report in reversed(self.all) if claim(report))


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def supervisors() -> Iterator[list[EngineSupervisor]]:
    """Those that `start` has made."""
    made: list[EngineSupervisor] = []
    yield made
    for supervisor in made:
        supervisor.close(10)


@pytest.fixture
def start(
    tmp_path: Path, reports: Reports, supervisors: list[EngineSupervisor], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., EngineHandle]:
    """Start an engine with the echo engine's options; the share of a run that reports to `reports`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(echo_engine.__file__).parent), prepend=os.pathsep)

    def start_with(batch_rows: int = 64, silence_s: float = SILENCE_S, **options: Any) -> EngineHandle:
        (tmp_path / "echo.json").write_text(json.dumps(options))
        settings = EngineSettings(
            "model", EngineConfig(num_threads=1, max_batch_rows=batch_rows), factory="echo_engine:EchoEngine"
        )
        supervisors.append(EngineSupervisor(settings, lambda: tmp_path, tmp_path, "tcp://worker", silence_s=silence_s))
        return supervisors[-1].join("run", reports)

    return start_with


def make_requests(prompts: range, adapter_id: str | None = None, max_tokens: int = 2) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [Request(f"row-{i}", (i,), adapter_id, sampling, stream_id=i) for i in prompts]


def open_shard(
    engine: EngineHandle, shard_id: int, requests: list[Request], adapters: list[RegisterAdapter]
) -> OpenShard:
    return engine.open(shard_id, map(ExportedRow, requests), adapters)


def collect(shard: OpenShard) -> dict[str, ServedRow]:
    rows: dict[str, ServedRow] = {}
    while True:
        done = shard.num_unfinished == 0
        fresh = shard.take(timeout_s=30)
        rows.update({row.result.request_id: row for row in fresh})
        if done:
            return rows


def assert_right(requests: list[Request], rows: dict[str, ServedRow]) -> None:
    assert rows.keys() == {request.request_id for request in requests}
    for request in requests:
        expected = echo_engine.answer(request.prompt_token_ids, request.adapter_id, request.sampling.max_tokens)
        assert rows[request.request_id].result.text == expected


def test_rows_of_several_open_shards_come_back_right(start: Callable[..., EngineHandle]) -> None:
    engine = start()
    first, second = make_requests(range(20)), make_requests(range(20, 50), adapter_id="sha-a")
    adapter = RegisterAdapter("sha-a", "/nowhere", "a")
    shards = [open_shard(engine, 0, first, []), open_shard(engine, 1, second, [adapter])]
    assert_right(first, collect(shards[0]))
    assert_right(second, collect(shards[1]))


def test_reports_tell_what_is_open_and_count_each_finished_row_once(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start(gate=str(gate))
    requests = make_requests(range(40), max_tokens=40)
    shard = open_shard(engine, 7, requests, [])
    open_report = reports.wait_for(lambda report: report.running_rows > 0)
    assert open_report.state == "ready"
    assert open_report.open_shards == unfinished((7, 40))
    gate.touch()
    collect(shard)
    reports.wait_for(lambda report: report.open_shards == () and report.engine_pid is not None)
    finished = [rows for report in reports.all for rows in report.finished]
    assert sum(rows.num_rows for rows in finished) == 40
    assert sum(rows.output_tokens for rows in finished) == 40 * 40
    assert {rows.adapter_id for rows in finished} == {None}


def test_a_killed_engine_is_replaced_and_its_rows_start_again(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start(gate=str(gate), batch_rows=4)
    requests = make_requests(range(24), max_tokens=10)
    shard = open_shard(engine, 0, requests, [])
    running = reports.wait_for(lambda report: report.running_rows > 0)
    assert running.engine_pid is not None
    os.kill(running.engine_pid, signal.SIGKILL)
    gate.touch()
    rows = collect(shard)
    assert_right(requests, rows)
    assert max(row.num_crashes for row in rows.values()) == 1
    died = reports.wait_for(lambda report: report.num_crashes == 1)
    assert died.error == "it was killed by signal 9"


@pytest.mark.parametrize("failure", ["crash_on_token", pytest.param("raise_on_token", marks=pytest.mark.long)])
def test_a_row_that_kills_engines_becomes_one_error_row(start: Callable[..., EngineHandle], failure: str) -> None:
    engine = start(batch_rows=8, **{failure: POISON})
    requests = make_requests(range(16))
    rows = collect(open_shard(engine, 0, requests, []))
    poisoned = rows.pop(f"row-{POISON}").result
    assert poisoned.finish_reason == "error"
    assert "died each time" in str(poisoned.error)
    assert_right([request for request in requests if POISON not in request.prompt_token_ids], rows)


def test_an_engine_that_runs_out_of_memory_gets_smaller_batches_and_no_row_is_blamed(
    start: Callable[..., EngineHandle], reports: Reports
) -> None:
    engine = start(room_for_rows=3)
    requests = make_requests(range(100))
    rows = collect(open_shard(engine, 0, requests, []))
    assert_right(requests, rows)
    assert {row.num_crashes for row in rows.values()} == {0}
    assert reports.wait_for(lambda report: report.batch_rows < 64).batch_rows in (32, 16, 8, 4, 2)
    assert reports.wait_for(lambda report: report.batch_rows == 2).num_crashes == 5


@pytest.mark.long
def test_rows_for_which_there_is_no_room_even_alone_say_so(start: Callable[..., EngineHandle]) -> None:
    engine = start(room_for_rows=0)
    rows = collect(open_shard(engine, 0, make_requests(range(2)), []))
    assert {row.result.finish_reason for row in rows.values()} == {"error"}
    assert all("no room for 1 rows" in str(row.result.error) for row in rows.values())


def test_a_stopped_engine_is_replaced_and_its_rows_start_again(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start(gate=str(gate), batch_rows=4, silence_s=IMPATIENT_S)
    requests = make_requests(range(24))
    shard = open_shard(engine, 0, requests, [])
    running = reports.wait_for(lambda report: report.running_rows > 0)
    assert running.engine_pid is not None
    os.kill(running.engine_pid, signal.SIGSTOP)
    gate.touch()
    assert_right(requests, collect(shard))
    assert "no heartbeat" in str(reports.wait_for(lambda report: report.num_crashes == 1).error)
    with pytest.raises(ProcessLookupError):
        os.kill(running.engine_pid, 0)


@pytest.mark.long
def test_a_stopped_engine_is_replaced_though_more_was_sent_to_it_than_its_pipe_takes(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start(gate=str(gate), silence_s=IMPATIENT_S)
    requests = make_requests(range(5000))
    first = open_shard(engine, 0, requests[:10], [])
    pid = reports.wait_for(lambda report: report.running_rows > 0).engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    gate.touch()
    try:
        # Half a megabyte.
        second = open_shard(engine, 1, requests[10:], [])
        assert "no heartbeat" in str(reports.wait_for(lambda report: report.num_crashes == 1).error)
        assert_right(requests, collect(first) | collect(second))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_supervisor_may_be_closed_whose_engine_does_not_read_what_it_is_sent(
    start: Callable[..., EngineHandle],
    reports: Reports,
    supervisors: list[EngineSupervisor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where its next report is due in that moment."""
    monkeypatch.setattr("lorabatch.pipeline.supervisor.supervisor.REPORT_INTERVAL_S", 0.0)
    engine = start(gate=str(tmp_path / "never"))
    pid = reports.wait_for(lambda report: report.state == "ready").engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        shard = open_shard(engine, 0, make_requests(range(5000)), [])
        reports.wait_for(lambda report: report.open_shards == unfinished((0, 5000)))
        supervisors[0].close(10)
        assert "supervisor failed" not in caplog.text
        with pytest.raises(ShardAbandonedError):
            shard.take(0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_model_that_cannot_be_loaded_fails_what_is_open_and_what_is_opened_later(
    start: Callable[..., EngineHandle], reports: Reports
) -> None:
    engine = start(fail_start="config.json: missing")
    for _ in range(2):
        with pytest.raises(EngineFailedError, match=r"config\.json: missing"):
            collect(open_shard(engine, 0, make_requests(range(3)), []))
    assert reports.wait_for(lambda report: report.state == "failed").error == "config.json: missing"


def test_rows_of_a_refused_adapter_become_errors(start: Callable[..., EngineHandle]) -> None:
    engine = start(refuse_adapters=["sha-b"])
    adapter = RegisterAdapter("sha-b", "/nowhere", "b")
    rows = collect(open_shard(engine, 0, make_requests(range(2), adapter_id="sha-b"), [adapter]))
    assert {row.result.error for row in rows.values()} == {f"adapter sha-b: refused for the test. {RUN_AGAIN}"}


def test_closing_hands_out_finished_rows_before_it_says_that_the_rest_is_given_up(
    start: Callable[..., EngineHandle], reports: Reports, supervisors: list[EngineSupervisor]
) -> None:
    engine = start(step_s=0.01, batch_rows=2)
    shard = open_shard(engine, 0, make_requests(range(100), max_tokens=4), [])
    reports.wait_for(lambda report: bool(report.finished))
    supervisors[0].close(10)
    finished = shard.take(timeout_s=0)
    assert 0 < len(finished) < 100
    with pytest.raises(ShardAbandonedError):
        shard.take(timeout_s=0)


def test_an_abandoned_shard_leaves_the_engine(start: Callable[..., EngineHandle], reports: Reports) -> None:
    engine = start(step_s=0.01, batch_rows=2)
    left = open_shard(engine, 0, make_requests(range(1000), max_tokens=1000), [])
    engine.submit(EngineQueue.abandon, left)
    requests = make_requests(range(1000, 1004))
    assert_right(requests, collect(open_shard(engine, 1, requests, [])))
    assert reports.wait_for(lambda report: report.state == "ready").worker == "tcp://worker"


def test_the_engine_process_ends_with_its_supervisor(
    start: Callable[..., EngineHandle], reports: Reports, supervisors: list[EngineSupervisor]
) -> None:
    start()
    pid = reports.wait_for(lambda report: report.engine_pid is not None).engine_pid
    assert pid is not None
    supervisors[0].close(10)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_lent_rows_are_answered_from_elsewhere_or_go_on_here(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start(gate=str(gate), batch_rows=4)
    requests = make_requests(range(10), max_tokens=3)
    shard = open_shard(engine, 5, requests, [])
    reports.wait_for(lambda report: report.running_rows > 0)
    loan = engine.lend(5, 4).result(10)
    assert loan is not None
    _, lent = loan
    assert [row.request.request_id for row in lent] == [f"row-{i}" for i in range(6, 10)]
    assert reports.wait_for(lambda report: report.lent_rows == 4).open_shards == unfinished((5, 10))
    engine.submit(EngineQueue.answered, shard, [served(row.request, num_crashes=2) for row in lent[:2]])
    engine.submit(EngineQueue.reclaim, shard, [row.request.request_id for row in lent])
    gate.touch()
    rows = collect(shard)
    assert_right(requests, rows)
    assert {name for name, row in rows.items() if row.num_crashes} == {"row-6", "row-7"}
    assert reports.wait_for(lambda report: not report.open_shards and bool(report.engine_pid)).lent_rows == 0


def served(request: Request, num_crashes: int = 0) -> ServedRow:
    """What any engine answers to a request."""
    text = echo_engine.answer(request.prompt_token_ids, request.adapter_id, request.sampling.max_tokens)
    return ServedRow(Result(request.request_id, (0, 1, 2), text, "length", 1, "base"), num_crashes)


def test_incoming_rows_go_on_where_they_were_and_are_no_shard_of_this_worker(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start(gate=str(gate))
    requests = make_requests(range(3), max_tokens=4)
    incoming = engine.open(None, [ExportedRow(request, (0, 1)) for request in requests], [])
    report = reports.wait_for(lambda report: report.running_rows == 3)
    assert (report.incoming_rows, report.open_shards) == (3, ())
    gate.touch()
    assert_right(requests, collect(incoming))


def test_nothing_is_lent_of_a_shard_that_is_not_open_or_by_an_engine_that_is_gone(
    start: Callable[..., EngineHandle], reports: Reports, tmp_path: Path
) -> None:
    engine = start(gate=str(tmp_path / "never"))
    open_shard(engine, 0, make_requests(range(3)), [])
    running = reports.wait_for(lambda report: report.running_rows > 0)
    assert engine.lend(1, 2).result(10) is None
    assert running.engine_pid is not None
    os.kill(running.engine_pid, signal.SIGSTOP)
    asked = engine.lend(0, 2)
    os.kill(running.engine_pid, signal.SIGKILL)
    assert asked.result(10) is None


def finish_order(shards: dict[str, OpenShard], num_rows: int) -> list[str]:
    """Whose rows finish, in order, for so many rows."""
    order: list[str] = []
    pause = threading.Event()
    while len(order) < num_rows:
        order += [name for name, shard in shards.items() for _ in shard.take(0)]
        pause.wait(0.01)
    return order


def test_runs_that_share_an_engine_get_equal_service_from_the_moment_the_second_comes(
    start: Callable[..., EngineHandle], reports: Reports, supervisors: list[EngineSupervisor], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = start(batch_rows=4, gate=str(gate), step_s=0.01)
    shards = {"first": open_shard(first, 0, make_requests(range(200)), [])}
    reports.wait_for(lambda report: report.running_rows == 4)
    second = supervisors[0].join("second", Reports())
    # The same shard id and request ids as the first: they are of another run.
    shards["second"] = open_shard(second, 0, make_requests(range(40)), [])
    gate.touch()
    order = finish_order(shards, 80)
    # The batch that ran and what was to enter next belong to the first; then they take turns.
    assert 28 <= order.count("second") <= 40, order
    for shard, num_rows in ((shards["first"], 200), (shards["second"], 40)):
        collect(shard)
        assert shard.num_unfinished == 0, num_rows
    pids = {report.engine_pid for report in reports.all if report.engine_pid}
    assert len(pids) == 1


def test_a_run_that_leaves_gives_its_rows_up_and_the_others_go_on(
    start: Callable[..., EngineHandle], reports: Reports, supervisors: list[EngineSupervisor], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = start(batch_rows=4, gate=str(gate))
    requests = make_requests(range(30))
    shard = open_shard(first, 3, requests, [])
    others = Reports()
    second = supervisors[0].join("second", others)
    left = open_shard(second, 3, make_requests(range(30), max_tokens=500), [])
    running = others.wait_for(lambda report: report.running_rows > 0)
    supervisors[0].leave("second", 10)
    with pytest.raises(ShardAbandonedError):
        left.take(0)
    gate.touch()
    assert_right(requests, collect(shard))
    done = reports.wait_for(lambda report: report.state == "ready" and not report.open_shards)
    assert (done.engine_pid, done.num_crashes) == (running.engine_pid, 0)


def test_a_row_that_kills_the_engine_costs_other_runs_no_row(
    start: Callable[..., EngineHandle], supervisors: list[EngineSupervisor]
) -> None:
    first = start(batch_rows=8, crash_on_token=POISON)
    second = supervisors[0].join("second", Reports())
    poisoned = open_shard(first, 0, make_requests(range(16)), [])
    innocent = make_requests(range(20, 40))
    assert_right(innocent, collect(open_shard(second, 0, innocent, [])))
    rows = collect(poisoned)
    assert [name for name, row in rows.items() if row.result.error is not None] == [f"row-{POISON}"]


def test_a_run_that_leaves_takes_along_what_was_generated_for_it(
    start: Callable[..., EngineHandle], reports: Reports, supervisors: list[EngineSupervisor]
) -> None:
    engine = start(step_s=0.02, batch_rows=4)
    shard = open_shard(engine, 0, make_requests(range(8), max_tokens=1000), [])
    reports.wait_for(lambda report: report.tokens_per_s > 0)
    supervisors[0].leave("run", 10)
    with pytest.raises(ShardAbandonedError):
        shard.take(0)
    assert [row.request.request_id for row in shard.begun] == ["row-0", "row-1", "row-2", "row-3"]
    for row in shard.begun:
        assert row.token_ids == tuple(range(len(row.token_ids)))
        assert len(row.token_ids) > 0


@pytest.mark.long
def test_a_run_may_leave_an_engine_that_does_not_answer(
    start: Callable[..., EngineHandle], reports: Reports, supervisors: list[EngineSupervisor], tmp_path: Path
) -> None:
    shard = open_shard(start(gate=str(tmp_path / "never")), 0, make_requests(range(8)), [])
    running = reports.wait_for(lambda report: report.running_rows > 0)
    assert running.engine_pid is not None
    os.kill(running.engine_pid, signal.SIGSTOP)
    supervisors[0].leave("run", 0.5)
    with pytest.raises(ShardAbandonedError):
        shard.take(0)
    assert shard.begun == ()
