from __future__ import annotations

from dataclasses import replace

import numpy as np

from lorabatch.scheduler.cost import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.dispatch import AdapterTraffic, Backlog, TrafficSettings, rows_behind
from lorabatch.scheduler.messages import EvictAdapter, LoadAdapter, Progress, ReplicaJoined, ReplicaLost, RunShard
from lorabatch.scheduler.scheduler import Scheduler, SchedulerSettings
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.run import run_planned
from lorabatch.scheduler.simulation.synthetic import draw_adapters, make_adapters, make_workload, power_popularity
from lorabatch.scheduler.waves import Shard, plan_shards

SIZES = {"x": 10, "y": 10, "z": 10}


def shard(number, *adapters):
    return Shard(number, number, "unmerged", adapters, 32, 320, 3200)


def loads(commands):
    return [(c.adapter, c.source_replica_id) for c in commands if isinstance(c, LoadAdapter)]


def evictions(commands):
    return [c.adapter for c in commands if isinstance(c, EvictAdapter)]


def test_an_adapter_is_loaded_once_and_from_a_peer_that_has_it():
    shards = [shard(0, "x"), shard(1, "x", "y"), shard(2, "x")]
    traffic = AdapterTraffic(shards, TrafficSettings(SIZES))
    assert loads(traffic.opened("a", shards[0])) == [("x", "")]
    assert loads(traffic.opened("a", shards[1])) == [("y", "")]
    assert loads(traffic.opened("b", shards[2])) == [("x", "a")]


def test_what_a_replica_reports_is_not_loaded_again():
    shards = [shard(0, "x")]
    traffic = AdapterTraffic(shards, TrafficSettings(SIZES))
    traffic.reported("a", ["x", "an adapter of another job"])
    assert traffic.opened("a", shards[0]) == []


def test_the_adapter_whose_next_use_is_furthest_goes_and_one_without_a_use_before_it():
    shards = [shard(0, "x"), shard(1, "y"), shard(2, "z"), shard(3, "y"), shard(4, "x")]
    traffic = AdapterTraffic(shards, TrafficSettings(SIZES, capacity_bytes=20))
    for number in (0, 1):
        traffic.opened("a", shards[number])
        traffic.closed("a", shards[number], is_pending=False)
    # x is used again at 4, y at 3.
    assert evictions(traffic.opened("a", shards[2])) == ["x"]
    traffic.closed("a", shards[2], is_pending=False)
    traffic.opened("b", shards[3])
    # Nobody needs y or z any more.
    assert evictions(traffic.opened("a", shards[4])) == ["y"]


def test_adapters_of_open_shards_stay_even_when_memory_is_short():
    shards = [shard(0, "x"), shard(1, "y"), shard(2, "z")]
    traffic = AdapterTraffic(shards, TrafficSettings(SIZES, capacity_bytes=15))
    commands = [command for one in shards for command in traffic.opened("a", one)]
    assert (len(loads(commands)), evictions(commands)) == (3, [])


def test_a_shard_that_runs_again_counts_as_a_use_again():
    shards = [shard(0, "x"), shard(1, "y"), shard(2, "z")]
    traffic = AdapterTraffic(shards, TrafficSettings(SIZES, capacity_bytes=20))
    traffic.opened("a", shards[0])
    traffic.opened("a", shards[1])
    traffic.closed("a", shards[1], is_pending=False)
    traffic.closed("a", shards[0], is_pending=True)
    assert evictions(traffic.opened("a", shards[2])) == ["y"]


def test_the_scheduler_sends_loads_before_their_shard_and_forgets_a_lost_replicas_memory():
    shards = [shard(0, "x"), shard(1, "x")]
    scheduler = Scheduler(shards, settings=SchedulerSettings(traffic=TrafficSettings(SIZES), open_batches=0.1))
    assert scheduler.handle(ReplicaJoined(0.0, "a", 64)) == [LoadAdapter("a", "x"), RunShard(0, "a", 0)]
    scheduler.handle(Progress(1.0, "a", 32, 32, 9.0, ("x",), ((0, 32),)))
    assert scheduler.handle(ReplicaJoined(1.0, "b", 64)) == [LoadAdapter("b", "x", "a"), RunShard(1, "b", 0)]
    scheduler.handle(ReplicaLost(2.0, "b"))
    commands = scheduler.handle(ReplicaJoined(3.0, "b", 64))
    assert commands == [LoadAdapter("b", "x", "a"), RunShard(1, "b", 1)]
    scheduler.check_integrity()


