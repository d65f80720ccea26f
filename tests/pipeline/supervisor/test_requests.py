"""The rows of an engine through any order of events: each is answered once, at the shard that waits for it.

What an engine process is told, and when.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.server.wire import unpack_exported_row, unpack_request
from lorabatch.pipeline.messages import AdapterSource, EngineFailedError, LocalAdapter, ShardAbandonedError
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow
from lorabatch.pipeline.supervisor.requests import EngineFeed, EngineRows, Loan, shared_window

BATCH = 4
MAX_TOKENS = 8


def make_row(name: str) -> ExportedRow:
    return ExportedRow(Request(name, (1, 2), None, SamplingParams(max_tokens=MAX_TOKENS)))


def result_of(request_id: str, num_tokens: int = MAX_TOKENS) -> Result:
    return Result(request_id, tuple(range(num_tokens)), "text", "length", 2, "base")


class Process:
    """An engine process as its messages describe it: what it holds, and what it owes an answer."""

    def __init__(self) -> None:
        self.rows: dict[str, ExportedRow] = {}
        self.exports: list[list[str]] = []

    def take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            match message["op"]:
                case "add":
                    self._add([ExportedRow(unpack_request(raw)) for raw in message["requests"]])
                case "import":
                    self._add([unpack_exported_row(raw) for raw in message["rows"]])
                case "abort":
                    for name in message["request_ids"]:
                        self.rows.pop(name, None)
                case "export":
                    self.exports.append(message["request_ids"])

    def _add(self, rows: list[ExportedRow]) -> None:
        for row in rows:
            assert row.request.request_id not in self.rows, f"{row.request.request_id} is in the process already"
            self.rows[row.request.request_id] = row

    def step(self) -> list[Result]:
        """One more token for the first rows; those that are done."""
        done = []
        for name, row in list(self.rows.items())[:BATCH]:
            self.rows[name] = row = replace(row, token_ids=(*row.token_ids, len(row.token_ids)))
            if len(row.token_ids) == MAX_TOKENS:
                del self.rows[name]
                done.append(result_of(name))
        return done

    def export(self) -> list[ExportedRow]:
        return [self.rows.pop(name) for name in self.exports.pop(0) if name in self.rows]


class EngineRowsMachine(RuleBasedStateMachine):
    """Runs join and leave, shards open, rows are lent and come back, the process dies: in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EngineRows()
        self.process = Process()
        self.is_ready = False
        self.num_opened = 0
        self.shards: list[OpenShard] = []
        self.answers: dict[tuple[str, int], list[str]] = {}
        self.loans: list[tuple[str, Future[Loan]]] = []
        self.lent: dict[str, ExportedRow] = {}

    def tell(self, messages: list[dict[str, Any]]) -> None:
        self.process.take(messages)

    def send(self) -> None:
        self.tell(self.rows.sendable(BATCH))

    @rule(run=st.sampled_from("ab"))
    def join(self, run: str) -> None:
        if run not in self.rows.runs:
            self.rows.join(run)

    @rule(run=st.sampled_from("ab"), num_rows=st.integers(1, 9))
    def open(self, run: str, num_rows: int) -> None:
        self.num_opened += 1
        shard = OpenShard(self.num_opened, [make_row(f"{self.num_opened}-{i}") for i in range(num_rows)], run)
        is_open = run in self.rows.runs
        self.rows.open(shard, ())
        if is_open:
            self.shards.append(shard)
            self.answers[(run, self.num_opened)] = []
        else:
            with pytest.raises(ShardAbandonedError):
                shard.take(0)
        self.send()

    @precondition(lambda self: not self.is_ready)
    @rule()
    def process_ready(self) -> None:
        self.rows.process_ready()
        self.is_ready = True
        self.send()

    @precondition(lambda self: self.is_ready)
    @rule(num_steps=st.integers(1, MAX_TOKENS))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for result in self.process.step():
                self.rows.finished(result)
            self.send()

    @precondition(lambda self: self.is_ready)
    @rule()
    def answer_export(self) -> None:
        if self.process.exports:
            self.rows.exported(self.process.export())
            self._collect_loans()
            self.send()

    @precondition(lambda self: self.is_ready)
    @rule(is_spared=st.booleans())
    def process_dies(self, is_spared: bool) -> None:
        self.process = Process()
        self.is_ready = False
        self.rows.process_gone("a test", is_spared=is_spared)
        self._collect_loans()

    @precondition(lambda self: bool(self.shards))
    @rule(data=st.data(), num_rows=st.integers(1, 5))
    def lend(self, data: st.DataObject, num_rows: int) -> None:
        shard = data.draw(st.sampled_from(self.shards))
        asked: Future[Loan] = Future()
        self.tell(self.rows.lend(shard.run, shard.shard_id or 0, num_rows, asked))
        self.loans.append((shard.run, asked))
        self._collect_loans()

    def _collect_loans(self) -> None:
        for run, asked in [loan for loan in self.loans if loan[1].done()]:
            self.loans.remove((run, asked))
            self.lent |= {row.request.request_id: row for row in asked.result().rows}

    @precondition(lambda self: bool(self.lent))
    @rule(data=st.data(), how=st.sampled_from(["answered", "reclaimed", "returned"]))
    def loan_ends(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.lent)))
        row = self.lent.pop(name)
        match how:
            case "answered":
                self.rows.answered([ServedRow(result_of(name), 0)])
            case "reclaimed":
                self.rows.reclaim([name])
            case _:
                longer = (*row.token_ids, len(row.token_ids))[: MAX_TOKENS - 1]
                self.rows.returned([replace(row, token_ids=longer)])
        self.send()

    @precondition(lambda self: bool(self.shards))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.shards))
        self.shards.remove(shard)
        self.tell(self.rows.abandon(shard))
        self.send()

    @rule(run=st.sampled_from("ab"))
    def leave(self, run: str) -> None:
        self.tell(self.rows.leave(run))
        for shard in [shard for shard in self.shards if shard.run == run]:
            self.shards.remove(shard)
            unfinished = shard.num_unfinished
            names = [row.request.request_id for row in shard.begun]
            assert len(names) == len(set(names)) <= unfinished
        self.send()

    @rule(run=st.sampled_from("ab"))
    def leave_in_good_order(self, run: str) -> None:
        left: list[str] = []

        def then() -> None:
            left.append(run)
            self.leave(run)

        self.tell(self.rows.hand_back(run, then))
        while not left:
            self.answer_export()

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def surrender(self, data: st.DataObject) -> None:
        """One shard goes, as guests do whose owner leaves; its other rows and shards stay."""
        shard = data.draw(st.sampled_from(self.shards))
        if not shard.num_unfinished:
            return
        self.tell(self.rows.surrender(shard))
        while shard in self.rows.runs[shard.run].shards:
            self.answer_export()
        self.shards.remove(shard)
        names = [row.request.request_id for row in shard.begun]
        assert len(names) == len(set(names)) <= shard.num_unfinished
        assert self.rows.surrender(shard) == []
        self.send()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.rows.check_integrity()
        for shard in self.shards:
            found = self.answers[(shard.run, shard.shard_id or 0)]
            found += [row.result.request_id for row in shard.take(0)]
            assert len(found) == len(set(found)), "a row was answered twice"
            assert len(found) + shard.num_unfinished == len(shard.rows)

    @invariant()
    def a_shared_engine_is_not_flooded(self) -> None:
        if len({name.split("/")[0] for name in self.process.rows}) > 1 and not self.process.exports:
            assert len(self.process.rows) <= shared_window(BATCH)

    def teardown(self) -> None:
        """Whatever has happened, an engine that lives finishes every row that somebody waits for."""
        while self.process.exports:
            self.rows.exported(self.process.export())
        self._collect_loans()
        self.rows.reclaim(self.lent)
        self.rows.process_ready()
        for _ in range(10_000):
            self.send()
            while self.process.exports:
                self.rows.exported(self.process.export())
            if not self.process.rows:
                break
            for result in self.process.step():
                self.rows.finished(result)
        self.nothing_is_lost()
        assert [shard.num_unfinished for shard in self.shards] == [0] * len(self.shards)


