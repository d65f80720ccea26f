"""Tables that commands print: audits, answers, profiles, policies."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..engine.peft import AdapterAudit
from ..engine.peft.audit import AUDIT_COLUMNS, audit_rows
from .terminal import plain_console

if TYPE_CHECKING:  # each takes up to a second to import, and `audit` needs none of them
    from ..jobs.cost_profile import CostProfile
    from ..pipeline.planning.simulate import SimulationResult

_VERDICT_STYLES = {"exact": "green", "exact-by-merge": "yellow", "refused": "red"}


def print_audits(audits: Sequence[AdapterAudit], console: Console | None = None, *, as_json: bool = False) -> None:
    """Print one line per adapter, verdicts in colour, and the number of adapters of each verdict; or all findings as
    JSON.
    """
    if as_json:
        typer.echo(json.dumps([found.to_json() for found in audits], indent=1))
        return
    table = Table()
    for column in AUDIT_COLUMNS:
        table.add_column(column, overflow="fold")
    rows, shared = audit_rows(audits)
    for row in rows:
        verdict = row[1]
        table.add_row(row[0], Text(verdict, style=_VERDICT_STYLES[verdict]), *row[2:])
    counts = {verdict: sum(audit.verdict == verdict for audit in audits) for verdict in _VERDICT_STYLES}
    console = console or plain_console()
    console.print(table)
    for note in shared:
        console.print(note, soft_wrap=True)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def print_counts(output: Path, console: Console | None = None) -> None:
    """Print the numbers of rows in and out of the demo, and a command to look at its answers."""
    import pyarrow.dataset as ds

    from ..demo.job import DEMO_FOLDER

    console = console or plain_console()
    answers = ds.dataset(output, format="parquet").to_table(columns=["id"])
    num_prompts = ds.dataset(DEMO_FOLDER / "prompts.parquet").count_rows()
    num_distinct = len(set(answers.column("id").to_pylist()))
    console.print(f"{num_prompts} rows in, {answers.num_rows} rows out, {num_distinct} distinct ids.")
    console.print(f"Answers: {output}/part-*.parquet. With DuckDB, for example:", soft_wrap=True)
    query = f"SELECT adapter, count(*), avg(completion_tokens) FROM '{output}/*.parquet' GROUP BY adapter"
    console.print(f'  {_python()} -c "import duckdb; print(duckdb.sql(\\"{query}\\"))"', soft_wrap=True)
    if find_spec("duckdb") is None:
        console.print("DuckDB is not installed: pip install duckdb")


def _python() -> str:
    """Path of the running Python as a shell takes it, relative to the present folder if it is below."""
    path = Path(sys.executable)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def print_profile(profile: CostProfile, path: Path, console: Console | None = None) -> None:
    """Print the fit of a profile for each kind of step, and its coefficients."""
    console = console or plain_console()
    fit_table = Table("steps", "measured", "R²", "median error")
    for kind, quality in profile.quality.items():
        fit_table.add_row(kind, str(quality.num_steps), f"{quality.r_squared:.3f}", f"{quality.median_error:.1%}")
    console.print(fit_table)
    table = Table("coefficient", "value")
    for field in fields(profile.cost):
        value = getattr(profile.cost, field.name)
        table.add_row(field.name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    what = f"{profile.num_engines} engines at once on {profile.device} ({profile.dtype})"
    console.print(f"{what}: {path}", soft_wrap=True)


def print_simulation(result: SimulationResult, console: Console | None = None) -> None:
    """Print one line per policy, the fastest first, and the files that were written."""
    console = console or plain_console()
    workload = result.workload
    limits = result.settings.limits
    title = (
        f"{workload.num_rows} rows, {len(workload.adapters)} adapters, {result.request.workers} workers, "
        f"{limits.batch_rows} rows and {limits.step_tokens} tokens a step"
    )
    if result.request.speeds is not None:
        title += f", {result.request.speeds} times as fast as the cost model says"
    console.print(title, soft_wrap=True)
    for sentence in result.assumptions:
        console.print(sentence, soft_wrap=True)
    # Without lines the nine columns fit into 80 characters.
    table = Table(box=None, pad_edge=False)
    names = ("policy", "seconds", "x best", "tokens/s", "busy", "rows/step", "merged", "switch", "load")
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    best = min(run.metrics.makespan_s for run in result.runs)
    for run in sorted(result.runs, key=lambda run: run.metrics.makespan_s):
        found = run.metrics
        shares = (found.merged_share, found.switch_share, found.load_share)
        table.add_row(
            run.policy,
            f"{found.makespan_s:.1f}",
            f"{found.makespan_s / best:.2f}" if best else "-",
            f"{found.output_tokens_per_s:.0f}",
            f"{found.utilisation:.0%}",
            f"{found.batch_rows:.1f}",
            *(f"{share:.1%}" for share in shares),
        )
    console.print(table)
    hint = "" if len(result.files) > 1 else " (plots need matplotlib: pip install matplotlib)"
    console.print(f"{result.request.output}: {', '.join(result.files)}{hint}", soft_wrap=True)
