"""`JobsView`: the jobs of a cluster as the dashboard shows them: tables, curves, JSON and Prometheus text.

It keeps the last state of each run, the last report of each of its workers and a history from its beginning. Ended runs
are dropped, the oldest first, when there are more than `_RUNS_KEPT` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...jobs.progress import AdapterCount
from ...jobs.record import JobState
from ...jobs.status.worker_names import WorkerNames
from ..messages import PublishedState, WorkerReport, job_of_run

_RUNS_KEPT = 20
_NAMES_SHOWN = 6
_MOST_SAMPLES = 1000


@dataclass(slots=True)
class History:
    """Tokens per second since a run began: a bounded number of samples at equal intervals."""

    #: Time in seconds since the epoch, and tokens per second.
    samples: list[tuple[float, float]] = field(default_factory=list)
    #: Time in seconds since the epoch, and address of the worker that was lost.
    losses: list[tuple[float, str]] = field(default_factory=list)
    #: Least seconds between two samples.
    _interval_s: float = 0.0

    def add(self, time_s: float, tokens_per_s: float) -> None:
        """Take in a sample. Above `_MOST_SAMPLES` every other sample is dropped and the interval between samples is
        doubled.
        """
        if self.samples and time_s - self.samples[-1][0] < self._interval_s:
            return
        self.samples.append((time_s, tokens_per_s))
        if len(self.samples) > _MOST_SAMPLES:
            self._interval_s = 2 * (time_s - self.samples[0][0]) / _MOST_SAMPLES
            del self.samples[1::2]

    def at(self, time_s: float) -> float:
        """The rate of the last sample before a time."""
        return next((rate for sampled_s, rate in reversed(self.samples) if sampled_s <= time_s), 0.0)


@dataclass(slots=True)
class RunView:
    """One run of a job, as the dashboard shows it."""

    #: Id of the run.
    run_id: str
    #: URL of the job's output, without secrets; "" before the first state.
    output: str = ""
    #: Last state published; None before the first one.
    state: JobState | None = None
    #: Last report of each worker, by its address.
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    #: Tokens per second and lost workers since the run began.
    history: History = field(default_factory=History)
    #: Address of a worker, also of one that is gone -> its engine processes lost.
    crashes: dict[str, int] = field(default_factory=dict)
    #: Coordinators of the run that have started.
    num_coordinators: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its metrics."""
        return {"job_id": job_of_run(self.run_id), "run_id": self.run_id}

    @property
    def is_over(self) -> bool:
        """Whether the run's last state was published."""
        return self.state is not None and self.state.is_final

    @property
    def rows_left(self) -> int:
        """Rows without an answer."""
        return 0 if self.state is None or self.is_over else self.state.rows - self.state.totals.done

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all engines of the run; 0 after its end."""
        return 0.0 if self.is_over else sum(report.tokens_per_s for report in self.reports.values())

    @property
    def names(self) -> WorkerNames:
        """Names of the run's workers."""
        return WorkerNames(self.state.worker_addresses if self.state else ())

    def places(self) -> dict[str, int]:
        """Place of each worker that reports, by its address: that of its name, then others."""
        return {worker: place for place, worker in enumerate(dict.fromkeys((*self.names.addresses, *self.reports)))}

    @property
    def num_crashes(self) -> int:
        """Engine processes that the run has lost."""
        return sum(self.crashes.values())

    @property
    def num_restarts(self) -> int:
        """Coordinators of the run after the first."""
        return max(0, self.num_coordinators - 1)


