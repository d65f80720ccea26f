"""Events that the scheduler handles and commands that it gives, on a real cluster and on a simulated one.

All are frozen records. Each is one line of `events.jsonl`: a flat JSON object with the class under `kind`. Tuples
become lists there and tuples again when they are read: `Event.from_json(event.to_json()) == event`.

A replica is the engine of one worker; both have the same id, the worker's address. `StepTotals` is part of what engines
report.
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
class StepTotals:
    """What the steps of an engine have done since it started, added up in the terms of the cost model.

    All fields but the last stand in the order of the model's coefficients, for their meaning see `StepLoad`.
    `num_lora_steps`: steps with unmerged rows. `num_mixed_steps`: with prompts and decoding rows.
    """

    num_steps: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    context_tokens: int = 0
    num_lora_steps: int = 0
    num_adapters: int = 0
    rank_sum: float = 0.0
    rank_tokens: float = 0.0
    prefill_pairs: float = 0.0
    lora_tokens: int = 0
    num_mixed_steps: int = 0
    drawn_tokens: int = 0
    scored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Event(Record):
    """Base of all events. `time_s`: since the scheduler started."""

    time_s: float


@dataclass(frozen=True, slots=True)
class WorkersSeen(Event):
    """The workers of the cluster, whether their engines are ready or not; an event whenever they have changed."""

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicasFound(Event):
    """Replicas that work for this job already when its scheduler starts, as they last reported.

    One event for all, so that none is given a shard that another has open. `replicas`: (replica id, batch rows,
    ((shard id, unfinished rows) of each open shard, …), seconds since its report) of each.
    """

    replicas: tuple[tuple[str, int, tuple[tuple[int, int], ...], float], ...]


@dataclass(frozen=True, slots=True)
class ReplicaJoined(Event):
    """A replica is ready for work. `batch_rows`: sequences it decodes together."""

    replica_id: str
    batch_rows: int


@dataclass(frozen=True, slots=True)
class ReplicaLeft(Event):
    """A replica's worker leaves in good order: finished and begun rows of its open shards are kept."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class ReplicaFailed(Event):
    """A replica's engine cannot be kept alive. `reason`: a clause without a full stop."""

    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ShardCommitted(Event):
    """A shard's part file is whole and in place."""

    shard_id: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class ShardFailed(Event):
    """An attempt at a shard ended without a part although its replica is alive."""

    shard_id: int
    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """A replica's report of its state, about once a second and when a shard there has all its answers. It is also the
    replica's heartbeat.

    `open_rows`: unfinished rows of the shards open there; `running_rows`: those in its batch, of which
    `prefilling_rows` have no token yet. `prefill_tokens_left`: that rows there, waiting ones too, compute before they
    decode. `open_shards`: (shard id, unfinished rows) of each open shard. `finished`: (adapter name or "", rows, output
    tokens) completed since the last report. `mode`: how its latest step served its rows, for reports only.
    `running_tokens`: what the running rows have generated so far. `lent_shards`: (shard id, rows that other replicas
    work on); `incoming_rows`: unfinished rows of other replicas' shards.

    Totals since the replica's engine started: `engine_s` seconds in steps, without merges and waits for adapters, and
    what these steps did, the fields of `StepTotals` in order.
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
    incoming_rows: int = 0
    engine_s: float = 0.0
    steps: tuple[float, ...] = ()
    prefilling_rows: int = 0
    prefill_tokens_left: int = 0


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed. Comes every few seconds, whatever else happens."""


@dataclass(frozen=True, slots=True)
class Command(Record):
    """Base of all commands."""


@dataclass(frozen=True, slots=True)
class RunShard(Command):
    """Open a shard on a replica.

    `attempt`: counts from 0 and grows with each retry. `adapter_sources`: (adapter, the replica it is fetched from,
    "" for storage) of each adapter to fetch before its rows run; adapters not named here are found by the replica.
    `rows_behind`: rows of the same merged wave that will follow this shard to the replica.
    """

    shard_id: int
    replica_id: str
    attempt: int
    adapter_sources: tuple[tuple[str, str], ...] = ()
    rows_behind: int = 0


@dataclass(frozen=True, slots=True)
class Recall(Command):
    """Close a shard on a replica without committing it: another replica has committed it."""

    shard_id: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class RemoveReplica(Command):
    """Close all shards of a replica without committing them and forget its reports; it may join again.

    `reason`: why the replica counts as lost, a clause without a full stop.
    """

    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MigrateRows(Command):
    """Lend `num_rows` unfinished rows of `shard_id` from its owner to a helper. `adapter`: of these rows, when the
    shard has one only (else "", as for the base model). `is_selective`: only rows of this adapter move.

    The owner keeps the shard and its commit and picks the rows it expects to run longest.
    """

    shard_id: int
    from_replica_id: str
    to_replica_id: str
    adapter: str
    num_rows: int
    is_selective: bool = False


@dataclass(frozen=True, slots=True)
class FinishJob(Command):
    """Every shard is committed."""


@dataclass(frozen=True, slots=True)
class FailJob(Command):
    """The job cannot be completed; `reason` is a plain sentence."""

    reason: str
