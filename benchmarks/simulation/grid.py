"""Small jobs over a grid of shapes: this project beside four simple policies and the job's lower bound.

python -m lorabatch.benchmarks.simulation.grid [--traces FOLDER] [--instances 36] [--only SHAPE …] [--seeds 5]
    [--first-seed 1] [--batches 4] [--parts]

A job has `--batches` full batches per worker. Adapters are popular by Zipf's law. Answers have the lengths of the Azure
traces, or drawn ones like them, or of a mix in which one row of ten is long; all rows have one `max_tokens`. Workers
are equal, or have log-normal speeds between 0.15 and 1 of the cost model's, which only policies that deal shards by
work know beforehand. A shape's makespans are means over `--seeds` jobs of that shape: one job says little, since any
change of order moves its makespan by 4 %, and the best of four policies on one job is often the luckiest.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorabatch.benchmarks.simulation.lengths import Lengths, read_trace, synthetic_lengths
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.baselines.batchers import unmerged
from lorabatch.scheduler.batchers.batching import Batcher, ReplicaFacts
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import MACHINES
from lorabatch.scheduler.estimates.lengths import LengthEstimator, expected_tokens
from lorabatch.scheduler.planning.bound import JobBound, job_bound
from lorabatch.scheduler.planning.waves import Shard, ShardPlan
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
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

BATCH_ROWS = 64
MAX_TOKENS = 1000
_MACHINE = "h200-llama-3-8b"
# The goal: nowhere further behind the best of the other policies.
_BEHIND = 0.98


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters from which an instance of the grid is drawn."""

    #: Zipf's exponent of the adapters' popularity.
    exponent: float
    #: Kind of lengths: `conv`, `code` or `bimodal`.
    lengths: str
    #: Adapters of the job.
    num_adapters: int
    #: Workers of the job.
    num_workers: int
    #: Whether all workers are equally fast.
    is_equal: bool


