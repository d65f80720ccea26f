from __future__ import annotations

from dataclasses import replace

from lorabatch.scheduler.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.wave_modes import pays_to_merge
from lorabatch.scheduler.waves import Shard


def make_wave(num_shards, *, rows=256, length=100):
    return [Shard(i, 0, "unmerged", ("a",), rows, rows * 300, rows * length) for i in range(num_shards)]


def pays(shards, cost=COST, num_replicas=2):
    return pays_to_merge(shards, 16, cost, batch_rows=64, num_replicas=num_replicas)


def test_a_large_wave_is_worth_its_switches():
    assert pays(make_wave(20))


def test_a_wave_that_does_not_fill_two_batches_is_not():
    assert not pays(make_wave(1, rows=100, length=10_000))


def test_switches_that_cost_too_much_are_not_made():
    assert not pays(make_wave(20), replace(COST, merge_s=10.0))


def test_more_replicas_switch_more_often():
    costly = replace(COST, merge_s=0.1)
    shards = make_wave(8)
    assert pays(shards, costly, num_replicas=1)
    assert not pays(shards, costly, num_replicas=8)
