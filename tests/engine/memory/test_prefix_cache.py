"""The radix tree of prompt beginnings: what is kept, found and given up, without any tensor."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.memory.pool import PagePool
from lorabatch.engine.memory.prefix_cache import PrefixCache

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
    assert cache.make_room(lambda: cache.find(short[0]) is None, spare_awaited=True)
    assert not cache.make_room(lambda: cache.find(long[1]) is None, spare_awaited=True)
    assert cache.make_room(lambda: cache.find(long[1]) is None, spare_awaited=False)
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
            assert cache.make_room(lambda wanted=wanted: pool.num_free >= wanted, spare_awaited=False)
        cache.release(path)
        cache.check_integrity()
        pool.check_integrity()
    assert cache.make_room(lambda: pool.num_free == num_pages, spare_awaited=True)
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
    assert cache.owners() == []
    assert not cache.make_room(lambda: False, spare_awaited=False)
    cache.use(path[0])
    cache.leave(path)
    cache.check_integrity()
    assert len(cache.owners()) == 2, "the first page is used by another row"
    assert not cache.make_room(lambda: False, spare_awaited=False)
    assert len(cache) == 1
    cache.leave(path[:1])
    assert cache.make_room(lambda: not len(cache), spare_awaited=False)
    pool.check_integrity()


def test_a_row_keeps_its_last_page_for_itself() -> None:
    pool = PagePool(2)
    cache = PrefixCache(pool, PAGE, lambda number: 1.0)
    path = cache.path(None, range(4))
    cache.expect(path)
    cache.expect(path)
    pool.allocate("row", 1)
    assert cache.adopt(path, 0, "row") is None
