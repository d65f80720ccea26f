"""Shows a job to people: live progress in a terminal, a line every few seconds elsewhere, and its status."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..jobs.agreement import Agreement
from ..jobs.errors import JobError, JobLimitError, naming_damage
from ..jobs.outcome import canary_line, canary_lines, outcome_lines, plain_time
from ..jobs.progress import clock, wall_clock
from ..jobs.record import ANSWERING_PHASES, BEGINNING_PHASES, STILL_AFTER_S, JobState, WorkerState
from ..jobs.spec import JobSpec
from ..jobs.status.job_status import JobStatus, Outcome, read_status
from ..jobs.store import JobStore
from .terminal import echo, plain_console

_LINE_INTERVAL_S = 5.0
_ADAPTERS_SHOWN = 4
# Seconds without a report after which a job counts as silent. A coordinator reports every second, unless storage holds
# it up.
_SILENT_AFTER_S = 10.0


class _NotebookDisplay:
    """A live display in a notebook, with the methods of `rich.live.Live` that `ConsoleProgress` calls: one output of a
    cell, replaced in place. Needs no widgets.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def start(self, refresh: bool = False) -> None:
        """Add the output to the running cell."""
        from IPython.display import display

        self._handle = display(Text("starting"), display_id=True)

    def update(self, renderable: RenderableType) -> None:
        """Replace the output by `renderable`."""
        shown = Table.grid()
        shown.add_row(renderable)
        self._handle.update(shown)

    def stop(self) -> None:
        """Leave the last output as it is."""


class ConsoleProgress:
    """A live display on standard error or in a notebook, else plain lines. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or plain_console(stderr=True)
        self._live: Live | _NotebookDisplay | None = None
        self._told_at_s = 0.0
        self._told_phase = ""
        self._shown_notes: set[str] = set()
        self._started_s = time.monotonic()
        # Time of the latest state by its own clock, and by this process's.
        self._heard: tuple[float, float] = (0.0, self._started_s)
        # Rows done, and the time since when; None while no rows run.
        self._last_row: tuple[int, float] | None = None
        # Time at which rows began to run, and the rows done by then, which do not count as speed; None before.
        self._running_since: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        if self._console.is_jupyter:
            self._live = _NotebookDisplay()
        elif self._console.is_terminal:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4, transient=False)
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, state: JobState) -> None:
        """Show the job's latest state: in the live display, or as a line at a new phase and every few seconds."""
        for text in state.notes:
            if text not in self._shown_notes:
                self._shown_notes.add(text)
                self.note(text)
        now_s = time.monotonic()
        rows_per_s, lull = self._rows_per_s(state, now_s), self._lull(state, now_s)
        if self._live is not None:
            self._live.update(job_display(state, now_s - self._started_s, rows_per_s, *lull))
            return
        if state.phase != self._told_phase or now_s - self._told_at_s >= _LINE_INTERVAL_S:
            self._told_phase, self._told_at_s = state.phase, now_s
            self.note(job_line(state, now_s - self._started_s, rows_per_s, *lull))

    def _lull(self, state: JobState, now_s: float) -> tuple[float, float]:
        """Seconds without a report of the job, and seconds in which it ran and no row finished."""
        if state.updated_at_s != self._heard[0]:
            self._heard = state.updated_at_s, now_s
        if state.phase not in ANSWERING_PHASES:
            self._last_row = None
        elif self._last_row is None or self._last_row[0] != state.rows_done:
            self._last_row = state.rows_done, now_s
        return now_s - self._heard[1], 0.0 if self._last_row is None else now_s - self._last_row[1]

    def _rows_per_s(self, state: JobState, now_s: float) -> float:
        if state.phase not in ANSWERING_PHASES:
            return 0.0
        since_s, rows_before = self._running_since = self._running_since or (now_s, state.rows_done)
        return (state.rows_done - rows_before) / max(now_s - since_s, 1e-3)

    def ask(self, question: str) -> bool:
        """Ask a person who sits at a terminal; anything but yes is no."""
        if self._live is not None:
            self._live.stop()
        try:
            # not as the prompt of `input`, which goes to standard output where that is no terminal
            self._console.print(f"{question} [y/N] ", end="", markup=False, soft_wrap=True)
            answer = input()
        except EOFError:
            answer = ""
        finally:
            if self._live is not None:
                self._live.start(refresh=True)
        return answer.strip().lower() in ("y", "yes")

    def note(self, text: str) -> None:
        """Print a sentence that stays on the screen; as a line of a log, with the time before it."""
        self._shown_notes.add(text)
        stamp = "" if self._live is not None else f"{wall_clock(time.time())} "
        self._console.print(f"{stamp}{text}", soft_wrap=True)


