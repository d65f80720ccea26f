"""What the scheduler asks of a cluster, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass

from .record import Record


@dataclass(frozen=True, slots=True)
class Command(Record):
    """Base of all commands."""


@dataclass(frozen=True, slots=True)
class RunShard(Command):
    """Open a shard on a replica. `attempt` counts from 0 and grows with each retry."""

    shard_id: int
    replica_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Recall(Command):
    """Close a shard on a replica without committing it: somebody else has committed it, or will."""

    shard_id: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class MigrateRows(Command):
    """Lend `num_rows` unfinished rows of `shard_id` from its owner to a helper. `adapter`: theirs, when the shard has
    one only (else "", as for the base model).

    The owner keeps the shard and its commit and picks the rows it expects to run longest.
    """

    shard_id: int
    from_replica_id: str
    to_replica_id: str
    adapter: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command):
    """Fetch an adapter before its rows need it; `source_replica_id` has it ("": from storage)."""

    replica_id: str
    adapter: str
    source_replica_id: str = ""


@dataclass(frozen=True, slots=True)
class EvictAdapter(Command):
    """Drop an adapter from a replica's memory; only where `TrafficSettings` limit it."""

    replica_id: str
    adapter: str


@dataclass(frozen=True, slots=True)
class FinishJob(Command):
    """Every shard is committed."""


@dataclass(frozen=True, slots=True)
class FailJob(Command):
    """The job cannot be completed; `reason` is a plain sentence."""

    reason: str
