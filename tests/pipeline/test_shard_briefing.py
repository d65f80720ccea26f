"""What a shard's task is told of its wave, and of workers that have its adapters."""

from __future__ import annotations

from lorabatch.pipeline.run_shard import ShardTask
from lorabatch.pipeline.shard_briefing import ShardBriefing
from lorabatch.scheduler.commands import LoadAdapter, RunShard
from lorabatch.scheduler.waves import Shard


def shard(number: int, *adapters: str, mode: str = "unmerged") -> Shard:
    return Shard(number, 0, mode, adapters, 32, 320, 3200)  # type: ignore[arg-type]


def test_a_load_holds_for_every_later_shard_of_its_adapter_on_that_worker() -> None:
    briefing = ShardBriefing("run", [shard(0, "x"), shard(1, "x", "y"), shard(2, "x")], 2)
    briefing.load(LoadAdapter("b", "x", "a"))
    briefing.load(LoadAdapter("b", "y", ""))
    assert briefing.task(RunShard(0, "b", 0)).sources == {"x": "a"}
    assert briefing.task(RunShard(1, "b", 0)).sources == {"x": "a"}
    assert briefing.task(RunShard(2, "c", 0)).sources == {}


def test_a_worker_that_was_lost_is_told_nothing_of_before() -> None:
    briefing = ShardBriefing("run", [shard(0, "x")], 2)
    briefing.load(LoadAdapter("b", "x", "a"))
    briefing.lost("b")
    assert briefing.task(RunShard(0, "b", 3)) == ShardTask("run", 0, 3)


def test_a_shard_of_a_merged_wave_knows_what_follows_it() -> None:
    shards = [shard(number, "x", mode="merged") for number in range(3)]
    briefing = ShardBriefing("run", shards, 2)
    assert [briefing.task(RunShard(number, "a", 0)).rows_behind for number in range(3)] == [32, 16, 0]
