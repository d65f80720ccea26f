"""Short forms of the records in events, for tests."""

from __future__ import annotations

from lorabatch.scheduler.messages import UnfinishedRows


def unfinished(*pairs: tuple[int, int]) -> tuple[UnfinishedRows, ...]:
    """Records of pairs (shard id, rows without a result)."""
    return tuple(UnfinishedRows(shard_id, num_rows) for shard_id, num_rows in pairs)
