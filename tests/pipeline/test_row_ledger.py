"""Rows through crashes: nothing is lost, nothing runs twice, a poison row is found, innocent rows are not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lorabatch.engine.exported_row import ExportedRow
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.pipeline.row_ledger import RowLedger


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
