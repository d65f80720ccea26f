"""The radix tree of prompt beginnings: what is kept, found and given up, without any tensor."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.memory.pool import PagePool
from lorabatch.engine.memory.prefix_cache import PageUse, PrefixCache

PAGE = 4


def make_cache(num_pages: int) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), PAGE, lambda number: 10.0 + number)


def keep_all(cache: PrefixCache, path: tuple[bytes, ...]) -> int:
    """Pages kept for a row that computes its whole prompt."""
    return sum(cache.keep(path, number) is not None for number in range(len(path)))


def test_a_path_is_the_adapter_and_the_tokens_and_nothing_else() -> None:
    cache = make_cache(1)
    path = cache.path("a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.path("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == path
    assert cache.path("a", [1, 2, 3, 4, 0, 6, 7, 8])[0] == path[0]
    assert cache.path("a", [1, 2, 3, 4, 0, 6, 7, 8])[1] != path[1]
    for other in ("b", None):
        assert not set(cache.path(other, [1, 2, 3, 4, 5, 6, 7, 8])) & set(path)
    # equal tokens after other beginnings are other pages
    assert cache.path("a", [0, 0, 0, 0, 5, 6, 7, 8])[1] != path[1]


def test_only_what_another_row_waits_for_is_kept() -> None:
    cache = make_cache(8)
    alone, shared = cache.path("a", range(8)), cache.path("b", range(8))
    for path in (alone, shared, shared):
        cache.expect(path)
    assert keep_all(cache, alone) == 0
    assert keep_all(cache, shared) == 2
    assert cache.find(shared[1]) is not None
    cache.check_integrity()


def test_a_page_whose_beginning_is_not_kept_is_not_kept_either() -> None:
    cache = make_cache(8)
    path = cache.path(None, range(8))
    cache.expect(path)
    cache.expect(path)
    assert cache.keep(path, 1) is None
    assert cache.keep(path, 0) is not None
    assert cache.keep(path, 1) is not None


def test_what_no_row_waits_for_goes_first_and_then_the_cheapest() -> None:
    cache = make_cache(3)
    long, short = cache.path("a", range(8)), cache.path("b", range(4))
    for path in (long, long, short, short, short):
        cache.expect(path)
    assert keep_all(cache, long) == 2
    assert keep_all(cache, short) == 1
    cache.release(short)
    cache.release(short)
    cache.release(short)
    assert cache.make_room(lambda: cache.find(short[0]) is None, PageUse.NONE)
    assert not cache.make_room(lambda: cache.find(long[1]) is None, PageUse.NONE)
    assert cache.make_room(lambda: cache.find(long[1]) is None, PageUse.AWAITED)
    assert cache.find(long[0]) is not None, "a beginning leaves after what continues it"
    cache.check_integrity()


def test_a_page_that_more_rows_wait_for_takes_the_place_of_one_that_fewer_wait_for() -> None:
    cache = make_cache(1)
    few, many = cache.path("a", range(4)), cache.path("b", range(4))
    for path in (few, few, many, many, many):
        cache.expect(path)
    assert keep_all(cache, few) == 1
    assert keep_all(cache, many) == 1
    assert cache.find(few[0]) is None
    assert keep_all(cache, few) == 0
    cache.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_any_order_of_rows_and_evictions_keeps_the_books(num_pages: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, PAGE, lambda number: 10.0 + number)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 20))] for _ in range(20)]
    rows = [cache.path(rng.choice("ab"), prompt) for prompt in prompts]
    for path in rows:
        cache.expect(path)
    for path in rows:
        found = [cache.find(key) is not None for key in path]
        assert found == sorted(found, reverse=True), "a cached page has its whole beginning in the cache"
        keep_all(cache, path)
        if rng.random() < 0.3:
            wanted = rng.randrange(num_pages + 1)
            assert cache.make_room(lambda wanted=wanted: pool.num_free >= wanted, PageUse.AWAITED)
        cache.release(path)
        cache.check_integrity()
        pool.check_integrity()
    assert cache.make_room(lambda: pool.num_free == num_pages, PageUse.NONE)
    assert len(cache) == 0


def test_pages_in_use_stay_whatever_is_asked_for() -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool, PAGE, lambda number: 10.0 + number)
    path = cache.path(None, range(12))
    for _ in range(2):
        cache.expect(path)
    pool.allocate("row", 4)
    assert cache.adopt(path, 1, "row") is None, "what it continues is not there"
    pages = [cache.adopt(path, number, "row") for number in range(3)]
    assert [page.start for page in pages if page] == [0, 1, 2]
    assert pool.range_of("row").num_pages == 1
    cache.release(path)
    cache.release(path)
    assert cache.owners(PageUse.RESERVED) == []
    assert not cache.make_room(lambda: False, PageUse.AWAITED)
    cache.use(path[0])
    cache.leave(path)
    cache.check_integrity()
    assert len(cache.owners(PageUse.RESERVED)) == 2, "the first page is used by another row"
    assert not cache.make_room(lambda: False, PageUse.AWAITED)
    assert len(cache) == 1
    cache.leave(path[:1])
    assert cache.make_room(lambda: not len(cache), PageUse.AWAITED)
    pool.check_integrity()


def test_a_row_keeps_its_last_page_for_itself() -> None:
    pool = PagePool(2)
    cache = PrefixCache(pool, PAGE, lambda number: 1.0)
    path = cache.path(None, range(4))
    cache.expect(path)
    cache.expect(path)
    pool.allocate("row", 1)
    assert cache.adopt(path, 0, "row") is None


def finish(cache: PrefixCache, path: tuple[bytes, ...]) -> int:
    """Pages kept for a finished row that was computed without the cache and will be continued."""
    cache.make_reservable(len(path))
    num_kept = sum(cache.keep_finished(path, number) is not None for number in range(len(path)))
    cache.reserve(path)
    return num_kept


def paths_there(cache: PrefixCache, *paths: tuple[bytes, ...]) -> list[int]:
    """Pages of each path that are in the cache."""
    return [sum(cache.find(key) is not None for key in path) for path in paths]


def test_of_rows_that_will_be_continued_the_one_that_finished_first_goes_first_and_from_its_end() -> None:
    cache = make_cache(24)
    first, second, third = (cache.path(name, range(8)) for name in "abc")
    for path in (first, second, third):
        assert finish(cache, path) == 2
    assert cache.make_room(lambda: cache.find(first[1]) is None, PageUse.RESERVED)
    assert paths_there(cache, first, second, third) == [1, 2, 2]
    cache.check_integrity()


def test_a_quarter_of_the_pool_is_reserved_and_the_oldest_reservation_ends_first() -> None:
    cache = make_cache(16)
    first, second, third = (cache.path(name, range(8)) for name in "abc")
    for path in (first, second, third):
        finish(cache, path)
        cache.check_integrity()
    assert paths_there(cache, first, second, third) == [2, 2, 2], "memory is free"
    assert (cache.num_evictable(PageUse.AWAITED), cache.num_evictable(PageUse.RESERVED)) == (2, 6)
    assert not cache.make_room(lambda: False, PageUse.AWAITED)
    assert paths_there(cache, first, second, third) == [0, 2, 2]
    long = cache.path("long", range(64))
    assert finish(cache, long) == 16, "reservations end for new ones"
    assert not cache.make_room(lambda: False, PageUse.AWAITED)
    assert paths_there(cache, second, third, long) == [0, 0, 4], "the first four pages are worth most"
    cache.check_integrity()


def test_pages_leave_by_their_expected_use() -> None:
    cache = make_cache(24)
    awaited, reserved, unused = (cache.path(name, range(8)) for name in "abc")
    cache.expect(awaited)
    cache.expect(awaited)
    assert keep_all(cache, awaited) == 2
    for path in (reserved, unused):
        assert finish(cache, path) == 2
    cache.continued(unused, 1)
    order = []
    for most in PageUse:
        cache.make_room(lambda: False, most)
        order.append(paths_there(cache, awaited, reserved, unused))
        cache.check_integrity()
    assert order == [[2, 2, 0], [0, 2, 0], [0, 0, 0]]


def test_a_finished_row_takes_no_page_that_has_a_use() -> None:
    cache = make_cache(8)
    awaited, reserved, finished = cache.path("a", range(24)), cache.path("b", range(8)), cache.path("c", range(8))
    cache.expect(awaited)
    cache.expect(awaited)
    assert keep_all(cache, awaited) == 6
    assert finish(cache, reserved) == 2
    assert cache.keep_finished(finished, 0) is None
    cache.release(awaited)
    cache.release(awaited)
    assert cache.keep_finished(finished, 0) is not None, "no row waits for the others any more"
    assert paths_there(cache, awaited, reserved) == [5, 2]
    cache.check_integrity()


def test_a_continuation_ends_the_reservation_of_what_it_reads_and_of_what_it_does_not_need() -> None:
    cache = make_cache(64)
    begun = list(range(8))
    one, other = (cache.path("a", [*begun, *range(first, first + 8)]) for first in (20, 40))
    for path in (one, other):
        finish(cache, path)
    cache.continued(one, 2)
    cache.check_integrity()
    assert cache.num_evictable(PageUse.AWAITED) == 2, "the other row needs the beginning that both have"
    cache.continued(other, 2)
    cache.check_integrity()
    assert cache.num_evictable(PageUse.AWAITED) == 6


def test_pages_of_a_finished_row_pass_to_the_cache_from_wherever_they_are() -> None:
    pool = PagePool(9)
    cache = PrefixCache(pool, PAGE, lambda number: 1.0)
    pool.allocate("left", 1)
    pool.allocate("row", 1)
    pool.allocate("between", 1)
    for _ in range(4):
        pool.extend("row")
    path = cache.path(None, range(20))
    assert finish(cache, path[:2]) == 2
    taken = [cache.inherit(path, number, "row") for number in range(5)]
    assert taken == [True] * 4 + [False], "the last page stays the row's"
    assert pool.num_pages_of("row") == 1
    pool.release("row")
    pool.release("left")
    pool.release("between")
    assert pool.num_free == 9 - 4
    assert [cache.find(key) is not None for key in path] == [True] * 4 + [False]
    cache.check_integrity()
    pool.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_the_next_page_to_leave_is_the_least_of_all(num_pages: int, seed: int) -> None:
    """`check_integrity` compares the order in which pages are offered with their present ranks."""
    rng = random.Random(seed)
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, PAGE, lambda number: 10.0 + number)
    awaited: list[tuple[bytes, ...]] = []
    for _ in range(60):
        path = cache.path(rng.choice("ab"), [rng.randrange(2) for _ in range(rng.randrange(1, 20))])
        there = [number for number, key in enumerate(path) if cache.find(key) is not None]
        match rng.randrange(6):
            case 0:
                cache.expect(path)
                awaited.append(path)
            case 1 if awaited:
                cache.release(awaited.pop(rng.randrange(len(awaited))))
            case 2:
                finish(cache, path)
            case 3 if there:
                cache.continued(path, rng.choice(there))
            case 4 if there:
                cache.touch(path[there[-1]])
            case _:
                wanted, most = rng.randrange(num_pages + 1), rng.choice(list(PageUse))
                had, limit = pool.num_free, pool.num_free + cache.num_evictable(most)
                has_room = cache.make_room(lambda wanted=wanted: pool.num_free >= wanted, most)
                assert has_room == (pool.num_free >= wanted)
                assert has_room == (limit >= wanted) or most == PageUse.NONE
                assert pool.num_free >= had
        cache.check_integrity()
        pool.check_integrity()
    assert cache.make_room(lambda: pool.num_free == num_pages, PageUse.RESERVED)
