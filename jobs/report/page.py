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

from ...engine.adapter_use import AdapterUse
from ...engine.request import FIRST_OPTIONS, SAMPLING_OPTIONS
from ..agreement import Agreement
from ..contents import part_name
from ..errors import JobRequestError, naming_damage
from ..input.columns import output_name, readable_values
from ..options.values import parse_price
from ..outcome import (
    BASE_NAME,
    AdapterOutcome,
    by_score,
    canary_line,
    cost_shares,
    cut_note,
    paired_cells,
    plain_time,
    prediction_lines,
    score_cells,
    stage_line,
    time_line,
)
from ..record import NOT_RECORDED, JobRecord
from ..spec import JobSpec
from ..status.job_status import JobStatus, read_status
from ..store import JobStore
from .figures import adapter_figure, run_figures, worker_names
from .tables import TableField, as_csv, search_table
from .timeline import IDLE, RunTimeline, read_timelines

_SECONDS_PER_HOUR = 3600.0
_FIRST_FACTS, _ADAPTERS_WITH_EXAMPLES = 4, 30
_SHOWN_FIELDS = ("adapter", "rows", "errors", "cut off", "mean", "longest", "generated", "engine s", "share", "cost")
_ERROR_ROWS_SHOWN, _PARTS_SEARCHED = 200, 1000
# Label, value.
Fact = tuple[str, str]
# Money, and its currency; "" for one that was not named.
Cost = tuple[float, str]


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
def write_report(store: JobStore, gpu_hour_price: str | float | None = None) -> str:
    """The report of the job in `store`, as HTML. Everything that came from outside is escaped.

    `gpu_hour_price`: price of one worker's hour, as `parse_price` reads it; None for the job's own,
    without which costs are left out. Raises
    `JobRequestError` for a price that cannot be read and when the output holds no job, `StorageError` when it cannot be
    read.
    """
    parse_price(gpu_hour_price)  # raises before anything is read
    store = store.latest()
    status = read_status(store)
    price = parse_price(status.record.spec.gpu_hour_price if gpu_hour_price is None else gpu_hour_price)
    is_ended = status.state is not None and status.state.is_final
    runs = read_timelines(store.read_events(), status.state.updated_at_s if status.state and is_ended else None)
    plan = store.read_plan_facts() if store.has_plan_facts() else {}
    summary = status.summary or {}
    worker_hours = sum(run.worker_s for run in runs) / _SECONDS_PER_HOUR
    cost = None if price is None else (worker_hours * price[0], price[1])
    counts = [AdapterOutcome.from_json(count) for count in summary.get("adapters", ())]
    shares, basis = cost_shares(counts)
    adapters = _adapters(counts, shares, cost)
    served = {adapter.name: adapter.sha256 for adapter in status.record.adapters if not adapter.is_refused}
    adapters_of_shards = {
        shard_id: {name: served[name] for name in names if name in served}
        for shard_id, names in enumerate(plan.get("adapter_names", ()))
    }
    drawn: dict[str, Column] = {}
    for i, run in enumerate(runs):
        drawn[f"run {i}"] = run_figures(run, adapters_of_shards)
        drawn[f"workers {i}"] = search_table(*_workers(run), "workers")
    use = AdapterUse(**summary.get("adapter_use", {})) if summary else AdapterUse()
    if (picture := adapter_figure(use)) is not None:
        drawn["adapter use"] = picture
    if adapters[1]:
        drawn["adapters"] = search_table(*_narrow(*adapters), "adapters")
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
        first_facts=list(islice(_first_facts(status, summary, cost, counts, runs), _FIRST_FACTS)),
        lines=[*_lines(status, summary, counts), *_canary(status)],
        facts=[
            *_counts(summary, status, store.read_agreement()),
            *_times(runs, plan, summary),
            *_adapter_facts(use),
            *_costs(cost, summary),
        ],
        runs=[_phases(run, summary if len(runs) == 1 else {}) for run in runs],
        library=Markup(_library() if drawn else ""),
        script=Markup(script),
        places={name: Markup(place) for name, place in places.items()},
        adapter_caption=f"Shares are by {basis}" + ("." if cost is None else ", and so is the cost."),
        examples=_with_examples(counts),
        scores=_scores(counts, shares, cost),
        costs=cost is not None,
        rivals=["base model", "best"] if _has_base(counts) else ["best"],
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