def job_line(state: JobState, elapsed_s: float, rows_per_s: float, silent_s: float = 0.0, no_row_s: float = 0.0) -> str:
    """One line about a job: phase, rows, rates, lull and time left. `silent_s`: seconds without a report of the job.
    `no_row_s`: seconds in which it ran and no row finished.
    """
    rates = [*_rates(state, rows_per_s, silent_s)]
    ends = filter(None, [_lull_text(silent_s, no_row_s), _time_left(state, silent_s)])
    return "  ".join([_stage(state, elapsed_s), *rates, *ends])


def _lull_text(silent_s: float, no_row_s: float) -> str:
    """A clause such as "no row has finished for 1:10"; "" for a lull that is too short to mention."""
    if silent_s >= _SILENT_AFTER_S:
        return f"no report for {clock(silent_s)}"
    return f"no row has finished for {clock(no_row_s)}" if no_row_s >= STILL_AFTER_S else ""


def _time_left(state: JobState, silent_s: float) -> str:
    """The time left; "" where the latest report is too old to show it."""
    return "" if silent_s >= _SILENT_AFTER_S else state.time_left


def _stage(state: JobState, elapsed_s: float) -> str:
    """Elapsed time, phase and rows of a job."""
    parts = [f"[{clock(elapsed_s)}] {state.phase}"]
    if state.phase == "indexing":
        parts.append(f"{state.rows_indexed:,} of {state.rows:,} rows indexed")
    if state.totals.done or (state.rows and state.phase not in BEGINNING_PHASES):
        parts.append(state.totals.to_text())
    return "  ".join(parts)


def _rates(state: JobState, rows_per_s: float, silent_s: float) -> Iterator[str]:
    """Clauses about shards, workers and rates; none where the latest report is too old to show them."""
    if silent_s >= _SILENT_AFTER_S:
        return
    workers = "1 worker" if len(state.workers) == 1 else f"{len(state.workers)} workers"
    if state.shards:
        yield f"{state.shards_done}/{state.shards} shards"
    if state.phase == "loading engines" and state.workers:
        yield f"0 of {workers} ready"
    if state.phase == "canary":
        yield f"canary {state.canary_rows - state.canary_left:,} of {state.canary_rows:,} rows"
    if state.phase in ANSWERING_PHASES:
        yield f"{rows_per_s:.1f} rows/s"
        yield f"{state.tokens_per_s:.0f} tokens/s"
        # A worker's report may be older than the rows that are done.
        running = min(sum(worker.running_rows for worker in state.workers), state.rows - state.rows_done)
        yield f"{running} running on {workers}"


