"""Writes the report of a job: one HTML file that needs nothing else, read from the output location alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..errors import JobRequestError
from ..status import JobStatus, read_status
from ..store import JobStore
from .drawing import NUM_COLUMNS, Drawing, Lane, draw
from .timeline import RunTimeline, read_timelines

_SECONDS_PER_HOUR = 3600.0
# Of a lane's 44 units of height: shards above, modes below, the busy area between.
_AREA_TOP, _AREA_BOTTOM = 11.0, 37.0
_RATE_HEIGHT = 48.0


@dataclass(frozen=True, slots=True)
class _Card:
    value: str
    label: str


def write_report(store: JobStore, gpu_hour_price: float | None = None) -> str:
    """The report of the job in `store`, as HTML. Everything that came from outside is escaped.

    `gpu_hour_price`: of one worker; None leaves money out. Raises `JobRequestError` when the output holds no job,
    `StorageError` when it cannot be read.
    """
    status = read_status(store)
    timelines = read_timelines(store.read_events())
    plan = store.read_plan_facts() if store.has_plan_facts() else {}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    drawings = [draw(timeline) for timeline in timelines]
    summary = status.summary or {}
    worker_hours = sum(timeline.worker_s for timeline in timelines) / _SECONDS_PER_HOUR
    cost = None if gpu_hour_price is None else worker_hours * gpu_hour_price
    return template.render(
        job_id=status.record.job_id,
        headline=status.headline,
        output=status.output,
        message=status.state.message if status.state else "",
        cards=[*_counts(status, summary), *_times(timelines, drawings, plan, summary), *_costs(cost, summary)],
        runs=[_painted(drawing) for drawing in drawings],
        columns=NUM_COLUMNS,
        adapters=_adapters(summary, cost),
        adapter_caption="Shares are of the generated tokens" + ("." if cost is None else ", and so is the cost."),
        has_price=cost is not None,
        errors=summary.get("errors", []),
        settings=sorted((name, value) for name, value in status.record.spec.items() if value not in (None, [], {})),
    )


def save_report(page: str, path: Path) -> None:
    """Write the page where the user wants it. Raises `JobRequestError` when that cannot be."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise JobRequestError(
            f"save={str(path)!r}: cannot be written ({why}). Name a file in a folder you may write to."
        ) from None


def _counts(status: JobStatus, summary: Mapping[str, Any]) -> Iterator[_Card]:
    if summary:
        yield _Card(f"{summary['num_rows']:,}", "rows answered")
        yield _Card(f"{summary['num_errors']:,}", "error rows")
        yield _Card(f"{summary['num_parts']:,}", "parts")
        yield _Card(f"{summary['prompt_tokens']:,}", "prompt tokens")
        yield _Card(f"{summary['completion_tokens']:,}", "generated tokens")
        if (fill := summary.get("batch_fill")) is not None:
            yield _Card(f"{fill:.1%}", "of batches full while shards were queued")
    elif status.state:
        yield _Card(f"{status.state.rows_done:,} of {status.state.rows:,}", "rows answered so far")
        yield _Card(f"{status.state.rows_error:,}", "error rows so far")
    if status.state and status.state.prefix_hit_rate is not None:
        yield _Card(f"{status.state.prefix_hit_rate:.1%}", "of prompt tokens reused")


def _times(
    timelines: Sequence[RunTimeline], drawings: Sequence[Drawing], plan: Mapping[str, Any], summary: Mapping[str, Any]
) -> Iterator[_Card]:
    if not timelines:
        return
    working_s = summary.get("working_s")
    if working_s is not None and len(timelines) == 1:
        yield _Card(f"{working_s:,.1f} s", "first shard opened to last part")
    else:
        yield _Card(f"{sum(timeline.end_s for timeline in timelines):,.1f} s", "with workers, first event to last")
    predicted_s = plan.get("predicted_s")
    yield _Card("not predicted" if predicted_s is None else f"{predicted_s:,.1f} s", "predicted for all rows")
    if working_s and len(timelines) == 1:
        bound_s = summary.get("bound_s")
        if predicted_s and not summary.get("num_reused"):
            yield _Card(f"{working_s / predicted_s:.2f}", "measured over predicted")
        yield _Card("not known" if not bound_s else f"{bound_s:,.1f} s", "lower bound, whatever the schedule")
        if bound_s:
            yield _Card(f"{working_s / bound_s:.2f}", "measured over lower bound")
    yield _Card(f"{drawings[-1].mean_busy:.0%}", "mean share of the batch in use")
    yield _Card(str(sum(len(timeline.moves) for timeline in timelines)), "migrations")
    yield _Card(f"{sum(timeline.worker_s for timeline in timelines):,.0f} s", "worker seconds")


def _costs(cost: float | None, summary: Mapping[str, Any]) -> Iterator[_Card]:
    if cost is None:
        return
    yield _Card(f"{cost:,.4f}", "cost at the given price")
    if tokens := summary.get("completion_tokens"):
        yield _Card(f"{cost / tokens * 1e6:,.2f}", "per million generated tokens")


def _adapters(summary: Mapping[str, Any], cost: float | None) -> list[dict[str, Any]]:
    tokens = summary.get("completion_tokens") or 0
    shares = [(count, count["completion_tokens"] / tokens if tokens else 0.0) for count in summary.get("adapters", ())]
    return [
        {**count, "name": count["adapter"], "share": share, "cost": (cost or 0.0) * share}
        for count, share in sorted(shares, key=lambda item: -item[1])
    ]


def _painted(drawing: Drawing) -> dict[str, Any]:
    peak = max(drawing.tokens_per_s, default=0.0)
    rate = " ".join(
        f"{i},{_RATE_HEIGHT * (1 - value / peak if peak else 1):.1f}" for i, value in enumerate(drawing.tokens_per_s)
    )
    return {"drawing": drawing, "peak": peak, "rate": rate, "lanes": [_painted_lane(lane) for lane in drawing.lanes]}


def _painted_lane(lane: Lane) -> dict[str, Any]:
    height = _AREA_BOTTOM - _AREA_TOP
    edge = " ".join(f"{i},{_AREA_BOTTOM - height * min(value or 0.0, 1.0):.1f}" for i, value in enumerate(lane.busy))
    area = f"0,{_AREA_BOTTOM} {edge} {NUM_COLUMNS},{_AREA_BOTTOM}"
    return {"worker": lane.worker, "note": lane.note, "shards": lane.shards, "modes": lane.modes, "area": area}
