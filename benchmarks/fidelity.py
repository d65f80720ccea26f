"""Predicted against measured: jobs planned with a measured cost model, then run for real on two workers.

python -m lorabatch.benchmarks.fidelity --cost-model PROFILE.json --save RESULTS.json [--job NAME …]

Most jobs' answers have known lengths (the stop token is ignored), so that what differs is the model of the engine and
of the cluster, not a guess of lengths. The last one is the demo, whose lengths are unknown: it is also predicted
afterwards, with the measured lengths. Measured: from the first shard opened to the last part written. Results of
several calls are collected in one file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lorabatch.benchmarks.fidelity_results import Fidelity
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import demo_spec
from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.jobs.cost_profile import machine, read_profile
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.dry_run import dry_run
from lorabatch.pipeline.run import run

NUM_WORKERS = 2
DEMO = "the demo"
RANKS = (8, 8, 16, 16, 32, 32, 64, 64)
_SCHEMA = pa.schema(
    {"id": pa.int64(), "adapter": pa.string(), "prompt_token_ids": pa.list_(pa.int32()), "max_tokens": pa.int32()}
)


@dataclass(frozen=True, slots=True)
class JobMix:
    """One job: `draw(generator)` gives (prompt tokens, output tokens, adapter number or -1) of each row."""

    name: str
    draw: Callable[[np.random.Generator], Sequence[tuple[int, int, int]]]
    options: tuple[tuple[str, Any], ...] = ()


def rows_between(count: int, prompt: tuple[int, int], output: tuple[int, int], adapters: Sequence[int]) -> Any:
    """A function that draws `count` rows: numbers of prompt and output tokens from the first of a pair to below the
    second, and adapters as often as `adapters` lists them."""

    def draw(generator: np.random.Generator) -> list[tuple[int, int, int]]:
        return [
            (int(generator.integers(*prompt)), int(generator.integers(*output)), int(generator.choice(adapters)))
            for _ in range(count)
        ]

    return draw


_ZIPF = (0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7)

MIXES = (
    JobMix("base model, short answers", rows_between(160, (16, 48), (8, 40), (-1,))),
    JobMix("one adapter", rows_between(140, (16, 64), (16, 40), (2,)), (("mode", "unmerged"),)),
    JobMix("8 adapters, Zipf", rows_between(140, (16, 64), (16, 40), _ZIPF), (("mode", "unmerged"),)),
    JobMix("long prompts, 4 adapters", rows_between(48, (150, 250), (4, 12), (0, 2, 4, 6)), (("mode", "unmerged"),)),
    JobMix(
        "long answers, 2 adapters and base", rows_between(64, (16, 32), (40, 110), (1, 7, -1)), (("mode", "unmerged"),)
    ),
    JobMix("two adapters, merged", rows_between(140, (16, 64), (16, 40), (2, 3)), (("mode", "merged"),)),
)


def prepared(
    mix: JobMix, model: Path, adapters: Path, folder: Path
) -> tuple[dict[str, Any], Sequence[tuple[int, int, int]]]:
    """Write a job's rows; its options, and what was drawn. Answers are as long as they may be."""
    generator = np.random.default_rng(0)
    drawn = mix.draw(generator)
    vocabulary = read_model_config(model).vocab_size
    rows = [
        {
            "id": i,
            "adapter": f"a{adapter}" if adapter >= 0 else None,
            "prompt_token_ids": generator.integers(10, vocabulary - 10, prompt).tolist(),
            "max_tokens": output,
        }
        for i, (prompt, output, adapter) in enumerate(drawn)
    ]
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), folder / "input.parquet")
    options: dict[str, Any] = {
        "model": str(model),
        "adapters": str(adapters),
        "input": str(folder / "input.parquet"),
        "output": str(folder / "output"),
        "workers": NUM_WORKERS,
        "ignore_eos": True,
        "row_settings": ("max_tokens",),
    }
    return options | dict(mix.options), drawn


def measure(mix: JobMix, model: Path, adapters: Path, cost_model: Path, folder: Path) -> Fidelity:
    """Plan a job, run it, compare."""
    options, drawn = prepared(mix, model, adapters, folder)
    options["cost_model"] = str(cost_model)
    predicted_s = dry_run(options).forecast.predicted_s
    run(JobSpec(**options))
    return Fidelity(
        mix.name,
        len(drawn),
        sum(prompt for prompt, _, _ in drawn),
        sum(output for _, output, _ in drawn),
        predicted_s,
        measured_makespan_s(JobStore(str(folder / "output"))),
    )


