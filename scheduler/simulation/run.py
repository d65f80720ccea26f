"""Runs a plan with the real Scheduler on simulated replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..batchers.batching import Batcher, ReplicaFacts
from ..costs.cost import CostModel
from ..estimates.lengths import LengthEstimator
from ..planning.waves import ShardPlan
from ..policies import make_scheduler
from ..settings import SchedulerSettings
from ..workload import Workload
from .replica import ReplicaSettings, SimulatedReplica
from .simulator import Cluster, JobSimulation
from .timeline import JobMetrics, Timeline, job_metrics

MakeBatcher = Callable[[ReplicaFacts], Batcher]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRun:
    """Outcome of a policy on a job, and the times of every row."""

    policy: str
    metrics: JobMetrics
    timeline: Timeline


def run_planned(
    workload: Workload,
    plan: ShardPlan,
    cost: CostModel,
    settings: ReplicaSettings,
    num_replicas: int,
    make_batcher: MakeBatcher,
    scheduling: SchedulerSettings,
    slowness: Sequence[float] | None = None,
) -> PolicyRun:
    """Play a plan with the real Scheduler on replicas that are all there from the start.

    `make_batcher`: makes the batcher of each replica, as an engine makes its own. Reports come once a second, as from
    real workers. `slowness`: seconds of each replica over those of the cost model (None: as the model says).
    """
    timeline = Timeline.empty(workload.num_rows, num_replicas)
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)

    def replica(number: int) -> SimulatedReplica:
        lengths, expected = LengthEstimator(), Counter[int]()
        facts = ReplicaFacts(
            cost=cost,
            ranks=lambda: ranks,
            must_merge=lambda adapter: False,
            max_batch_rows=settings.max_batch_rows,
            lengths=lengths,
            rows_to_come=expected.__getitem__,
        )
        own = cost if slowness is None else cost.scaled(slowness[number])
        return SimulatedReplica(number, workload, own, make_batcher(facts), settings, timeline, lengths, expected)

    hop_s = scheduling.tail.hop_s if scheduling.tail is not None else 0.0
    simulation = JobSimulation(
        workload,
        plan,
        make_scheduler(plan.shards, settings=scheduling).handle,
        [replica(number) for number in range(num_replicas)],
        Cluster((0.0,) * num_replicas, hop_s=hop_s),
        timeline,
        settings,
    )
    makespan_s = simulation.run()
    assert simulation.failure is None, simulation.failure
    return PolicyRun(scheduling.policy, job_metrics(workload, timeline, makespan_s), timeline)
