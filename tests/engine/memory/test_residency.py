"""Who leaves the pool to make room: as few loads as any order of leaving could have."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.memory.adapter_layout import AdapterLayout
from lorabatch.engine.memory.copies import AdapterCopies, Parts
from lorabatch.engine.memory.loader import AdapterLoader
from lorabatch.engine.memory.packed import PackedAdapter
from lorabatch.engine.memory.pool import PagePool
from lorabatch.engine.memory.residency import AdapterResidency, ResidentAdapter

PAGE_ELEMENTS = 8


def make_residency(num_pages: int) -> tuple[PagePool, AdapterResidency]:
    pool = PagePool(num_pages)
    layout = AdapterLayout(page_elements=PAGE_ELEMENTS, size=PAGE_ELEMENTS)
    loader = AdapterLoader(lambda adapter_id: PackedAdapter(torch.zeros(PAGE_ELEMENTS), layout), 0)
    memory = torch.zeros(num_pages * PAGE_ELEMENTS)
    return pool, AdapterResidency(pool, memory, PAGE_ELEMENTS, loader, AdapterCopies())


def fewest_loads(uses: tuple[str, ...], capacity: int) -> int:
    """Over all choices of who leaves at each load."""

    @cache
    def loads(at: int, held: frozenset[str]) -> int:
        if at == len(uses):
            return 0
        if uses[at] in held:
            return loads(at + 1, held)
        if len(held) < capacity:
            return 1 + loads(at + 1, held | {uses[at]})
        return 1 + min(loads(at + 1, held - {gone} | {uses[at]}) for gone in held)

    return loads(0, frozenset())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14).map(tuple), st.integers(1, 4))
def test_eviction_by_next_use_loads_as_few_adapters_as_any_order_of_leaving(
    uses: tuple[str, ...], capacity: int
) -> None:
    pool, residency = make_residency(capacity)
    for at, adapter_id in enumerate(uses):
        later = uses[at + 1 :]
        next_use = {a: float(later.index(a)) if a in later else float("inf") for a in set(uses)}
        if residency.get(adapter_id) is None:
            assert residency.make_room(lambda: pool.num_free > 0, next_use.__getitem__, lambda a: True)
            residency.load(adapter_id)
        residency.check_integrity([])
        pool.check_integrity()
    assert residency.num_loads == fewest_loads(uses, capacity)
    assert residency.loader.num_reads == residency.num_loads, "with no host memory, every load is a read"


def test_pinned_adapters_stay_whatever_their_next_use() -> None:
    pool, residency = make_residency(2)
    for adapter_id in "ab":
        residency.load(adapter_id)
    residency.pin("b")
    next_use = {"a": 1.0, "b": float("inf")}
    assert residency.make_room(lambda: pool.num_free > 0, next_use.__getitem__, lambda a: True)
    assert residency.resident_ids == ("b",)
    assert not residency.make_room(lambda: pool.num_free > 1, next_use.__getitem__, lambda a: True)
    residency.check_integrity(["b"])


class Contents:
    """Adapters of random sizes, each of numbers of its own."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes

    def __call__(self, adapter_id: str) -> PackedAdapter:
        size = self._sizes[adapter_id]
        numbers = torch.randn(size, generator=torch.Generator().manual_seed(ord(adapter_id)))
        return PackedAdapter(numbers, AdapterLayout(page_elements=PAGE_ELEMENTS, num_elements=size, size=size))

    def pages_of(self, adapter_id: str) -> int:
        return -(-self._sizes[adapter_id] // PAGE_ELEMENTS)


def numbers_of(resident: ResidentAdapter) -> torch.Tensor:
    """An adapter's numbers, from where its pages are in the pool."""
    in_pages = resident.memory.view(-1, PAGE_ELEMENTS)[torch.from_numpy(resident.pages)]
    return in_pages.flatten()[: resident.layout.size]


_MOVES = st.tuples(st.sampled_from(["load", "evict", "row", "scattered row", "end"]), st.integers(0, 25))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_MOVES, max_size=60),
    st.lists(st.integers(1, 5 * PAGE_ELEMENTS), min_size=26, max_size=26),
    st.integers(1, 40),
    st.integers(0, 400),
)
def test_an_adapter_loads_wherever_as_many_pages_are_free_and_keeps_its_numbers(
    moves: list[tuple[str, int]], sizes: list[int], num_pages: int, host_bytes: int
) -> None:
    """Keys and values of rows are written between adapters, some of which leave for host memory and come back."""
    contents = Contents(dict(zip("abcdefghijklmnopqrstuvwxyz", sizes, strict=True)))
    pool, memory = PagePool(num_pages), torch.zeros(num_pages * PAGE_ELEMENTS)
    residency = AdapterResidency(pool, memory, PAGE_ELEMENTS, AdapterLoader(contents, host_bytes), AdapterCopies())
    rows: dict[int, None] = {}
    for move, number in moves:
        adapter_id = chr(ord("a") + number)
        if move == "load" and residency.get(adapter_id) is None:
            pages = contents.pages_of(adapter_id)
            has_room = residency.make_room(lambda: pool.num_free >= pages, lambda _: 0.0, lambda _: False)  # noqa: B023
            assert has_room == (pool.num_free >= pages)
            if has_room:
                assert len(residency.load(adapter_id).pages) == pages
        elif move == "evict" and residency.get(adapter_id) is not None:
            residency.evict(adapter_id, lambda _: 0.0)
        elif move in ("row", "scattered row") and number not in rows:
            size = number % 4 + 1
            if move == "row" and pool.allocate(number, size) is not None:
                rows[number] = None
            elif move == "scattered row" and pool.num_free >= size:
                pool.allocate_anywhere(number, size)
                rows[number] = None
            for run in pool.runs_of(number) if number in rows else ():
                memory[run.start * PAGE_ELEMENTS : run.end * PAGE_ELEMENTS] = torch.nan
        elif move == "end" and number in rows:
            del rows[number]
            pool.release(number)
        pool.check_integrity()
        residency.check_integrity([])
        for resident_id in residency.resident_ids:
            resident = residency.get(resident_id)
            assert resident is not None
            assert numbers_of(resident).equal(contents(resident_id).numbers)


class OneWay(AdapterCopies):
    """Copies that cannot come back, as to the pools of members on devices of their own."""

    keeps_sources = True

    def to_host(self, memory: torch.Tensor, parts: Parts) -> torch.Tensor:
        raise AssertionError("pages cannot be copied back")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), max_size=30), st.integers(0, 8))
def test_numbers_that_cannot_come_back_stay_on_the_host_as_far_as_it_has_room(uses: list[str], held: int) -> None:
    contents, one = Contents(dict.fromkeys("abcdef", PAGE_ELEMENTS)), PAGE_ELEMENTS * 4
    pool, memory = PagePool(2), torch.zeros(2 * PAGE_ELEMENTS)
    residency = AdapterResidency(pool, memory, PAGE_ELEMENTS, AdapterLoader(contents, held * one), OneWay())
    for number, adapter_id in enumerate(uses):
        later = uses[number + 1 :]
        next_use = {a: float(later.index(a)) if a in later else float("inf") for a in "abcdef"}
        if residency.get(adapter_id) is None:
            assert residency.make_room(lambda: pool.num_free > 0, next_use.__getitem__, lambda _: True)
            resident = residency.load(adapter_id)
            assert numbers_of(resident).equal(contents(adapter_id).numbers)
        residency.check_integrity([])
    if held >= 6:
        assert residency.loader.num_reads == len(set(uses)), "each is read once"
    if not held:
        assert residency.loader.num_reads == residency.num_loads