TestEngineRows = EngineRowsMachine.TestCase
TestEngineRows.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_failure_reaches_every_run_and_whoever_comes_later() -> None:
    rows = EngineRows()
    shards = []
    for run in "ab":
        rows.join(run)
        shards.append(OpenShard(0, [make_row("r")], run))
        rows.open(shards[-1], ())
    rows.fail(EngineFailedError("no engine"))
    rows.join("c")
    shards.append(OpenShard(0, [make_row("r")], "c"))
    rows.open(shards[-1], ())
    for shard in shards:
        with pytest.raises(EngineFailedError):
            shard.take(0)
    for run in "abc":
        assert rows.leave(run) == []


ADAPTER = LocalAdapter(AdapterSource("sha-a", "a", "/a"), Path("/a"))


def row(request_id: str, adapter_id: str | None = "sha-a") -> ExportedRow:
    return ExportedRow(Request(request_id, (5,), adapter_id, SamplingParams()))


def ops(feed: EngineFeed, *rows: ExportedRow) -> list[str]:
    return [message["op"] for message in feed.messages(rows)]


def test_a_process_hears_of_an_adapter_before_its_first_row_and_once() -> None:
    feed = EngineFeed()
    feed.learn([ADAPTER])
    assert ops(feed, row("1"), row("2", None)) == ["adapter", "add"]
    assert ops(feed, row("3")) == ["add"]
    feed.new_process()
    assert ops(feed, row("4")) == ["adapter", "add"]


def test_announced_rows_are_told_with_the_next_rows_of_their_adapter() -> None:
    feed = EngineFeed()
    feed.learn([ADAPTER])
    feed.expect("sha-a", 70)
    assert ops(feed, row("1", None)) == ["add"]
    messages = feed.messages([row("2")])
    assert [message["op"] for message in messages] == ["adapter", "expect", "add"]
    assert (messages[1]["adapter_id"], messages[1]["num_rows"]) == ("sha-a", 70)
    feed.expect("sha-a", 0)
    assert ops(feed, row("3")) == ["expect", "add"]
