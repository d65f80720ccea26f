"""How good the time left is with and without a canary, and what the canary costs: simulated jobs of unknown lengths.

python -m lorabatch.benchmarks.simulation.canary [--jobs 20] [--canary 16] [--seed 0] [--rows 2000 8000]

Each job has 4 to 16 adapters whose answers differ: their medians are log-normal around 60 tokens with a standard
deviation of 0.8, and `max_tokens` is 512. It runs on one to four workers with and without a canary. Once a second the
scheduler estimates the time left, as in a real job. Errors are shares of the job's seconds, averaged over a part of the
job; every job counts alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorabatch.benchmarks.simulation.time_left import Job, play
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.estimates.time_left import TimeLeft
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)

MAX_TOKENS = 512
_PARTS = ((0.0, 0.1), (0.1, 0.25), (0.0, 0.25), (0.25, 1.0))


@dataclass(frozen=True, slots=True)
class Compared:
    """One job without and with a canary."""

    #: Rows of the job.
    num_rows: int
    #: Share of its rows that the canary has.
    canary_share: float
    #: Seconds of the job without and with the canary.
    seconds: tuple[float, float]
    #: Mean errors of the time left without and with the canary, by the parts of `_PARTS`.
    errors: tuple[tuple[float, float], ...]


def draw(seed: int, rows: tuple[int, int]) -> Job:
    """The job of a seed. `rows`: bounds of its number of rows."""
    generator = np.random.default_rng(seed)
    settings = RunSettings.of_machine("cpu-smollm2-135m", batch_rows=int(generator.choice([32, 64])))
    num_rows = int(np.exp(generator.uniform(np.log(rows[0]), np.log(rows[1]))))
    num_adapters, num_workers = int(generator.choice([4, 8, 16])), int(generator.choice([1, 2, 4]))
    popularity = power_popularity(num_adapters, float(generator.choice([0.0, 1.0])))
    adapter = draw_adapters(generator, num_rows, popularity)
    medians = np.exp(generator.normal(np.log(60), 0.8, num_adapters))
    prompt = draw_lengths(generator, num_rows, int(generator.choice([40, 120, 400])), 0.7, 1500)
    drawn = np.rint(medians[adapter] * np.exp(generator.normal(0, 0.6, num_rows)))
    output = np.clip(drawn, 1, MAX_TOKENS).astype(np.int32)
    adapters = make_adapters(generator.choice([8, 16, 32], num_adapters).tolist())
    workload = make_workload(adapters, adapter, prompt, output, max_tokens=MAX_TOKENS)
    slowness = tuple(np.exp(generator.normal(0, 0.05, num_workers)).tolist())
    return Job(workload, settings, slowness, False, {}, False, 1.0)


def compare(job: Job, canary: int) -> Compared:
    """Play one job twice."""
    with_canary = replace(job, settings=replace(job.settings, canary=canary))
    played = [play(job), play(with_canary)]
    cut = prediction.cut_rows(with_canary.planned, job.rows, len(job.slowness))
    num_canary = sum(shard.num_rows for shard in cut.plan.shards if shard.is_canary)
    errors = tuple((_error(*played[0], *part), _error(*played[1], *part)) for part in _PARTS)
    seconds = (played[0][0], played[1][0])
    return Compared(job.rows.num_rows, num_canary / job.rows.num_rows, seconds, errors)


def _error(end_s: float, shown: Sequence[tuple[float, TimeLeft]], least: float, most: float) -> float:
    """Mean error of the time left in one part of a job, as a share of its seconds."""
    moments = [(end_s - at_s, left) for at_s, left in shown if least * end_s <= at_s < most * end_s]
    return float(np.mean([abs(left.seconds - true_s) / end_s for true_s, left in moments]))


def table(found: Sequence[Compared]) -> str:
    """Lines with each job, and the means over all of them."""
    parts = [f"{least:.0%} to {most:.0%}" for least, most in _PARTS]
    lines = [f"| rows | canary | seconds | with canary | {' | '.join(parts)} |", "|---:" * (4 + len(parts)) + "|"]
    for one in found:
        errors = " | ".join(f"{without:.0%} → {canary:.0%}" for without, canary in one.errors)
        more = one.seconds[1] / one.seconds[0] - 1
        lines.append(f"| {one.num_rows} | {one.canary_share:.1%} | {one.seconds[0]:.0f} | {more:+.2%} | {errors} |")
    means = [np.mean([one.errors[i] for one in found], axis=0) for i in range(len(_PARTS))]
    medians = [np.median([one.errors[i] for one in found], axis=0) for i in range(len(_PARTS))]
    costs = np.array([one.seconds[1] / one.seconds[0] - 1 for one in found])
    for name, values, cost in (("mean", means, costs.mean()), ("median", medians, np.median(costs))):
        shown = " | ".join(f"{without:.1%} → {canary:.1%}" for without, canary in values)
        lines.append(f"| {name} | | | {cost:+.2%} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.canary", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--canary", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--rows", type=int, nargs=2, default=(2000, 8000), help="bounds of a job's rows")
    chosen = parser.parse_args()
    found = []
    for number in range(chosen.jobs):
        found.append(compare(draw(chosen.seed + number, tuple(chosen.rows)), chosen.canary))
        print(table(found[-1:]).splitlines()[2], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
