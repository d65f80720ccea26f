"""The queue through any order of events: each row ends in exactly one result, at the shard that waits for it."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.server.frames import AbortRows, AddRows, ExpectRows, ExportRows, RegisterAdapter, RowTokens
from lorabatch.pipeline.messages import EngineFailedError, ShardAbandonedError
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow
from lorabatch.pipeline.supervisor.queue import EngineQueue, LentRows, shared_window
from lorabatch.pipeline.supervisor.rows import RowState

BATCH = 4
MAX_TOKENS = 8


def make_row(name: str, adapter_id: str | None = None) -> ExportedRow:
    return ExportedRow(Request(name, (1, 2), adapter_id, SamplingParams(max_tokens=MAX_TOKENS)))


def result_of(request_id: str, num_tokens: int = MAX_TOKENS) -> Result:
    return Result(request_id, tuple(range(num_tokens)), "text", "length", 2, "base")


class Process:
    """An engine process as its frames describe it: what it holds, and its replies to exports that are on their way.
    `leaving`: rows in these that nobody has dropped meanwhile.
    """

    def __init__(self) -> None:
        self.rows: dict[str, ExportedRow] = {}
        self.exports: list[list[RowTokens]] = []
        self.leaving: set[str] = set()

    def take(self, queue: EngineQueue) -> None:
        for frame in queue.take_frames(BATCH):
            match frame:
                case AddRows(rows):
                    for row in rows:
                        assert row.request.request_id not in self.rows, f"{row.request.request_id} is here already"
                        assert row.token_ids == tuple(range(len(row.token_ids)))
                        self.rows[row.request.request_id] = row
                case AbortRows(request_ids):
                    for request_id in request_ids:
                        if request_id in self.leaving:
                            self.leaving.remove(request_id)
                        else:
                            del self.rows[request_id]
                case ExportRows(request_ids):
                    # at once: a row that is added later is not among them
                    rows = [self.rows.pop(name) for name in request_ids if name in self.rows]
                    self.leaving.update(row.request.request_id for row in rows)
                    self.exports.append([RowTokens(r.request.request_id, r.token_ids, r.token_logprobs) for r in rows])

    def step(self) -> list[Result]:
        """One more token for the first rows; those that are done."""
        done = []
        for name, row in list(self.rows.items())[:BATCH]:
            self.rows[name] = row = replace(row, token_ids=(*row.token_ids, len(row.token_ids)))
            if len(row.token_ids) == MAX_TOKENS:
                del self.rows[name]
                done.append(result_of(name))
        return done

    def export(self) -> list[RowTokens]:
        given_up = self.exports.pop(0)
        self.leaving.difference_update(row.request_id for row in given_up)
        return given_up


class EngineQueueMachine(RuleBasedStateMachine):
    """Runs join and leave, shards open, rows are lent and come back, the process dies: in any order.

    All shards have the same request ids, and all runs the same shard ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = EngineQueue()
        self.process = Process()
        self.is_ready = False
        self.num_opened: Counter[str] = Counter()
        self.shards: list[OpenShard] = []
        self.closed: list[OpenShard] = []
        self.answers: dict[OpenShard, Counter[str]] = {}
        self.requests: dict[OpenShard, dict[str, Request]] = {}
        self.lending: list[Future[LentRows | None]] = []
        self.lent: list[tuple[OpenShard, ExportedRow]] = []

    def send(self) -> None:
        self.process.take(self.queue)

    def is_joined(self, run_id: str) -> bool:
        return run_id in self.queue.table.runs

    @rule(run_id=st.sampled_from("ab"))
    def join(self, run_id: str) -> None:
        if not self.is_joined(run_id):
            self.queue.join(run_id)

    @rule(
        run_id=st.sampled_from("ab"),
        num_rows=st.integers(1, 9),
        num_announced=st.integers(0, 5),
        is_incoming=st.booleans(),
        is_planned=st.booleans(),
    )
    def open(self, run_id: str, num_rows: int, num_announced: int, is_incoming: bool, is_planned: bool) -> None:
        self.num_opened[run_id] += 1
        shard_id = None if is_incoming else self.num_opened[run_id]
        rows_left = 3 if is_planned and not is_incoming else None
        rows = [make_row(f"row-{i}") for i in range(num_rows)]
        shard = OpenShard(shard_id, rows, run_id, rows_left, 0 if is_planned else num_announced)
        self.requests[shard] = {row.request.request_id: row.request for row in shard.rows}
        self.queue.open(shard, ())
        if self.is_joined(run_id):
            self.shards.append(shard)
            self.answers[shard] = Counter()
        else:
            with pytest.raises(ShardAbandonedError):
                shard.take(0)
        self.send()

    @precondition(lambda self: bool(self.shards))
    @rule(data=st.data(), num_rows=st.integers(1, 5))
    def extend(self, data: st.DataObject, num_rows: int) -> None:
        """Further rows follow from results of a shard, perhaps when none of its rows is left."""
        shard = data.draw(st.sampled_from(self.shards))
        rows = [make_row(f"row-{len(self.requests[shard]) + i}") for i in range(num_rows)]
        shard.announce(num_rows)
        self.queue.extend(shard, rows)
        self.requests[shard] |= {row.request.request_id: row.request for row in rows}
        self.send()

    @precondition(lambda self: any(shard.num_announced for shard in self.shards))
    @rule(data=st.data(), is_refused=st.booleans())
    def adapter_comes(self, data: st.DataObject, is_refused: bool) -> None:
        """Rows that waited for an adapter go to the engine, or are answered without it."""
        shard = data.draw(st.sampled_from([shard for shard in self.shards if shard.num_announced]))
        num_rows = data.draw(st.integers(1, shard.num_announced))
        if is_refused:
            shard.announce(-num_rows)
        else:
            self._come(shard, num_rows)

    def _come(self, shard: OpenShard, num_rows: int) -> None:
        rows = [make_row(f"row-{len(self.requests[shard]) + i}", f"sha-{num_rows}") for i in range(num_rows)]
        self.queue.extend(shard, rows, [RegisterAdapter(f"sha-{num_rows}", "/a", "a")])
        self.requests[shard] |= {row.request.request_id: row.request for row in rows}
        self.send()

    @precondition(lambda self: bool(self.shards))
    @rule(data=st.data())
    def rows_are_done(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.shards))
        before = shard.rows_left
        if before:
            self.queue.rows_done(shard, [(None, MAX_TOKENS)])
            assert (shard.rows_left, shard.planned_rows_left) == (before - 1, before - 1)

    @precondition(lambda self: not self.is_ready)
    @rule()
    def process_ready(self) -> None:
        self.queue.process_ready()
        self.is_ready = True
        self.send()

    @precondition(lambda self: self.is_ready)
    @rule(num_steps=st.integers(1, MAX_TOKENS))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.queue.finished(self.process.step())
            self.send()

    @precondition(lambda self: self.is_ready)
    @rule()
    def reply_to_export(self) -> None:
        if self.process.exports:
            self.queue.exported(self.process.export())
            self._collect_lent()
            self.send()

    @precondition(lambda self: self.is_ready)
    @rule(is_spared=st.booleans())
    def process_dies(self, is_spared: bool) -> None:
        self.process = Process()
        self.is_ready = False
        self.queue.process_gone("a test", is_spared=is_spared)
        self._collect_lent()
        assert not self.lending, "rows to be lent wait for a process that is gone"
        assert self.queue.take_frames(BATCH) == []

    @precondition(lambda self: bool(self.shards))
    @rule(data=st.data(), num_rows=st.integers(0, 5))
    def lend(self, data: st.DataObject, num_rows: int) -> None:
        shard = data.draw(st.sampled_from(self.shards))
        if shard.shard_id is not None:
            self.lending.append(Future())
            self.queue.lend(shard.run_id, shard.shard_id, num_rows, self.lending[-1])
            self._collect_lent()
            self.send()

    def _collect_lent(self) -> None:
        for future in [future for future in self.lending if future.done()]:
            self.lending.remove(future)
            lent = future.result()
            if lent is not None:
                shard, rows = lent
                own = self.requests[shard]
                assert all(row.request is own[row.request.request_id] for row in rows)
                self.lent += [(shard, row) for row in rows]

    @precondition(lambda self: bool(self.lent))
    @rule(data=st.data(), how=st.sampled_from(["answered", "answered twice", "reclaimed", "returned", "late"]))
    def loan_ends(self, data: st.DataObject, how: str) -> None:
        index = data.draw(st.integers(0, len(self.lent) - 1))
        shard, row = self.lent.pop(index)
        request_id = row.request.request_id
        match how:
            case "reclaimed":
                self.queue.reclaim(shard, [request_id])
            case "returned":
                longer = (*row.token_ids, len(row.token_ids))[: MAX_TOKENS - 1]
                self.queue.returned(shard, [replace(row, token_ids=longer)])
            case "late":
                # The helper was taken for lost: its result follows when the row goes on here.
                self.queue.reclaim(shard, [request_id])
                self.send()
                self.queue.answered(shard, [ServedRow(result_of(request_id), 0)])
            case _:
                self.queue.answered(shard, [ServedRow(result_of(request_id), 0)] * (2 if "twice" in how else 1))
        self.send()

    @precondition(lambda self: bool(self.shards))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.shards))
        self.queue.abandon(shard)
        self._close(shard)
        self.send()

    def _close(self, shard: OpenShard) -> None:
        self.shards.remove(shard)
        self.closed.append(shard)
        begun = Counter(row.request.request_id for row in shard.begun)
        assert begun.total() <= shard.num_unfinished
        assert set(begun.values()) <= {1}
        assert not begun.keys() & self.answers[shard].keys(), "a row with a result is given up"

    @rule(run_id=st.sampled_from("ab"))
    def leave(self, run_id: str) -> None:
        self.queue.leave(run_id)
        self.check_results()
        for shard in [shard for shard in self.shards if shard.run_id == run_id]:
            self._close(shard)
        self.send()

    @rule(run_id=st.sampled_from("ab"))
    def leave_in_good_order(self, run_id: str) -> None:
        left: list[str] = []
        self.queue.hand_back(run_id, lambda: left.append(run_id))
        self.send()
        while not left:
            self.reply_to_export()
        self.leave(run_id)

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def surrender(self, data: st.DataObject) -> None:
        """One shard goes, as incoming rows do whose owner leaves; its run and the other shards stay."""
        shard = data.draw(st.sampled_from(self.shards))
        if not shard.num_unfinished and not shard.num_announced:
            return
        self.queue.surrender(shard)
        self.send()
        while not shard.is_abandoned:
            self.reply_to_export()
        self.check_results()
        self._close(shard)
        self.queue.surrender(shard)
        self.send()

    @invariant()
    def is_consistent(self) -> None:
        self.queue.check_integrity()

    @invariant()
    def check_results(self) -> None:
        for shard in self.shards:
            self.answers[shard].update(row.result.request_id for row in _taken(shard))
            assert set(self.answers[shard].values()) <= {1}, "a row has two results"
            assert self.answers[shard].total() + shard.num_unfinished == len(self.requests[shard])

    @invariant()
    def a_shard_with_rows_to_come_is_open(self) -> None:
        for shard in self.shards:
            assert not shard.num_announced or shard in self.queue.table.runs[shard.run_id].shards

    @invariant()
    def nothing_is_added_to_a_closed_shard(self) -> None:
        assert all(_taken(shard) == [] for shard in self.closed)

    @invariant()
    def the_process_has_what_the_table_says(self) -> None:
        in_process = {row.row_id for row in self.queue.table.in_process}
        assert in_process == self.process.rows.keys() | self.process.leaving

    @invariant()
    def a_shared_engine_is_not_flooded(self) -> None:
        table = self.queue.table
        if len(table.in_process_by_run()) > 1 and not self.process.exports:
            assert table.num_in_process <= shared_window(BATCH)

    def teardown(self) -> None:
        """Whatever has happened, an engine that lives finishes every row of every open shard, once."""
        while self.process.exports:
            self.queue.exported(self.process.export())
        self._collect_lent()
        for shard, row in self.lent:
            self.queue.reclaim(shard, [row.request.request_id])
        self.queue.process_ready()
        for shard in self.shards:
            if shard.num_announced:
                self._come(shard, shard.num_announced)
        for _ in range(10_000):
            self.send()
            while self.process.exports:
                self.queue.exported(self.process.export())
            if not self.process.rows:
                break
            self.queue.finished(self.process.step())
        self.check_results()
        self.queue.check_integrity()
        assert len(self.queue.table) == 0
        for shard in self.shards:
            assert self.answers[shard] == Counter(dict.fromkeys(self.requests[shard], 1))


