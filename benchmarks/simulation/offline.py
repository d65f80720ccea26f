"""Offline jobs: the planner against what others would do with the same rows on the same replicas.

The planner: ordered shards, the real Scheduler, and the adaptive batcher that knows the backlog. The others get
their rows at once in input order, dealt to replicas in turn, and batch by their own policy: dLoRA's dynamic
batching with migration, S-LoRA's unmerged batches, vLLM-like first come first served with eight adapters at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from lorabatch.scheduler.adaptive_batching import AdaptiveBatcher
from lorabatch.scheduler.baselines import FcfsBatcher, UnmergedBatcher
from lorabatch.scheduler.batching import Batcher
from lorabatch.scheduler.cost import CostModel
from lorabatch.scheduler.dispatch import RoundRobinDispatcher
from lorabatch.scheduler.machines import H200_LLAMA_3_8B
from lorabatch.scheduler.metrics import job_metrics
from lorabatch.scheduler.scheduler import Scheduler, SchedulerSettings
from lorabatch.scheduler.simulated_replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulator import Cluster, JobSimulation
from lorabatch.scheduler.synthetic import (
    draw_adapters,
    make_adapters,
    make_workload,
    power_popularity,
    top_five_popularity,
    uniform_popularity,
)
from lorabatch.scheduler.timeline import Timeline
from lorabatch.scheduler.waves import plan_shards
from lorabatch.scheduler.workload import Workload

from .dlora_figures import dlora_batcher
from .lengths import Lengths
from .serving_run import Policy, serve

BATCH = 64
NUM_REPLICAS = 4
SETTINGS = ReplicaSettings(max_batch_rows=BATCH, max_step_tokens=8192, leap_steps=8, look_ahead=512)


@dataclass(frozen=True, slots=True)
class Job:
    """One offline job of the comparison."""

    name: str
    workload: Workload


def jobs(lengths: Lengths, num_rows: int, seed: int) -> list[Job]:
    """Six jobs that differ in how many adapters there are and how even their shares.

    Adapters are tasks, and tasks have lengths of their own: outputs are the trace's times a factor per adapter
    (1/4 to 2), and its rows' `max_tokens` is that factor times 1,000.
    """
    generator = np.random.default_rng(seed)
    mixed = [8, 16, 32, 64, 128]
    kinds = {
        "one adapter": (np.ones(1), [16]),
        "2 adapters, even": (uniform_popularity(2), [16, 16]),
        "8 adapters, Zipf": (power_popularity(8, 1.0), [16] * 8),
        "50 adapters, top five 70 %": (top_five_popularity(50), mixed * 10),
        "200 adapters, Zipf": (power_popularity(200, 1.0), mixed * 40),
        "200 adapters, even": (uniform_popularity(200), mixed * 40),
    }
    made = []
    for name, (popularity, ranks) in kinds.items():
        factor = generator.choice([0.25, 0.5, 1.0, 2.0], len(ranks)) if len(ranks) > 2 else np.ones(len(ranks))
        prompt, drawn = lengths.draw(generator, num_rows)
        adapter = draw_adapters(generator, num_rows, popularity)
        limit = (1000 * factor[adapter]).astype(np.int32)
        output = np.clip(np.rint(drawn * factor[adapter]), 1, limit).astype(np.int32)
        made.append(Job(name, make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=limit)))
    return made


def planned_makespan(workload: Workload, cost: CostModel = H200_LLAMA_3_8B) -> tuple[float, float]:
    """Seconds of the planned job, and the share of passes that ran merged. Output lengths are not known to it."""
    plan = plan_shards(workload, batch_rows=BATCH, num_replicas=NUM_REPLICAS)
    timeline = Timeline.empty(workload.num_rows, NUM_REPLICAS)
    mean_output = float(workload.max_tokens.mean()) / 2
    rows_of = np.bincount(workload.adapter_index % (len(workload.adapters) + 1), minlength=len(workload.adapters) + 1)

    def steps_to_come(adapter: int | None, num_rows: int) -> float:
        """Passes a replica's share of an adapter's rows will take."""
        rows = num_rows if adapter is None else max(num_rows, rows_of[adapter] / NUM_REPLICAS / 2)
        return mean_output * max(1.0, rows / BATCH)

    ranks = np.array([a.rank for a in workload.adapters], dtype=np.float64)
    replicas = [
        SimulatedReplica(i, workload, cost, AdaptiveBatcher(cost, ranks, steps_to_come), SETTINGS, timeline)
        for i in range(NUM_REPLICAS)
    ]
    scheduler = Scheduler(plan.shards, settings=SchedulerSettings(expected_replicas=NUM_REPLICAS))
    cluster = Cluster((0.0,) * NUM_REPLICAS, progress_s=0.5)
    outcome = JobSimulation(workload, plan, scheduler, replicas, cluster, timeline, SETTINGS).run()
    return outcome.makespan_s, job_metrics(workload, timeline, outcome.makespan_s).merged_share


def others(num_adapters: int, cost: CostModel = H200_LLAMA_3_8B) -> dict[str, Policy]:
    """The systems compared with; each deals rows to replicas in turn, only dLoRA moves them afterwards."""
    everywhere = np.ones((num_adapters, NUM_REPLICAS), dtype=bool)
    batchers: dict[str, Callable[[], Batcher]] = {
        "dLoRA": lambda: dlora_batcher(num_adapters, cost),
        "S-LoRA": UnmergedBatcher,
        "vLLM-like": lambda: FcfsBatcher(8),
    }
    return {
        name: Policy(name, make, lambda: RoundRobinDispatcher(everywhere), 2.0 if name == "dLoRA" else None)
        for name, make in batchers.items()
    }


def online_makespan(workload: Workload, policy: Policy, cost: CostModel = H200_LLAMA_3_8B) -> float:
    """Seconds until the last row when every row arrives at 0."""
    arrived = replace(workload, release_s=np.zeros(workload.num_rows))
    _, timeline = serve(arrived, policy, cost, SETTINGS, NUM_REPLICAS)
    return float(timeline.finish_s.max())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Makespans in seconds of one job, the planner's under "planner"."""

    job: str
    makespan_s: dict[str, float]
    merged_share: float


def compare(lengths: Lengths, num_rows: int, seeds: tuple[int, ...] = (21, 22, 23)) -> list[Comparison]:
    """Every job under every system; makespans are means over the seeds."""
    by_seed = [[_compare_job(job) for job in jobs(lengths, num_rows, seed)] for seed in seeds]
    return [
        Comparison(
            same[0].job,
            {name: float(np.mean([found.makespan_s[name] for found in same])) for name in same[0].makespan_s},
            float(np.mean([found.merged_share for found in same])),
        )
        for same in zip(*by_seed, strict=True)
    ]


def _compare_job(job: Job) -> Comparison:
    planned, merged_share = planned_makespan(job.workload)
    makespan = {"planner": planned}
    for name, policy in others(len(job.workload.adapters)).items():
        makespan[name] = online_makespan(job.workload, policy)
    return Comparison(job.name, makespan, merged_share)
