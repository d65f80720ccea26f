"""Reading adapters ahead: no step waits for what is not needed yet, and errors come when it is.

Adapters below the pool: a budget of bytes, and who makes room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from lorabatch.engine.errors import AdapterUnusableError
from lorabatch.engine.memory.adapter_layout import AdapterLayout
from lorabatch.engine.memory.loader import MAX_AHEAD, AdapterLoader
from lorabatch.engine.memory.packed import PackedAdapter


class Storage:
    """Adapters that come when `gate` opens; those in `broken` raise."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.broken: set[str] = set()
        self.read_ids: list[str] = []

    def __call__(self, adapter_id: str) -> PackedAdapter:
        assert self.gate.wait(timeout=30)
        self.read_ids.append(adapter_id)
        if adapter_id in self.broken:
            raise AdapterUnusableError(adapter_id, "damaged")
        return PackedAdapter(torch.zeros(4), AdapterLayout())


@pytest.fixture
def storage() -> Storage:
    return Storage()


def test_prefetching_returns_at_once_and_taking_waits(storage: Storage) -> None:
    loader = AdapterLoader(storage, 0)
    loader.prefetch(["a", "b", "a"])
    assert not loader.is_ready("a")
    storage.gate.set()
    assert loader.take("b").numbers.numel() == 4
    assert loader.is_ready("a"), "one thread reads in the order asked"
    loader.take("a")
    assert storage.read_ids == ["a", "b"]
    assert loader.num_reads == 2
    assert not loader.is_ready("a")


def test_several_threads_read_at_once() -> None:
    together = threading.Barrier(6, timeout=30)

    def read(adapter_id: str) -> PackedAdapter:
        together.wait()
        return PackedAdapter(torch.zeros(len(adapter_id)), AdapterLayout())

    loader = AdapterLoader(read, 0, num_threads=6)
    names = ["a" * (i + 1) for i in range(6)]
    loader.prefetch(names)
    assert loader.room_ahead == 0, "one adapter for each thread is enough ahead"
    assert [loader.take(name).numbers.numel() for name in reversed(names)] == [6, 5, 4, 3, 2, 1]


def test_an_error_surfaces_when_the_adapter_is_taken_and_the_next_taker_reads_again(storage: Storage) -> None:
    loader = AdapterLoader(storage, 0)
    storage.broken.add("a")
    storage.gate.set()
    loader.prefetch(["a"])
    with pytest.raises(AdapterUnusableError, match="damaged"):
        loader.take("a")
    storage.broken.clear()
    assert loader.take("a").numbers.numel() == 4


def test_what_left_the_pool_comes_back_without_a_read(storage: Storage) -> None:
    storage.gate.set()
    loader = AdapterLoader(storage, 1000)
    kept = loader.take("a")
    loader.keep("a", kept.num_bytes, lambda: kept, lambda a: 0.0)
    loader.prefetch(["a"])
    assert loader.is_ready("a")
    assert loader.take("a") is kept
    assert loader.num_reads == 1


def test_what_host_memory_has_no_room_for_is_not_copied(storage: Storage) -> None:
    copied: list[str] = []

    def copy() -> PackedAdapter:
        copied.append("copy")
        return PackedAdapter(torch.zeros(4), AdapterLayout())

    for budget, next_use, expected in ((15, 0.0, []), (16, 0.0, ["copy"])):
        loader = AdapterLoader(storage, budget)
        loader.keep("a", 16, copy, lambda a, use=next_use: use)  # type: ignore[misc]
        assert copied == expected
    loader.keep("b", 16, copy, {"a": 1.0, "b": 2.0}.__getitem__)
    assert copied == ["copy"], "b is needed later than a, which has the room"


def test_what_is_read_ahead_is_bounded_and_forgotten_with_its_rows(storage: Storage) -> None:
    loader = AdapterLoader(storage, 0)
    storage.gate.set()
    loader.prefetch(f"{i}" for i in range(MAX_AHEAD))
    assert loader.room_ahead == 0
    loader.take(f"{MAX_AHEAD - 1}")  # the last one asked for: all are read
    loader.drop_unwanted(lambda adapter_id: adapter_id == "0")
    assert loader.is_ready("0")
    assert not loader.is_ready("1")
    assert loader.room_ahead > 0


def test_an_adapter_in_two_places_is_an_error(storage: Storage) -> None:
    storage.gate.set()
    loader = AdapterLoader(storage, 1000)
    taken = loader.take("a")
    loader.keep("a", taken.num_bytes, lambda: taken, lambda a: 0.0)
    with pytest.raises(AssertionError, match="in the pool and also before it"):
        loader.check_integrity(["a"])


def keep(loader: AdapterLoader, adapter_id: str, num_elements: int, next_use: Callable[[str], float]) -> None:
    adapter = PackedAdapter(torch.zeros(num_elements), AdapterLayout())
    loader.keep(adapter_id, adapter.num_bytes, lambda: adapter, next_use)
    loader.check_integrity([])


def test_the_adapter_needed_furthest_in_the_future_makes_room(storage: Storage) -> None:
    uses = {"soon": 1.0, "later": 9.0, "between": 5.0}
    loader = AdapterLoader(storage, 2 * 40)
    for adapter_id in uses:
        keep(loader, adapter_id, 10, uses.__getitem__)
    assert [a for a in uses if loader.is_ready(a)] == ["soon", "between"]
    assert loader.take("soon").numbers.numel() == 10
    assert not loader.is_ready("soon")
    assert loader.kept_bytes == 40


def test_an_adapter_needed_later_than_all_others_is_not_kept_at_their_cost(storage: Storage) -> None:
    loader = AdapterLoader(storage, 80)
    keep(loader, "small", 10, lambda a: 1.0)
    keep(loader, "large", 15, {"small": 1.0, "large": 2.0}.__getitem__)
    assert loader.is_ready("small")
    assert not loader.is_ready("large")


def test_without_a_budget_nothing_is_kept(storage: Storage) -> None:
    loader = AdapterLoader(storage, 0)
    keep(loader, "a", 1, lambda a: 0.0)
    assert not loader.is_ready("a")
    with pytest.raises(ValueError, match="host_tier_bytes=-1"):
        AdapterLoader(storage, -1)


def test_a_wrong_sum_is_reported_with_both_numbers(storage: Storage) -> None:
    loader = AdapterLoader(storage, 80)
    keep(loader, "a", 10, lambda a: 0.0)
    loader.kept_bytes = 8
    with pytest.raises(AssertionError, match="hold 40 bytes, counted 8"):
        loader.check_integrity([])