# Value of a metric of jobs, None for no value.
_OfJob = Callable[[RunView, JobState], float | None]
# Name of a metric of jobs -> its help, and a function that returns its value. A name ends in its unit, a counter's in
# `_total`.
_JOB_METRICS: dict[str, tuple[str, _OfJob]] = {
    "rows": ("Rows of the job.", lambda run, state: state.rows),
    "done_rows": ("Rows that are answered or errors.", lambda run, state: state.totals.done),
    "answered_rows": ("Rows that are answered.", lambda run, state: state.totals.answered),
    "error_rows": ("Rows that are errors.", lambda run, state: state.totals.errors),
    "reused_rows": ("Rows that earlier runs had done.", lambda run, state: state.totals.reused),
    "parts": ("Parts of the output.", lambda run, state: state.shards),
    "written_parts": ("Parts that are written.", lambda run, state: state.shards_done),
    "left_seconds": ("Seconds to the end, as far as is known.", lambda run, state: state.eta_s),
    "left_low_seconds": ("A rough lower end of them.", lambda run, state: (state.eta_range_s or (None,))[0]),
    "left_high_seconds": ("A rough upper end of them.", lambda run, state: (state.eta_range_s or (None,))[-1]),
    "updated_timestamp_seconds": ("Time of the latest state, Unix time.", lambda run, state: state.updated_at_s),
    "prompt_tokens_total": ("Prompt tokens of finished parts.", lambda run, state: state.prompt_tokens),
    "completion_tokens_total": ("Tokens generated in finished parts.", lambda run, state: state.completion_tokens),
    "lost_workers_total": ("Workers lost.", lambda run, state: len(run.history.losses)),
    "lost_engines_total": ("Engine processes lost.", lambda run, state: run.num_crashes),
    "coordinator_restarts_total": ("Coordinators after the first.", lambda run, state: run.num_restarts),
}
# Name of a metric of adapters -> its help, and a function that returns its value from the job's rows and the counts.
_ADAPTER_METRICS: dict[str, tuple[str, Callable[[int, AdapterCount], float]]] = {
    "rows": ("Rows of the adapter.", lambda rows, count: rows),
    "done_rows": ("Rows that are answered or errors.", lambda rows, count: count.num_rows),
    "error_rows": ("Rows of finished parts that are errors.", lambda rows, count: count.num_errors),
    "completion_tokens_total": (
        "Tokens generated in finished parts.", lambda rows, count: count.completion_tokens
    ),
}  # fmt: skip
# Name of a metric of engines -> its help, and a function that returns its value.
_ENGINE_METRICS: dict[str, tuple[str, Callable[[WorkerReport], float]]] = {
    "tokens_per_second": ("Tokens an engine generates in a second.", lambda report: report.tokens_per_s),
    "running_rows": ("Rows an engine decodes together.", lambda report: report.telemetry.num_running),
    "batch_rows": ("Rows an engine can decode together.", lambda report: report.batch_rows),
    "open_rows": ("Unfinished rows of open shards.", lambda report: report.open_rows),
    "lent_rows": ("Open rows that other engines work on.", lambda report: report.lent_rows),
    "incoming_rows": ("Rows of other workers' shards.", lambda report: report.incoming_rows),
    "adapter_copies_bytes": (
        "Bytes of local copies of adapters on the host.",
        lambda report: report.adapter_copies_bytes,
    ),
    "used_pages": ("Pages of the pool in use.", lambda report: report.telemetry.pages_used),
    "adapter_pages": ("Pages that hold adapters.", lambda report: report.telemetry.adapter_pages),
    "prefix_pages": ("Pages of the prefix cache.", lambda report: report.telemetry.prefix_pages),
    "pages": ("Pages of the pool.", lambda report: report.telemetry.pages_total),
    "host_tier_used_bytes": (
        "Host memory of adapters that left the pool.", lambda report: report.telemetry.host_tier_used_bytes
    ),
    "host_tier_bytes": ("Host memory for such adapters.", lambda report: report.telemetry.host_tier_bytes),
    "lost_processes_total": ("Engine processes lost.", lambda report: report.num_crashes),
}  # fmt: skip
# Field of `AdapterUse` -> help of its metric, a counter. Seconds are named in full.
ADAPTER_USE_METRICS = {
    "pool_hits": "Rows that entered while their adapter was in the pool.",
    "loads": "Copies of adapters into the pool.",
    "host_loads": "Copies of adapters that host memory had kept.",
    "disk_reads": "Reads of adapters from the worker's disk.",
    "peer_fetches": "Adapters fetched from other workers.",
    "storage_fetches": "Adapters fetched from storage.",
    "fetch_s": "Seconds of the worker's fetches.",
    "stall_s": "Seconds of steps that waited for adapters.",
    "switches": "Merges of adapters and restorations.",
    "switching_s": "Seconds of steps that merges and restorations took.",
    "step_s": "Seconds of steps.",
    "lora_steps": "Steps with unmerged rows.",
    "step_adapters": "Distinct unmerged adapters of a step, summed over the steps.",
    "present_row_s": "Rows in steps, times seconds.",
    "absent_row_s": "Rows with a place and without their adapter, times seconds.",
    "page_s": "Pages of the pool, times seconds of steps.",
    "adapter_page_s": "Pages with adapters, times seconds of steps.",
    "row_page_s": "Pages with keys and values of rows, times seconds of steps.",
    "prefix_page_s": "Pages of the prefix cache, times seconds of steps.",
}
_Samples = list[tuple[Mapping[str, str], float]]


