"""How good and how fast the decisions are: placement gap and regret, migration at K = 8, and the scheduler at scale."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.baselines.dlora_migration import AdapterRows, ReplicaLoad, plan_migration
from lorabatch.scheduler.batchers.batching import clustered
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B
from lorabatch.scheduler.messages import Command, Event
from lorabatch.scheduler.planning.placement import PlacementProblem, place_shards
from lorabatch.scheduler.planning.waves import ShardPlan
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.simulation.replica import SimulatedReplica
from lorabatch.scheduler.simulation.simulator import Cluster, JobSimulation
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.simulation.timeline import Timeline
from lorabatch.scheduler.workload import Workload

SETTINGS = RunSettings.of_machine("h200-llama-3-8b", batch_rows=256)


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """Time to plan and to simulate a job of one size. All times are the CPU's."""

    #: Rows of the job.
    num_rows: int
    #: Adapters of the job.
    num_adapters: int
    #: Simulated replicas.
    num_replicas: int
    #: Seconds to plan the job.
    plan_s: float
    #: Seconds to simulate the job, the scheduler included.
    simulate_s: float
    #: Events that the scheduler handled.
    num_events: int
    #: Mean microseconds of the scheduler per event.
    mean_event_us: float
    #: Milliseconds of the scheduler for the event that took longest.
    longest_event_ms: float


@dataclass(frozen=True, slots=True)
class PlanningScale:
    """Time and memory of a whole plan of 1,000,000 rows over 1,000 adapters on 100 replicas."""

    #: Seconds to cut the rows into shards and to place these, without the forecast.
    seconds: float
    #: Seconds of the forecast from a sample of rows.
    forecast_s: float
    #: Largest resident memory of the process so far, in bytes.
    peak_bytes: int
    #: Share by which the placement's makespan is above its lower bound.
    gap: float
    #: Shards of the plan.
    num_shards: int


def planning_scale() -> PlanningScale:
    """Waves, modes and placement with its bound, as `lorabatch plan` makes them."""
    workload = _zipf_job(1_000_000, 1_000)
    start = time.perf_counter()
    cut = prediction.cut_rows(SETTINGS, workload, 100)
    assert cut.placement is not None
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    sample = prediction.sample(SETTINGS, workload.num_rows, 100, max_rows=5_000)
    sample.add(workload, cut)
    sample.predict(partial(prediction.play, SETTINGS))
    forecast_s = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return PlanningScale(seconds, forecast_s, peak_bytes, cut.placement.gap, len(cut.plan.shards))