SHAPES = tuple(
    Shape(*values)
    for values in itertools.product(
        (0.9, 1.2, 1.5), ("conv", "code", "bimodal"), (20, 500, 5000), (3, 7), (True, False)
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """One job and its workers. `slowness`: seconds of each over those of the cost model."""

    shape: Shape
    workload: Workload
    slowness: tuple[float, ...]
    settings: RunSettings

    @property
    def cost(self) -> CostModel:
        """Cost model of a worker with a slowness of 1, which is the fastest there can be."""
        return self.settings.cost


def settings(storage_gb_per_s: float, machine_name: str = _MACHINE) -> RunSettings:
    """Settings of the grid's workers: those of a real job, with adapters that are read at `storage_gb_per_s`."""
    machine = RunSettings.of_machine(machine_name, batch_rows=BATCH_ROWS)
    cost = replace(machine.cost, storage_bytes_per_s=storage_gb_per_s * 1e9)
    return replace(machine, engine=replace(machine.engine, cost=cost))


def draw(shape: Shape, traces: dict[str, Lengths], seed: int, workers: RunSettings, batches: float = 4.0) -> Instance:
    """The instance of a shape that belongs to a seed."""
    generator = np.random.default_rng((seed, *map(ord, repr(shape))))
    num_rows = round(batches * BATCH_ROWS * shape.num_workers)
    ranks = generator.choice([8, 16, 32, 64, 128, 256], shape.num_adapters)
    adapter = draw_adapters(generator, num_rows, power_popularity(shape.num_adapters, shape.exponent))
    if shape.lengths == "bimodal":
        is_long = generator.random(num_rows) < 0.1
        short, long = (
            draw_lengths(generator, num_rows, 60, 0.5, 200),
            draw_lengths(generator, num_rows, 800, 0.2, MAX_TOKENS),
        )
        prompt, output = draw_lengths(generator, num_rows, 300, 0.8, 2000), np.where(is_long, long, short)
    else:
        prompt, output = traces[shape.lengths].draw(generator, num_rows)
    output = np.clip(output, 1, MAX_TOKENS).astype(np.int32)
    workload = make_workload(make_adapters(ranks.tolist()), adapter, prompt, output, max_tokens=MAX_TOKENS)
    speeds = np.ones(shape.num_workers)
    if not shape.is_equal:
        speeds = np.clip(generator.lognormal(-0.7, 0.7, shape.num_workers), 0.15, 1.0)
    return Instance(shape, workload, tuple((1 / speeds).tolist()), workers)


Maker = Callable[[], Batcher]


def ours(instance: Instance) -> float:
    """Makespan of the plan and the scheduler that a real job has."""
    found = prediction.simulate(instance.settings, instance.workload, len(instance.slowness), instance.slowness)
    return found.metrics.makespan_s


def queue(instance: Instance) -> float:
    """Shards of 16 rows in input order, taken by whichever worker has room; our batcher."""
    workload = instance.workload
    plan = _in_input_order(workload)
    scheduler = Scheduler(plan.shards, settings=SchedulerSettings(expected_replicas=len(instance.slowness)))
    return _play(instance, plan, scheduler, _our_batcher(instance))


def dealt(instance: Instance, make: Maker, *, by_work: bool) -> float:
    """Rows are dealt once: shards of one adapter by work and speed (LPT), or rows in turn as they come."""
    workload, slowness, limits = instance.workload, instance.slowness, prediction.replica_settings(instance.settings)
    rows_of: list[list[NDArray[np.int64]]] = [[] for _ in slowness]
    if by_work:
        row_s = instance.cost.row_seconds(
            workload.prompt_tokens, expected_tokens(workload.max_tokens), batch_rows=BATCH_ROWS
        )
        order = np.argsort(workload.adapter_index, kind="stable")
        pieces = [
            piece
            for rows in np.split(order, np.flatnonzero(np.diff(workload.adapter_index[order])) + 1)
            for piece in np.split(rows, range(16, len(rows), 16))
        ]
        done = np.zeros(len(slowness))
        for piece in sorted(pieces, key=lambda rows: -row_s[rows].sum()):
            best = int(np.argmin(done + row_s[piece].sum() * np.array(slowness)))
            done[best] += row_s[piece].sum() * slowness[best]
            rows_of[best].append(piece)
        rows_of = [sorted(pieces, key=lambda rows: int(workload.adapter_index[rows[0]])) for pieces in rows_of]
    else:
        rows_of = [[np.arange(number, workload.num_rows, len(slowness))] for number in range(len(slowness))]
    timeline = Timeline.empty(workload.num_rows, len(slowness))
    ends = [0.0]
    for number, (pieces, slow) in enumerate(zip(rows_of, slowness, strict=True)):
        if pieces:
            replica = SimulatedReplica(number, workload, instance.cost.scaled(slow), make(), limits, timeline)
            replica.add(np.concatenate(pieces))
            now = 0.0
            while replica.num_rows:
                now, _ = replica.step(now)
            ends.append(now)
    return max(ends)


def _our_batcher(instance: Instance) -> Maker:
    workload = instance.workload
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
    lengths = LengthEstimator.of_rows(workload.max_tokens, workload.prompt_tokens)
    facts = ReplicaFacts(
        cost=instance.cost,
        ranks=lambda: ranks,
        must_merge=lambda adapter: False,
        max_batch_rows=BATCH_ROWS,
        lengths=lengths,
    )
    return lambda: instance.settings.batcher(facts)


def _in_input_order(workload: Workload) -> ShardPlan:
    starts = range(0, workload.num_rows, 16)
    offsets = np.array([*starts, workload.num_rows], np.int64)
    shards = tuple(
        Shard(number, 0, "unmerged", (), int(rows), int(prompt), int(rows) * MAX_TOKENS // 2)
        for number, (rows, prompt) in enumerate(
            zip(np.diff(offsets), np.add.reduceat(workload.prompt_tokens, offsets[:-1]), strict=True)
        )
    )
    return ShardPlan(np.arange(workload.num_rows), offsets, shards)


def _play(instance: Instance, plan: ShardPlan, scheduler: Scheduler, make: Maker) -> float:
    workload, slowness, limits = instance.workload, instance.slowness, prediction.replica_settings(instance.settings)
    timeline = Timeline.empty(workload.num_rows, len(slowness))
    replicas = [
        SimulatedReplica(number, workload, instance.cost.scaled(slow), make(), limits, timeline)
        for number, slow in enumerate(slowness)
    ]
    cluster = Cluster((0.0,) * len(slowness))
    simulation = JobSimulation(workload, plan, scheduler.handle, replicas, cluster, timeline, limits)
    makespan_s = simulation.run()
    assert simulation.failure is None, simulation.failure
    return makespan_s


def bound(instance: Instance, cost: CostModel | None = None) -> JobBound:
    """The job's lower bound, true lengths known. `cost`: other prices than the instance's."""
    assert instance.workload.output_tokens is not None
    return job_bound(
        instance.workload,
        instance.workload.output_tokens.astype(np.float64),
        cost or instance.cost,
        batch_rows=BATCH_ROWS,
        step_tokens=instance.settings.limits.step_tokens,
        slowness=instance.slowness,
        adapter_source="storage",
    )


def parts(instance: Instance) -> dict[str, float]:
    """Parts of this project's makespan on equal workers, in seconds of a mean worker. The first three are the bound."""
    found = prediction.simulate(instance.settings, instance.workload, len(instance.slowness), instance.slowness)
    timeline, cost, num_workers = found.timeline, instance.cost, len(instance.slowness)
    without_adapters = replace(cost, lora_step_s=0, adapter_s=0, rank_s=0, rank_token_s=0, lora_token_s=0)
    rows_s, with_steps_s, all_s = (
        bound(instance, prices).work_s for prices in (replace(without_adapters, step_s=0), without_adapters, cost)
    )
    busy_s = float(timeline.busy_s.mean())
    again = float(timeline.prompt_tokens.sum() - instance.workload.prompt_tokens.sum())
    found_s = {
        "rows": rows_s,
        "full steps": with_steps_s - rows_s,
        "adapters, at least": all_s - with_steps_s,
        "steps that are not full": cost.step_s * float(timeline.num_steps.mean()) - (with_steps_s - rows_s),
        "prompts beside rows that decode": cost.mixed_step_s * float(timeline.mixed_steps.mean()),
        "switches and loads": float((timeline.switch_s + timeline.load_s).mean()),
        "second prompts of rows that moved": cost.prefill_token_s * again / num_workers,
    }
    found_s["adapters, more than that"] = busy_s - sum(found_s.values())
    return {**found_s, "workers that wait for the last": found.metrics.makespan_s - busy_s}


POLICIES: dict[str, Callable[[Instance], float]] = {
    "ours": ours,
    "by adapter, dealt by work, unmerged": lambda i: dealt(i, lambda: unmerged, by_work=True),
    "by adapter, dealt by work, our batcher": lambda i: dealt(i, _our_batcher(i), by_work=True),
    "in turn, unmerged": lambda i: dealt(i, lambda: unmerged, by_work=False),
    "input order, queue, our batcher": queue,
}


def adding(traces: dict[str, Lengths], workers: RunSettings, num_seeds: int) -> list[dict[str, Any]]:
    """Print what adding one slower worker to one or two fast ones does, over seeds and kinds of lengths; the makespans
    over those without it.
    """
    found = []
    for num_fast, slowness in itertools.product((1, 2), (2.0, 4.0, 10.0, 20.0)):
        over_alone = []
        for seed in range(num_seeds):
            shape = Shape(1.2, ("conv", "code", "bimodal")[seed % 3], 50, num_fast, is_equal=True)
            alone = draw(shape, traces, seed, workers, batches=9 / num_fast)
            both = replace(alone, slowness=(*alone.slowness, slowness))
            over_alone.append(ours(both) / ours(alone))
        ideal = num_fast / (num_fast + 1 / slowness)
        mean = float(np.mean(over_alone))
        print(
            f"{num_fast} fast, one {slowness:g} times slower: {mean:.3f} of without it",
            f"({min(over_alone):.3f} to {max(over_alone):.3f}), {mean / ideal:.3f} of the ideal split",
            flush=True,
        )
        found.append({"fast": num_fast, "slowness": slowness, "over_without": over_alone})
    return found


def main() -> None:
    """Run, print a table, write the rows."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.grid", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of AzureLLMInferenceTrace_conv.csv and …_code.csv")
    parser.add_argument("--instances", type=int, default=len(SHAPES), help=f"how many of the {len(SHAPES)} shapes")
    names = [_name(shape) for shape in SHAPES]
    parser.add_argument(
        "--only", nargs="+", metavar="SHAPE", choices=names, help="shapes, by the names that are printed"
    )
    parser.add_argument("--seeds", type=int, default=1, help="jobs of each shape")
    parser.add_argument("--first-seed", type=int, default=1, help="of these jobs; other seeds are other jobs")
    parser.add_argument("--batches", type=float, default=4.0)
    parser.add_argument("--storage", type=float, default=40.0, help="GB/s of adapter loads; host memory by default")
    parser.add_argument("--machine", choices=sorted(MACHINES), default=_MACHINE, help="cost model of the workers")
    parser.add_argument(
        "--adding", type=int, metavar="SEEDS", help="only add slower workers, with this number of seeds"
    )
    parser.add_argument("--parts", action="store_true", help="only what the makespans on equal workers are made of")
    parser.add_argument("--output", type=Path, help="a JSON file of all jobs")
    chosen = parser.parse_args()
    traces, workers = _traces(chosen.traces), settings(chosen.storage, chosen.machine)
    if chosen.adding:
        found_adding = adding(traces, workers, chosen.adding)
        if chosen.output:
            chosen.output.write_text(json.dumps(found_adding, indent=1))
        return
    shapes = [SHAPES[i] for i in np.linspace(0, len(SHAPES) - 1, chosen.instances).round().astype(int)]
    if chosen.only:
        shapes = [shape for shape in SHAPES if _name(shape) in chosen.only]
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    if chosen.parts:
        equal = [shape for shape in shapes if shape.is_equal]
        instances = [draw(shape, traces, seed, workers, chosen.batches) for shape in equal for seed in seeds]
        print("\n".join(table_of_parts(instances)))
        return
    jobs = [(shape, traces, seed, workers, chosen.batches) for shape in shapes for seed in seeds]
    found = []
    with ProcessPoolExecutor() as pool:
        ratios = pool.map(_over_bound, jobs)
        for shape in shapes:
            of_seeds = list(itertools.islice(ratios, len(seeds)))
            found.append(Found(shape, {name: [over[name] for over in of_seeds] for name in POLICIES}))
            print(f"{_name(shape):36}", *(f"{ratio:6.3f}" for ratio in found[-1].means.values()), flush=True)
    print("\n".join(summary(found)))
    if chosen.output:
        chosen.output.write_text(json.dumps([asdict(entry) for entry in found], indent=1))


def _over_bound(job: tuple[Shape, dict[str, Lengths], int, RunSettings, float]) -> dict[str, float]:
    instance = draw(*job)
    bound_s = bound(instance).seconds
    return {name: policy(instance) / bound_s for name, policy in POLICIES.items()}


def table_of_parts(instances: Sequence[Instance]) -> list[str]:
    """Mean shares of the makespan by kind of lengths, as lines of a table."""
    shares: dict[str, list[dict[str, float]]] = {}
    for instance in instances:
        found = parts(instance)
        makespan_s = sum(found.values())
        shares.setdefault(instance.shape.lengths, []).append({name: s / makespan_s for name, s in found.items()})
    kinds = [f"{kind} ({len(of_kind)})" for kind, of_kind in shares.items()]
    lines = [f"| share of the makespan | {' | '.join(kinds)} |", "|---|" + "---:|" * len(kinds)]
    for name in next(iter(shares.values()))[0]:
        means = (100 * float(np.mean([share[name] for share in of_kind])) for of_kind in shares.values())
        lines.append(f"| {name} | {' | '.join(f'{mean:.1f} %' for mean in means)} |")
    return lines


@dataclass(frozen=True, slots=True)
class Found:
    """Jobs of one shape: makespans of each policy over the jobs' bounds, one for each seed."""

    shape: Shape
    over_bound: dict[str, list[float]]

    @property
    def means(self) -> dict[str, float]:
        """Mean makespan over the bound, by policy."""
        return {name: float(np.mean(ratios)) for name, ratios in self.over_bound.items()}

    @property
    def best_over_ours(self) -> float:
        """The mean of the other policy that is best on this shape, over ours."""
        return min(ratio for name, ratio in self.means.items() if name != "ours") / self.means["ours"]

    @property
    def best_of_jobs_over_ours(self) -> list[float]:
        """Makespan of the best of the other policies over ours, job by job."""
        ours, *others = np.array([self.over_bound[name] for name in POLICIES])
        return [float(ratio) for ratio in np.min(others, axis=0) / ours]


def summary(found: Sequence[Found]) -> list[str]:
    """Means over the bound, and ours beside the best of the others, for equal and for unequal workers."""
    lines = []
    for is_equal in (True, False):
        group = [entry for entry in found if entry.shape.is_equal is is_equal]
        if not group:
            continue
        lines.append(f"{'equal' if is_equal else 'unequal'} workers ({len(group)} shapes), over the bound:")
        for name in POLICIES:
            over_ours = [entry.means[name] / entry.means["ours"] for entry in group]
            mean = np.mean([entry.means[name] for entry in group])
            lines.append(f"  {mean:6.3f}  {name}: {_spread(over_ours)} of ours")
        lines.append(f"  best of the others over ours: {_spread([entry.best_over_ours for entry in group])}")
        of_jobs = [ratio for entry in group for ratio in entry.best_of_jobs_over_ours]
        lines.append(f"  the same of single jobs: {_spread(of_jobs)}")
    return lines


def _spread(ratios: Sequence[float]) -> str:
    behind = sum(ratio < _BEHIND for ratio in ratios)
    return f"{np.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {behind} of {len(ratios)} below {_BEHIND})"


def _name(shape: Shape) -> str:
    kind = "equal" if shape.is_equal else "unequal"
    return f"{shape.lengths} {shape.num_adapters} zipf {shape.exponent} {shape.num_workers} {kind}"


def _traces(folder: Path | None) -> dict[str, Lengths]:
    if folder is None:
        generator = np.random.default_rng(8)
        prompt, output = draw_lengths(generator, 20_000, 1500, 0.8, 4000), draw_lengths(generator, 20_000, 12, 1.1, 600)
        return {"conv": synthetic_lengths(), "code": Lengths(prompt, output, "drawn")}
    return {name: read_trace(folder / f"AzureLLMInferenceTrace_{name}.csv") for name in ("conv", "code")}


if __name__ == "__main__":
    main()
