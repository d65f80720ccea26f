"""Whole-job policies by name, simulated: what `lorabatch simulate --policy` compares.

`planner` is this project: planned shards, the real Scheduler, steps chosen by cost. The others get all rows at the
start, dealt to replicas in turn, and batch by their own rule; dLoRA's also migrates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .adaptive_batching import AdaptiveBatcher
from .baselines import FcfsBatcher, MergedBatcher, OneAtATimeBatcher, UnmergedBatcher
from .batching import Batcher
from .cost import CostModel, lora_load
from .credits import Credits
from .dispatch import RoundRobinDispatcher
from .dynamic_batching import DynamicBatcher, Thresholds, Tuning
from .metrics import JobMetrics, job_metrics
from .scheduler import Scheduler
from .scheduler_settings import SchedulerSettings
from .serving import ServingSettings, ServingSimulation
from .simulated_replica import ReplicaSettings, SimulatedReplica
from .simulator import Cluster, JobSimulation
from .timeline import Timeline
from .waves import ShardPlan, plan_shards
from .workload import Workload

POLICIES = {
    "planner": "this project: planned shards, dispatch by the Scheduler, steps chosen by cost",
    "dlora": "dLoRA's dynamic batching with credits, and migration every two seconds",
    "s-lora": "S-LoRA-like: everybody unmerged, first come first served",
    "fcfs": "vLLM-like: first come first served, at most eight adapters at once",
    "merged-only": "one adapter at a time, merged, rows may join",
    "one-at-a-time": "PEFT-like: one adapter's closed batch at a time, merged",
}


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRun:
    """What a policy achieved on a job, and when every row ran."""

    policy: str
    metrics: JobMetrics
    timeline: Timeline


def simulate_policy(
    policy: str, workload: Workload, cost: CostModel, settings: ReplicaSettings, num_replicas: int
) -> PolicyRun:
    """One offline job under one policy. `workload.output_tokens` must be known.

    Raises ValueError naming the policies there are.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}.")
    if policy == "planner":
        plan = plan_shards(workload, batch_rows=settings.max_batch_rows, num_replicas=num_replicas)
        return run_planned(workload, plan, cost, settings, num_replicas)
    return _run_online(policy, workload, cost, settings, num_replicas)


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
    mean_output = float(workload.max_tokens.mean()) / 2 if workload.num_rows else 1.0

    def steps_to_come(adapter: int | None, num_rows: int, batch_rows: int) -> float:
        rows = num_rows if adapter is None else max(num_rows, rows_of[adapter] / num_replicas / 2)
        return mean_output * max(1.0, rows / batch_rows)

    return AdaptiveBatcher(cost, ranks, steps_to_come, patience=max(1.0, mean_output))


def dlora_batcher(ranks: NDArray[np.float64], cost: CostModel, max_batch_rows: int) -> DynamicBatcher:
    """dLoRA's own policy, its iteration times from the cost model. `ranks` `[num_adapters]`."""

    def iteration_s(types: NDArray[np.int32], merged: int | None) -> float:
        unmerged = lora_load(types, 1.0, ranks, merged_adapter=merged, kernel=cost.kernel)
        load = replace(unmerged, decode_rows=len(types), context_tokens=len(types) * 500.0)
        return float(cost.step_seconds(load))

    initial = 200.0 * max_batch_rows
    account = Credits(len(ranks), initial=initial, starve_above=1.5 * initial, normal_below=1.2 * initial)
    return DynamicBatcher(iteration_s, account, Tuning(switch_s=cost.merge_s), Thresholds(alpha=0.9, beta=0.5))


def _run_online(
    policy: str, workload: Workload, cost: CostModel, settings: ReplicaSettings, num_replicas: int
) -> PolicyRun:
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
    makers: dict[str, Callable[[], Batcher]] = {
        "dlora": lambda: dlora_batcher(ranks, cost, settings.max_batch_rows),
        "s-lora": UnmergedBatcher,
        "fcfs": lambda: FcfsBatcher(max_resident=8),
        "merged-only": MergedBatcher,
        "one-at-a-time": OneAtATimeBatcher,
    }
    arrived = replace(workload, release_s=np.zeros(workload.num_rows))
    timeline = Timeline.empty(workload.num_rows, num_replicas)
    replicas = [
        SimulatedReplica(number, arrived, cost, makers[policy](), settings, timeline) for number in range(num_replicas)
    ]
    in_turn = RoundRobinDispatcher(np.ones((len(workload.adapters), num_replicas), dtype=bool))
    serving = ServingSettings(settings.max_batch_rows, migrate_every_s=2.0 if policy == "dlora" else None)
    ServingSimulation(arrived, replicas, in_turn, cost, serving).run()
    makespan_s = float(timeline.finish_s.max(initial=0.0))
    return PolicyRun(policy, job_metrics(workload, timeline, makespan_s), timeline)