class TimedScheduler:
    """The scheduler with a stopwatch round it, of the CPU's time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_events, self.total_s, self.longest_s = 0, 0.0, 0.0

    def handle(self, event: Event) -> list[Command]:
        """Have the scheduler handle the event, and time it."""
        start = time.process_time()
        commands = self._scheduler.handle(event)
        taken = time.process_time() - start
        self.num_events += 1
        self.total_s += taken
        self.longest_s = max(self.longest_s, taken)
        return commands


def scale_row(num_rows: int, num_adapters: int, num_replicas: int) -> ScaleRow:
    """Plan a Zipf job of this size, and simulate it on coarse replicas (16 passes at once) with a simple batcher.

    Seconds are the CPU's.
    """
    workload = _zipf_job(num_rows, num_adapters)
    start = time.process_time()
    plan = prediction.cut_rows(SETTINGS, workload, num_replicas).plan
    plan_s = time.process_time() - start
    start = time.process_time()
    scheduler = _simulate(workload, plan, num_replicas)
    simulate_s = time.process_time() - start
    return ScaleRow(
        num_rows,
        num_adapters,
        num_replicas,
        plan_s,
        simulate_s,
        scheduler.num_events,
        1e6 * scheduler.total_s / scheduler.num_events,
        1e3 * scheduler.longest_s,
    )


def _zipf_job(num_rows: int, num_adapters: int) -> Workload:
    generator = np.random.default_rng(0)
    return make_workload(
        make_adapters(generator.choice([8, 16, 32, 64, 128], num_adapters).tolist()),
        draw_adapters(generator, num_rows, power_popularity(num_adapters, 1.0)),
        draw_lengths(generator, num_rows, 200, 0.8, 2000),
        draw_lengths(generator, num_rows, 100, 0.8, 500),
    )


def _simulate(workload: Workload, plan: ShardPlan, num_replicas: int) -> TimedScheduler:
    settings = replace(prediction.replica_settings(SETTINGS), leap_steps=16, is_coarse=True, look_ahead=1024)
    timeline = Timeline.empty(workload.num_rows, num_replicas)
    replicas = [
        SimulatedReplica(i, workload, H200_LLAMA_3_8B, clustered, settings, timeline) for i in range(num_replicas)
    ]
    scheduler = TimedScheduler(Scheduler(plan.shards, settings=SETTINGS.scheduler(num_replicas)))
    cluster = Cluster((0.0,) * num_replicas, progress_s=2.0)
    simulation = JobSimulation(workload, plan, scheduler.handle, replicas, cluster, timeline, settings)
    simulation.run()
    assert simulation.failure is None, simulation.failure
    return scheduler


@dataclass(frozen=True, slots=True)
class PlacementQuality:
    """Regret against brute force over small instances, and the gap on 10,000 Zipf rows, all as shares."""

    worst_regret: float
    mean_regret: float
    zipf_gap: float
    zipf_s: float


def placement_quality(num_instances: int = 60) -> PlacementQuality:
    """At most 7 shards on 2 or 3 replicas, and 10,000 rows over 100 adapters on 16."""
    regrets = []
    for seed in range(num_instances):
        problem = _small_problem(seed)
        best = min(
            float(problem.finish_s(np.array(choice)).max())
            for choice in product(range(problem.num_replicas), repeat=problem.num_shards)
        )
        regrets.append(place_shards(problem).makespan_s / best - 1.0)
    start = time.perf_counter()
    gap = place_shards(_zipf_problem()).gap
    return PlacementQuality(max(regrets), float(np.mean(regrets)), gap, time.perf_counter() - start)


def _small_problem(seed: int) -> PlacementProblem:
    generator = np.random.default_rng(seed)
    num_shards, num_adapters = int(generator.integers(2, 8)), int(generator.integers(1, 4))
    return PlacementProblem(
        generator.integers(1, 20, num_shards).astype(float),
        tuple((int(a),) for a in generator.integers(0, num_adapters, num_shards)),
        generator.integers(0, 6, num_adapters).astype(float),
        int(generator.integers(2, 4)),
    )


def _zipf_problem() -> PlacementProblem:
    """Shards of the real planner, seconds from the cost model, one load per adapter and replica."""
    workload = _zipf_job(10_000, 100)
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=64)
    plan = prediction.cut_rows(settings, workload, 16).plan
    number = {adapter.adapter_id: i for i, adapter in enumerate(workload.adapters)}
    seconds = H200_LLAMA_3_8B.row_seconds(workload.prompt_tokens, workload.max_tokens / 2, batch_rows=64)
    return PlacementProblem(
        np.array([seconds[plan.rows_of(shard.shard_id)].sum() for shard in plan.shards]),
        tuple(tuple(number[adapter_id] for adapter_id in shard.adapters) for shard in plan.shards),
        np.array([H200_LLAMA_3_8B.load_seconds(a.weight_bytes, "storage") for a in workload.adapters]),
        16,
    )


def migration_decision_ms(num_decisions: int = 30) -> tuple[float, float]:
    """(median, longest) milliseconds of one co-migration decision at K = 8: 32 replicas, 32 adapters."""
    taken = []
    for seed in range(num_decisions):
        replicas = _unbalanced(seed)
        start = time.perf_counter()
        plan_migration(replicas, {})
        taken.append(1e3 * (time.perf_counter() - start))
    return float(np.median(taken)), max(taken)


def _unbalanced(seed: int) -> list[ReplicaLoad]:
    generator = np.random.default_rng(seed)
    replicas = []
    for number in range(32):
        held = [f"a{k}" for k in sorted(generator.choice(32, 3, replace=False).tolist())]
        groups = tuple(AdapterRows(name, int(generator.integers(1, 40) * (1 + 3 * (number % 2))), 0.1) for name in held)
        replicas.append(ReplicaLoad(f"r{number:02}", groups, frozenset(held)))
    return replicas