def _taken(shard: OpenShard) -> list[ServedRow]:
    try:
        return shard.take(0)
    except ShardAbandonedError:
        return []


TestEngineQueue = EngineQueueMachine.TestCase
TestEngineQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_shard_that_is_not_wanted_any_more_gets_no_further_rows() -> None:
    queue = EngineQueue()
    shard = opened(queue, make_row("first"))
    queue.process_ready()
    process = Process()
    process.take(queue)
    for _ in range(MAX_TOKENS):
        queue.finished(process.step())
    assert [row.result.request_id for row in shard.take(0)] == ["first"]
    queue.surrender(shard)
    shard.announce(1)
    queue.extend(shard, [make_row("second")])
    with pytest.raises(ShardAbandonedError):
        shard.take(0)


def test_take_waits_for_rows_that_are_announced() -> None:
    shard = OpenShard(0, (), "run")
    shard.announce(1)
    threading.Timer(0.05, lambda: (shard.extend(1), shard.deliver(ServedRow(result_of("late"), 0)))).start()
    assert [row.result.request_id for row in shard.take(60)] == ["late"]


def test_take_waits_no_more_when_the_rows_to_come_are_answered_elsewhere() -> None:
    shard = OpenShard(0, [make_row("first")], "run", num_announced=2)
    shard.deliver(ServedRow(result_of("first"), 0))
    assert (shard.num_unfinished, shard.planned_rows_left) == (0, 2)
    assert len(shard.take(0.01)) == 1
    threading.Timer(0.05, lambda: shard.announce(-2)).start()
    assert shard.take(60) == []