def test_adapters_sent_ahead_take_the_load_stalls_away():
    rng = np.random.default_rng(0)
    adapters = make_adapters([16, 64] * 20)
    adapter = draw_adapters(rng, 800, power_popularity(40, 0.5))
    workload = make_workload(
        adapters, adapter, np.full(800, 100, np.int32), rng.integers(20, 200, 800).astype(np.int32)
    )
    settings = ReplicaSettings(max_batch_rows=16, adapter_source="storage", leap_steps=4)
    plan = plan_shards(workload, batch_rows=16, num_replicas=2)
    waits = SchedulerSettings(expected_replicas=2)
    ahead = replace(waits, traffic=TrafficSettings({a.name: a.weight_bytes for a in adapters}))
    on_demand, sent = (
        run_planned(workload, plan, COST, settings, 2, scheduling=chosen).metrics for chosen in (waits, ahead)
    )
    assert on_demand.load_share > 0.05
    assert sent.load_share < 0.01
    assert sent.makespan_s < on_demand.makespan_s


def make_shard(shard_id, wave, *, rows=10, length=100):
    return Shard(shard_id, wave, "unmerged", (f"a{wave}",), rows, 0, rows * length)


def anything(shard_id):
    return True


def test_an_empty_backlog_gives_nothing():
    assert Backlog([]).take("r", anything) is None


def test_waves_of_longer_rows_come_first_even_against_affinity():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1, length=900)])
    backlog.opened(0, "r")
    backlog.discard(0)
    assert backlog.take("r", anything) == 2


def test_among_equal_lengths_a_replica_goes_on_with_its_wave():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1), make_shard(3, 1, rows=90)])
    backlog.discard(0)
    backlog.opened(0, "r")
    assert backlog.take("r", anything) == 1


def test_another_replica_starts_the_wave_with_the_most_work_per_replica():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1), make_shard(3, 0)])
    backlog.discard(0)
    backlog.opened(0, "r")
    backlog.opened(0, "s")
    assert backlog.take("t", anything) == 2


def test_a_shard_put_back_keeps_its_place():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 0)])
    assert backlog.take("r", anything) == 0
    backlog.put_back(0)
    backlog.check_integrity()
    assert backlog.take("r", anything) == 0


def test_a_shard_that_is_not_allowed_is_passed_over():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 1)])
    assert backlog.take("r", lambda shard_id: shard_id == 1) == 1
    assert backlog.take("r", lambda shard_id: False) is None
    assert 0 in backlog
    assert len(backlog) == 1


def test_measured_lengths_change_which_wave_is_next():
    backlog = Backlog([make_shard(0, 0), make_shard(1, 1)])
    backlog.correct_length("a1", 800.0)
    assert backlog.take("r", anything) == 1
    backlog.correct_length("somebody else", 5.0)
    assert backlog.take("r", anything) == 0


def test_a_pool_of_several_adapters_keeps_its_prediction():
    pool = Shard(0, 0, "unmerged", ("x", "y"), 10, 0, 1000)
    backlog = Backlog([pool, make_shard(1, 1, length=200)])
    backlog.correct_length("x", 10_000.0)
    assert backlog.take("r", anything) == 1


def make_outlook_shard(number, wave, mode, rows):
    return Shard(number, wave, mode, ("a",), rows, rows, rows)


def test_shards_of_merged_waves_announce_what_follows_them_in_their_wave():
    shards = [
        make_outlook_shard(0, 0, "merged", 40),
        make_outlook_shard(1, 0, "merged", 30),
        make_outlook_shard(2, 0, "merged", 21),
        make_outlook_shard(3, 1, "unmerged", 100),
        make_outlook_shard(4, 2, "merged", 10),
        make_outlook_shard(5, 3, "none", 10),
    ]
    assert rows_behind(shards, 1) == {0: 51, 1: 21, 2: 0, 4: 0}
    assert rows_behind(shards, 2) == {0: 25, 1: 10, 2: 0, 4: 0}
