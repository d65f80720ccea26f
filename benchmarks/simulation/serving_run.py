"""One serving run from a workload and named policies, and the search for the rate a policy can sustain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lorabatch.scheduler.baselines.dlora_migration import MigrationSettings
from lorabatch.scheduler.baselines.serving import Dispatcher, Replan, ServingSettings, ServingSimulation
from lorabatch.scheduler.batching import Batcher
from lorabatch.scheduler.cost import CostModel
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.timeline import ServingMetrics, Timeline, serving_metrics
from lorabatch.scheduler.workload import Workload

# Waiting rows have computed nothing yet, so moving them costs little and small imbalances are worth it.
MIGRATION = MigrationSettings(gamma=1.02, trigger=1.05, least_gain=0.01)


@dataclass(frozen=True, slots=True)
class Policy:
    """How replicas batch and where requests go. Batchers and dispatchers keep state, so each run makes new ones."""

    #: Name in the figures.
    name: str
    #: Makes the batcher of one replica.
    make_batcher: Callable[[], Batcher]
    #: Makes the dispatcher of one run.
    make_dispatcher: Callable[[], Dispatcher]
    #: Seconds between decisions to migrate rows; None: rows stay.
    migrate_every_s: float | None = None
    #: Prices and thresholds of migration.
    migration: MigrationSettings = MIGRATION
    #: Makes a new dispatcher from the adapters' demand so far; None: the first one stays.
    replan: Replan | None = None
    #: Seconds between calls of `replan`; None: never.
    replan_every_s: float | None = None


def serve(
    workload: Workload, policy: Policy, cost: CostModel, settings: ReplicaSettings, num_replicas: int
) -> tuple[ServingMetrics, Timeline]:
    """Run to the end; a run with arrivals is cut off at twenty times their span."""
    assert workload.release_s is not None
    timeline = Timeline.empty(workload.num_rows, num_replicas)
    replicas = [
        SimulatedReplica(i, workload, cost, policy.make_batcher(), settings, timeline) for i in range(num_replicas)
    ]
    span = float(workload.release_s.max())
    serving = ServingSettings(
        batch_rows=settings.max_batch_rows,
        migrate_every_s=policy.migrate_every_s,
        migration=policy.migration,
        replan_every_s=policy.replan_every_s,
        give_up_s=20 * span if span > 0 else float("inf"),
    )
    ServingSimulation(workload, replicas, policy.make_dispatcher(), cost, serving, policy.replan).run()
    return serving_metrics(workload, timeline), timeline


def at_rate(workload: Workload, factor: float) -> Workload:
    """The workload with its requests arriving `factor` times as fast."""
    assert workload.release_s is not None
    return replace(workload, release_s=workload.release_s / factor)


def sustained_factor(excess: Callable[[float], float], *, low: float, high: float, rounds: int = 4) -> float:
    """The rate factor at which a metric reaches its objective (`excess` 1), on logarithmic scales: bisection, and a
    straight line through the ends of the last interval."""
    ends = {factor: excess(factor) for factor in (low, high)}
    if ends[low] >= 1 or ends[high] <= 1:
        return low if ends[low] >= 1 else high
    for _ in range(rounds):
        middle = float(np.sqrt(low * high))
        ends[middle] = excess(middle)
        low, high = (middle, high) if ends[middle] <= 1 else (low, middle)
    share = 0.5 if np.isinf(ends[high]) else np.log(1 / ends[low]) / np.log(ends[high] / ends[low])
    return float(low * (high / low) ** share)
