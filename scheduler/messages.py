"""What happens in a cluster, real or simulated, as the scheduler is told. `time_s` counts from the job's
start.

What the scheduler asks of a cluster, real or simulated.

Frozen records that travel as JSON: the base of events and commands.

A record becomes a flat object with its class under `kind`; tuples become lists and come back as tuples, so
`Event.from_json(event.to_json()) == event` and one line of `events.jsonl` is one record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self


class Record:
    """Mixin for frozen dataclasses; each family (events, commands) has its own registry of kinds."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls) -> None:
        if Record in cls.__bases__:
            cls.kinds = {}
        else:
            cls.kinds[cls.__name__] = cls

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object: `kind` and every field."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {"kind": type(self).__name__} | {f.name: getattr(self, f.name) for f in fields}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The record that `to_json` wrote. Raises ValueError for a kind this family does not have."""
        kind = value.get("kind")
        if kind not in cls.kinds:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(sorted(cls.kinds))}")
        fields = {name: _as_tuples(item) for name, item in value.items() if name != "kind"}
        record: Self = cls.kinds[kind](**fields)
        return record


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


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
