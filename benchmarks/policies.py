"""Real jobs under this project's and other systems' policies, and the same jobs simulated.

python -m lorabatch.benchmarks.policies [--workers 2 3] [--repeats 3] [--only WORKLOAD …] [--systems SYSTEM …]
    [--save RESULT.json]

Real engines of one thread each on a small random base model. Each workload runs under every policy in turn, `--repeats`
times; makespans are medians, from the first shard opened to the last part written. Engines are started once for each
policy and number of workers and stay warm; prompts are new in every run, so that no prompt is found in a prefix cache.
Lengths of answers are known to the plan but for one workload, whose rows end by chance. Simulated makespans have the
lengths that the answers had and a cost model that is measured first, with as many engines as workers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from distributed import Client
from numpy.typing import NDArray
from safetensors.torch import save_file

from lorabatch.benchmarks.engine.many_adapters import small_base
from lorabatch.benchmarks.provenance import provenance
from lorabatch.engine.config import read_model_config
from lorabatch.engine.models.load import dummy_weights
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.cluster.connect import embedded
from lorabatch.pipeline.cluster.devices import find_device
from lorabatch.pipeline.messages import EngineSettings
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.dry_run import dry_run
from lorabatch.pipeline.planning.profile import profile_model
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.pipeline.run import run
from lorabatch.pipeline.worker.registration import register_plugin, unregister_plugin
from lorabatch.scheduler.simulation.synthetic import draw_adapters, power_popularity

BATCH_ROWS = 16
# Name -> policy and placement.
SYSTEMS = {
    "ours": ("planner", "planner"),
    "dLoRA": ("dlora", "planner"),
    "S-LoRA": ("s-lora", "planner"),
    "vLLM-like": ("vllm-like", "planner"),
    "LoRAServe": ("s-lora", "loraserve"),
    "ours, LoRAServe's placement": ("planner", "loraserve"),
}
RANKS = (4, 8, 16, 32, 64, 128)
# A row that may end by itself does so at each token with this probability.
_END_SHARE = 0.02
_SCHEMA = pa.schema(
    {"id": pa.int64(), "adapter": pa.string(), "prompt_token_ids": pa.list_(pa.int32()), "max_tokens": pa.int32()}
)
Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]


def between(low: int, high: int) -> Lengths:
    """Any length from `low` to `high`, all alike."""
    return lambda generator, count: generator.integers(low, high + 1, count)


def bimodal(short: Lengths, long: Lengths, share: float) -> Lengths:
    """Short ones, and long ones among them."""
    return lambda generator, count: np.where(
        generator.random(count) < share, long(generator, count), short(generator, count)
    )


@dataclass(frozen=True, slots=True)
class Mix:
    """One workload: how its rows are drawn."""

    #: Name in the table.
    name: str
    #: Rows of a job; `--scale` multiplies the numbers of `MIXES`.
    num_rows: int
    #: LoRA rank of each adapter.
    ranks: tuple[int, ...]
    #: Exponent of the adapters' popularity; 0 is even.
    skew: float
    #: Draws the prompt tokens of rows.
    prompt: Lengths
    #: Draws the `max_tokens` of rows.
    output: Lengths
    #: Whether answers take all of `max_tokens`, and the plan knows it.
    has_known_ends: bool = True


MIXES = (
    Mix("4 adapters, skewed", 120, (16,) * 4, 2.0, between(16, 64), between(16, 64)),
    Mix("40 adapters, even", 120, (16,) * 40, 0.0, between(16, 64), between(16, 64)),
    Mix("16 adapters, Zipf 1.5", 120, (16,) * 16, 1.5, between(16, 64), between(16, 64)),
    Mix("long prompts, short answers", 120, (16,) * 8, 1.0, between(200, 400), between(4, 12)),
    Mix("short prompts, long answers", 60, (16,) * 8, 1.0, between(8, 24), between(60, 160)),
    Mix("bimodal lengths", 120, (16,) * 8, 1.0, between(16, 64), bimodal(between(8, 24), between(150, 250), 0.1)),
    Mix("adapters of unequal rank", 120, RANKS * 2, 1.0, between(16, 64), between(16, 64)),
    Mix("lengths unknown", 80, (16,) * 8, 1.0, between(16, 64), between(256, 256), has_known_ends=False),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured and simulated makespans of one system on one workload."""

    #: Name of the workload (`Mix.name`).
    workload: str
    #: Number of workers.
    workers: int
    #: Key of `SYSTEMS`.
    system: str
    #: Seconds from the first shard opened to the last part written, one per repeat.
    seconds: tuple[float, ...]
    #: Seconds of the same span, simulated with the lengths that answers had.
    simulated_s: float

    @property
    def median_s(self) -> float:
        """Median seconds of the repeats."""
        return median(self.seconds)

    @property
    def error(self) -> float:
        """How far the simulation is above what was measured, as a share of it."""
        return self.simulated_s / self.median_s - 1