class JobsView:
    """Formats states and reports for browsers, programs and Prometheus."""

    def __init__(self) -> None:
        self._runs: dict[str, RunView] = {}

    @property
    def runs(self) -> list[RunView]:
        """All runs that are kept, the latest first."""
        return list(reversed(self._runs.values()))

    def coordinator_started(self, run_id: str) -> None:
        """Count a coordinator of the run that has started, the first or one more."""
        self._run(run_id).num_coordinators += 1

    def state_published(self, run_id: str, message: PublishedState) -> None:
        """Take in a coordinator's state."""
        run = self._run(run_id)
        run.output, run.state = message.output, message.state
        run.history.add(message.state.updated_at_s, message.state.tokens_per_s)
        if run.is_over:
            run.reports.clear()

    def reported(self, run_id: str, report: WorkerReport) -> None:
        """Take in a worker's report."""
        run = self._run(run_id)
        if not run.is_over:
            run.reports[report.worker] = report
            run.crashes[report.worker] = report.num_crashes

    def lost(self, worker: str, time_s: float) -> None:
        """Note that a worker is not in the cluster any more. `time_s`: seconds since the epoch."""
        for run in self._runs.values():
            report = run.reports.pop(worker, None)
            if report is not None and report.state != "left":
                run.history.losses.append((time_s, worker))

    def busy_workers(self) -> set[str]:
        """Addresses of workers with unfinished rows, of their own shards or of others'."""
        reports = (report for run in self._runs.values() for report in run.reports.values())
        return {report.worker for report in reports if report.open_rows or report.incoming_rows}

    def _run(self, run_id: str) -> RunView:
        run = self._runs.setdefault(run_id, RunView(run_id))
        ended = [other for other in self._runs.values() if other.is_over]
        for other in ended[: max(0, len(self._runs) - _RUNS_KEPT)]:
            del self._runs[other.run_id]
        return run

    def to_json(self) -> dict[str, Any]:
        """All runs with their states, reports and histories, for programs."""
        return {
            "jobs": [
                {
                    "run_id": run.run_id,
                    "output": run.output,
                    "state": None if run.state is None else asdict(run.state),
                    "workers": [asdict(report) for report in run.reports.values()],
                    "tokens_per_s": run.history.samples,
                    "worker_names": {worker: run.names.name(worker) for worker in run.names.addresses},
                    "lost_workers": run.history.losses,
                    "engine_crashes": run.num_crashes,
                    "coordinator_restarts": run.num_restarts,
                }
                for run in self.runs
            ]
        }

    def to_prometheus(self) -> str:
        """All metrics in the text format of Prometheus, version 0.0.4.

        No label is called `job` or `instance`, which Prometheus sets itself.
        """
        lines: list[str] = []
        for name, help_text, samples in self._families():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP lorabatch_{name} {help_text}", f"# TYPE lorabatch_{name} {kind}"]
            lines += [f"lorabatch_{name}{{{_labels(labels)}}} {value:.15g}" for labels, value in samples]
        return "\n".join(lines) + "\n"

    def _families(self) -> Iterator[tuple[str, str, _Samples]]:
        states = [(run, run.state) for run in self.runs if run.state is not None]
        for name, (text, job_value) in _JOB_METRICS.items():
            values = [(run.labels, job_value(run, state)) for run, state in states]
            yield f"job_{name}", text, [(labels, value) for labels, value in values if value is not None]
        phases: _Samples = [({**run.labels, "phase": state.phase}, 1) for run, state in states]
        yield "job_phase", "The phase that the job is in.", phases
        outputs: _Samples = [({**run.labels, "output": run.output}, 1) for run, _ in states]
        yield "job_info", "The URL of the job's output.", outputs
        for name, (text, adapter_value) in _ADAPTER_METRICS.items():
            counts: _Samples = [
                ({**run.labels, "adapter": count.adapter}, adapter_value(state.adapter_rows[count.adapter], count))
                for run, state in states
                for count in state.adapters
            ]
            yield f"adapter_{name}", text, counts
        for name, (text, value) in _ENGINE_METRICS.items():
            samples: _Samples = [
                ({**run.labels, "worker": report.worker}, value(report))
                for run in self.runs
                for report in run.reports.values()
            ]
            yield f"engine_{name}", text, samples
        for name, text in ADAPTER_USE_METRICS.items():
            used: _Samples = [
                ({**run.labels, "worker": report.worker}, getattr(report.telemetry.adapters + report.fetches, name))
                for run in self.runs
                for report in run.reports.values()
            ]
            plain = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
            yield f"engine_adapter_{plain}_total", text, used

    @property
    def shown(self) -> list[RunView]:
        """Runs whose adapters and workers are shown: those that have not ended, else the latest one."""
        known = [run for run in self.runs if run.state is not None]
        return [run for run in known if not run.is_over] or known[:1]

    def job_rows(self) -> list[dict[str, Any]]:
        """A row of values for each run that has a state. Text from outside is not escaped."""
        return [_job_row(run, run.state) for run in self.runs if run.state is not None]

    def adapter_rows(self) -> list[dict[str, Any]]:
        """A row of values for each adapter of the runs that are shown, by run."""
        return [row for run in self.shown if run.state is not None for row in _adapter_rows(run, run.state)]

    def worker_rows(self) -> list[dict[str, Any]]:
        """A row of values for each worker of the runs that are shown, by run, `w0` first."""
        return [
            _worker_row(run, run.reports[worker])
            for run in self.shown
            for worker in sorted(run.reports, key=run.places().__getitem__)
        ]


