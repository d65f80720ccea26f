"""Who leaves the pool to make room: as few loads as any order of leaving could have."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.memory.copies import AdapterCopies
from lorabatch.engine.memory.loader import AdapterLoader
from lorabatch.engine.memory.packed import AdapterLayout, PackedAdapter
from lorabatch.engine.memory.pool import PagePool
from lorabatch.engine.memory.residency import AdapterResidency

PAGE_ELEMENTS = 8


def make_residency(num_pages: int) -> tuple[PagePool, AdapterResidency]:
    pool = PagePool(num_pages)
    loader = AdapterLoader(lambda adapter_id: PackedAdapter(torch.zeros(PAGE_ELEMENTS), AdapterLayout()), 0)
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
            residency.load(adapter_id, 1)
        residency.check_integrity([])
        pool.check_integrity()
    assert residency.num_loads == fewest_loads(uses, capacity)
    assert residency.loader.num_reads == residency.num_loads, "with no host memory, every load is a read"


def test_pinned_adapters_stay_whatever_their_next_use() -> None:
    pool, residency = make_residency(2)
    for adapter_id in "ab":
        residency.load(adapter_id, 1)
    residency.pin("b")
    next_use = {"a": 1.0, "b": float("inf")}
    assert residency.make_room(lambda: pool.num_free > 0, next_use.__getitem__, lambda a: True)
    assert residency.resident_ids == ("b",)
    assert not residency.make_room(lambda: pool.num_free > 1, next_use.__getitem__, lambda a: True)
    residency.check_integrity(["b"])