def job_display(
    state: JobState, elapsed_s: float, rows_per_s: float, silent_s: float = 0.0, no_row_s: float = 0.0
) -> RenderableType:
    """A bar for the job and a line per worker. For the seconds see `job_line`."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=1.0, completed=state.totals.share_done, width=30), Text(_time_left(state, silent_s)))
    clauses = [*_rates(state, rows_per_s, silent_s), _lull_text(silent_s, no_row_s)]
    head = Group(Text(_stage(state, elapsed_s)), bar, Text("  ".join(filter(None, clauses))))
    if not state.workers or state.is_final or silent_s >= _SILENT_AFTER_S:
        return head
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "rows open", "running", "tokens/s", "prompt reused", "mode", "adapters in memory"):
        is_text = name in ("worker", "mode", "adapters in memory")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "worker")
    for worker in state.workers:
        adapters = worker.resident_adapters[-_ADAPTERS_SHOWN:]
        more = len(worker.resident_adapters) - len(adapters)
        table.add_row(
            worker.name,
            str(worker.open_rows),
            str(worker.running_rows),
            f"{worker.tokens_per_s:.0f}",
            f"{worker.prefix_hit_rate:.0%}",
            worker.mode,
            ", ".join(adapters) + (f" and {more} more" if more else ""),
        )
    return Group(head, table)


def print_status(status: JobStatus, *, as_json: bool = False) -> None:
    """Print the status of a job, as lines of text or as JSON."""
    echo(json.dumps(status.to_json(), indent=1) if as_json else "\n".join(status_lines(status)))


def print_agreement(found: Agreement, *, as_json: bool = False) -> None:
    """Print how answers agree with answers in float32, as a line of text or as JSON."""
    echo(json.dumps(found.to_json(), indent=1) if as_json else str(found))


def print_end(spec: JobSpec | None, message: str, exit_code: int) -> None:
    """Print the end of a run as one line of JSON: the job's status, with the run's own outcome, message and exit code.

    A request that was refused has no status, and a job that failed because of storage may have none.
    """
    outcomes: dict[int, Outcome] = {0: "done", 1: "failed", JobLimitError.exit_code: "stopped", 130: "stopped"}
    values: dict[str, Any] = {}
    if spec is not None and exit_code in outcomes:
        with suppress(JobError):
            values = read_status(JobStore(spec.output, spec.storage_options)).to_json()
    values |= {"outcome": outcomes.get(exit_code, "refused"), "exit_code": exit_code}
    values["message"] = message or values.get("message", "")
    typer.echo(json.dumps(values))


def _outcome(summary: Mapping[str, Any]) -> list[str]:
    kinds = [f"{kind['num_rows']:,} x {kind['kind']}, first at {kind['location']}" for kind in summary["errors"]]
    return [*outcome_lines(summary), *(f"errors: {kind}" for kind in kinds)]


def status_lines(status: JobStatus) -> list[str]:
    """A job's status as plain lines of text."""
    state, totals = status.state, status.totals
    lines = [
        f"job       {status.record.job_id}, begun {plain_time(status.record.created_at)}",
        f"output    {status.output}",
        f"state     {status.headline}",
    ]
    if state is not None and totals is not None:
        lines.append(f"rows      {totals.to_text()}" + (f" ({totals.share_done:.1%} done)" if totals.rows else ""))
        lines.append(f"parts     {status.num_parts:,} of {state.shards:,}")
        if status.done_summary is None:
            lines.append(f"tokens    {state.prompt_tokens:,} prompt, {state.completion_tokens:,} generated")
    if state is not None and not (state.is_final or status.is_stale or status.is_finished):
        speed = f"speed     {state.tokens_per_s:,.0f} generated tokens/s"
        still = f"nothing has moved for {clock(state.still_s)}" if state.still_s >= STILL_AFTER_S else ""
        lines.append(", ".join(filter(None, [speed, still, status.time_left])))
        lines += [
            f"worker    {worker.name}: {worker.tokens_per_s:,.0f} tokens/s, {worker.open_rows} open rows, "
            f"{worker.mode or 'idle'}, {worker.prefix_hit_rate:.0%} of prompt tokens reused{_memory(worker)}"
            for worker in state.workers
        ]
    if status.done_summary is not None:
        with naming_damage("summary.json"):
            lines += [f"{'outcome' if i == 0 else '':10}{line}" for i, line in enumerate(_outcome(status.done_summary))]
    elif state is not None:
        if state.batch_fill is not None:
            lines.append(f"batches   {state.batch_fill:.1%} full while shards were queued")
        if state.prefix_hit_rate is not None:
            lines.append(f"prompts   {state.prefix_hit_rate:.1%} of their tokens reused")
    if status.canary is not None:
        with naming_damage("canary.json"):
            shown = canary_lines(status.canary) if status.done_summary is None else [canary_line(status.canary)]
        lines += [f"{'canary' if i == 0 else '':10}{line}" for i, line in enumerate(shown)]
    if state is not None:
        lines += [f"note      {note}" for note in state.notes]
    if status.message:
        lines.append(f"message   {status.message}")
    if status.next_step is not None:
        lines.append(f"next      {status.next_step}")
    return lines


def _memory(worker: WorkerState) -> str:
    """Clauses about the pool and the host tier of a worker's engine, and copies of adapters on its disk; "" before it
    has reported them.
    """
    copies = worker.adapter_copies_bytes
    disk = f", {copies / 1e6:,.0f} MB of adapters on its disk" if copies else ""
    if not worker.pages:
        return disk
    used, adapters = worker.used_pages / worker.pages, worker.adapter_pages / worker.pages
    tier = f"{worker.host_tier_used_bytes / 1e9:.1f} of {worker.host_tier_bytes / 1e9:.1f} GB"
    return f", pool {used:.0%} full ({adapters:.0%} adapters), {tier} of host memory for adapters{disk}"
