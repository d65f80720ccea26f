"""Whose rows go to a shared engine next: equal service in tokens, nothing saved up, nobody starved."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.exported_row import ExportedRow
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.pipeline.row_turns import RowTurns


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
