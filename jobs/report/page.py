"""Writes the report of a job: one HTML file that needs nothing else, read from the output location alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from bokeh.embed import components
from bokeh.models import Column
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ...engine.request import FIRST_OPTIONS, SAMPLING_OPTIONS
from ..agreement import Agreement
from ..errors import JobRequestError, naming_damage
from ..input.columns import output_name, readable_values
from ..record import NOT_RECORDED, JobRecord
from ..spec import JobSpec
from ..status.job_status import JobStatus, read_status
from ..store import JobStore, part_name
from .figures import run_figures, worker_names
from .tables import TableField, as_csv, search_table
from .timeline import IDLE, RunTimeline, read_timelines

_SECONDS_PER_HOUR = 3600.0
_ERROR_ROWS_SHOWN, _PARTS_SEARCHED = 200, 1000
# Label, value.
Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _ErrorRow:
    """One error row, as the report shows it."""

    #: Id of the row.
    id: str
    #: Name of its adapter; "" for the base model.
    adapter: str
    #: Its part, and its number in the part, from 1.
    place: str
    #: The error.
    reason: str


@naming_damage("the job's records")
def write_report(store: JobStore, gpu_hour_price: float | None = None) -> str:
    """The report of the job in `store`, as HTML. Everything that came from outside is escaped.

    `gpu_hour_price`: price of one worker's hour; None leaves costs out. Raises `JobRequestError` when the output holds
    no job, `StorageError` when it cannot be read.
    """
    store = store.latest()
    status = read_status(store)
    is_ended = status.state is not None and status.state.is_final
    runs = read_timelines(store.read_events(), status.state.updated_at_s if status.state and is_ended else None)
    plan = store.read_plan_facts() if store.has_plan_facts() else {}
    summary = status.summary or {}
    worker_hours = sum(run.worker_s for run in runs) / _SECONDS_PER_HOUR
    cost = None if gpu_hour_price is None else worker_hours * gpu_hour_price
    adapters = _adapters(summary, cost)
    served = {adapter.name: adapter.sha256 for adapter in status.record.adapters if not adapter.is_refused}
    adapters_of_shards = {
        shard_id: {name: served[name] for name in names if name in served}
        for shard_id, names in enumerate(plan.get("adapter_names", ()))
    }
    drawn: dict[str, Column] = {}
    for i, run in enumerate(runs):
        drawn[f"run {i}"] = run_figures(run, adapters_of_shards)
        drawn[f"workers {i}"] = search_table(*_workers(run), "workers")
    if adapters[1]:
        drawn["adapters"] = search_table(*adapters, "adapters")
    script, places = components(drawn) if drawn else ("", {})
    num_errors = status.totals.errors if status.totals else 0
    error_rows = _error_rows(store, status.record, plan) if num_errors else []
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return template.render(
        job_id=status.record.job_id,
        headline=status.headline,
        output=status.output,
        message=status.state.message if status.state else "",
        facts=[*_counts(status, summary, store.read_agreement()), *_times(runs, plan, summary), *_costs(cost, summary)],
        runs=[_phases(run) for run in runs],
        library=Markup(_library() if drawn else ""),
        script=Markup(script),
        places={name: Markup(place) for name, place in places.items()},
        adapter_caption="Shares are of the generated tokens" + ("." if cost is None else ", and so is the cost."),
        csv=base64.b64encode(as_csv(*adapters).encode()).decode(),
        num_errors=num_errors,
        errors=_kinds(summary, error_rows),
        error_rows=error_rows,
        settings=_settings(status.record.spec),
    )


def _settings(spec: JobSpec) -> list[tuple[str, Any]]:
    recorded = spec.model_dump(mode="json", exclude=NOT_RECORDED)
    return sorted((name, value) for name, value in recorded.items() if _is_shown(name, value))


def _is_shown(name: str, value: Any) -> bool:
    """Whether the report shows an option: a set value, and for a rarely used option one that is not the default."""
    is_rare = name in SAMPLING_OPTIONS and name not in FIRST_OPTIONS
    return value not in (None, "", [], {}) and not (is_rare and value == SAMPLING_OPTIONS[name].default)


def save_report(page: str, path: Path) -> None:
    """Write the page to `path`. Raises `JobRequestError` when it cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise JobRequestError(
            f"save={str(path)!r}: cannot be written ({why}). Name a file in a folder you may write to."
        ) from None


