"""The command: offline jobs and the time of decisions, in a result page `benchmarks/results/DATE-simulation.md`.

`papers.py` has the papers' figures, `grid.py` small jobs.

python -m lorabatch.benchmarks.simulation --output benchmarks/results [--trace AzureLLMInferenceTrace_conv.csv]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from lorabatch.benchmarks.fidelity_results import RESULTS, FidelityResults
from lorabatch.benchmarks.simulation.decisions import (
    migration_decision_ms,
    placement_quality,
    planning_scale,
    scale_row,
)
from lorabatch.benchmarks.simulation.kept import Kept
from lorabatch.benchmarks.simulation.lengths import read_trace, synthetic_lengths
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


def _command(chosen: argparse.Namespace) -> str:
    words = ["python -m lorabatch.benchmarks.simulation"]
    words += [f"--trace {chosen.trace.name}"] if chosen.trace else []
    words += [f"--offline-rows {chosen.offline_rows}", f"--largest {chosen.largest}"]
    words += [f"--replay {chosen.replay.name}"] if chosen.replay else []
    return " ".join(words)


if __name__ == "__main__":
    main()
