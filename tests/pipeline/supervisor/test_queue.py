"""Rows through crashes: nothing is lost, nothing runs twice, a poison row is found, innocent rows are not.

Whose rows go to a shared engine next: equal service in tokens, nothing saved up, nobody starved.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.pipeline.supervisor.queue import RowLedger, RowTurns


def make_rows(num_rows: int) -> list[ExportedRow]:
    return [ExportedRow(Request(f"row-{i}", (i,), None, SamplingParams())) for i in range(num_rows)]


def ids(rows: list[ExportedRow]) -> list[str]:
    return [row.request.request_id for row in rows]


def run_until_empty(ledger: RowLedger, poison: set[str], accidents: int = 0, seed: int = 0) -> tuple[set[str], int]:
    """Drive a process that dies when it works on a poison row, and `accidents` times for no reason."""
    luck = random.Random(seed)
    in_process: list[str] = []
    given_up: set[str] = set()
    num_crashes = 0
    while len(ledger):
        in_process += ids(ledger.take())
        ledger.check_integrity()
        assert in_process, "rows are left but none may run"
        has_accident = accidents > 0 and luck.random() < 0.2
        if poison.intersection(in_process) or has_accident:
            accidents -= has_accident
            num_crashes += 1
            given_up |= set(ids([lost.row for lost in ledger.crashed()]))
            in_process = []
            ledger.check_integrity()
        else:
            done = in_process.pop(luck.randrange(len(in_process)))
            assert ledger.finished(done)
    return given_up, num_crashes


def test_rows_go_in_together_and_once() -> None:
    ledger = RowLedger()
    ledger.add(make_rows(3))
    assert ids(ledger.take()) == ["row-0", "row-1", "row-2"]
    assert ledger.take() == []


def test_a_first_crash_sends_all_rows_again_before_new_ones() -> None:
    ledger = RowLedger()
    old, new = make_rows(4)[:2], make_rows(4)[2:]
    ledger.add(old)
    ledger.take()
    ledger.add(new)
    assert ledger.crashed() == []
    assert ledger.take() == old + new


def test_a_result_counts_once() -> None:
    ledger = RowLedger()
    ledger.add(make_rows(1))
    ledger.take()
    assert ledger.finished("row-0")
    assert not ledger.finished("row-0")


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("num_poison", [0, 1, 2])
def test_poison_rows_and_no_others_are_given_up(num_rows: int, num_poison: int) -> None:
    poison = {f"row-{i}" for i in range(0, num_rows, 3)[:num_poison]}
    ledger = RowLedger()
    ledger.add(make_rows(num_rows))
    given_up, num_crashes = run_until_empty(ledger, poison)
    assert given_up == poison
    # Two crashes to suspect, a halving per level, two alone; each poison row pays its own way down.
    assert num_crashes <= 2 + len(poison) * (num_rows.bit_length() + 3)


@pytest.mark.parametrize("seed", range(20))
def test_accidents_cost_no_row(seed: int) -> None:
    ledger = RowLedger()
    ledger.add(make_rows(32))
    given_up, num_crashes = run_until_empty(ledger, set(), accidents=6, seed=seed)
    assert given_up == set()
    assert num_crashes <= 6


def test_suspects_run_with_nothing_else_and_new_rows_wait_for_them() -> None:
    ledger = RowLedger()
    ledger.add(make_rows(2))
    for _ in range(2):
        ledger.take()
        ledger.crashed()
    ledger.add([ExportedRow(Request("fresh", (1,), None, SamplingParams()))])
    assert set(ids(ledger.take())) == {"row-0", "row-1"}
    assert ledger.take() == []
    ledger.finished("row-0")
    ledger.finished("row-1")
    assert ids(ledger.take()) == ["fresh"]


def test_forgotten_rows_are_aborted_only_where_they_run() -> None:
    ledger = RowLedger()
    ledger.add(make_rows(1))
    ledger.take()
    ledger.add([ExportedRow(Request("waiting", (1,), None, SamplingParams()))])
    assert ledger.forget(["row-0", "waiting", "never-heard-of"]) == ["row-0"]
    assert len(ledger) == 0
    ledger.check_integrity()


def begun(row: ExportedRow, num_tokens: int) -> ExportedRow:
    return replace(row, token_ids=tuple(range(num_tokens)))


def test_the_last_rows_are_lent_and_what_happens_here_does_not_touch_them() -> None:
    ledger = RowLedger()
    rows = make_rows(6)
    ledger.add(rows)
    ledger.take()
    assert ledger.lendable(ids(rows), 2) == ["row-4", "row-5"]
    assert ledger.lend([begun(row, 3) for row in rows[4:]]) == [begun(row, 3) for row in rows[4:]]
    ledger.check_integrity()
    ledger.crashed()
    assert ids(ledger.take()) == ["row-0", "row-1", "row-2", "row-3"]
    assert ledger.finished("row-5")
    assert len(ledger.lent) == 1
    ledger.check_integrity()


def test_reclaimed_rows_go_first_and_bring_the_tokens_they_had() -> None:
    ledger = RowLedger()
    rows = make_rows(3)
    ledger.add(rows)
    ledger.take()
    ledger.lend([begun(rows[1], 7)])
    ledger.add(make_rows(4)[3:])
    ledger.reclaim(["row-1", "row-2", "nobody"])
    ledger.check_integrity()
    assert ledger.take() == [begun(rows[1], 7), *make_rows(4)[3:]]


def test_rows_that_saw_a_crash_or_are_not_in_the_process_are_not_lent() -> None:
    ledger = RowLedger()
    ledger.add(make_rows(2))
    ledger.take()
    ledger.crashed()
    ledger.take()
    ledger.add(make_rows(3)[2:])
    assert ledger.lendable(["row-0", "row-1", "row-2", "gone"], 9) == []
    assert ledger.lend([begun(make_rows(10)[9], 1)]) == []


def test_forgotten_rows_that_are_lent_come_back_from_nowhere() -> None:
    ledger = RowLedger()
    ledger.add(make_rows(1))
    ledger.take()
    ledger.lend(make_rows(1))
    assert ledger.forget(["row-0"]) == []
    ledger.reclaim(["row-0"])
    assert ledger.take() == []
    ledger.check_integrity()


def row(name: str, max_tokens: int = 10, prompt: int = 5) -> ExportedRow:
    return ExportedRow(Request(name, (1,) * prompt, None, SamplingParams(max_tokens=max_tokens)))


class Engine:
    """Serves rows by turns, `window` at a time, first in first out; `served` counts generated tokens by run."""

    def __init__(self, window: int) -> None:
        self.turns = RowTurns()
        self.window = window
        self.rows: dict[str, ExportedRow] = {}
        self.inside: list[tuple[str, str]] = []
        self.served: Counter[str] = Counter()
        self.order: list[str] = []

    def arrive(self, run: str, num_rows: int, max_tokens: int = 10) -> None:
        rows = {f"{run}-{len(self.rows) + i}": row(f"{run}-{i}", max_tokens) for i in range(num_rows)}
        self.rows |= rows
        self.turns.arrived(run, rows)

    def finish_one(self, tokens: int | None = None) -> None:
        while len(self.inside) < self.window and (turn := self.turns.next()) is not None:
            self.turns.enter(*turn, self.rows[turn[1]])
            self.inside.append(turn)
        if self.inside:
            run, name = self.inside.pop(0)
            generated = tokens or self.rows[name].request.sampling.max_tokens
            self.turns.gone(run, name, self.rows[name], generated)
            self.served[run] += generated
            self.order.append(run)


def test_a_run_alone_is_served_in_order() -> None:
    turns = RowTurns()
    turns.arrived("a", ["1", "2"])
    assert [turns.next(), turns.next(), turns.next()] == [("a", "1"), ("a", "2"), None]


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


def test_rows_that_come_back_go_before_others_of_their_run_and_owe_nothing() -> None:
    turns = RowTurns()
    rows = {name: row(name) for name in ("1", "2", "3")}
    turns.arrived("a", rows)
    for _ in range(2):
        run, name = turns.next() or ("", "")
        turns.enter(run, name, rows[name])
    turns.back("a", ["2"])
    turns.away("a", "1")
    assert turns.waiting() == ["2", "3"]
    turns.arrived("b", ["other"])
    # Nothing of a is finished or in the engine: both stand at the beginning.
    assert turns.next() == ("a", "2")


def test_a_run_is_forgotten_only_without_rows() -> None:
    turns = RowTurns()
    turns.arrived("a", ["1"])
    with pytest.raises(AssertionError, match="1 rows left"):
        turns.forget("a")
    turns.gone("a", "1", row("1"), 0)
    turns.forget("a")
    assert turns.num_runs == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 200)), min_size=1, max_size=12),
    st.integers(1, 16),
)
def test_no_row_is_lost_or_served_twice(arrivals: list[tuple[str, int, int]], window: int) -> None:
    engine = Engine(window)
    for run, num_rows, max_tokens in arrivals:
        engine.arrive(run, num_rows, max_tokens)
        for _ in range(num_rows // 2):
            engine.finish_one()
    for _ in range(len(engine.rows)):
        engine.finish_one()
    assert Counter(engine.order) == Counter(name.split("-")[0] for name in engine.rows)
    assert engine.turns.num_runs == 0
    assert engine.turns.waiting() == []
