"""Offline jobs: the planner against what others would do with the same rows on the same replicas.

All are runs as jobs have them (`pipeline/planning/settings.py`), under the policies of `scheduler/policies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lorabatch.benchmarks.simulation.draws import top_five_popularity
from lorabatch.benchmarks.simulation.lengths import Lengths
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.workload import Workload

NUM_REPLICAS = 4
# Batches of 64 rows, for jobs of a few thousand rows; all else as an engine chooses it.
SETTINGS = RunSettings.of_machine("h200-llama-3-8b", batch_rows=64)
COMPARED = {"dlora": "dLoRA", "s-lora": "S-LoRA", "vllm-like": "vLLM-like"}


@dataclass(frozen=True, slots=True)
class Job:
    """One offline job of the comparison."""

    name: str
    workload: Workload


def jobs(lengths: Lengths, num_rows: int, seed: int) -> list[Job]:
    """Six jobs that differ in how many adapters there are and how even their shares.

    Adapters are tasks, and tasks have lengths of their own: outputs are the trace's times a factor per adapter
    (1/4 to 2), and its rows' `max_tokens` is that factor times 1,000.
    """
    generator = np.random.default_rng(seed)
    mixed = [8, 16, 32, 64, 128]
    kinds = {
        "one adapter": (np.ones(1), [16]),
        "2 adapters, even": (power_popularity(2, 0.0), [16, 16]),
        "8 adapters, Zipf": (power_popularity(8, 1.0), [16] * 8),
        "50 adapters, top five 70 %": (top_five_popularity(50), mixed * 10),
        "200 adapters, Zipf": (power_popularity(200, 1.0), mixed * 40),
        "200 adapters, even": (power_popularity(200, 0.0), mixed * 40),
    }
    made = []
    for name, (popularity, ranks) in kinds.items():
        factor = generator.choice([0.25, 0.5, 1.0, 2.0], len(ranks)) if len(ranks) > 2 else np.ones(len(ranks))
        prompt, drawn = lengths.draw(generator, num_rows)
        adapter = draw_adapters(generator, num_rows, popularity)
        limit = (1000 * factor[adapter]).astype(np.int32)
        output = np.clip(np.rint(drawn * factor[adapter]), 1, limit).astype(np.int32)
        made.append(Job(name, make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=limit)))
    return made


@dataclass(frozen=True, slots=True)
class Comparison:
    """Makespans in seconds of one job, the planner's under "planner"."""

    job: str
    makespan_s: dict[str, float]
    merged_share: float


def compare(lengths: Lengths, num_rows: int, seeds: tuple[int, ...] = (21, 22, 23)) -> list[Comparison]:
    """Every job under every system; makespans are means over the seeds."""
    by_seed = [[_compare_job(job) for job in jobs(lengths, num_rows, seed)] for seed in seeds]
    return [
        Comparison(
            same[0].job,
            {name: float(np.mean([found.makespan_s[name] for found in same])) for name in same[0].makespan_s},
            float(np.mean([found.merged_share for found in same])),
        )
        for same in zip(*by_seed, strict=True)
    ]


def _compare_job(job: Job) -> Comparison:
    runs = {
        name: prediction.simulate(SETTINGS.under(policy), job.workload, NUM_REPLICAS)
        for policy, name in COMPARED.items()
    }
    runs["planner"] = prediction.simulate(SETTINGS, job.workload, NUM_REPLICAS)
    makespan = {name: run.metrics.makespan_s for name, run in runs.items()}
    return Comparison(job.name, makespan, runs["planner"].metrics.merged_share)


@dataclass(frozen=True, slots=True)
class LoadsAhead:
    """Makespan in seconds and share of busy time spent on adapter loads: rows that fetch their adapter, and adapters
    that the scheduler has sent ahead."""

    job: str
    on_demand: tuple[float, float]
    ahead: tuple[float, float]


def compare_loads(lengths: Lengths, num_rows: int, seed: int = 21) -> list[LoadsAhead]:
    """With and without sources named in RunShard: engines read adapters that their next rows need in any case."""
    found = []
    for job in jobs(lengths, num_rows, seed)[2:]:
        seconds = []
        for is_ahead in (False, True):
            run = prediction.simulate(replace(SETTINGS, shares_adapters=is_ahead), job.workload, NUM_REPLICAS)
            seconds.append((run.metrics.makespan_s, run.metrics.load_share))
        found.append(LoadsAhead(job.name, *seconds))
    return found
