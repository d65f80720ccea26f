"""Forecasts of jobs: continuous in the length of prompts, as good from a sample of the rows as from all of them, and
how far off where only an earlier job says how long answers are.

python -m lorabatch.benchmarks.simulation.forecasts [--trace CSV …] [--output benchmarks/results]

Steps and memory are those of the engine that would run. Writes `DATE-forecasts.md`. Predicted seconds repeat exactly;
seconds of the CPU depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from lorabatch.benchmarks.fidelity_results import RESULTS
from lorabatch.benchmarks.provenance import cpu_name
from lorabatch.benchmarks.simulation.lengths import Lengths, kept_answers, read_trace, synthetic_lengths
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.forecast import Forecast, forecast_job
from lorabatch.scheduler.simulation.synthetic import draw_adapters, make_adapters, make_workload, power_popularity
from lorabatch.scheduler.workload import BASE_MODEL, Workload

PROMPT_TOKENS = (300, 400, 448, 480, 500, 512, 520, 540, 600, 800, 1000, 1024, 1050, 1500, 2000, 3000)
RANKS = (8, 16, 32, 64, 128)
#: Rows, adapters and workers of jobs whose plan is played as a whole and as a sample.
JOBS = ((6_000, 1, 1), (8_000, 50, 2), (8_000, 500, 8), (10_000, 50, 16), (10_000, 2_000, 4))
PLAYED_ROWS = 4_000
MAX_TOKENS = 1_000
#: Machines with rows in a batch, workers, and full batches for each, of jobs of which an earlier job tells.
EARLIER_JOBS = tuple(
    itertools.product((("cpu-smollm2-135m", 16), ("h200-llama-3-8b", 64)), (1, 3), (1, 4, 12)),
)


def by_prompt() -> list[str]:
    """A table of predicted seconds over the length of prompts, on a CPU whose steps hold 512 tokens."""
    settings = replace(RunSettings.of_machine("cpu-smollm2-135m"), length_share=1.0)
    lines = [
        "## Seconds over the length of prompts",
        "SmolLM2-135M on a CPU (preset cost model), one worker, 128 rows of 60 tokens each, steps of 512 tokens.",
        "",
        "| prompt tokens | base rows | one adapter of rank 16 |",
        "|---:|---:|---:|",
    ]
    for prompt in PROMPT_TOKENS:
        seconds = []
        for adapter in (BASE_MODEL, 0):
            columns = (np.full(128, value, np.int32) for value in (adapter, prompt, 60))
            rows = make_workload(make_adapters([16], 160_000), *columns, max_tokens=60)
            seconds.append(prediction.forecast(settings, rows, 1, max_rows=128).predicted_s)
        lines.append(f"| {prompt} | {seconds[0]:.1f} s | {seconds[1]:.1f} s |")
    return [*lines, ""]


def zipf_job(lengths: Lengths, num_rows: int, num_adapters: int) -> Workload:
    """Rows whose prompts are as long as in the trace, uncut, and whose answers take half of their `max_tokens`."""
    generator = np.random.default_rng(0)
    prompt, output = lengths.draw(generator, num_rows, most=100_000)
    adapter = draw_adapters(generator, num_rows, power_popularity(num_adapters, 1.0))
    ranks = [RANKS[i % len(RANKS)] for i in range(num_adapters)]
    return make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=2 * output)


def sampled(lengths: Lengths, sizes: Sequence[tuple[int, int, int]]) -> list[str]:
    """A table of jobs, their plan played, and a sample of it played."""
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=64)
    limits = settings.limits
    lines = [
        f"## A sample against the whole: {lengths.source}",
        f"Llama-3-8B on H200 (preset cost model), batches of 64 rows, steps of {limits.step_tokens} tokens, prompts "
        "uncut; adapters of ranks 8 to 128 by Zipf's law. Deviations are from the whole plan, played.",
        "",
        "| rows | adapters | workers | whole plan | CPU | sample | rows | CPU |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_rows, num_adapters, num_workers in sizes:
        rows = zipf_job(lengths, num_rows, num_adapters)
        whole, whole_s = timed(settings, rows, num_workers, num_rows)
        part, part_s = timed(settings, rows, num_workers, PLAYED_ROWS)
        seconds = whole.predicted_s
        lines.append(
            f"| {num_rows:,} | {num_adapters:,} | {num_workers} | {seconds:.1f} s | {whole_s:.1f} s "
            f"| {part.predicted_s / seconds - 1:+.1%} | {part.simulated_rows:,} "
            f"| {part_s:.1f} s |"
        )
        print(lines[-1], flush=True)
    return [*lines, ""]


def after_earlier(lengths: Lengths, seeds: Sequence[int]) -> list[str]:
    """A table of jobs of four adapters, predicted with the answers of an equal one with other rows, and played."""
    lines = [
        f"## After an earlier job: {lengths.source}",
        "Four adapters by Zipf's exponent 0.9, answers of up to 1,000 tokens. An equal job with other rows ran before. "
        f"Deviations of the predicted from the played job, over {len(seeds)} pairs of jobs: mean, mean of their sizes.",
        "",
        "| machine | rows in a batch | workers | batches each | mean | mean size |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (machine, batch_rows), num_workers, num_batches in EARLIER_JOBS:
        found = []
        for seed in seeds:
            generator, num_rows = np.random.default_rng(seed), batch_rows * num_workers * num_batches
            before, job = (four_adapters(lengths, num_rows, generator) for _ in range(2))
            settings = replace(
                RunSettings.of_machine(machine, batch_rows=batch_rows),
                lengths={(key, 0): found for key, found in kept_answers(before).items()},
            )
            predicted_s = prediction.forecast(settings, job, num_workers, max_rows=num_rows).predicted_s
            found.append(predicted_s / prediction.simulate(settings, job, num_workers).metrics.makespan_s - 1)
        sizes = f"{np.mean(found):+.1%} | {np.mean(np.abs(found)):.1%}"
        lines.append(f"| {machine} | {batch_rows} | {num_workers} | {num_batches} | {sizes} |")
        print(lines[-1], flush=True)
    return [*lines, ""]


def four_adapters(lengths: Lengths, num_rows: int, generator: np.random.Generator) -> Workload:
    """Rows as in the trace, with answers of up to `MAX_TOKENS`."""
    prompt, output = lengths.draw(generator, num_rows, most=MAX_TOKENS)
    adapter = draw_adapters(generator, num_rows, power_popularity(4, 0.9))
    return make_workload(make_adapters(RANKS[:4]), adapter, prompt, output, max_tokens=MAX_TOKENS)


def timed(settings: RunSettings, rows: Workload, num_workers: int, played_rows: int) -> tuple[Forecast, float]:
    """A forecast that plays about `played_rows` rows, and the CPU's seconds for it, planning included."""
    start = time.process_time()
    cut = prediction.cut_rows(settings, rows, num_workers)
    found = forecast_job(
        rows, cut, settings.cost, num_workers, partial(prediction.play_expected, settings), played_rows
    )
    return found, time.process_time() - start


def main() -> None:
    """Parse, forecast, write, say where."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.forecasts", description=__doc__)
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="Azure LLM inference traces (CSV)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result page")
    parser.add_argument("--largest", type=int, default=10_000, help="largest job of the second table, in rows")
    parser.add_argument("--pairs", type=int, default=10, help="of jobs in each line of the third table")
    chosen = parser.parse_args()
    sizes = [size for size in JOBS if size[0] <= chosen.largest]
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    lines = [
        f"# Forecasts of simulated jobs, {day}",
        f"Made by `python -m lorabatch.benchmarks.simulation.forecasts` on {os.cpu_count()} cores, {cpu_name()}. "
        "CPU is the time of this process.",
        "",
        *by_prompt(),
    ]
    traces = [read_trace(path) for path in chosen.trace] or [synthetic_lengths()]
    for lengths in traces:
        lines += sampled(lengths, sizes)
    for lengths in traces:
        lines += after_earlier(lengths, range(chosen.pairs))
    path = chosen.output / f"{day}-forecasts.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
