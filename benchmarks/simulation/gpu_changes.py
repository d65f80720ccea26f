"""Mixed steps and throughput of a GPU by number of adapters, before and after two changes to its steps, simulated.

python -m lorabatch.benchmarks.simulation.gpu_changes [--rows 2000]

Before: rows enter as soon as there is a place, with memory for all of `max_tokens`. After: prompts enter together (ADR
83), and rows take memory as they grow (ADR 84). Llama-3-8B on one GPU as `scheduler/costs/machines.py` assumes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from lorabatch.benchmarks.simulation.growing_rows import Shape, settings_of, workload
from lorabatch.engine.batching.policy import choose_batcher
from lorabatch.pipeline.planning import prediction
from lorabatch.scheduler.batchers.batching import Batcher, ReplicaFacts
from lorabatch.scheduler.simulation.run import run_planned
from lorabatch.scheduler.simulation.timeline import JobMetrics

_ADAPTERS = (1, 16, 64, 256)
SHAPES = tuple(Shape(gigabytes, 60, 200, 0.7, 2048, count) for gigabytes in (80, 141) for count in _ADAPTERS)


def before_and_after(shape: Shape, num_rows: int) -> tuple[JobMetrics, JobMetrics]:
    """A job on one worker under the rules of both. Both runs have the shards of the second."""
    settings, rows = settings_of(shape), workload(shape, num_rows)
    plan = prediction.cut_rows(settings, rows, 1).plan

    def run(*, is_after: bool) -> JobMetrics:
        def batcher(facts: ReplicaFacts) -> Batcher:
            # without a price of mixed steps no row waits for others
            price = facts.cost.mixed_step_s if is_after else 0.0
            return choose_batcher(settings.engine, replace(facts, cost=replace(facts.cost, mixed_step_s=price)))

        replica = replace(prediction.replica_settings(settings), rows_grow=is_after)
        return run_planned(rows, plan, settings.cost, replica, 1, batcher, settings.scheduler(1)).metrics

    return run(is_after=False), run(is_after=True)


def table(num_rows: int) -> Iterator[str]:
    """Lines of Markdown. Of two numbers in a cell the second is after the changes."""
    yield "| GB | adapters | mixed steps | rows per step | output tokens/s | faster by |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for shape in SHAPES:
        both = before, after = before_and_after(shape, num_rows)
        cells = [
            *(shape.gigabytes, shape.num_adapters),
            ", ".join(f"{each.mixed_share:.0%}" for each in both),
            ", ".join(f"{each.batch_rows:.0f}" for each in both),
            ", ".join(f"{each.output_tokens_per_s:,.0f}" for each in both),
            f"{after.output_tokens_per_s / before.output_tokens_per_s - 1:.0%}",
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table as it grows."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.gpu_changes", description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    for line in table(parser.parse_args().rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
