from __future__ import annotations

import pytest

from lorabatch.scheduler.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.simulated_memory import SimulatedMemory
from lorabatch.scheduler.workload import AdapterInfo

ADAPTERS = [AdapterInfo(name, 8, 10**8) for name in "xyz"]
STORED_S = COST.load_seconds(10**8, "storage")


def test_an_absent_adapter_is_waited_for_once():
    memory = SimulatedMemory(ADAPTERS, COST, "storage", None)
    assert memory.wait_s([0, 1], 5.0) == pytest.approx(2 * STORED_S)
    assert memory.wait_s([1, 0], 5.0) == 0.0


def test_an_adapter_on_its_way_is_waited_for_as_long_as_it_still_takes():
    memory = SimulatedMemory(ADAPTERS, COST, "storage", None)
    memory.fetch(0, 1.0, "storage")
    memory.fetch(1, 1.0, "storage")
    # One link: the second comes after the first.
    assert memory.wait_s([1], 1.0 + STORED_S) == pytest.approx(STORED_S)
    assert memory.wait_s([0], 1.0 + 2 * STORED_S) == 0.0


def test_the_least_recently_used_goes_but_nothing_that_is_needed():
    memory = SimulatedMemory(ADAPTERS, COST, "host", 2)
    for needed in ([0], [1], [0], [2]):
        memory.wait_s(needed, 0.0)
    assert memory.resident == [0, 2]
    memory.wait_s([0, 1, 2], 0.0)
    assert sorted(memory.resident) == [0, 1, 2]


def test_what_was_dropped_or_lost_is_loaded_again():
    memory = SimulatedMemory(ADAPTERS, COST, "storage", None)
    memory.wait_s([0, 1], 0.0)
    memory.drop(0)
    assert memory.wait_s([0], 0.0) == pytest.approx(STORED_S)
    memory.clear()
    assert memory.resident == []
