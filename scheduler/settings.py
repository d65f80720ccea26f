"""`SchedulerSettings`: the limits of a scheduler, what it may do, and what its job's plan predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .assignment.lending import TailSettings
from .assignment.migration import ReplicaMemory
from .costs.cost import CostModel
from .estimates.time_left import PlannedJob
from .messages import CanaryAnswered, Event


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of a scheduler, and what it may do."""

    #: Full batches of unfinished rows kept open per replica, so that no batch drains at a shard's end.
    open_batches: float = 2.0
    #: The job fails once this many attempts of one shard have failed.
    max_failures: int = 4
    #: The job fails once this many attempts of one shard were lost with their replica.
    max_losses: int = 8
    #: Replicas of the job. Those still to join count as present when a short job is shared out.
    expected_replicas: int = 1
    #: Settings by which running rows move to idle replicas (None: no row moves).
    tail: TailSettings | None = None
    #: Costs that steps should have, against which the paces of replicas are measured (None: all count as alike, and no
    #: row moves).
    cost: CostModel | None = None
    #: The job as its plan predicts it, from which the time left is estimated (None: no time left is known).
    planned: PlannedJob | None = None
    #: Whether adapters are fetched from a replica that has them before storage.
    shares_adapters: bool = False
    #: Policy whose rules dispatch and migrate, a name in `policies.POLICIES`.
    policy: str = "planner"
    #: Whether rows were dealt out: a replica opens the shards that the plan gives it, and others only when it has none
    #: open. Otherwise it only opens its own first.
    is_dealt: bool = False
    #: Memory of each replica, for a policy that asks (None: unknown).
    memory: ReplicaMemory | None = None
    #: Whether no row but the canary's runs until the canary is answered and the job is to go on.
    holds_rest: bool = False
    #: Answers of the canary, when they were counted before this scheduler began (None: they were not).
    canary: CanaryAnswered | None = None
    #: Seconds without a report after which a replica is lost. Replicas report once a second; Dask finds a silent worker
    #: only after minutes.
    silence_limit_s: float = 20.0
    #: Most seconds between two ticks. After a longer gap, the scheduler's own process is taken to have been stopped.
    max_tick_gap_s: float = 6.0
    #: Seconds without any replica after which a job fails.
    ready_limit_s: float = 600.0

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every field."""
        nested = {"planned": self.planned and self.planned.to_json(), "canary": self.canary and self.canary.to_json()}
        return asdict(replace(self, planned=None, canary=None)) | nested

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SchedulerSettings:
        """The settings that `to_json` wrote."""
        kinds = {
            "tail": lambda tail: TailSettings(**tail),
            "cost": CostModel.from_json,
            "memory": lambda memory: ReplicaMemory(**memory),
            "planned": PlannedJob.from_json,
            "canary": Event.from_json,
        }
        nested = {name: make(raw[name]) for name, make in kinds.items() if raw[name] is not None}
        return cls(**{**raw, **nested})
