"""`JobsView`: the jobs of a cluster as the dashboard shows them: JSON, Prometheus text and HTML.

It keeps the last state of each run and the last report of each worker, and of ended runs only a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from ...jobs.record import JobState
from ..messages import PublishedState, WorkerReport

_RUNS_KEPT = 20
_ADAPTERS_SHOWN = 6


@dataclass(slots=True)
class RunView:
    """One run of a job. `output`: free of secrets. `reports`: by worker."""

    run_id: str
    output: str = ""
    state: JobState | None = None
    reports: dict[str, WorkerReport] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether its last state was published."""
        return self.state is not None and self.state.is_final

    @property
    def rows_left(self) -> int:
        """Rows without an answer."""
        return 0 if self.state is None or self.is_over else self.state.rows - self.state.rows_done

    @property
    def tokens_per_s(self) -> float:
        """Of all its engines."""
        return 0.0 if self.is_over else sum(report.tokens_per_s for report in self.reports.values())


_CELL = "padding:3px 1.2em 3px 0;border-bottom:1px solid #dfe3ea;text-align:"
_TEXT, _NUMBER = f"{_CELL}left", f"{_CELL}right;font-variant-numeric:tabular-nums"
# Column of a job's table -> its style.
_COLUMNS = {
    "worker": _TEXT,
    "state": _TEXT,
    "tokens/s": _NUMBER,
    "batch": _NUMBER,
    "open rows": _NUMBER,
    "lent": _NUMBER,
    "incoming": _NUMBER,
    "mode": _TEXT,
    "prompt reused": _NUMBER,
    "pages": _NUMBER,
    "adapters": _TEXT,
}


# Name of a metric of engines -> its help, its value.
_ENGINE_METRICS: dict[str, tuple[str, Callable[[WorkerReport], float]]] = {
    "tokens_per_s": ("Tokens an engine generates in a second.", lambda report: report.tokens_per_s),
    "running_rows": ("Rows an engine decodes together.", lambda report: report.telemetry.num_running),
    "batch_rows": ("Rows an engine can decode together.", lambda report: report.batch_rows),
    "open_rows": ("Unfinished rows of open shards.", lambda report: report.open_rows),
    "lent_rows": ("Open rows that other engines work on.", lambda report: report.lent_rows),
    "incoming_rows": ("Rows of other workers' shards.", lambda report: report.incoming_rows),
    "pages_used": ("Pages of the pool in use.", lambda report: report.telemetry.pages_used),
    "pages_total": ("Pages of the pool.", lambda report: report.telemetry.pages_total),
    "num_crashes": ("Engine processes lost.", lambda report: report.num_crashes),
}


