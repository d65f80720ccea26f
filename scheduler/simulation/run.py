"""Runs a plan with the real Scheduler on simulated replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..batching import AdaptiveBatcher, Batcher
from ..cost import CostModel
from ..lengths import LengthEstimator
from ..scheduler import Scheduler, SchedulerSettings
from ..waves import ShardPlan
from ..workload import Workload
from .replica import ReplicaSettings, SimulatedReplica
from .simulator import Cluster, JobSimulation
from .timeline import JobMetrics, Timeline, job_metrics


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRun:
    """What a policy achieved on a job, and when every row ran."""

    policy: str
    metrics: JobMetrics
    timeline: Timeline


def run_planned(
    workload: Workload,
    plan: ShardPlan,
    cost: CostModel,
    settings: ReplicaSettings,
    num_replicas: int,
    make_batcher: Callable[[], Batcher] | None = None,
    scheduling: SchedulerSettings | None = None,
) -> PolicyRun:
    """A plan, played by the real Scheduler on replicas that are all there from the start.

    `make_batcher`: of each replica; by default the planner's own. `scheduling`: by default as in real runs.
    """
    make = make_batcher or (lambda: planner_batcher(workload, cost, settings, num_replicas))
    timeline = Timeline.empty(workload.num_rows, num_replicas)
    replicas = [SimulatedReplica(number, workload, cost, make(), settings, timeline) for number in range(num_replicas)]
    scheduler = Scheduler(plan.shards, settings=scheduling or SchedulerSettings(expected_replicas=num_replicas))
    cluster = Cluster((0.0,) * num_replicas, progress_s=0.5)
    outcome = JobSimulation(workload, plan, scheduler, replicas, cluster, timeline, settings).run()
    assert outcome.failure is None, outcome.failure
    return PolicyRun("planner", job_metrics(workload, timeline, outcome.makespan_s), timeline)


def planner_batcher(workload: Workload, cost: CostModel, settings: ReplicaSettings, num_replicas: int) -> Batcher:
    """The batcher of a planned job: it knows how many rows of each adapter the whole job still holds at first."""
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
    rows_of = workload.rows_per_adapter()
    mean_output = LengthEstimator.of_rows(workload.max_tokens).mean()

    def steps_to_come(adapter: int | None, num_rows: int, batch_rows: int) -> float:
        rows = num_rows if adapter is None else max(num_rows, rows_of[adapter] / num_replicas / 2)
        return mean_output * max(1.0, rows / batch_rows)

    return AdaptiveBatcher(cost, ranks, steps_to_come, patience=max(1.0, mean_output))
