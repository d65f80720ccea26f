"""Simulates what holding rows back (`PromptsTogether`) gains where prompts cost decoding rows time.

python -m lorabatch.benchmarks.simulation.mixed_steps [--rows 3000]

One H200 with Llama-3-8B as `scheduler/costs/machines.py` assumes it, with the settings of a job. Each job runs twice:
rows enter as soon as there is a place, and held back as in real jobs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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
from lorabatch.scheduler.simulation.timeline import JobMetrics
from lorabatch.scheduler.workload import Workload

_ADAPTERS = (1, 16, 64, 256)
_RANK = 16
_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a batch; median tokens of prompts and of answers."""

    batch_rows: int
    prompt_tokens: int
    output_tokens: int


SHAPES = (Shape(64, 60, 200), Shape(256, 60, 200), Shape(256, 600, 200), Shape(256, 600, 30), Shape(512, 60, 200))


def workload(shape: Shape, num_adapters: int, num_rows: int) -> Workload:
    """Lengths spread around their medians (log-normal); every adapter equally wanted."""
    generator = np.random.default_rng(num_adapters)
    prompt = draw_lengths(generator, num_rows, shape.prompt_tokens, 0.7, 3000)
    output = draw_lengths(generator, num_rows, shape.output_tokens, 0.7, _MAX_TOKENS)
    adapter = draw_adapters(generator, num_rows, power_popularity(num_adapters, 0.0))
    return make_workload(make_adapters([_RANK] * num_adapters), adapter, prompt, output, max_tokens=_MAX_TOKENS)


def at_once_and_held_back(shape: Shape, rows: Workload) -> tuple[JobMetrics, JobMetrics]:
    """A job on one worker; first with rows that enter at once."""
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=shape.batch_rows)
    free = replace(settings.engine, cost=replace(settings.cost, mixed_step_s=0.0))
    at_once = replace(settings, engine=free, prices=settings.cost)
    return prediction.simulate(at_once, rows, 1).metrics, prediction.simulate(settings, rows, 1).metrics


def table(num_rows: int) -> Iterator[str]:
    """Lines of Markdown. Of two numbers in a cell the second is with rows held back."""
    yield "| batch | prompt | answer | adapters | mixed steps | rows per step | seconds | faster by |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for shape in SHAPES:
        for num_adapters in _ADAPTERS:
            both = at_once_and_held_back(shape, workload(shape, num_adapters, num_rows))
            before, after = both
            cells = [
                *(shape.batch_rows, shape.prompt_tokens, shape.output_tokens, num_adapters),
                ", ".join(f"{each.mixed_share:.0%}" for each in both),
                ", ".join(f"{each.batch_rows:.0f}" for each in both),
                ", ".join(f"{each.makespan_s:.1f}" for each in both),
                f"{before.makespan_s / after.makespan_s - 1:.1%}",
            ]
            yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table as it grows."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.mixed_steps", description=__doc__)
    parser.add_argument("--rows", type=int, default=3000)
    for line in table(parser.parse_args().rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