def _first_facts(
    status: JobStatus,
    summary: Mapping[str, Any],
    cost: Cost | None,
    counts: Sequence[AdapterOutcome],
    runs: Sequence[RunTimeline],
) -> Iterator[Fact]:
    """The figures of the first row, the most wanted first; more than fit into it."""
    if totals := status.totals:
        errors = "" if not totals.errors else ", 1 error" if totals.errors == 1 else f", {totals.errors:,} errors"
        yield "rows answered", f"{totals.answered:,} of {totals.rows:,}{errors}"
    if status.time_left:
        yield "time left", status.time_left
    if "seconds" in summary:
        yield "time of the run", f"{summary['seconds']:,.1f} s"
    elif runs:
        yield "time so far, all runs", f"{sum(run.end_s for run in runs):,.1f} s"
    if (rate := summary.get("rows_per_s")) is not None:
        yield "rows/s while rows were answered", f"{rate:,.1f}"
    if cost is not None:
        yield f"cost{_in(cost)}", f"{cost[0]:,.4f}"
    if any(count.finish_reasons for count in counts):
        yield "answers cut off", f"{sum(count.num_cut for count in counts):,}"
    if totals:
        yield "rows from an earlier run", f"{totals.reused:,}"
    if summary:
        yield "generated tokens", f"{summary['completion_tokens']:,}"


def _lines(status: JobStatus, summary: Mapping[str, Any], counts: Sequence[AdapterOutcome]) -> list[str]:
    """Sentences below the first row: beginning and end, answers that were cut off, prediction and bound."""
    if "seconds" not in summary:
        return [f"Begun {plain_time(status.record.created_at)}"]
    return [
        line[0].upper() + line[1:]
        for line in (time_line(summary), stage_line(summary), cut_note(counts), *prediction_lines(summary))
        if line
    ]


def _canary(status: JobStatus) -> list[str]:
    """A sentence on the canary; none without one."""
    return [] if status.canary is None else [f"Canary: {canary_line(status.canary)}"]


def _counts(summary: Mapping[str, Any], status: JobStatus, agreement: Agreement | None) -> Iterator[Fact]:
    if totals := status.totals:
        yield "error rows", f"{totals.errors:,}"
        yield "rows from an earlier run", f"{totals.reused:,}"
    if summary:
        yield "parts", f"{summary['num_parts']:,}"
        yield "prompt tokens", f"{summary['prompt_tokens']:,}"
        yield "generated tokens", f"{summary['completion_tokens']:,}"
        for name, text in (("prompt_tokens", "prompt tokens/s"), ("completion_tokens", "generated tokens/s")):
            if (rate := summary.get(f"{name}_per_s")) is not None:
                yield text, f"{rate:,.0f}"
        if (fill := summary.get("batch_fill")) is not None:
            yield "of batches full while shards were queued", f"{fill:.1%}"
    if agreement is not None:
        yield (
            f"answers in {agreement.products} as in float32",
            f"{agreement.num_equal} of {agreement.num_rows} compared",
        )
    if status.state and status.state.prefix_hit_rate is not None:
        yield "of prompt tokens reused", f"{status.state.prefix_hit_rate:.1%}"


def _adapter_facts(use: AdapterUse) -> Iterator[Fact]:
    """Costs of adapters, in numbers."""
    if use.lora_steps:
        yield "adapters in a step with some", f"{use.step_adapters / use.lora_steps:.1f}"
    if use.loads:
        yield "adapters copied into pools", f"{use.loads:,}, {use.host_loads:,} of them from host memory"
    if use.disk_reads:
        yield "adapters read from disks", f"{use.disk_reads:,}"
    if use.peer_fetches or use.storage_fetches:
        found = f"{use.peer_fetches:,} from other workers, {use.storage_fetches:,} from storage"
        yield "adapters fetched", f"{found}, in {use.fetch_s:,.1f} s"
    if use.stall_s:
        yield "seconds of steps that waited for adapters", f"{use.stall_s:,.1f}"
    if use.switches:
        yield "switches of weights", f"{use.switches:,}, in {use.switching_s:,.1f} s"