@dataclass(frozen=True, slots=True)
class Rig:
    """Settings that all jobs share. `folder`: scratch. `cost_model`: number of workers -> file of the profile.
    `systems`: keys of `SYSTEMS` that are compared.
    """

    folder: Path
    model: Path
    cost_model: dict[int, Path]
    systems: tuple[str, ...]

    def spec(self, system: str, workers: int, mix: Mix, seed: int) -> JobSpec:
        """A job with a new input and an output of its own. The same workload has the same lengths for every seed."""
        policy, placement = SYSTEMS[system]
        adapters = self._adapters(mix)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        pq.write_table(rows_of(mix, seed), folder / "input.parquet")
        chosen: dict[str, Any] = {"policy": policy, "placement": placement}
        return JobSpec(
            model=str(self.model),
            adapters=str(adapters),
            input=str(folder / "input.parquet"),
            output=str(folder / "output"),
            **chosen,
            workers=workers,
            batch_rows=BATCH_ROWS,
            engine_threads=1,
            cost_model=str(self.cost_model[workers]),
            ignore_eos=mix.has_known_ends,
            temperature=1.0,
            row_settings=("max_tokens",),
        )

    def _adapters(self, mix: Mix) -> Path:
        folder = self.folder / "adapters" / "-".join(map(str, mix.ranks))
        for number, rank in enumerate(mix.ranks):
            if not (folder / f"a{number}").exists():
                write_random_adapter(folder / f"a{number}", read_model_config(self.model), rank, seed=number)
        return folder


def rows_of(mix: Mix, seed: int) -> pa.Table:
    """The rows of a workload. `seed`: of the tokens of their prompts."""
    generator, tokens = np.random.default_rng(7), np.random.default_rng(seed)
    adapter = draw_adapters(generator, mix.num_rows, power_popularity(len(mix.ranks), mix.skew))
    prompt, output = mix.prompt(generator, mix.num_rows), mix.output(generator, mix.num_rows)
    rows = [
        {
            "id": number,
            "adapter": f"a{adapter[number]}",
            "prompt_token_ids": tokens.integers(100, 40_000, prompt[number]).tolist(),
            "max_tokens": int(output[number]),
        }
        for number in range(mix.num_rows)
    ]
    return pa.Table.from_pylist(rows, _SCHEMA)


