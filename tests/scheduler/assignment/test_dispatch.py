from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.assignment.dispatch import AdapterSources, ShardQueue, rows_behind
from lorabatch.scheduler.messages import AdapterFetch, ReplicaJoined, ReplicaLeft, ReplicaReported, RunShard
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.scheduler.simulation.synthetic import draw_adapters, make_adapters, make_workload, power_popularity
from lorabatch.tests.scheduler.unfinished import unfinished


def shard(number, *adapters):
    return Shard(number, number, "unmerged", adapters, 32, 320, 3200)


def test_an_adapter_is_read_from_storage_once_and_fetched_from_a_replica_that_has_it_after():
    sources = AdapterSources()
    assert sources.of_shard("a", shard(0, "x")) == (AdapterFetch("x", None),)
    assert sources.of_shard("a", shard(1, "x", "y")) == (AdapterFetch("x", None), AdapterFetch("y", None))
    assert sources.of_shard("b", shard(2, "x")) == (AdapterFetch("x", "a"),)


def test_copies_are_spread_over_the_replicas_that_have_an_adapter():
    sources = AdapterSources()
    for replica in "abc":
        sources.reported(replica, ["x", "y"])
    named = [sources.of_shard(f"new-{i}", shard(i, "x", "y")) for i in range(6)]
    count = Counter(fetch.from_replica_id for fetches in named for fetch in fetches)
    assert count["a"] == count["b"] == count["c"] == 4


def test_a_replica_that_has_an_adapter_is_named_before_one_that_is_fetching_it():
    sources = AdapterSources()
    sources.of_shard("a", shard(0, "x"))
    sources.reported("b", ["x"])
    assert sources.of_shard("c", shard(1, "x")) == (AdapterFetch("x", "b"),)
    assert sources.of_shard("d", shard(2, "x")) == (AdapterFetch("x", "b"),)


def test_what_a_replica_reports_needs_no_source():
    sources = AdapterSources()
    sources.reported("a", ["x", "an adapter of another job"])
    assert sources.of_shard("a", shard(0, "x")) == ()


def test_a_source_that_is_gone_is_replaced_by_storage():
    sources = AdapterSources()
    sources.of_shard("a", shard(0, "x"))
    sources.of_shard("b", shard(1, "x"))
    sources.removed("a")
    assert sources.of_shard("b", shard(2, "x")) == (AdapterFetch("x", None),)


def test_commands_name_sources_and_a_replica_that_was_removed_has_nothing_any_more():
    shards = [shard(0, "x"), shard(1, "x")]
    scheduler = Scheduler(shards, settings=SchedulerSettings(shares_adapters=True, open_batches=0.1))
    assert scheduler.handle(ReplicaJoined(0.0, "a", 64)) == [RunShard(0, "a", 0, (AdapterFetch("x", None),))]
    scheduler.handle(ReplicaReported(1.0, "a", 32, 32, 9.0, ("x",), unfinished((0, 32))))
    assert scheduler.handle(ReplicaJoined(1.0, "b", 64)) == [RunShard(1, "b", 0, (AdapterFetch("x", "a"),))]
    scheduler.handle(ReplicaLeft(2.0, "b"))
    assert scheduler.handle(ReplicaJoined(3.0, "b", 64)) == [RunShard(1, "b", 1, (AdapterFetch("x", "a"),))]
    scheduler.check_integrity()


def test_a_shard_of_a_merged_wave_says_how_many_rows_follow_it():
    shards = [Shard(number, 0, "merged", ("x",), 32, 320, 3200) for number in range(3)]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2, open_batches=10))
    commands = scheduler.handle(ReplicaJoined(0.0, "a", 64)) + scheduler.handle(ReplicaJoined(0.0, "b", 64))
    assert {command.shard_id: command.rows_behind for command in commands} == {0: 32, 1: 16, 2: 0}


@pytest.mark.long
def test_a_job_ends_sooner_when_adapters_come_from_other_workers():
    rng = np.random.default_rng(0)
    adapters = make_adapters([16, 64] * 20)
    adapter = draw_adapters(rng, 800, power_popularity(40, 0.5))
    workload = make_workload(
        adapters, adapter, np.full(800, 100, np.int32), rng.integers(20, 200, 800).astype(np.int32)
    )
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=16)
    cost = replace(settings.cost, storage_bytes_per_s=2e8, mixed_step_s=0.0)
    slow_storage = replace(settings.engine, cost=cost)
    from_storage, from_workers = (
        prediction.simulate(replace(settings, engine=slow_storage, shares_adapters=is_shared), workload, 2).metrics
        for is_shared in (False, True)
    )
    loads_s = [metrics.load_share * metrics.makespan_s for metrics in (from_workers, from_storage)]
    assert loads_s[0] < loads_s[1]
    assert from_workers.makespan_s < 0.9 * from_storage.makespan_s


