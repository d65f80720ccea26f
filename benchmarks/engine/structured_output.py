"""`python -m lorabatch.benchmarks.engine.structured_output FOLDER [RESULT]`: whether completions are what rows ask for.

A job of 10,000 rows of the demo's base model and its adapters, over 200 JSON Schemas and 300 regular expressions. Each
completion that has ended is checked by `jsonschema` or `re`, which know nothing of how it was made. The job's output is
FOLDER: a job that was interrupted goes on when the command is run again. Then 10,000 rows of one schema, to see how
often it is compiled.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.engine.constraints import NUM_EXPRESSIONS, NUM_SCHEMAS, Constraints, problem_with
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run

_ADAPTERS = (None, "contacts", "pirate", "sentiment", "sql")


def write_input(path: Path, num_rows: int) -> None:
    """Rows that ask for every adapter and every constraint."""
    constraints = Constraints.random()
    rows = []
    for i in range(num_rows):
        row: dict[str, Any] = {"id": i, "adapter": _ADAPTERS[i % len(_ADAPTERS)], "prompt": f"Number {i}:"}
        rows.append(row | {"json_schema": None, "regex": None} | constraints.of_row(i))
    pq.write_table(pa.Table.from_pylist(rows), path)


def check_output(output: Path, num_rows: int) -> dict[str, Any]:
    """Counts of rows by constraint and end. Raises AssertionError for a row that ended and is not what it should be."""
    constraints = Constraints.random()
    parts = [
        pq.read_table(part, columns=["id", "completion", "finish_reason"]) for part in output.glob("part-*.parquet")
    ]
    rows = pa.concat_tables(parts).to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(num_rows)), f"{len(rows)} rows"
    counts: dict[str, Counter[str]] = {"json_schema": Counter(), "regex": Counter()}
    for row in rows:
        option = constraints.of_row(row["id"])
        [kind] = option
        counts[kind][row["finish_reason"]] += 1
        problem = problem_with(row["completion"], option) if row["finish_reason"] == "stop" else None
        assert problem is None, f"row {row['id']}: {problem}"
    return {kind: dict(sorted(found.items())) for kind, found in counts.items()}


def times_compiled(num_rows: int) -> int:
    """How often rows of one schema have it compiled."""
    [(_, schema)] = Constraints.random().options[0].items()
    engine = Engine(base_model_folder(), EngineConfig(mode="unmerged", max_batch_rows=256))
    sampling = SamplingParams(max_tokens=1, json_schema=schema)
    results = list(engine.run(Request(str(i), (i % 1000 + 100, 30), None, sampling, i) for i in range(num_rows)))
    assert len(results) == num_rows
    return engine.rules.num_compiled_grammars


def main() -> None:
    """Run the job, check its rows, print the counts, and save them if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m lorabatch.benchmarks.engine.structured_output", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="of the job's input and output")
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    rows, output = chosen.folder / "input.parquet", chosen.folder / "output"
    if not rows.exists():
        write_input(rows, chosen.rows)
    job = run(
        JobSpec(
            model=str(base_model_folder()),
            adapters=str(DEMO_FOLDER / "adapters"),
            input=str(rows),
            output=str(output),
            workers=chosen.workers,
            max_tokens=80,
            temperature=1.0,
            row_settings=("json_schema", "regex"),
        )
    )
    assert job.num_errors == 0, job.errors
    result = provenance(["torch", "llguidance", "jsonschema"]) | {
        "benchmark": "rows that end are what their constraint says",
        "model": "SmolLM2-135M-Instruct, and four adapters of the demo",
        "rows": chosen.rows,
        "schemas": NUM_SCHEMAS,
        "regular_expressions": NUM_EXPRESSIONS,
        "completion_tokens": job.completion_tokens,
        "rows_by_end": check_output(output, chosen.rows),
        "rows_that_ended_and_are_not_what_they_should_be": 0,
        "times_compiled_of_one_schema": times_compiled(chosen.rows),
    }
    print(json.dumps(result, indent=1))
    if chosen.result is not None:
        chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