def _times(runs: Sequence[RunTimeline], plan: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[Fact]:
    if not runs:
        return
    if len(runs) > 1:
        yield "all runs, first event to last", f"{sum(run.end_s for run in runs):,.1f} s"
    if not (working_s := summary.get("working_s")):
        predicted_s = plan.get("predicted_s")
        yield "predicted for all rows", "not predicted" if predicted_s is None else f"{predicted_s:,.1f} s"
    elif len(runs) == 1:
        yield "first shard opened to last part", f"{working_s:,.1f} s"
    yield "of the batch in use, from ready engines to the end", f"{runs[-1].mean_busy:.0%}"
    yield "migrations", str(sum(len(run.moves) for run in runs))
    yield "workers lost", str(sum(len(track.losses) for run in runs for track in run.tracks))
    yield "worker seconds, engines' start included", f"{sum(run.worker_s for run in runs):,.0f} s"
    if num_in_part := sum(run.is_in_part for run in runs):
        yield "runs of another version of lorabatch, not all of whose events are shown", str(num_in_part)


def _costs(cost: Cost | None, summary: Mapping[str, Any]) -> Iterator[Fact]:
    if cost is None:
        return
    yield f"cost{_in(cost)}", f"{cost[0]:,.4f}"
    if tokens := summary.get("completion_tokens"):
        yield f"per million generated tokens{_in(cost)}", f"{cost[0] / tokens * 1e6:,.2f}"


def _in(cost: Cost) -> str:
    return f", {cost[1]}" if cost[1] else ", in the currency of the price"


def _phases(run: RunTimeline, summary: Mapping[str, Any]) -> str:
    """Seconds of the phases of a run by its events; "" if its summary has them, which is shown above."""
    if summary.get("phases_s"):
        return ""
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


def _adapters(counts: Sequence[AdapterOutcome], shares: Sequence[float], cost: Cost | None) -> _Table:
    """The table of adapters, the largest share of the costs first."""
    fields = [TableField("adapter", width=150), TableField("rows", "0,0", 60), TableField("errors", "0,0", 55)]
    fields += [TableField(title, "0,0", 60) for title in ("stop", "length", "cut off")]
    lengths = {"shortest": "0,0", "mean": "0,0.0", "median": "0,0.0", "p95": "0,0.0", "longest": "0,0"}
    fields += [TableField(title, number, 60) for title, number in lengths.items()]
    fields += [TableField("prompt tokens", "0,0", 90), TableField("generated", "0,0", 75)]
    fields += [TableField("rows/s", "0,0.0", 60), TableField("prompt tokens/s", "0,0", 90)]
    fields += [TableField("engine s", "0,0.0", 65), TableField("share", "0.0%", 60)]
    fields += [] if cost is None else [TableField("cost", "0,0.0000", 65)]
    is_scored = any(count.score for count in counts)
    fields += [TableField(title, "0.0%", 60) for title in _SCORE_FIELDS] if is_scored else []
    rows = []
    for count, share in sorted(zip(counts, shares, strict=True), key=lambda one: (-one[1], one[0].adapter)):
        tokens = (count.answer_tokens.get(name) for name in lengths)
        reasons = (count.finish_reasons.get(name, 0) if count.finish_reasons else None for name in ("stop", "length"))
        row: list[Any] = [count.adapter or BASE_NAME, count.num_rows, count.num_errors, *reasons]
        row += [count.num_cut if count.finish_reasons else None, *tokens, count.prompt_tokens, count.completion_tokens]
        row += [count.rows_per_s, count.prompt_tokens_per_s, count.engine_s, share]
        row += [] if cost is None else [cost[0] * share]
        rows.append([*row, *_score_numbers(count.score or {})] if is_scored else row)
    return fields, rows


_SCORE_FIELDS = ("score", "score from", "score to", "to base", "to base from", "to base to", "to best", "to best from",
                 "to best to")  # fmt: skip


def _score_numbers(score: Mapping[str, Any]) -> list[float | None]:
    """The values of `_SCORE_FIELDS` for an adapter."""
    numbers = [score.get("mean"), *score.get("interval", (None, None))]
    for key in ("to_base", "to_best"):
        found = score.get(key) or {}
        numbers += [found.get("difference"), *found.get("interval", (None, None))]
    return numbers


def _scores(
    counts: Sequence[AdapterOutcome], shares: Sequence[float], cost: Cost | None
) -> list[tuple[AdapterOutcome, list[str], list[Mapping[str, Any]]]]:
    """Each adapter with a score, the best first: the cells of its row in the table of scores, and the rows to show that
    have another score than with the base model, or else with the best adapter.
    """
    rivals = ("to_base", "to_best") if _has_base(counts) else ("to_best",)
    share_of = {count.adapter: share for count, share in zip(counts, shares, strict=True)}
    found = []
    for count, score in by_score(counts):
        cells = [*score_cells(score)]
        for key in rivals:
            other = score.get(key)
            cells += [*paired_cells(other), f"{other['p_value']:.3g}" if other else "-"]
        cells += [f"{count.prompt_tokens + count.completion_tokens:,}"]
        cells += ["-" if count.engine_s is None else f"{count.engine_s:,.1f}"]
        cells += [] if cost is None else [f"{cost[0] * share_of[count.adapter]:,.4f}"]
        found.append((count, cells, list(score.get("flips", ()))))
    return found


def _has_base(counts: Sequence[AdapterOutcome]) -> bool:
    """Whether the base model has a score."""
    return any(count.score is not None and not count.adapter for count in counts)


def _narrow(fields: list[TableField], rows: list[list[Any]]) -> _Table:
    """The columns of a table of adapters that a page has room for; the CSV has all."""
    shown = [i for i, field in enumerate(fields) if field.title in _SHOWN_FIELDS]
    return [fields[i] for i in shown], [[row[i] for i in shown] for row in rows]


def _with_examples(counts: Sequence[AdapterOutcome]) -> list[AdapterOutcome]:
    """Adapters whose examples are shown, the most rows first."""
    shown = [count for count in counts if count.examples]
    return sorted(shown, key=lambda count: (-count.num_rows, count.adapter))[:_ADAPTERS_WITH_EXAMPLES]


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
