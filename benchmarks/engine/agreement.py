"""What number formats change: `python -m lorabatch.benchmarks.engine.agreement [--rows 100] [--save FILE]`.

The demo's four tasks are answered greedily by real jobs, one for each format, over held-out prompts. Each answer is
compared with that of float32, and judged by its task's headline measure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

import lorabatch
from lorabatch.benchmarks.provenance import provenance
from lorabatch.console.terminal import plain_console
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.demo.tasks import TASKS
from lorabatch.jobs.agreement import Agreement, Answer
from lorabatch.kernels.packed_weight import Products, can_multiply

FORMATS: Mapping[Products, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"base_quantization": "int8"},
}
HELD_OUT_SEED = 2
Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TaskAgreement:
    """One task in one format. `right`: share of prompts for which the task's headline measure holds."""

    task: str
    right: float
    agreement: Agreement


def main(num_rows: int, save: Path | None = None) -> list[TaskAgreement]:
    """Run the jobs, print the table, and save it."""
    model = base_model_folder()
    found: list[TaskAgreement] = []
    with tempfile.TemporaryDirectory(prefix="lorabatch-agreement-") as scratch:
        rows = [
            {"id": f"{name} {i}", "adapter": name, "messages": task.messages(e.prompt), "max_tokens": task.max_tokens}
            for name, task in TASKS.items()
            for i, e in enumerate(task.examples("held_out", num_rows, HELD_OUT_SEED))
        ]
        pq.write_table(pa.Table.from_pylist(rows), Path(scratch) / "rows.parquet")
        reference: Answers = {}
        for products in filter(can_multiply, FORMATS):
            answers = _answers(model, Path(scratch), products)
            reference = reference or answers
            found += _compared(products, answers, reference, num_rows)
    plain_console().print(_table(found))
    if save is not None:
        result = {"benchmark": "agreement"} | provenance(("torch",)) | {"model": model.name}
        save.write_text(
            json.dumps(result | {"found": [asdict(one) for one in found]}, indent=1) + "\n", encoding="utf-8"
        )
    return found


def _answers(model: Path, scratch: Path, products: Products) -> Answers:
    """Output rows by id."""
    output = scratch / products
    lorabatch.run(
        model=model,
        adapters=DEMO_FOLDER / "adapters",
        input=scratch / "rows.parquet",
        output=output,
        logprobs=True,
        workers=1,
        progress=False,
        **FORMATS[products],
    )
    return {row["id"]: row for row in lorabatch.Job(output).to_arrow().to_pylist()}


def _compared(products: Products, answers: Answers, reference: Answers, num_rows: int) -> Iterator[TaskAgreement]:
    for name, task in TASKS.items():
        holds = next(iter(task.measures.values()))
        examples = task.examples("held_out", num_rows, HELD_OUT_SEED)
        rows = [(answers[f"{name} {i}"], reference[f"{name} {i}"]) for i in range(num_rows)]
        right = mean(bool(holds(ours["completion"], e)) for (ours, _), e in zip(rows, examples, strict=True))
        pairs = [(_answer(ours), _answer(theirs)) for ours, theirs in rows]
        yield TaskAgreement(name, right, Agreement.of(name, products, pairs))


def _answer(row: Mapping[str, Any]) -> Answer:
    return Answer(row["token_ids"], row["token_logprobs"])


def _table(found: list[TaskAgreement]) -> Table:
    table = Table(title="answers against those of float32")
    for column in ("format", "adapter", "rows", "right", "equal", "before a difference", "logprob"):
        table.add_column(column, justify="left" if column in ("format", "adapter") else "right")
    for one in found:
        agreed = one.agreement
        shares = (f"{share:.1%}" for share in (one.right, agreed.num_equal / agreed.num_rows, agreed.leading_share))
        distance = "-" if agreed.logprob_distance is None else f"{agreed.logprob_distance:.4f}"
        table.add_row(agreed.products, one.task, str(agreed.num_rows), *shares, distance)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100, help="held-out prompts of each task")
    parser.add_argument("--save", type=Path, help="JSON file for the result")
    main(**{{"rows": "num_rows"}.get(k, k): v for k, v in vars(parser.parse_args()).items()})
