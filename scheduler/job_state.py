"""The scheduler's mutable state: what it believes of each replica, and where each shard stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from .waves import Shard


@dataclass(slots=True)
class ReplicaState:
    """What the scheduler believes of one replica. `rows_left`: unfinished rows of each shard open there."""

    replica_id: str
    batch_rows: int
    rows_left: dict[int, int] = field(default_factory=dict)
    open_rows: int = 0
    resident: frozenset[str] = frozenset()

    def set_rows_left(self, shard_id: int, rows: int) -> None:
        """A shard is open here with so many unfinished rows."""
        self.open_rows += rows - self.rows_left.get(shard_id, 0)
        self.rows_left[shard_id] = rows

    def close(self, shard_id: int) -> None:
        """A shard is open here no more."""
        self.open_rows -= self.rows_left.pop(shard_id)


@dataclass(slots=True)
class ShardState:
    """Where one shard stands."""

    shard: Shard
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    owner: str | None = None
    is_committed: bool = False
    # Replicas where it failed: others are tried first.
    failed_on: frozenset[str] = frozenset()