def opened(queue: EngineQueue, *rows: ExportedRow, shard_id: int = 0, run_id: str = "run") -> OpenShard:
    """A shard of a run that joins if it has not."""
    if run_id not in queue.table.runs:
        queue.join(run_id)
    shard = OpenShard(shard_id, rows, run_id)
    queue.open(shard, [ADAPTER])
    return shard


ADAPTER = RegisterAdapter("sha-a", "/a", "a")


def test_a_failure_reaches_every_run_and_every_later_one() -> None:
    queue = EngineQueue()
    shards = [opened(queue, make_row("r"), run_id=run_id) for run_id in "ab"]
    queue.fail(EngineFailedError("no engine"))
    shards.append(opened(queue, make_row("r"), run_id="c"))
    for shard in shards:
        with pytest.raises(EngineFailedError):
            shard.take(0)
    for run_id in "abc":
        queue.leave(run_id)


def test_rows_of_one_adapter_are_lent_when_it_is_named() -> None:
    queue, process = EngineQueue(), Process()
    opened(queue, *[make_row(f"row-{i}", adapter_id=(None, "sha-a")[i % 2]) for i in range(6)])
    queue.process_ready()
    process.take(queue)
    for adapter_id, expected in (("sha-a", ["row-3", "row-5"]), (None, ["row-2", "row-4"])):
        lent: Future[LentRows | None] = Future()
        queue.lend("run", 0, 2, lent, is_selective=True, adapter_id=adapter_id)
        process.take(queue)
        queue.exported(process.export())
        loan = lent.result(0)
        assert loan is not None
        assert [row.request.request_id for row in loan[1]] == expected
    queue.check_integrity()


