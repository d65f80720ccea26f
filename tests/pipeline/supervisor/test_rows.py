"""Rows through crashes and turns: none is lost, none runs twice, a row that kills engines is found, others are not.

Runs that share an engine get equal service in tokens: nothing saved up, no run starved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow
from lorabatch.pipeline.supervisor.rows import TRANSITIONS, QueuedRow, RowEvent, RowState, RowTable, RunRows


class Rows:
    """A table whose rows are called by their request ids."""

    def __init__(self, num_rows: int = 0) -> None:
        self.table = RowTable()
        if num_rows:
            self.add(num_rows)

    def add(self, num_rows: int, run_id: str = "run", max_tokens: int = 10, name: str = "row") -> None:
        """Rows of one more shard: `row-0`, `row-1`, … each with five tokens in its prompt."""
        sampling = SamplingParams(max_tokens=max_tokens)
        requests = [Request(f"{name}-{i}", (1,) * 5, None, sampling) for i in range(num_rows)]
        self.table.runs.setdefault(run_id, RunRows(run_id))
        self.table.add(OpenShard(0, map(ExportedRow, requests), run_id))

    def all(self) -> list[QueuedRow]:
        return [row for run in self.table.runs.values() for row in run.rows()]

    def of(self, *names: str) -> list[QueuedRow]:
        return [row for row in self.all() if row.request.request_id in names]

    def take(self, window: int | None = None) -> list[str]:
        return names(self.table.take(window))

    def finish(self, *names: str) -> None:
        for row in self.of(*names):
            self.table.finish(row, 3)
            row.shard.deliver(served(row))


def names(rows: Iterable[QueuedRow]) -> list[str]:
    return [row.request.request_id for row in rows]


def served(row: QueuedRow) -> ServedRow:
    return ServedRow(Result(row.request.request_id, (1, 2, 3), "text", "length", 5, "base"), 0)


def run_until_empty(rows: Rows, poison: set[str], accidents: int = 0, seed: int = 0) -> tuple[set[str], int]:
    """A process that dies when it works on a poison row, and `accidents` times for no reason."""
    luck = random.Random(seed)
    given_up: set[str] = set()
    num_crashes = 0
    while len(rows.table):
        rows.table.take()
        rows.table.check_integrity()
        in_process = names(rows.table.in_process)
        assert in_process, "rows are left but none may run"
        has_accident = accidents > 0 and luck.random() < 0.2
        if poison.intersection(in_process) or has_accident:
            accidents -= has_accident
            num_crashes += 1
            blamed = rows.table.crashed()
            for row in blamed:
                row.shard.deliver(served(row))
            given_up |= set(names(blamed))
            rows.table.check_integrity()
        else:
            rows.finish(luck.choice(in_process))
    return given_up, num_crashes


def test_every_unfinished_state_has_a_way_to_an_end() -> None:
    ends = {RowState.FINISHED, RowState.DROPPED}
    assert all(set(TRANSITIONS[event]) == set(RowState) - ends for event in (RowEvent.FINISH, RowEvent.DROP))
    assert not any(state in ends for allowed in TRANSITIONS.values() for state in allowed)
    assert set(TRANSITIONS) == set(RowEvent)


def test_an_event_that_a_state_does_not_allow_names_row_event_and_state() -> None:
    rows = Rows(1)
    with pytest.raises(AssertionError, match="row row-0 of run run: lend while waiting"):
        rows.table.lend(rows.all())
    rows.table.take()
    (row,) = rows.all()
    rows.finish("row-0")
    with pytest.raises(AssertionError, match="row row-0 of run run: finish while finished"):
        rows.table.finish(row, 1)


def test_integrity_fails_with_the_counts_that_disagree() -> None:
    rows = Rows(3)
    rows.table.runs["run"].num_waiting = 2
    with pytest.raises(AssertionError, match="3 rows wait, counted 2"):
        rows.table.check_integrity()
    rows = Rows(3)
    rows.all()[0].state = RowState.LENT
    with pytest.raises(AssertionError, match="1 rows are not waiting"):
        rows.table.check_integrity()


def test_rows_go_in_together_and_once() -> None:
    rows = Rows(3)
    assert rows.take() == ["row-0", "row-1", "row-2"]
    assert rows.take() == []


def test_a_first_crash_sends_all_rows_again_before_new_ones() -> None:
    rows = Rows(2)
    rows.take()
    rows.add(2, name="new")
    assert rows.table.crashed() == []
    assert rows.take() == ["row-0", "row-1", "new-0", "new-1"]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("num_poison", [0, 1, 2])
def test_poison_rows_and_no_others_are_given_up(num_rows: int, num_poison: int) -> None:
    poison = {f"row-{i}" for i in range(0, num_rows, 3)[:num_poison]}
    given_up, num_crashes = run_until_empty(Rows(num_rows), poison)
    assert given_up == poison
    # Two crashes to suspect, a halving per level, two alone; each poison row pays its own way down.
    assert num_crashes <= 2 + len(poison) * (num_rows.bit_length() + 3)


@pytest.mark.parametrize("seed", range(20))
def test_accidents_cost_no_row(seed: int) -> None:
    given_up, num_crashes = run_until_empty(Rows(32), set(), accidents=6, seed=seed)
    assert given_up == set()
    assert num_crashes <= 6


def test_suspects_run_with_nothing_else_and_new_rows_wait_for_them() -> None:
    rows = Rows(2)
    for _ in range(2):
        rows.take()
        rows.table.crashed()
    rows.add(1, name="fresh")
    assert set(rows.take()) == {"row-0", "row-1"}
    assert rows.take() == []
    rows.finish("row-0", "row-1")
    assert rows.take() == ["fresh-0"]


def test_dropped_rows_are_aborted_only_where_they_run() -> None:
    rows = Rows(1)
    rows.take()
    rows.add(1, name="waiting")
    (running,) = rows.of("row-0")
    assert rows.table.drop(rows.all()) == [running.row_id]
    assert len(rows.table) == 0
    rows.table.check_integrity()


def test_what_happens_here_does_not_touch_lent_rows() -> None:
    rows = Rows(6)
    rows.take()
    lent = rows.of("row-4", "row-5")
    rows.table.export(lent)
    rows.table.lend(lent)
    rows.table.crashed()
    assert rows.take() == ["row-0", "row-1", "row-2", "row-3"]
    rows.finish("row-5")
    assert names(rows.table.in_state(RowState.LENT)) == ["row-4"]
    rows.table.check_integrity()


def test_rows_that_saw_a_crash_or_are_not_in_the_process_are_not_exported() -> None:
    rows = Rows(2)
    rows.take()
    rows.table.crashed()
    rows.take()
    rows.add(1, name="waiting")
    assert rows.table.exportable(rows.all()) == []


def test_rows_that_come_back_go_before_others_of_their_run_and_owe_nothing() -> None:
    rows = Rows()
    rows.add(3, "a", name="a")
    rows.take(2)
    first, second = rows.of("a-0", "a-1")
    rows.table.give_back([second])
    rows.table.export([first])
    rows.table.lend([first])
    rows.add(1, "b", name="b")
    # Nothing of a is finished or in the process: both stand at the beginning.
    assert rows.take(1) == ["a-1"]
    rows.table.check_integrity()


class Engine:
    """Serves rows by turns, `window` at a time, first in first out; `served` counts generated tokens by run."""

    def __init__(self, window: int) -> None:
        self.rows = Rows()
        self.window = window
        self.served: Counter[str] = Counter()
        self.order: list[str] = []
        self.num_arrived = 0

    def arrive(self, run_id: str, num_rows: int, max_tokens: int = 10) -> None:
        self.rows.add(num_rows, run_id, max_tokens)
        self.num_arrived += num_rows

    def finish_one(self, tokens: int | None = None) -> None:
        self.rows.table.take(self.window)
        for row in self.rows.table.in_process[:1]:
            generated = tokens or row.request.sampling.max_tokens
            self.rows.table.finish(row, generated)
            row.shard.deliver(served(row))
            self.served[row.run.run_id] += generated
            self.order.append(row.run.run_id)


def test_runs_get_equal_tokens_whatever_their_rows_are_like() -> None:
    engine = Engine(window=8)
    engine.arrive("short", 1000, max_tokens=10)
    engine.arrive("long", 1000, max_tokens=100)
    for _ in range(600):
        engine.finish_one()
    # A row's prompt counts too, so that tokens generated differ by less than the prompts of ten short rows.
    assert engine.served["long"] / engine.served["short"] == pytest.approx((20 + 5) / 20 * 200 / 205, rel=0.05)


def test_rows_that_end_long_before_their_limit_count_as_what_they_were() -> None:
    engine = Engine(window=4)
    engine.arrive("bold", 2000, max_tokens=1000)
    engine.arrive("modest", 2000, max_tokens=10)
    for _ in range(2000):
        engine.finish_one(tokens=10)
    # They differ by what one row in the engine may still take (2,000 tokens at a weight of 2), and no more.
    difference = engine.order.count("modest") - engine.order.count("bold")
    assert 0 <= difference * (5 + 2 * 10) <= 5 + 2 * 1000


def test_a_run_that_comes_late_starts_level_and_does_not_catch_up() -> None:
    engine = Engine(window=4)
    engine.arrive("first", 500)
    for _ in range(100):
        engine.finish_one()
    engine.arrive("late", 500)
    for _ in range(100):
        engine.finish_one()
    assert 40 <= engine.order[100:].count("late") <= 54


def test_a_pause_saves_nothing_up() -> None:
    engine = Engine(window=2)
    engine.arrive("a", 10)
    engine.arrive("b", 300)
    for _ in range(200):
        engine.finish_one()
    engine.arrive("a", 100)
    for _ in range(50):
        engine.finish_one()
    assert 20 <= engine.order[200:].count("a") <= 30


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 200)), min_size=1, max_size=12),
    st.integers(1, 16),
)
def test_no_row_is_lost_or_served_twice(arrivals: list[tuple[str, int, int]], window: int) -> None:
    engine = Engine(window)
    for run_id, num_rows, max_tokens in arrivals:
        engine.arrive(run_id, num_rows, max_tokens)
        for _ in range(num_rows // 2):
            engine.finish_one()
        engine.rows.table.check_integrity()
    for _ in range(engine.num_arrived):
        engine.finish_one()
    arrived: Counter[str] = Counter()
    for run_id, num_rows, _ in arrivals:
        arrived[run_id] += num_rows
    assert Counter(engine.order) == arrived
    assert engine.rows.table.num_active_runs == 0
    engine.rows.table.check_integrity()
