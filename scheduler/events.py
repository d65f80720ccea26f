"""What happens in a cluster, real or simulated, as the scheduler is told. `time_s` counts from the job's
start.
"""

from __future__ import annotations

from dataclasses import dataclass

from .record import Record


@dataclass(frozen=True, slots=True)
class Event(Record):
    """Base of all events."""

    time_s: float


@dataclass(frozen=True, slots=True)
class ReplicaJoined(Event):
    """A replica is ready for work. `batch_rows`: sequences it decodes together."""

    replica_id: str
    batch_rows: int


@dataclass(frozen=True, slots=True)
class ReplicasFound(Event):
    """Replicas that work for this job already when its scheduler starts, all at once, so that none is given a shard
    that another has open.

    `replicas`: (replica id, batch rows, ((shard id, unfinished rows) of each open shard, …)) of each.
    """

    replicas: tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True, slots=True)
class ReplicaLost(Event):
    """A replica is gone; what it had not committed is lost with it, unless it was `handed_over`."""

    replica_id: str
    handed_over: bool = False


@dataclass(frozen=True, slots=True)
class ShardCommitted(Event):
    """A shard's part file is whole and in place."""

    shard_id: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class ShardFailed(Event):
    """An attempt at a shard ended without a part although its replica lives."""

    shard_id: int
    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """A replica's state, about once a second.

    `open_rows`: unfinished rows of the shards open there; `running_rows`: those decoding now. `open_shards`:
    (shard id, unfinished rows) of each open shard. `finished`: (adapter name or "", rows, output tokens) completed
    since the last report, for length prediction. `mode`: how its latest step served its rows, for whoever reads the
    record. `running_tokens`: what the running rows have generated so far. `lent_shards`: (shard id, rows that other
    replicas work on); `guest_rows`: unfinished rows of other replicas' shards.
    """

    replica_id: str
    open_rows: int
    running_rows: int
    tokens_per_s: float
    resident_adapters: tuple[str, ...]
    open_shards: tuple[tuple[int, int], ...] = ()
    finished: tuple[tuple[str, int, int], ...] = ()
    mode: str = ""
    running_tokens: int = 0
    lent_shards: tuple[tuple[int, int], ...] = ()
    guest_rows: int = 0


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed; nothing else happened."""
