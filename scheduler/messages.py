"""Events that the scheduler handles and commands that it gives, on a real cluster and on a simulated one.

All are frozen records. Each is one line of `events.jsonl`: a JSON object with the class under `kind`, in which records
such as `UnfinishedRows` are flat objects: `Event.from_json(event.to_json()) == event`.

A replica is the engine of one worker; both have the same id, the worker's address. An adapter's id is the hash of its
content, and None is the base model. `StepTotals` is part of what engines report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, Self

from ..system.codec import from_plain, to_plain

#: Kind of the line with which a scheduler's part of `events.jsonl` begins.
BEGINNING = "SchedulerStarted"
#: Version of the events and commands in `events.jsonl`. Runs of another version are not replayed.
EVENTS_VERSION = 9


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
        return {"kind": type(self).__name__} | to_plain(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The record that `to_json` wrote. Raises ValueError for a kind this family does not have, and for other fields
        than the kind has.
        """
        kind = value.get("kind")
        if kind not in cls.kinds:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(sorted(cls.kinds))}")
        record: Self = from_plain(cls.kinds[kind], {name: item for name, item in value.items() if name != "kind"})
        return record


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Work of all steps of one engine since it started, added up in the terms of the cost model.

    All fields but the last stand in the order of the coefficients that price them (`cost.STEP_COEFFICIENTS`).
    """

    #: Forward passes.
    num_steps: int = 0
    #: Prompt tokens computed.
    prefill_tokens: int = 0
    #: Decoding rows, summed over the steps; each gets one token per step.
    decode_rows: int = 0
    #: KV slots read, over all rows and steps.
    context_tokens: int = 0
    #: Steps with unmerged rows.
    num_lora_steps: int = 0
    #: Distinct unmerged adapters of a step, summed over the steps.
    num_adapters: int = 0
    #: LoRA ranks of the distinct unmerged adapters of a step, summed over the steps.
    rank_sum: float = 0.0
    #: LoRA ranks of the tokens with an unmerged adapter, added up (see `StepLoad`).
    rank_tokens: float = 0.0
    #: Pairs of a computed prompt token and a token it attends to, itself included (`prompt_pairs`).
    prefill_pairs: float = 0.0
    #: Tokens with an unmerged adapter.
    lora_tokens: int = 0
    #: Steps with both prompts and decoding rows.
    num_mixed_steps: int = 0
    #: Tokens drawn at a temperature rather than the likeliest.
    drawn_tokens: int = 0
    #: Prompt tokens whose log-probabilities were asked.
    scored_tokens: int = 0

    @property
    def values(self) -> tuple[float, ...]:
        """All fields, in order."""
        values: tuple[float, ...] = _step_totals(self)
        return values


_step_totals = attrgetter(*(each.name for each in fields(StepTotals)))


@dataclass(frozen=True, slots=True)
class UnfinishedRows:
    """Number of rows of one shard that have no result."""

    shard_id: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Number and output tokens of finished rows of one adapter (None: the base model) and of about one length."""

    adapter_id: str | None
    num_rows: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class FoundReplica:
    """A replica that works for the job already when its scheduler starts, as it last reported."""

    #: Id of the replica.
    replica_id: str
    #: Sequences it decodes together.
    batch_rows: int
    #: Its open shards.
    open_shards: tuple[UnfinishedRows, ...]
    #: Seconds since its report.
    silent_s: float


@dataclass(frozen=True, slots=True)
class AdapterFetch:
    """An adapter that a replica fetches, and the replica that has it (None: it is read from storage)."""

    adapter_id: str
    from_replica_id: str | None


@dataclass(frozen=True, slots=True)
class Event(Record):
    """Base of all events. `time_s`: seconds since the scheduler started."""

    time_s: float


@dataclass(frozen=True, slots=True)
class WorkersSeen(Event):
    """The workers of the cluster, whether their engines are ready or not; sent whenever they have changed."""

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicasFound(Event):
    """All replicas that work for this job already when its scheduler starts. They come in one event, so that none is
    given a shard that another has open.
    """

    replicas: tuple[FoundReplica, ...]


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
class ReplicaReported(Event):
    """A replica's report of its state, about once a second and when a shard of its own has all its answers. It is also
    the replica's heartbeat.
    """

    #: Replica that reports.
    replica_id: str
    #: Unfinished rows of the shards that it has open.
    open_rows: int
    #: Rows in its batch, those of other replicas' shards included.
    running_rows: int
    #: Tokens generated per second since the report before.
    tokens_per_s: float
    #: Ids of the adapters in its engine's memory.
    resident_adapters: tuple[str, ...]
    #: Unfinished rows of each open shard.
    open_shards: tuple[UnfinishedRows, ...] = ()
    #: Rows finished since the last report.
    finished: tuple[FinishedRows, ...] = ()
    #: Mode in which its latest step served its rows; for reports only.
    mode: str = ""
    #: Tokens that the running rows have generated so far.
    running_tokens: int = 0
    #: Unfinished rows of each open shard that other replicas work on, where there are some.
    lent_shards: tuple[UnfinishedRows, ...] = ()
    #: Unfinished rows of other replicas' shards.
    incoming_rows: int = 0
    #: Seconds in steps since its engine started, without merges and waits for adapters.
    engine_s: float = 0.0
    #: Work of these steps.
    steps: StepTotals = field(default_factory=StepTotals)
    #: Running rows that have no token yet.
    prefilling_rows: int = 0
    #: Tokens that its rows, waiting ones too, must compute before they all decode.
    prefill_tokens_left: int = 0
    #: Share of prompt tokens that its engine reused instead of computing them, from 0 to 1.
    reused_share: float = 0.0


@dataclass(frozen=True, slots=True)
class CanaryAnswered(Event):
    """The canary has its answers, and was counted."""

    #: Rows of the canary that were answered, by adapter and length.
    answers: tuple[FinishedRows, ...]
    #: Waves of one adapter that run sooner merged, with answers of these lengths; None where the mode is not chosen.
    merged_waves: tuple[int, ...] | None = None
    #: Whether the other rows may run; else the event is told again once they may.
    goes_on: bool = True


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed. Sent every few seconds, whatever else happens."""


@dataclass(frozen=True, slots=True)
class Command(Record):
    """Base of all commands."""


@dataclass(frozen=True, slots=True)
class RunShard(Command):
    """Open a shard on a replica."""

    #: Shard to open.
    shard_id: int
    #: Replica that opens it.
    replica_id: str
    #: Number of the attempt; counts from 0 and grows with each retry.
    attempt: int
    #: Adapters to fetch before their rows run; the replica finds adapters not named here by itself.
    adapter_fetches: tuple[AdapterFetch, ...] = ()
    #: Rows of the same merged wave that will follow this shard to the replica.
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
    """Lend unfinished rows of a shard from its owner to a helper.

    The owner keeps the shard and its commit and picks the rows it expects to run longest.
    """

    #: Shard of the rows.
    shard_id: int
    #: Owner of the shard.
    from_replica_id: str
    #: Helper that works on the rows.
    to_replica_id: str
    #: Unfinished rows to lend.
    num_rows: int
    #: Whether only rows of one adapter move, that of `adapter_id`; else rows of any move.
    is_selective: bool = False
    #: Id of this adapter; None for the base model, and when rows of any adapter move.
    adapter_id: str | None = None


@dataclass(frozen=True, slots=True)
class FinishJob(Command):
    """The job is finished: every shard is committed."""


@dataclass(frozen=True, slots=True)
class FailJob(Command):
    """The job cannot be completed; `reason` is a plain sentence."""

    reason: str
