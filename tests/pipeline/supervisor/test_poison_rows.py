"""Rows that kill engines, through the table of rows and the restart policy together: they are found, the others are
answered, and an engine that is broken itself is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import pytest

from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.pipeline.supervisor.health import FIRST_DELAY_S, MAX_BLAMED_ROWS, RestartPolicy
from lorabatch.pipeline.supervisor.open_shard import OpenShard
from lorabatch.pipeline.supervisor.rows import QueuedRow, RowTable, RunRows

# The whole of what was sent is in one batch: nothing finishes in a process that has a poison row.
ALL = 10**9


@dataclass
class Fate:
    """What became of a job's rows."""

    answered: set[str] = field(default_factory=set)
    blamed: set[str] = field(default_factory=set)
    delays_s: list[float] = field(default_factory=list)
    given_up: str | None = None


def work(num_rows: int, kills: Callable[[Collection[str]], bool], batch_rows: int = ALL) -> Fate:
    """Engines on rows 0, 1, … in that order; one that `kills` claims a batch of dies, all others finish theirs."""
    table, policy, fate = RowTable(), RestartPolicy(), Fate()
    table.runs["run"] = RunRows("run")
    requests = [Request(str(i), (1,), None, SamplingParams()) for i in range(num_rows)]
    table.add(OpenShard(0, map(ExportedRow, requests), "run"))
    policy.started()
    while len(table) and fate.given_up is None:
        table.take()
        batch = table.in_process[:batch_rows]
        assert batch, "rows are left but none may run"
        if not kills(ids_of(batch)):
            policy.row_finished()
            for row in batch:
                table.finish(row, 1)
            fate.answered |= ids_of(batch)
            continue
        is_of_search = table.is_searching
        blamed = ids_of(table.crashed())
        fate.blamed |= blamed
        fate.given_up = policy.died("a crash", False, is_of_search=is_of_search, num_blamed=len(blamed))
        if fate.given_up is None:
            fate.delays_s.append(policy.delay_s)
            policy.started()
    return fate


def ids_of(rows: Iterable[QueuedRow]) -> set[str]:
    return {row.request.request_id for row in rows}


def ids(first: int, num_rows: int) -> set[str]:
    return {str(i) for i in range(first, first + num_rows)}


@pytest.mark.parametrize("batch_rows", [ALL, 8])
@pytest.mark.parametrize("place", ["front", "middle", "end"])
@pytest.mark.parametrize("num_rows", [16, 17, 100, *(pytest.param(n, marks=pytest.mark.long) for n in (1024, 4096))])
def test_adjacent_poison_rows_become_error_rows_and_all_others_are_answered(
    num_rows: int, place: str, batch_rows: int
) -> None:
    for num_poison in (1, 2, 3, 5, 9, MAX_BLAMED_ROWS - 1):
        first = {"front": 0, "middle": (num_rows - num_poison) // 2, "end": num_rows - num_poison}[place]
        poison = ids(first, num_poison)
        fate = work(num_rows, lambda batch, poison=poison: not poison.isdisjoint(batch), batch_rows)
        assert fate.given_up is None, (num_poison, fate.given_up)
        assert fate.blamed == poison
        assert fate.answered == ids(0, num_rows) - poison
        # Two before the search, then each pays its own way down at most.
        assert len(fate.delays_s) <= 2 + num_poison * (num_rows.bit_length() + 3)
        assert set(fate.delays_s[2:]) <= {FIRST_DELAY_S}


def test_poison_rows_far_apart_are_no_limit() -> None:
    poison = {str(i) for i in range(0, 1024, 8)}
    fate = work(1024, lambda batch: not poison.isdisjoint(batch))
    assert fate.given_up is None
    assert fate.blamed == poison


@pytest.mark.parametrize("num_rows", [MAX_BLAMED_ROWS, 100, 4096])
def test_an_engine_that_survives_no_row_is_given_up_before_it_has_cost_many(num_rows: int) -> None:
    fate = work(num_rows, lambda batch: True)
    assert fate.answered == set()
    assert len(fate.blamed) == MAX_BLAMED_ROWS
    assert fate.given_up is not None
    assert f"{MAX_BLAMED_ROWS} rows in succession" in fate.given_up
    assert len(fate.delays_s) <= 2 + num_rows.bit_length() + 3 * MAX_BLAMED_ROWS


def test_an_engine_that_breaks_in_the_middle_is_given_up_too() -> None:
    lives = iter(range(10**6))
    fate = work(1000, lambda batch: next(lives) >= 20, batch_rows=4)
    assert len(fate.answered) == 80
    assert len(fate.blamed) == MAX_BLAMED_ROWS
    assert fate.given_up is not None
