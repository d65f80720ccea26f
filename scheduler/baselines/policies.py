"""Policies of other systems on whole jobs, by name, simulated: what `lorabatch simulate --policy` compares with ours.

All rows arrive at the start, go to replicas in turn, and are batched by the policy's own rule; dLoRA's also migrates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..batching import Batcher
from ..cost import CostModel
from ..simulation.replica import ReplicaSettings, SimulatedReplica
from ..simulation.run import PolicyRun
from ..simulation.timeline import Timeline, job_metrics
from ..workload import Workload
from .batchers import FcfsBatcher, MergedBatcher, OneAtATimeBatcher, UnmergedBatcher
from .dlora_batching import dlora_batcher
from .serving import RoundRobinDispatcher, ServingSettings, ServingSimulation

POLICIES = {
    "dlora": "dLoRA's dynamic batching with credits, and migration every two seconds",
    "s-lora": "S-LoRA-like: all rows unmerged, first come first served",
    "fcfs": "vLLM-like: first come first served, at most eight adapters at once",
    "merged-only": "one adapter at a time, merged, rows may join",
    "one-at-a-time": "PEFT-like: one adapter's closed batch at a time, merged",
}


def simulate_policy(
    policy: str,
    workload: Workload,
    cost: CostModel,
    settings: ReplicaSettings,
    num_replicas: int,
    slowness: Sequence[float] | None = None,
) -> PolicyRun:
    """One offline job under one policy. `workload.output_tokens` must be known. `slowness`: as in `run_planned`.

    Raises ValueError naming the policies there are.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}.")
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
    costs = [cost] * num_replicas if slowness is None else [cost.scaled(slow) for slow in slowness]
    replicas = [
        SimulatedReplica(number, arrived, own, makers[policy](), settings, timeline) for number, own in enumerate(costs)
    ]
    in_turn = RoundRobinDispatcher(np.ones((len(workload.adapters), num_replicas), dtype=bool))
    serving = ServingSettings(settings.max_batch_rows, migrate_every_s=2.0 if policy == "dlora" else None)
    ServingSimulation(arrived, replicas, in_turn, cost, serving).run()
    makespan_s = float(timeline.finish_s.max(initial=0.0))
    return PolicyRun(policy, job_metrics(workload, timeline, makespan_s), timeline)
