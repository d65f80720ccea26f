"""What of a merged wave is still to come behind each of its shards, so that a replica knows what a merge is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .waves import Shard


def rows_behind(shards: Sequence[Shard], num_replicas: int) -> dict[int, int]:
    """By shard, rows of its wave behind it that one of `num_replicas` may expect; only of waves planned to run merged.

    Shards come in order, and to all replicas alike; what is announced last is what holds.
    """
    behind: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for shard in reversed(shards):
        if shard.mode == "merged":
            behind[shard.shard_id] = seen[shard.wave_id] // num_replicas
            seen[shard.wave_id] += shard.num_rows
    return behind