def test_lent_rows_are_the_last_and_come_back_first_with_the_tokens_they_have() -> None:
    queue, process = EngineQueue(), Process()
    shard = opened(queue, *[make_row(f"row-{i}") for i in range(6)])
    queue.process_ready()
    process.take(queue)
    process.step()
    lent: Future[LentRows | None] = Future()
    queue.lend("run", 0, 4, lent)
    process.take(queue)
    queue.exported(process.export())
    loan = lent.result(0)
    assert loan is not None
    assert [(row.request.request_id, len(row.token_ids)) for row in loan[1]] == [
        ("row-2", 1),
        ("row-3", 1),
        ("row-4", 0),
        ("row-5", 0),
    ]
    assert queue.lent_by_shard("run") == {0: 4}
    queue.returned(shard, [replace(loan[1][0], token_ids=tuple(range(5)))])
    queue.reclaim(shard, ["row-2", "row-3", "unknown"])
    queue.answered(shard, [ServedRow(result_of("row-5"), 2)])
    assert [(row.result.request_id, row.num_crashes) for row in shard.take(0)] == [("row-5", 2)]
    assert len(queue.table.in_state(RowState.LENT)) == 1
    (frame,) = queue.take_frames(BATCH)
    assert isinstance(frame, AddRows)
    assert [len(row.token_ids) for row in frame.rows] == [1, 5]
    queue.check_integrity()