def _job_row(run: RunView, state: JobState) -> dict[str, Any]:
    totals = state.totals
    lost = {"workers": len(run.history.losses), "engines": run.num_crashes, "coordinators": run.num_restarts}
    return {
        "job": run.run_id,
        "time left": state.time_left,
        "phase": state.phase,
        "rows done": f"{totals.done:,} of {totals.rows:,}" + (f" ({totals.share_done:.1%})" if totals.rows else ""),
        "errors": totals.errors,
        "tokens/s": round(run.tokens_per_s),
        "parts": f"{state.shards_done:,} of {state.shards:,}",
        "reused": f"{totals.reused:,} rows of earlier runs" if totals.reused else "",
        "lost": ", ".join(f"{what}: {n}" for what, n in lost.items() if n),
        "output": run.output,
        "message": state.message,
    }


def _adapter_rows(run: RunView, state: JobState) -> Iterator[dict[str, Any]]:
    holders: dict[str, list[str]] = {}
    for worker in state.workers:
        for name in worker.resident_adapters:
            holders.setdefault(name, []).append(worker.name.partition(" ")[0])
    for count in state.adapters:
        rows = state.adapter_rows[count.adapter]
        yield {
            "adapter": count.adapter or "(base model)",
            "rows done": f"{count.num_rows:,} of {rows:,} ({count.num_rows / max(1, rows):.1%})",
            "errors": count.num_errors,
            "tokens in parts": count.completion_tokens,
            "in memory of": _some(holders.get(count.adapter, [])),
            "job": run.run_id,
        }
    num_rows = state.rows - sum(state.adapter_rows.values())
    if state.adapter_rows and num_rows > 0:
        done = max(0, state.totals.done - sum(count.num_rows for count in state.adapters))
        yield {
            "adapter": "(all others)",
            "rows done": f"{done:,} of {num_rows:,} ({done / num_rows:.1%})",
            "errors": max(0, state.totals.errors - sum(count.num_errors for count in state.adapters)),
            "tokens in parts": max(0, state.completion_tokens - sum(c.completion_tokens for c in state.adapters)),
            "in memory of": "",
            "job": run.run_id,
        }


def _worker_row(run: RunView, report: WorkerReport) -> dict[str, Any]:
    resident = {worker.address: worker.resident_adapters for worker in run.state.workers} if run.state else {}
    telemetry = report.telemetry
    return {
        "worker": run.names.name(report.worker),
        "state": report.state,
        "tokens/s": round(report.tokens_per_s),
        "batch": f"{telemetry.num_running} of {report.batch_rows}",
        "open rows": report.open_rows,
        "lent": report.lent_rows,
        "incoming": report.incoming_rows,
        "mode": telemetry.mode,
        "prompt reused": f"{telemetry.prefix_hit_rate:.0%}",
        "pages": f"{telemetry.pages_used:,} of {telemetry.pages_total:,}",
        "engine restarts": report.num_crashes,
        "adapters": _some(list(reversed(resident.get(report.worker, ())))),
        "job": run.run_id,
    }


def _some(names: Sequence[str]) -> str:
    """The first names, and how many there are besides."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
