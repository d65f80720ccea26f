"""The demo: the shipped adapters and prompts as an ordinary job, and its answers on the screen."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
from rich.console import Console
from rich.table import Table

from ..demo.base_model import BaseModelUnavailableError, base_model_folder
from ..jobs.errors import JobFailedError
from ..jobs.spec import JobSpec

_DEMO = Path(__file__).resolve().parent.parent / "demo"
_SHOWN_PER_ADAPTER = 3
_CELL_CHARACTERS = 160


def demo_spec(output: Path, *, workers: int, overwrite: bool) -> JobSpec:
    """The demo's job. Fetches and converts the base model on first use.

    Raises `JobFailedError` when it cannot be fetched.
    """
    try:
        model = base_model_folder()
    except BaseModelUnavailableError as error:
        raise JobFailedError(str(error)) from None
    return JobSpec(
        model=str(model),
        adapters=str(_DEMO / "adapters"),
        input=str(_DEMO / "prompts.parquet"),
        output=str(output),
        name="demo",
        workers=workers,
        overwrite=overwrite,
    )


def print_answers(output: Path, console: Console | None = None) -> None:
    """A few rows per adapter, rows in against rows out, and how to look at the rest."""
    console = console or Console()
    answers = ds.dataset(output, format="parquet").to_table()
    names = sorted(set(answers.column("adapter").to_pylist()), key=lambda name: name or "")
    for name in names:
        console.print(_sample(answers, name))
    num_prompts = ds.dataset(_DEMO / "prompts.parquet").count_rows()
    num_distinct = len(set(answers.column("id").to_pylist()))
    console.print(f"{num_prompts} rows in, {answers.num_rows} rows out, {num_distinct} distinct ids.")
    console.print(f"Answers: {output}/part-*.parquet. With DuckDB, for example:", highlight=False, soft_wrap=True)
    query = f"SELECT adapter, count(*), avg(completion_tokens) FROM '{output}/*.parquet' GROUP BY adapter"
    console.print(
        f'  .venv/bin/python -c "import duckdb; print(duckdb.sql(\\"{query}\\"))"', highlight=False, soft_wrap=True
    )


def _sample(answers: pa.Table, name: str | None) -> Table:
    rows = [row for row in answers.to_pylist() if row["adapter"] == name]
    table = Table(title=f"{name or 'base model'}: {len(rows)} rows", title_justify="left", expand=True, show_lines=True)
    table.add_column("prompt", ratio=3)
    table.add_column("completion", ratio=2)
    for row in sorted(rows, key=lambda row: str(row["id"]))[:_SHOWN_PER_ADAPTER]:
        table.add_row(_shortened(row["messages"][-1]["content"]), _shortened(row["completion"] or row["error"]))
    return table


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CELL_CHARACTERS else line[: _CELL_CHARACTERS - 1] + "…"