def base_model(folder: Path) -> Path:
    """A small random base whose rows end by chance, unless they ignore their end."""
    small_base(folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ends = np.linspace(1000, 48_000, round(_END_SHARE * 49_152)).astype(int)
        path.write_text(json.dumps(config | {"eos_token_id": ends.tolist()}), encoding="utf-8")
    weights = dummy_weights(read_model_config(folder), torch.float32, torch.device("cpu"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@contextmanager
def warm_engines(client: Client, rig: Rig, workers: int) -> Iterator[None]:
    """Keep an engine for every system on every worker: a run without shards that uses it."""
    held = []
    for system in rig.systems:
        job = open_job(rig.spec(system, workers, MIXES[0], 0))
        settings = RunSettings.of(job, workers, find_device("cpu"))
        sha256 = job.record.model.sha256
        engines = EngineSettings(job.spec.model, settings.engine, model_sha256=sha256)
        held.append(register_plugin(client, job.record.job_id, engines, job.store))
    yield
    for run_id in held:
        unregister_plugin(client, run_id)


def measure(rig: Rig, mix: Mix, workers: int, client: Client, repeats: int) -> list[Measured]:
    """Run a workload under every system in turn, then simulate each with the lengths that answers had."""
    seconds: dict[str, list[float]] = {system: [] for system in rig.systems}
    spec = None
    for repeat in range(repeats):
        for number, system in enumerate(rig.systems):
            spec = rig.spec(system, workers, mix, seed=1 + repeat * len(rig.systems) + number)
            result = run(spec, client=client)
            assert (result.num_rows, result.num_errors) == (mix.num_rows, 0), result
            assert result.working_s is not None
            seconds[system].append(result.working_s)
    assert spec is not None
    simulated = _simulated(spec, workers, rig.systems)
    return [Measured(mix.name, workers, system, tuple(seconds[system]), simulated[system]) for system in rig.systems]


def _simulated(spec: JobSpec, workers: int, systems: Sequence[str]) -> dict[str, float]:
    """Makespans of a finished job's rows, by system."""
    answers = ds.dataset(spec.output, format="parquet").to_table(columns=["id", "completion_tokens"])
    tokens = np.empty(len(answers), np.int32)
    tokens[answers["id"].to_numpy()] = answers["completion_tokens"].to_numpy()
    found = dry_run(spec.model_dump(exclude={"columns"}) | {"policy": "planner", "placement": "planner"})
    output = np.empty_like(tokens)
    output[found.workload.input_order] = tokens
    workload = replace(found.workload, output_tokens=output)
    return {
        system: prediction.simulate(found.settings.under(*SYSTEMS[system]), workload, workers).metrics.makespan_s
        for system in systems
    }


def table(found: Sequence[Measured]) -> str:
    """One line for each workload and number of workers: measured seconds, simulated ones and their error."""
    systems = list(dict.fromkeys(one.system for one in found))
    lines = [f"| workload | workers | {' | '.join(systems)} |", f"|---|---:|{'---:|' * len(systems)}"]
    for workload, workers in dict.fromkeys((one.workload, one.workers) for one in found):
        of_system = {one.system: one for one in found if (one.workload, one.workers) == (workload, workers)}
        best_s = min(one.median_s for one in of_system.values())
        cells = [
            f"{'**' if one.median_s == best_s else ''}{one.median_s:.1f}{'**' if one.median_s == best_s else ''} "
            f"({one.simulated_s:.1f}, {one.error:+.0%})"
            for one in (of_system[system] for system in systems)
        ]
        lines.append(f"| {workload} | {workers} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print as it goes, print the table."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.policies", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[mix.name for mix in MIXES], help="beginnings of workloads' names")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--scale", type=float, default=4.0, help="factor of the number of rows; 1: jobs of two seconds")
    parser.add_argument("--profile-seconds", type=float, default=40.0, help="of a cost model; too few leave gaps")
    parser.add_argument("--save", type=Path, help="JSON file")
    chosen = parser.parse_args()
    # No job is to know what earlier ones have measured.
    os.environ["LORABATCH_HISTORY"] = "off"
    mixes = [
        replace(mix, num_rows=round(mix.num_rows * chosen.scale))
        for mix in MIXES
        if any(mix.name.startswith(name) for name in chosen.only)
    ]
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as name:
        rig = Rig(Path(name), base_model(Path(name) / "base"), {}, tuple(chosen.systems))
        for workers in chosen.workers:
            path = rig.cost_model[workers] = Path(name) / f"cost-{workers}.json"
            engines = {"workers": workers, "engine_threads": 1, "batch_rows": BATCH_ROWS}
            spec = JobSpec(model=str(rig.model), input="-", output="-", **engines)
            profile_model(spec, chosen.profile_seconds, path)
            with embedded(workers) as client, warm_engines(client, rig, workers):
                for mix in mixes:
                    found += measure(rig, mix, workers, client, chosen.repeats)
                    for one in found[-len(rig.systems) :]:
                        shown = ", ".join(f"{value:.2f}" for value in one.seconds)
                        print(
                            f"{one.workload}, {workers} workers, {one.system}: {shown}; {one.simulated_s:.2f}",
                            flush=True,
                        )
    print(table(found))
    if chosen.save:
        facts: dict[str, Any] = provenance(["torch", "distributed", "numpy"])
        chosen.save.write_text(json.dumps(facts | {"found": [asdict(one) for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