def measure_demo(cost_model: Path, folder: Path) -> list[Fidelity]:
    """The demo as `plan` sees it, and once more with the lengths that its answers have had."""
    spec = demo_spec(folder / "output", workers=NUM_WORKERS, overwrite=False)
    options = spec.model_dump(exclude={"columns"}) | {"cost_model": str(cost_model)}
    found = dry_run(options)
    run(JobSpec(**options))
    measured_s = measured_makespan_s(JobStore(str(folder / "output")))
    answers = ds.dataset(folder / "output", format="parquet").to_table(columns=["id", "adapter", "completion_tokens"])
    workload = replace(found.workload, output_tokens=_in_index_order(answers, spec))
    known_s = prediction.simulate(found.settings, workload, NUM_WORKERS).metrics.makespan_s
    sizes = (workload.num_rows, int(workload.prompt_tokens.sum()), int(answers["completion_tokens"].to_numpy().sum()))
    return [
        Fidelity(DEMO, *sizes, predicted_s=found.forecast.predicted_s, measured_s=measured_s, has_lengths=False),
        Fidelity(f"{DEMO}, lengths as they came", *sizes, predicted_s=known_s, measured_s=measured_s),
    ]


def _in_index_order(answers: pa.Table, spec: JobSpec) -> NDArray[np.int32]:
    """Tokens of each answer in the order of the job's workload: row group after row group, by adapter in each."""
    tokens = dict(zip(answers["id"].to_pylist(), answers["completion_tokens"].to_pylist(), strict=True))
    asked = pq.ParquetFile(spec.inputs[0])
    groups = [asked.read_row_group(i, ["id", "adapter"]).to_pylist() for i in range(asked.num_row_groups)]
    ordered = [row["id"] for group in groups for row in sorted(group, key=lambda row: row["adapter"] or "")]
    return np.array([tokens[row_id] for row_id in ordered], np.int32)


def measured_makespan_s(store: JobStore) -> float:
    """From the first shard opened to the last one committed, by the job's own journal."""
    now_s = 0.0
    opened_s: list[float] = []
    committed_s: list[float] = []
    for line in store.read_events():
        now_s = float(line.get("time_s", now_s))
        if line["kind"] == "RunShard":
            opened_s.append(now_s)
        if line["kind"] == "ShardCommitted":
            committed_s.append(now_s)
    return max(committed_s) - min(opened_s)


def main() -> None:
    """Parse, measure, collect, print."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.fidelity", description=__doc__)
    parser.add_argument("--cost-model", type=Path, required=True, help="file of `lorabatch profile --workers 2`")
    parser.add_argument("--save", type=Path, required=True, help="JSON file; results that are there are kept")
    parser.add_argument("--model", type=Path, help="model folder; by default the demo's base")
    parser.add_argument("--job", type=int, nargs="*", default=range(len(MIXES) + 1), help="numbers, all by default")
    chosen = parser.parse_args()
    model = chosen.model or base_model_folder()
    before = json.loads(chosen.save.read_text(encoding="utf-8"))["jobs"] if chosen.save.exists() else []
    found = {job["job"]: job for job in before}
    with tempfile.TemporaryDirectory() as name:
        adapters = Path(name) / "adapters"
        for i, rank in enumerate(RANKS):
            write_random_adapter(adapters / f"a{i}", read_model_config(model), rank, seed=i)
        for number in chosen.job:
            folder = Path(name) / str(number)
            folder.mkdir()
            if number < len(MIXES):
                measured = [measure(MIXES[number], model, adapters, chosen.cost_model, folder)]
            else:
                measured = measure_demo(chosen.cost_model, folder)
            for one in measured:
                found[one.job] = asdict(one)
                print(f"{one.job}: predicted {one.predicted_s:.1f} s, measured {one.measured_s:.1f} s", flush=True)
    facts = {"machine": machine(), "date": datetime.now(UTC).date().isoformat(), "workers": NUM_WORKERS}
    facts |= {"model": model.name, "profile": read_profile(chosen.cost_model).to_json()}
    chosen.save.write_text(json.dumps(facts | {"jobs": list(found.values())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
