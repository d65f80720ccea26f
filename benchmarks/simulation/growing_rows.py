"""Simulates what jobs gain if rows on a GPU take memory as they grow, and not for all of `max_tokens` at once.

python -m lorabatch.benchmarks.simulation.growing_rows [--rows 2000]

Llama-3-8B on one GPU as `scheduler/costs/machines.py` assumes it, with the settings of a job. Each job runs thrice:
rows hold memory for all of `max_tokens`; they grow; and they hold what they will need, which is not known.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lorabatch.engine.batching.policy import choose_batcher
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.simulation.run import run_planned
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.simulation.timeline import JobMetrics
from lorabatch.scheduler.workload import Workload

_RANK = 16
_LONGEST = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of job, and the memory of the GPU that it runs on."""

    #: Memory of the GPU, in GB.
    gigabytes: int
    #: Median tokens of a prompt.
    prompt_tokens: int
    #: Median tokens of an answer.
    output_tokens: int
    #: Sigma of the answers' log-normal lengths.
    spread: float
    #: `max_tokens` of every row.
    max_tokens: int
    #: Adapters, all equally popular.
    num_adapters: int = 64


SHAPES = (
    *(Shape(gigabytes, 60, 200, 0.7, most) for gigabytes in (80, 141) for most in (1024, 2048, 4096)),
    *(Shape(80, 600, 200, 0.7, 4096, adapters) for adapters in (1, 16, 64, 256)),
    Shape(80, 60, 60, 1.2, 1024),
    Shape(80, 60, 200, 1.2, 1024),
    Shape(40, 600, 200, 0.7, 1024),
)


def workload(shape: Shape, num_rows: int) -> Workload:
    """Lengths spread around their medians (log-normal); every adapter equally wanted."""
    generator = np.random.default_rng(shape.max_tokens)
    prompt = draw_lengths(generator, num_rows, shape.prompt_tokens, 0.7, 3000)
    output = draw_lengths(generator, num_rows, shape.output_tokens, shape.spread, _LONGEST)
    adapter = draw_adapters(generator, num_rows, power_popularity(shape.num_adapters, 0.0))
    adapters = make_adapters([_RANK] * shape.num_adapters)
    return make_workload(adapters, adapter, prompt, output, max_tokens=shape.max_tokens)


def settings_of(shape: Shape) -> RunSettings:
    """Settings of a job on a GPU with the shape's memory."""
    found = RunSettings.of_machine("h200-llama-3-8b")
    return replace(found, device=replace(found.device, memory_bytes=shape.gigabytes * 10**9))


def held_grown_and_known(shape: Shape, rows: Workload) -> tuple[JobMetrics, JobMetrics, JobMetrics]:
    """A job on one worker under each rule. All three runs have the shards of the second."""
    settings = settings_of(shape)
    plan = prediction.cut_rows(settings, rows, 1).plan
    assert rows.output_tokens is not None
    known = replace(rows, max_tokens=rows.output_tokens)

    def run(workload: Workload, *, rows_grow: bool) -> JobMetrics:
        replica = replace(prediction.replica_settings(settings), rows_grow=rows_grow)
        return run_planned(
            workload,
            plan,
            settings.cost,
            replica,
            1,
            lambda facts: choose_batcher(settings.engine, facts),
            settings.scheduler(1),
        ).metrics

    return run(rows, rows_grow=False), run(rows, rows_grow=True), run(known, rows_grow=False)


def table(num_rows: int) -> Iterator[str]:
    """Lines of Markdown. Of three numbers in a cell the second is with rows that grow."""
    names = (
        "GB",
        "prompt",
        "answer",
        "spread",
        "`max_tokens`",
        "adapters",
        "rows per step",
        "seconds",
        "faster",
        "preempted",
    )
    yield f"| {' | '.join(names)} |"
    yield f"|{'---:|' * len(names)}"
    for shape in SHAPES:
        runs = held_grown_and_known(shape, workload(shape, num_rows))
        held, grown, _ = runs
        cells = [
            *(shape.gigabytes, shape.prompt_tokens, shape.output_tokens, shape.spread),
            *(shape.max_tokens, shape.num_adapters),
            ", ".join(f"{each.batch_rows:.0f}" for each in runs),
            ", ".join(f"{each.makespan_s:.1f}" for each in runs),
            f"{round(100 * (held.makespan_s / grown.makespan_s - 1))}%",
            grown.num_preempted,
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table as it grows."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.growing_rows", description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    for line in table(parser.parse_args().rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