def test_rows_that_are_leaving_are_not_lent_again() -> None:
    queue, process = EngineQueue(), Process()
    opened(queue, *[make_row(f"row-{i}") for i in range(3)])
    queue.process_ready()
    process.take(queue)
    futures: list[Future[LentRows | None]] = [Future(), Future(), Future()]
    for future in futures:
        queue.lend("run", 0, 2, future)
    process.take(queue)
    assert futures[2].result(0) is None
    while process.exports:
        queue.exported(process.export())
    loans = [future.result(0) for future in futures[:2]]
    assert [len(loan[1]) if loan else 0 for loan in loans] == [2, 1]


def test_a_process_learns_of_an_adapter_before_its_first_row_and_once() -> None:
    queue = EngineQueue()
    queue.process_ready()
    opened(queue, make_row("1", "sha-a"), make_row("2"))
    assert frame_types(queue) == [RegisterAdapter, ExpectRows, AddRows]
    queue.process_gone("a test", is_spared=True)
    queue.process_ready()
    assert frame_types(queue) == [RegisterAdapter, AddRows]


def test_rows_behind_are_announced_with_the_next_rows_of_their_adapter() -> None:
    queue = EngineQueue()
    queue.join("run")
    queue.process_ready()
    queue.open(OpenShard(0, [make_row("1")], "run"), [ADAPTER], rows_behind=70)
    assert frame_types(queue) == [AddRows]
    opened_later = OpenShard(None, [make_row("2", "sha-a")], "run")
    queue.open(opened_later, [ADAPTER])
    assert ExpectRows("sha-a", 70) in queue.take_frames(BATCH)


def frame_types(queue: EngineQueue) -> list[type]:
    return [type(frame) for frame in queue.take_frames(BATCH)]


def test_rows_of_one_shard_have_names_of_their_own() -> None:
    queue = EngineQueue()
    queue.join("run")
    with pytest.raises(AssertionError, match="two rows have one request id"):
        queue.open(OpenShard(3, [make_row("1"), make_row("1")], "run"), ())
