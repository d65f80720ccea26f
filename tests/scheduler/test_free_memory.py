from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.free_memory import FreeMemory


def num_fitting(memory: FreeMemory, waiting: list[int], running: list[int]) -> int:
    rows = np.arange(len(waiting))
    return memory.num_fitting(rows, np.asarray(waiting, np.int32), np.asarray(running, np.int32))


def make_memory(gaps: tuple[int, ...], row_pages: list[int], **changes: object) -> FreeMemory:
    return FreeMemory(gaps, np.asarray(row_pages, np.int64), **changes)  # type: ignore[arg-type]


def test_rows_enter_in_order_until_one_finds_no_gap():
    assert num_fitting(make_memory((5, 3), [3, 5, 1]), [0, 0, 0], [0]) == 2
    # ten pages are free, but not side by side
    assert num_fitting(make_memory((5, 5), [6, 1]), [0, 0], [0]) == 0


def test_the_smallest_gap_that_is_long_enough_is_taken():
    assert num_fitting(make_memory((8, 4), [4, 8]), [0, 0], [0]) == 2


def test_an_adapter_needs_room_beside_its_first_row_only():
    memory = make_memory((10,), [2, 2, 2], adapter_pages={1: 5})
    assert num_fitting(memory, [1, 1, 1], [0]) == 2
    assert num_fitting(memory, [1, 1, 1], [1]) == 3
    assert num_fitting(memory, [-1, 2, -1], [0]) == 3


def test_rows_are_rounded_up_where_a_gap_is_that_long():
    assert num_fitting(make_memory((8,), [1, 1, 1], rounded_to=4), [0, 0, 0], [0]) == 2
    assert num_fitting(make_memory((3,), [3], rounded_to=4), [0], [0]) == 1


def test_an_idle_replica_has_room_for_any_row():
    memory = make_memory((2,), [5, 5])
    assert num_fitting(memory, [0, 0], []) == 1
    assert num_fitting(memory, [0, 0], [0]) == 0
    assert num_fitting(memory, [], []) == 0


@pytest.mark.parametrize("rows", [[2, 0], [1]])
def test_rows_may_be_chosen_and_put_in_another_order(rows):
    chosen = make_memory((9,), [1, 2, 3], awaited=frozenset({4})).of_rows(np.asarray(rows))
    assert chosen.row_pages.tolist() == [[1, 2, 3][row] for row in rows]
    assert (chosen.gaps, chosen.awaited) == ((9,), {4})