class JobsView:
    """Formats states and reports for browsers, programs and Prometheus."""

    def __init__(self) -> None:
        self._runs: dict[str, RunView] = {}

    @property
    def runs(self) -> list[RunView]:
        """The latest first."""
        return list(reversed(self._runs.values()))

    def state_published(self, run_id: str, message: PublishedState) -> None:
        """Take in a coordinator's state."""
        run = self._run(run_id)
        run.output, run.state = message.output, message.state
        if run.is_over:
            run.reports.clear()

    def reported(self, run_id: str, report: WorkerReport) -> None:
        """Take in a worker's report."""
        run = self._run(run_id)
        if not run.is_over:
            run.reports[report.worker] = report

    def lost(self, worker: str) -> None:
        """A worker has left the cluster."""
        for run in self._runs.values():
            run.reports.pop(worker, None)

    def busy_workers(self) -> set[str]:
        """Those with unfinished rows, their own or others'."""
        reports = (report for run in self._runs.values() for report in run.reports.values())
        return {report.worker for report in reports if report.open_rows or report.incoming_rows}

    def _run(self, run_id: str) -> RunView:
        run = self._runs.setdefault(run_id, RunView(run_id))
        ended = [other for other in self._runs.values() if other.is_over]
        for other in ended[: max(0, len(self._runs) - _RUNS_KEPT)]:
            del self._runs[other.run_id]
        return run

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "jobs": [
                {
                    "run_id": run.run_id,
                    "output": run.output,
                    "state": None if run.state is None else asdict(run.state),
                    "workers": [asdict(report) for report in run.reports.values()],
                }
                for run in self.runs
            ]
        }

    def to_prometheus(self) -> str:
        """The text format of Prometheus, version 0.0.4."""
        lines: list[str] = []
        for name, help_text, samples in self._families():
            lines += [f"# HELP lorabatch_{name} {help_text}", f"# TYPE lorabatch_{name} gauge"]
            lines += [f"lorabatch_{name}{{{_labels(labels)}}} {value:g}" for labels, value in samples]
        return "\n".join(lines) + "\n"

    def _families(self) -> Iterator[tuple[str, str, list[tuple[Mapping[str, str], float]]]]:
        states = [(run, run.state) for run in self.runs if run.state is not None]
        for name, text in (
            ("rows", "Rows of the job."),
            ("rows_done", "Rows that are answered."),
            ("rows_error", "Rows that are errors."),
            ("shards_done", "Parts that are written."),
            ("completion_tokens", "Tokens generated in finished parts."),
        ):
            yield f"job_{name}", text, [({"job": run.run_id}, getattr(state, name)) for run, state in states]
        reports = [(run, report) for run in self.runs for report in run.reports.values()]
        for name, (text, value) in _ENGINE_METRICS.items():
            yield f"engine_{name}", text, [({"job": r.run_id, "worker": w.worker}, value(w)) for r, w in reports]

    def to_html(self) -> str:
        """Tables for people."""
        if not self._runs:
            return "<p>No job has run on this cluster yet.</p>"
        return "".join(_run_html(run) for run in self.runs)


def _run_html(run: RunView) -> str:
    state = run.state
    head = f"<h3>{escape(run.run_id)}</h3><p>{escape(run.output)}</p>"
    if state is not None:
        share = 100 * state.rows_done / state.rows if state.rows else 100.0
        left = "" if state.eta_s is None or state.is_final else f", about {state.eta_s:,.0f} s to go"
        head += (
            f"<p><b>{state.phase}</b>: {state.rows_done:,} of {state.rows:,} rows ({share:.1f} %), "
            f"{state.rows_error:,} errors, {state.shards_done:,} of {state.shards:,} parts{left}. "
            f"{escape(state.message)}</p><progress value='{share:.1f}' max='100' style='width:40em'></progress>"
        )
    rows = "".join(_worker_html(run, report) for report in run.reports.values())
    titles = "".join(f"<th style='{style}'>{name}</th>" for name, style in _COLUMNS.items())
    return head + (f"<table style='border-collapse:collapse'><tr>{titles}</tr>{rows}</table>" if rows else "")


def _worker_html(run: RunView, report: WorkerReport) -> str:
    names = {worker.name: worker.resident_adapters for worker in run.state.workers} if run.state else {}
    telemetry = report.telemetry
    adapters = names.get(report.worker, ())
    more = len(adapters) - _ADAPTERS_SHOWN
    cells = (
        report.worker,
        report.state,
        f"{report.tokens_per_s:,.0f}",
        f"{telemetry.num_running} of {report.batch_rows}",
        f"{report.open_rows:,}",
        str(report.lent_rows),
        str(report.incoming_rows),
        telemetry.mode,
        f"{telemetry.prefix_hit_rate:.0%}",
        f"{telemetry.pages_used:,} of {telemetry.pages_total:,}",
        ", ".join(adapters[-_ADAPTERS_SHOWN:]) + (f" and {more} more" if more > 0 else ""),
    )
    styled = zip(cells, _COLUMNS.values(), strict=True)
    return "<tr>" + "".join(f"<td style='{style}'>{escape(cell)}</td>" for cell, style in styled) + "</tr>"


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