def make_shard(shard_id, wave, *, rows=10, length=100):
    return Shard(shard_id, wave, "unmerged", (f"a{wave}",), rows, 0, rows * length)


def anything(shard_id):
    return True


def test_an_empty_queue_gives_nothing():
    assert ShardQueue([]).take("r", anything) is None


def test_waves_of_longer_rows_come_first_even_against_affinity():
    queue = ShardQueue([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1, length=900)])
    queue.opened(0, "r")
    queue.discard(0)
    assert queue.take("r", anything) == 2


def test_among_equal_lengths_a_replica_goes_on_with_its_wave():
    queue = ShardQueue([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1), make_shard(3, 1, rows=90)])
    queue.discard(0)
    queue.opened(0, "r")
    assert queue.take("r", anything) == 1


def test_another_replica_starts_the_wave_with_the_most_work_per_replica():
    queue = ShardQueue([make_shard(0, 0), make_shard(1, 0), make_shard(2, 1), make_shard(3, 0)])
    queue.discard(0)
    queue.opened(0, "r")
    queue.opened(0, "s")
    assert queue.take("t", anything) == 2


def test_a_shard_put_back_keeps_its_place():
    queue = ShardQueue([make_shard(0, 0), make_shard(1, 0)])
    assert queue.take("r", anything) == 0
    queue.put_back(0)
    queue.check_integrity()
    assert queue.take("r", anything) == 0


def test_a_shard_that_is_not_allowed_is_passed_over():
    queue = ShardQueue([make_shard(0, 0), make_shard(1, 1)])
    assert queue.take("r", lambda shard_id: shard_id == 1) == 1
    assert queue.take("r", lambda shard_id: False) is None
    assert 0 in queue
    assert len(queue) == 1


def test_measured_lengths_change_which_wave_is_next():
    queue = ShardQueue([make_shard(0, 0), make_shard(1, 1)])
    queue.correct_length("a1", 800.0)
    assert queue.take("r", anything) == 1
    queue.correct_length("unknown", 5.0)
    assert queue.take("r", anything) == 0


def test_a_pool_of_several_adapters_keeps_its_prediction():
    pool = Shard(0, 0, "unmerged", ("x", "y"), 10, 0, 1000)
    queue = ShardQueue([pool, make_shard(1, 1, length=200)])
    queue.correct_length("x", 10_000.0)
    assert queue.take("r", anything) == 1


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


def placed(*homes, tokens=3200):
    """A shard of an adapter of its own for each home; the first has the most work."""
    return [Shard(i, i, "unmerged", (f"x{i}",), 32, 320, tokens - i, home) for i, home in enumerate(homes)]


def taken(queue, *replicas):
    return [queue.take(replica, lambda shard_id: True) for replica in replicas]


def test_a_replica_opens_what_is_placed_on_it_first():
    queue = ShardQueue(placed(1, 0, 1, 0))
    assert taken(queue, "a", "b", "b", "a") == [1, 0, 2, 3]
    queue.check_integrity()


def test_a_replica_without_shards_of_its_own_opens_those_of_absent_ones_before_those_of_others():
    queue = ShardQueue(placed(0, 1, 2, 1))
    assert taken(queue, "a", "b") == [0, 1]
    assert taken(queue, "a", "a") == [2, 3]
    assert taken(queue, "a", "b") == [None, None]


def test_long_rows_come_first_among_the_shards_of_a_replica():
    shards = placed(0, 0)
    shards[1] = replace(shards[1], predicted_output_tokens=12_800)
    assert taken(ShardQueue(shards), "a", "a") == [1, 0]


def test_a_shard_without_a_place_is_for_whoever_has_opened_its_own():
    assert taken(ShardQueue(placed(None, 0)), "a", "a") == [1, 0]


def test_the_number_of_a_replica_that_left_goes_to_the_next_that_comes():
    queue = ShardQueue(placed(0, 1, 0, 1))
    assert taken(queue, "a", "b") == [0, 1]
    queue.removed("a")
    assert taken(queue, "c") == [2]


def test_a_replica_of_an_earlier_scheduler_keeps_what_is_placed_on_it():
    queue = ShardQueue(placed(0, 1, 0, 1))
    queue.discard(1)
    queue.opened(1, "b")
    assert taken(queue, "b", "a", "a") == [3, 0, 2]


def test_rows_that_follow_a_placed_shard_are_those_of_its_replica():
    shards = [Shard(number, 0, "merged", ("x",), 32, 320, 3200, number % 2) for number in range(4)]
    assert rows_behind(shards, 2) == {0: 32, 1: 32, 2: 0, 3: 0}
