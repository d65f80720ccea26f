"""Writes the result page of one run of the simulation benchmarks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lorabatch.benchmarks.fidelity_results import FidelityResults
from lorabatch.benchmarks.provenance import cpu_name
from lorabatch.benchmarks.simulation.decisions import PlacementQuality, PlanningScale, ScaleRow
from lorabatch.benchmarks.simulation.offline import Comparison, LoadsAhead
from lorabatch.scheduler.simulation.replay import ReplayOutcome


@dataclass(frozen=True, slots=True)
class Results:
    """Everything one run of the command measured."""

    #: Source of the rows' lengths, as text.
    lengths_source: str
    #: Offline jobs under the planner and under other policies.
    comparisons: Sequence[Comparison]
    #: Rows of each offline job.
    offline_rows: int
    #: Offline jobs with adapters loaded on demand and sent ahead.
    loads: Sequence[LoadsAhead]
    #: Regret and gap of placements.
    placement: PlacementQuality
    #: (median, longest) milliseconds of one co-migration decision.
    migration_ms: tuple[float, float]
    #: Time and memory of a plan of a million rows.
    planning: PlanningScale
    #: Time to plan and to simulate, one entry per size of job.
    scale: Sequence[ScaleRow]
    #: Real jobs, predicted and measured; None leaves the section out.
    fidelity: FidelityResults | None
    #: Command line that repeats the run.
    command: str
    #: Outcome of the replay of a real run; None: none was replayed.
    replayed: ReplayOutcome | None = None


def write_report(results: Results, folder: Path) -> Path:
    """Writes `folder/DATE-simulation.md`. Returns the file."""
    name = f"{datetime.now(UTC):%Y-%m-%d}-simulation"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# Simulation, {name[:10]}",
        "",
        "The scheduler's code on simulated replicas: offline jobs, and the time of decisions.",
        "[Simulated results](../simulation/README.md) says which of these results hold for real jobs.",
        "",
        f"Lengths: {results.lengths_source}. Everything but the timings repeats exactly from its seeds.",
        "",
        f"Made by `{results.command}` with Python {platform.python_version()} on {os.cpu_count()} cores, "
        f"{cpu_name()}, {name[:10]}.",
        "",
        *_offline(results.comparisons, results.offline_rows),
        *_loads(results.loads),
        *_decisions(results),
        *(results.fidelity.to_lines() if results.fidelity else []),
    ]
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _offline(comparisons: Sequence[Comparison], num_rows: int) -> list[str]:
    others = [name for name in comparisons[0].makespan_s if name != "planner"]
    lines = [
        "## Offline jobs: the planner against online policies",
        "",
        f"{num_rows} rows, 4 replicas (H200, Llama-3-8B cost model), all rows there at the start. Seconds, and in",
        "brackets the ratio to the planner's; means over three seeds. The planner has the settings of a real job.",
        "",
        "| job | planner | " + " | ".join(others) + " | passes merged |",
        "|---|---|" + "---|" * len(others) + "---|",
    ]
    for found in comparisons:
        planned = found.makespan_s["planner"]
        cells = [f"{found.makespan_s[name]:.1f} ({found.makespan_s[name] / planned:.2f})" for name in others]
        lines.append(f"| {found.job} | {planned:.1f} | {' | '.join(cells)} | {found.merged_share:.0%} |")
    worst = min(
        (found.makespan_s[name] / found.makespan_s["planner"], name, found.job)
        for found in comparisons
        for name in others
    )
    return [
        *lines,
        "",
        f"The planner's worst case: {worst[0]:.3f} against {worst[1]} on “{worst[2]}” (goal: at least "
        "0.98). Output lengths are unknown to every policy.",
        "",
    ]


def _loads(loads: Sequence[LoadsAhead]) -> list[str]:
    lines = [
        "## Adapters sent ahead",
        "",
        "The same jobs with adapters in storage (1 GB/s): read by the engine for its next rows, or fetched as soon as",
        "the scheduler opens the shard, from a worker that has the adapter.",
        "",
        "| job | on demand, s | of it loading | sent ahead, s | of it loading |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {found.job} | {found.on_demand[0]:.1f} | {found.on_demand[1]:.1%} | {found.ahead[0]:.1f} | "
        f"{found.ahead[1]:.1%} |"
        for found in loads
    ]
    return [*lines, ""]


def _decisions(results: Results) -> list[str]:
    placement, (median_ms, longest_ms) = results.placement, results.migration_ms
    lines = [
        "## Decisions",
        "",
        f"- Placement against brute force on small instances: {placement.worst_regret:.1%} worse at most, "
        f"{placement.mean_regret:.2%} on average (60 of them; goal 5%).",
        f"- Gap of the placement on 10,000 Zipf rows over 100 adapters and 16 replicas: {placement.zipf_gap:.2%} "
        f"(found in {placement.zipf_s:.1f} s; goal 2%).",
        f"- Co-migration at K = 8 (32 replicas, 32 adapters): {median_ms:.1f} ms median, {longest_ms:.1f} ms at most.",
        f"- A whole plan (waves, modes, {results.planning.num_shards:,} shards placed) of 1,000,000 rows over 1,000 "
        f"adapters on 100 replicas: {results.planning.seconds:.1f} s, gap of the placement {results.planning.gap:.2%}; "
        f"its forecast, of a sample of rows, {results.planning.forecast_s:.1f} s; "
        f"the process took {results.planning.peak_bytes / 1e9:.1f} GB at most (goals 60 s and 4 GB).",
        *_replayed(results.replayed),
        "",
        "| rows | adapters | replicas | plan, s | simulate, s | events | per event, µs | longest, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.num_rows:,} | {row.num_adapters:,} | {row.num_replicas:,} | {row.plan_s:.1f} | "
        f"{row.simulate_s:.0f} | {row.num_events:,} | {row.mean_event_us:.0f} | {row.longest_event_ms:.0f} |"
        for row in results.scale
    ]
    return [*lines, ""]


def _replayed(outcome: ReplayOutcome | None) -> list[str]:
    if outcome is None:
        return []
    found = "exactly" if outcome.first_difference is None else f"but not at event {outcome.first_difference[0]}"
    return [
        f"- Replay of a real run (`lorabatch demo`, two workers): its {outcome.num_events:,} recorded events give the "
        f"{outcome.num_commands:,} recorded commands, {found}."
    ]
