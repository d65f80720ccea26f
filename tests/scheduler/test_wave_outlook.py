from __future__ import annotations

from lorabatch.scheduler.wave_outlook import rows_behind
from lorabatch.scheduler.waves import Shard


def make_shard(number, wave, mode, rows):
    return Shard(number, wave, mode, ("a",), rows, rows, rows)


def test_shards_of_merged_waves_announce_what_follows_them_in_their_wave():
    shards = [
        make_shard(0, 0, "merged", 40),
        make_shard(1, 0, "merged", 30),
        make_shard(2, 0, "merged", 21),
        make_shard(3, 1, "unmerged", 100),
        make_shard(4, 2, "merged", 10),
        make_shard(5, 3, "none", 10),
    ]
    assert rows_behind(shards, 1) == {0: 51, 1: 21, 2: 0, 4: 0}
    assert rows_behind(shards, 2) == {0: 25, 1: 10, 2: 0, 4: 0}
