"""Jobs with and without the planned placement: how long they take, and how many adapters their replicas load.

Each job is played with `placement` `none` and `planned`, on replicas of one speed and on replicas half of which are
slow, which the plan does not know. `lorabatch.benchmarks.simulation.placement` prints one table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.workload import Workload

GPU, CPU = "h200-llama-3-8b", "cpu-smollm2-135m"
#: Seconds of a slow replica's steps over those of the cost model.
_SLOWNESS = 1.6


@dataclass(frozen=True, slots=True)
class Job:
    """The rows of a job, and the replicas that it runs on."""

    #: Preset cost model of the replicas.
    machine: str
    #: Rows of the job; their adapters follow Zipf's law.
    num_rows: int
    #: Adapters of the job.
    num_adapters: int
    #: Replicas of the job.
    num_replicas: int
    #: Seconds to fetch an adapter, beside those for its bytes.
    load_s: float
    #: Median tokens of an answer.
    output_tokens: int

    def rows(self, seed: int) -> Workload:
        """Rows drawn from a seed."""
        generator = np.random.default_rng(seed)
        return make_workload(
            make_adapters(generator.choice([8, 16, 32, 64], self.num_adapters).tolist()),
            draw_adapters(generator, self.num_rows, power_popularity(self.num_adapters, 1.0)),
            draw_lengths(generator, self.num_rows, 100, 0.6, 800),
            draw_lengths(generator, self.num_rows, self.output_tokens, 0.6, 4 * self.output_tokens),
        )


JOBS = (
    Job(GPU, 1_500, 20, 4, 0.002, 100),
    Job(GPU, 1_500, 50, 4, 0.1, 100),
    Job(GPU, 2_000, 100, 8, 0.02, 80),
    Job(GPU, 2_000, 100, 8, 0.2, 80),
    Job(GPU, 2_000, 60, 12, 0.02, 80),
    Job(GPU, 2_000, 200, 16, 0.02, 80),
    Job(CPU, 800, 50, 4, 0.0, 40),
    Job(CPU, 1_600, 100, 8, 0.0, 40),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One job with the planned placement over the same job without."""

    #: Makespan over makespan.
    makespan: float
    #: Adapters that became resident, on all replicas together, over the same.
    loads: float


def compare(job: Job, seed: int, *, half_are_slow: bool) -> Ratio:
    """Play a job with and without the planned placement."""
    rows = job.rows(seed)
    plain = RunSettings.of_machine(job.machine)
    cost = replace(plain.cost, load_s=job.load_s)
    plain = replace(plain, engine=replace(plain.engine, cost=cost), placement="none")
    slowness = None
    if half_are_slow:
        slowness = [1.0 if number % 2 else _SLOWNESS for number in range(job.num_replicas)]
    makespan_s, loads = [], []
    for settings in (plain, replace(plain, placement="planned")):
        cut = prediction.cut_rows(settings, rows, job.num_replicas)
        run = prediction.play(settings, rows, cut.plan, job.num_replicas, slowness)
        makespan_s.append(run.metrics.makespan_s)
        loads.append(run.timeline.num_loads.sum())
    return Ratio(makespan_s[1] / makespan_s[0], loads[1] / loads[0])


def table(jobs: Sequence[Job], num_seeds: int) -> str:
    """A row for each job: means over the seeds, and the standard error of the makespans' ratio."""
    lines = [
        "| machine | rows | adapters | replicas | fetch | speed | makespan | standard error | adapter loads |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for job in jobs:
        for half_are_slow in (False, True):
            found = [compare(job, seed, half_are_slow=half_are_slow) for seed in range(num_seeds)]
            ends = [ratio.makespan for ratio in found]
            lines.append(
                f"| {job.machine} | {job.num_rows:,} | {job.num_adapters} | {job.num_replicas} | {job.load_s:g} s "
                f"| {'half slow' if half_are_slow else 'equal'} | {np.mean(ends):.3f} "
                f"| {np.std(ends) / np.sqrt(len(ends) - 1):.3f} | {np.mean([ratio.loads for ratio in found]):.2f} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.placement", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    print("\n" + table(JOBS, parser.parse_args().seeds))


if __name__ == "__main__":
    main()
