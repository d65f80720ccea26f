"""The command: run every comparison and write `docs/simulation.md`.

python -m lorabatch.benchmarks.simulation --output docs [--trace AzureLLMInferenceTrace_conv.csv]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..fidelity_results import FidelityResults
from . import dlora_figures, loraserve_figures
from .decisions import migration_decision_ms, placement_quality, planning_scale, scale_row
from .figure import Figure
from .lengths import Lengths, read_trace, synthetic_lengths
from .offline import compare
from .report import Results, write_report

SIZES = ((100_000, 100, 10), (1_000_000, 1_000, 100), (10_000_000, 10_000, 1_000))


def main() -> None:
    """Parse, measure, write, say where."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder of simulation.md")
    parser.add_argument("--trace", type=Path, help="an Azure LLM inference trace (CSV) for real lengths")
    parser.add_argument("--rows", type=int, default=1500, help="requests per serving run")
    parser.add_argument("--offline-rows", type=int, default=3000, help="rows per offline job")
    parser.add_argument("--largest", type=int, default=1_000_000, help="largest job of the scale table, in rows")
    parser.add_argument("--fidelity", type=Path, help="a file of benchmarks.fidelity; by default the newest result")
    chosen = parser.parse_args()
    lengths = read_trace(chosen.trace) if chosen.trace else synthetic_lengths()
    results = Results(
        lengths_source=lengths.source,
        figures=_figures(lengths, chosen.rows),
        comparisons=compare(lengths, chosen.offline_rows),
        offline_rows=chosen.offline_rows,
        placement=placement_quality(),
        migration_ms=migration_decision_ms(),
        planning=planning_scale(),
        fidelity=FidelityResults.read(chosen.fidelity) if chosen.fidelity else FidelityResults.newest(),
        scale=[scale_row(*size) for size in SIZES if size[0] <= chosen.largest],
        command=_command(chosen),
    )
    print(f"wrote {write_report(results, chosen.output)}")


def _figures(lengths: Lengths, num_rows: int) -> list[Figure]:
    figures = list(dlora_figures.figure_10_and_14(lengths, num_rows))
    # A P95 of 10 s says something only over minutes: LoRAServe's higher rates need more requests.
    makers: tuple[tuple[Callable[[Lengths, int], Figure], int], ...] = (
        (dlora_figures.figure_11, 1),
        (dlora_figures.figure_12, 1),
        (loraserve_figures.figure_17, 3),
        (loraserve_figures.figure_19, 3),
        (loraserve_figures.figure_21, 2),
        (loraserve_figures.figure_22, 3),
    )
    for make, factor in makers:
        figures.append(make(lengths, factor * num_rows))
        print(f"{figures[-1].name} done", flush=True)
    return figures


def _command(chosen: argparse.Namespace) -> str:
    words = ["python -m lorabatch.benchmarks.simulation"]
    words += [f"--trace {chosen.trace.name}"] if chosen.trace else []
    words += [f"--rows {chosen.rows}", f"--offline-rows {chosen.offline_rows}", f"--largest {chosen.largest}"]
    return " ".join(words)


if __name__ == "__main__":
    main()
