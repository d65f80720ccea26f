"""The command: runs every comparison and writes a result page, `benchmarks/results/DATE-simulation.md`.

python -m lorabatch.benchmarks.simulation --output benchmarks/results [--trace AzureLLMInferenceTrace_conv.csv]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lorabatch.benchmarks.fidelity_results import RESULTS, FidelityResults
from lorabatch.benchmarks.simulation import dlora_figures, loraserve_figures
from lorabatch.benchmarks.simulation.decisions import (
    migration_decision_ms,
    placement_quality,
    planning_scale,
    scale_row,
)
from lorabatch.benchmarks.simulation.figure import Figure
from lorabatch.benchmarks.simulation.kept import Kept
from lorabatch.benchmarks.simulation.lengths import Lengths, read_trace, synthetic_lengths
from lorabatch.benchmarks.simulation.offline import compare, compare_loads
from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.benchmarks.simulation.report import Results, write_report
from lorabatch.jobs.store import JobStore

SIZES = ((100_000, 100, 10), (1_000_000, 1_000, 100), (10_000_000, 10_000, 1_000))


def main() -> None:
    """Parse, measure, write, say where."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result page")
    parser.add_argument("--trace", type=Path, help="an Azure LLM inference trace (CSV) for real lengths")
    parser.add_argument("--rows", type=int, default=1500, help="requests per serving run")
    parser.add_argument("--offline-rows", type=int, default=3000, help="rows per offline job")
    parser.add_argument("--largest", type=int, default=1_000_000, help="largest job of the scale table, in rows")
    parser.add_argument("--fidelity", type=Path, help="a file of benchmarks.fidelity; by default the newest result")
    parser.add_argument("--replay", type=Path, help="the output folder of a demo that ran, to replay its journal")
    parser.add_argument("--keep", type=Path, help="folder for parts that are done, to go on with after an end")
    chosen = parser.parse_args()
    lengths = read_trace(chosen.trace) if chosen.trace else synthetic_lengths()
    kept = Kept(chosen.keep)
    results = Results(
        lengths_source=lengths.source,
        figures=_figures(lengths, chosen.rows, kept),
        comparisons=kept.get("offline jobs", lambda: compare(lengths, chosen.offline_rows)),
        offline_rows=chosen.offline_rows,
        loads=kept.get("adapter loads", lambda: compare_loads(lengths, chosen.offline_rows)),
        placement=kept.get("placement", placement_quality),
        migration_ms=kept.get("migration", migration_decision_ms),
        planning=kept.get("planning", planning_scale),
        fidelity=FidelityResults.read(chosen.fidelity) if chosen.fidelity else FidelityResults.newest(),
        scale=[kept.get(f"scale {size[0]}", partial(scale_row, *size)) for size in SIZES if size[0] <= chosen.largest],
        command=_command(chosen),
        replayed=replay_job(JobStore(str(chosen.replay))) if chosen.replay else None,
    )
    print(f"wrote {write_report(results, chosen.output)}")


def _figures(lengths: Lengths, num_rows: int, kept: Kept) -> list[Figure]:
    """Every figure. A P95 of 10 s says something only over minutes: LoRAServe's higher rates need more requests."""
    makers: tuple[tuple[str, Callable[[Lengths, int], Figure], int], ...] = (
        ("dLoRA 11", dlora_figures.figure_11, 2),
        ("dLoRA 12", dlora_figures.figure_12, 1),
        ("LoRAServe 17", loraserve_figures.figure_17, 3),
        ("LoRAServe 19", loraserve_figures.figure_19, 3),
        ("LoRAServe 21", loraserve_figures.figure_21, 6),
        ("LoRAServe 22", loraserve_figures.figure_22, 3),
    )
    first = kept.get("dLoRA 10 and 14", lambda: dlora_figures.figure_10_and_14(lengths, num_rows))
    return [
        *first,
        *(kept.get(name, partial(make, lengths, factor * num_rows)) for name, make, factor in makers),
    ]


def _command(chosen: argparse.Namespace) -> str:
    words = ["python -m lorabatch.benchmarks.simulation"]
    words += [f"--trace {chosen.trace.name}"] if chosen.trace else []
    words += [f"--rows {chosen.rows}", f"--offline-rows {chosen.offline_rows}", f"--largest {chosen.largest}"]
    words += [f"--replay {chosen.replay.name}"] if chosen.replay else []
    return " ".join(words)


if __name__ == "__main__":
    main()
