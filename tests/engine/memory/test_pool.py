"""The page pool: every page free or owned, whatever is taken and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.memory.pool import PagePool, PageRange


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_any_order_of_taking_and_giving_back_keeps_the_books(num_pages: int, moves: list[tuple[bool, int]]) -> None:
    pool = PagePool(num_pages)
    held: list[int] = []
    for turn, (takes, size) in enumerate(moves):
        if takes or not held:
            before = pool.largest_free_run
            run = pool.allocate(turn, size)
            assert (run is None) == (size > before)
            if run is not None:
                held.append(turn)
        else:
            pool.release(held.pop(size % len(held)))
        pool.check_integrity()
    for owner in held:
        pool.release(owner)
    pool.check_integrity()
    assert pool.largest_free_run == pool.num_free == num_pages


@given(st.integers(2, 30), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=60))
def test_runs_that_are_extended_keep_the_books(num_pages: int, moves: list[tuple[int, int]]) -> None:
    pool, held, heirs = PagePool(num_pages), list[int](), 0
    for turn, (move, size) in enumerate(moves):
        owner = held[size % len(held)] if held else -1
        before = pool.num_free
        if move == 0 and size <= before:
            pool.allocate_anywhere(turn, size)
            held.append(turn)
            assert (pool.num_pages_of(turn), pool.num_free) == (size, before - size)
        elif move == 1 and held and before:
            pages = pool.num_pages_of(owner)
            pool.extend(owner)
            assert (pool.num_pages_of(owner), pool.num_free) == (pages + 1, before - 1)
        elif move == 2 and held and pool.num_pages_of(owner) > 1:
            if size % 2:
                pool.release_first(owner)
            else:
                pool.pass_first(owner, ("heir", turn))
                heirs += 1
        elif move == 3 and held:
            held.remove(owner)
            pool.release(owner)
        pool.check_integrity()
    for owner in held:
        pool.release(owner)
    pool.check_integrity()
    assert pool.num_free == num_pages - heirs


def test_a_run_is_extended_by_the_page_behind_it_or_else_from_the_smallest_gap() -> None:
    pool = PagePool(12)
    for owner, size in (("row", 2), ("next", 2), ("b", 3), ("c", 1), ("d", 1)):
        pool.allocate(owner, size)
    for owner in ("b", "d"):
        pool.release(owner)
    for _ in range(4):
        pool.extend("row")
    assert pool.runs_of("row") == (PageRange(0, 2), PageRange(4, 3), PageRange(8, 1))
    pool.release("row")
    pool.check_integrity()
    assert pool.num_free == 9


def test_a_gap_is_refilled_by_a_run_of_its_size() -> None:
    pool = PagePool(10)
    for owner in "abc":
        pool.allocate(owner, 2)
    pool.release("b")
    assert pool.allocate("d", 2) == PageRange(2, 2)


def test_giving_back_what_is_not_held_is_an_error() -> None:
    with pytest.raises(KeyError):
        PagePool(3).release("unknown")


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0)


def test_first_pages_of_a_run_are_passed_on_and_given_back() -> None:
    pool = PagePool(6)
    pool.allocate("row", 4)
    assert pool.pass_first("row", "heir") == PageRange(0, 1)
    pool.release_first("row")
    pool.check_integrity()
    assert (pool.range_of("heir"), pool.range_of("row"), pool.num_free) == (PageRange(0, 1), PageRange(2, 2), 3)
    pool.release("heir")
    pool.check_integrity()
    assert pool.largest_free_run == 2
    pool.release_first("row")
    with pytest.raises(AssertionError, match="without a page"):
        pool.release_first("row")
