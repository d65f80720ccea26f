"""Measures how number formats change answers:
`python -m lorabatch.benchmarks.engine.agreement [--rows 100] [--model FOLDER …] [--save FILE]`.

Held-out prompts of the demo's four tasks are answered greedily by real jobs, one for each model and format. Each answer
is compared with that of float32, and judged by its task's headline measure. The demo's base, the default, answers with
its trained adapters; other models answer without adapters (`task_model` trains small ones on these tasks).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

import lorabatch
from lorabatch.benchmarks.engine.result import FORMAT_OPTIONS
from lorabatch.benchmarks.provenance import provenance
from lorabatch.console.terminal import plain_console
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.demo.tasks import TASKS
from lorabatch.jobs.agreement import Agreement, Answer
from lorabatch.kernels.packed_weight import Products, can_multiply

HELD_OUT_SEED = 2
Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TaskAgreement:
    """One model's answers to one task in one format. `right`: share of prompts for which the task's headline measure
    holds."""

    model: str
    task: str
    right: float
    agreement: Agreement


def main(num_rows: int, models: Sequence[Path] = (), save: Path | None = None) -> list[TaskAgreement]:
    """Run the jobs, print the table, and save it. `models`: none for the demo's base."""
    found: list[TaskAgreement] = []
    for model in models or [base_model_folder()]:
        with tempfile.TemporaryDirectory(prefix="lorabatch-agreement-") as scratch:
            found += _of_model(model.resolve(), Path(scratch), num_rows)
    plain_console().print(_table(found))
    if save is not None:
        result = {"benchmark": "agreement"} | provenance(("torch",)) | {"found": [asdict(one) for one in found]}
        save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return found


def _of_model(model: Path, scratch: Path, num_rows: int) -> Iterator[TaskAgreement]:
    is_adapted = model == base_model_folder().resolve()
    rows = [
        {
            "id": f"{name} {i}",
            "adapter": name if is_adapted else None,
            "messages": task.messages(example.prompt),
            "max_tokens": task.max_tokens,
        }
        for name, task in TASKS.items()
        for i, example in enumerate(task.examples("held_out", num_rows, HELD_OUT_SEED))
    ]
    pq.write_table(pa.Table.from_pylist(rows), scratch / "rows.parquet")
    reference: Answers = {}
    for products in filter(can_multiply, FORMAT_OPTIONS):
        answers = _answers(model, scratch, products, DEMO_FOLDER / "adapters" if is_adapted else None)
        reference = reference or answers
        yield from _compared(model.name, products, answers, reference)


def _answers(model: Path, scratch: Path, products: Products, adapters: Path | None) -> Answers:
    """Output rows by id."""
    output = scratch / products
    lorabatch.run(
        model=model,
        adapters=adapters,
        input=scratch / "rows.parquet",
        output=output,
        logprobs=True,
        row_settings=["max_tokens"],
        workers=1,
        progress=False,
        **FORMAT_OPTIONS[products],
    )
    return {row["id"]: row for row in lorabatch.Job(output).to_arrow().to_pylist()}


def _compared(model: str, products: Products, answers: Answers, reference: Answers) -> Iterator[TaskAgreement]:
    num_rows = len(answers) // len(TASKS)
    for name, task in TASKS.items():
        holds = next(iter(task.measures.values()))
        examples = task.examples("held_out", num_rows, HELD_OUT_SEED)
        rows = [(answers[f"{name} {i}"], reference[f"{name} {i}"]) for i in range(num_rows)]
        judged = [bool(holds(ours["completion"], e)) for (ours, _), e in zip(rows, examples, strict=True)]
        pairs = [(_answer(ours), _answer(theirs)) for ours, theirs in rows]
        yield TaskAgreement(model, name, mean(judged), Agreement.of(name, products, pairs))


def _answer(row: Mapping[str, Any]) -> Answer:
    return row["token_ids"], row["token_logprobs"]


def _table(found: list[TaskAgreement]) -> Table:
    table = Table(title="answers against those of float32")
    for column in ("model", "format", "task", "rows", "right", "equal", "before a difference", "logprob"):
        table.add_column(column, justify="left" if column in ("model", "format", "task") else "right")
    for one in found:
        agreed = one.agreement
        shares = (f"{share:.1%}" for share in (agreed.num_equal / agreed.num_rows, agreed.leading_share))
        distance = "-" if agreed.logprob_distance is None else f"{agreed.logprob_distance:.4f}"
        table.add_row(one.model, agreed.products, one.task, str(agreed.num_rows), f"{one.right:.1%}", *shares, distance)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100, help="held-out prompts of each task")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a model folder with a chat template; repeatable"
    )
    parser.add_argument("--save", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    main(options.rows, options.model, options.save)