def _library() -> str:
    """Bokeh's scripts as inline HTML, so that the report needs no network."""
    return str(Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"]).render())


def _counts(status: JobStatus, summary: Mapping[str, Any], agreement: Agreement | None) -> Iterator[Fact]:
    if totals := status.totals:
        yield "rows answered", f"{totals.answered:,} of {totals.rows:,}"
        yield "error rows", f"{totals.errors:,}"
        yield "rows from an earlier run", f"{totals.reused:,}"
    if status.time_left:
        yield "time left", status.time_left
    if summary:
        yield "parts", f"{summary['num_parts']:,}"
        yield "prompt tokens", f"{summary['prompt_tokens']:,}"
        yield "generated tokens", f"{summary['completion_tokens']:,}"
        if (fill := summary.get("batch_fill")) is not None:
            yield "of batches full while shards were queued", f"{fill:.1%}"
    if agreement is not None:
        yield (
            f"answers in {agreement.products} as in float32",
            f"{agreement.num_equal} of {agreement.num_rows} compared",
        )
    if status.state and status.state.prefix_hit_rate is not None:
        yield "of prompt tokens reused", f"{status.state.prefix_hit_rate:.1%}"


def _times(runs: Sequence[RunTimeline], plan: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[Fact]:
    if not runs:
        return
    working_s = summary.get("working_s")
    if working_s is not None and len(runs) == 1:
        yield "first shard opened to last part", f"{working_s:,.1f} s"
    else:
        yield "with workers, first event to last", f"{sum(run.end_s for run in runs):,.1f} s"
    predicted_s = plan.get("predicted_s")
    yield "predicted for all rows", "not predicted" if predicted_s is None else f"{predicted_s:,.1f} s"
    if working_s and len(runs) == 1:
        bound_s = summary.get("bound_s")
        if predicted_s and not summary.get("num_reused"):
            yield "measured over predicted", f"{working_s / predicted_s:.2f}"
            if corrected_s := summary.get("corrected_s"):
                yield "predicted again after the first steps", f"{corrected_s:,.1f} s"
        yield "lower bound, whatever the schedule", f"{bound_s:,.1f} s" if bound_s else "not known"
        if bound_s:
            yield "measured over lower bound", f"{working_s / bound_s:.2f}"
    yield "mean share of the batch in use", f"{runs[-1].mean_busy:.0%}"
    yield "migrations", str(sum(len(run.moves) for run in runs))
    yield "workers lost", str(sum(len(track.losses) for run in runs for track in run.tracks))
    yield "worker seconds", f"{sum(run.worker_s for run in runs):,.0f} s"
    if num_in_part := sum(run.is_in_part for run in runs):
        yield "runs of another version of lorabatch, not all of whose events are shown", str(num_in_part)


def _costs(cost: float | None, summary: Mapping[str, Any]) -> Iterator[Fact]:
    if cost is None:
        return
    yield "cost at the given price", f"{cost:,.4f}"
    if tokens := summary.get("completion_tokens"):
        yield "per million generated tokens", f"{cost / tokens * 1e6:,.2f}"


def _phases(run: RunTimeline) -> str:
    shown = (f"{name} {end_s - start_s:,.1f} s" for name, start_s, end_s in run.phase_spans())
    return ", ".join(shown)


_Table = tuple[list[TableField], list[list[Any]]]


def _workers(run: RunTimeline) -> _Table:
    """The table of a run's workers, with the seconds that each spent computing or idle."""
    seconds = [track.seconds_by_kind() for track in run.tracks]
    idle = [kind for kind in IDLE if any(kind in of_track for of_track in seconds)]
    fields = [
        TableField("worker", width=130),
        TableField("address", width=190),
        TableField("lost at", width=80),
        TableField("parts", "0,0", 60),
    ]
    fields += [TableField(title, "0,0.0", 80) for title in ("computing", *(IDLE[kind] for kind in idle))]
    names = worker_names(run)
    rows = [
        [
            names[track.worker],
            track.worker,
            ", ".join(f"{at_s:,.1f} s" for at_s, _ in track.losses),
            sum(span.ended == "committed" for span in track.spans),
            sum(s for kind, s in of_track.items() if kind not in IDLE),
            *(of_track.get(kind, 0.0) for kind in idle),
        ]
        for track, of_track in zip(run.tracks, seconds, strict=True)
    ]
    return fields, rows


def _adapters(summary: Mapping[str, Any], cost: float | None) -> _Table:
    """The table of adapters: rows, errors, tokens and cost of each, the most tokens first."""
    fields = [TableField("adapter", width=220), TableField("rows", "0,0"), TableField("errors", "0,0")]
    fields += [TableField("generated tokens", "0,0", 120), TableField("share", "0.0%")]
    fields += [] if cost is None else [TableField("cost", "0,0.0000")]
    total = summary.get("completion_tokens") or 0
    rows = []
    for count in sorted(summary.get("adapters", ()), key=lambda count: -count["completion_tokens"]):
        tokens = count["completion_tokens"]
        share = tokens / total if total else 0.0
        row = [count["adapter"] or "(base model)", count["num_rows"], count["num_errors"], tokens, share]
        rows.append(row if cost is None else [*row, cost * share])
    return fields, rows


def _kinds(summary: Mapping[str, Any], error_rows: Sequence[_ErrorRow]) -> list[dict[str, Any]]:
    """Kinds of errors, each with an `anchor`: number of the first shown row with this error, None without one."""
    first: dict[str, int] = {}
    for i, row in enumerate(error_rows):
        first.setdefault(row.reason, i)
    return [{**kind, "anchor": first.get(kind["sentence"])} for kind in summary.get("errors", ())]


def _error_rows(store: JobStore, record: JobRecord, plan: Mapping[str, Any]) -> list[_ErrorRow]:
    """The first error rows in the committed parts."""
    # Shards without engine work hold error rows only.
    without_work = {shard["shard_id"] for shard in plan.get("shards", ()) if shard["mode"] == "none"}
    parts = sorted(store.committed_parts(), key=lambda shard_id: (shard_id not in without_work, shard_id))
    found = (row for shard_id in parts[:_PARTS_SEARCHED] for row in _errors_of_part(store, record, shard_id))
    return list(islice(found, _ERROR_ROWS_SHOWN))


def _errors_of_part(store: JobStore, record: JobRecord, shard_id: int) -> Iterator[_ErrorRow]:
    error = output_name(record, "error")
    names = [error, record.input.roles.get("id", "id")]
    names += [record.input.roles["adapter"]] if "adapter" in record.input.roles else []
    with store.open_part(shard_id) as part:
        file = pq.ParquetFile(part)
        errors = file.read(columns=[error]).column(0)
        if errors.null_count == len(errors):
            return
        table = file.read(columns=names)
        columns = [readable_values(table.column(name)) for name in names]
    for number, (sentence, row_id, *adapter) in enumerate(zip(*columns, strict=True), 1):
        if sentence is not None:
            place = f"{part_name(shard_id)}, row {number:,}"
            yield _ErrorRow(str(row_id), str(*(name or "" for name in adapter)), place, sentence)
