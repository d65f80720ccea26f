"""Draws a run's throughput and timeline with Bokeh: phases, workers, their shards and their activities.

A drawing has a bounded number of shapes, however long the run. Time is cut into `_COLUMNS` equal columns; one shard,
activity or move is drawn of all that begin in the same column, and throughput is averaged within a column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from bokeh.layouts import column
from bokeh.models import (
    Column,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    Legend,
    LegendItem,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure

from ...engine.adapter_use import AdapterUse
from .timeline import IDLE, MODES, Move, RunTimeline, ShardSpan, WorkerTrack

# Kind of bar -> colour, hatch pattern. Kinds that may be side by side differ in pattern.
_LOOKS = {
    "part written": ("#9cc5a1", " "),
    "failed or lost": ("#d64545", "diagonal_cross"),
    "recalled": ("#cfd4dc", "horizontal_line"),
    "unfinished": ("#f2c14e", "dot"),
    "base": ("#98a2b3", "dot"),
    "unmerged": ("#6f9ff0", " "),
    "merged": ("#e9a05c", "right_diagonal_line"),
    "mixture": ("#b78be6", "cross"),
    "engine starting": ("#e4e7ec", "right_diagonal_line"),
    "opening a shard": ("#f5dfa0", "vertical_line"),
    "waiting for a shard": ("#f0b7b7", "horizontal_line"),
    "its rows lent": ("#c7b7e8", "vertical_line"),
    "no shard left": ("#e4e7ec", " "),
    "no report": ("#d8cdb4", "cross"),
}
_ENDS = {
    "committed": "part written",
    "failed": "failed or lost",
    "lost": "failed or lost",
    "recalled": "recalled",
    "open": "unfinished",
}
_PHASES = ("#dbe6fb", "#bcd0f5")
_COLUMNS = 400
_LEGEND_COLUMNS = 4
# Left margin of both figures, wide enough for names of workers, so that their axes of seconds are aligned.
_LEFT_BORDER_PX = 176
_LANE_PX, _LEAST_LANE_PX, _MOST_PX = 60, 16, 24_000
# Top and bottom of shards and of activities, as shares of a lane's height from its top.
_SHARDS, _ACTIVITY = (0.06, 0.44), (0.50, 0.94)
_SHARD_ROWS = 8
_IDLE_HEIGHT = 0.14
_NAMED_PHASE_SHARE = 0.12
_CLOCK_FROM_S = 600.0

ItemT = TypeVar("ItemT")
# Kind -> column -> values of its bars.
_Bars = defaultdict[str, defaultdict[str, list[Any]]]


def worker_names(run: RunTimeline) -> dict[str, str]:
    """Address -> name of each worker of a run."""
    return {track.worker: run.names.name(track.worker) for track in run.tracks}


def run_figures(run: RunTimeline, adapters: Mapping[int, Mapping[str, str]]) -> Column:
    """A run's throughput above its timeline, with one axis of seconds. `adapters`: shard id -> name and content hash of
    each of its adapters, for the shards whose adapters are known.
    """
    seconds = Range1d(0.0, run.end_s or 1.0, bounds=(0.0, run.end_s or 1.0))
    return column(_throughput(run, seconds), _timeline(run, seconds, adapters), sizing_mode="stretch_width")


#: Bars of the picture of adapters: what is shared out, and its parts (name, colour, hatch pattern, value).
_AdapterBars = list[tuple[str, list[tuple[str, str, str, float]]]]


def adapter_figure(use: AdapterUse) -> Column | None:
    """Bars that share out seconds, memory, rows and ways to an adapter by kind; None without any step."""
    if not use.step_s:
        return None
    computing_s = max(0.0, use.step_s - use.stall_s - use.switching_s)
    free_page_s = max(0.0, use.page_s - use.adapter_page_s - use.row_page_s - use.prefix_page_s)
    blue, orange, red, grey = "#6f9ff0", "#e9a05c", "#d64545", "#cfd4dc"
    bars: _AdapterBars = [
        (
            "seconds of steps",
            [
                ("computing", blue, " ", computing_s),
                ("waiting for adapters", red, "diagonal_cross", use.stall_s),
                ("switching weights", orange, "right_diagonal_line", use.switching_s),
            ],
        ),
        (
            "row-seconds",
            [
                ("adapter there", blue, " ", use.present_row_s),
                ("adapter not there", red, "diagonal_cross", use.absent_row_s),
            ],
        ),
        (
            "ways to an adapter",
            [
                ("in the pool", blue, " ", use.pool_hits),
                ("from host memory", orange, "right_diagonal_line", use.host_loads),
                ("from files", red, "diagonal_cross", use.loads - use.host_loads),
            ],
        ),
        (
            "page-seconds of the pool",
            [
                ("keys and values", blue, " ", use.row_page_s),
                ("adapters", orange, "right_diagonal_line", use.adapter_page_s),
                ("prefix cache", "#9cc5a1", "dot", use.prefix_page_s),
                ("free", grey, "horizontal_line", free_page_s),
            ],
        ),
    ]
    return column(_shared_out(bars), sizing_mode="stretch_width", css_classes=["adapter-use"])


def _shared_out(bars: _AdapterBars) -> figure:
    """One bar for each of `bars`, as long as the others, with its parts and their shares."""
    names = [name for name, _ in reversed(bars)]
    plot = figure(
        y_range=names,
        x_range=(0.0, 1.0),
        height=60 + 44 * len(bars),
        sizing_mode="stretch_width",
        toolbar_location=None,
    )
    data: defaultdict[str, list[Any]] = defaultdict(list)
    for name, parts in bars:
        total, left = sum(value for *_, value in parts), 0.0
        for title, colour, pattern, value in parts:
            if total and value:
                share = value / total
                for key, cell in (
                    *(("bar", name), ("left", left), ("right", left + share), ("colour", colour)),
                    *(("pattern", pattern), ("part", title), ("value", f"{value:,.1f}"), ("share", f"{share:.1%}")),
                    ("text", f"{title} {share:.0%}" if share > 0.12 else ""),
                ):
                    data[key].append(cell)
                left += share
    source = ColumnDataSource(dict(data))
    plot.hbar(
        y="bar", left="left", right="right", height=0.7, source=source, fill_color="colour", line_color="white",
        hatch_pattern="pattern", hatch_color="#8892a3", hatch_alpha=0.4,
    )  # fmt: skip
    plot.text(x="left", y="bar", text="text", source=source, x_offset=6, text_baseline="middle", text_font_size="11px")
    plot.add_tools(HoverTool(tooltips=[("part", "@part"), ("share", "@share"), ("value", "@value")]))
    plot.xaxis.formatter = NumeralTickFormatter(format="0%")
    plot.grid.visible = False
    return plot


def _figure(seconds: Range1d, height: int, **options: Any) -> figure:
    plot = figure(
        x_range=seconds,
        height=height,
        sizing_mode="stretch_width",
        tools="xpan,xbox_zoom,xzoom_in,xzoom_out,reset,save",
        active_drag="xbox_zoom",
        min_border_left=_LEFT_BORDER_PX,
        **options,
    )
    plot.toolbar.logo = None
    plot.xaxis.axis_label = "seconds since the run began"
    if seconds.end > _CLOCK_FROM_S:
        plot.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
        plot.xaxis.axis_label = "hours, minutes and seconds since the run began"
    return plot


def _throughput(run: RunTimeline, seconds: Range1d) -> figure:
    plot = _figure(seconds, 190, name="throughput", title="Generated tokens per second, all workers")
    columns: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for s, rate in run.rates:
        columns[int(_COLUMNS * s / (run.end_s or 1.0))].append((s, rate))
    means = [fmean(rate for _, rate in samples) for samples in columns.values()]
    source = ColumnDataSource({"s": [samples[0][0] for samples in columns.values()], "rate": means})
    line = plot.step("s", "rate", source=source, name="rates", mode="after", line_width=2, color="#2f6fde")
    plot.add_tools(
        HoverTool(renderers=[line], mode="vline", tooltips=[("at", "@s{0,0.0} s"), ("tokens/s", "@rate{0,0}")])
    )
    plot.y_range.start = 0
    plot.xgrid.visible = False
    return plot


def _timeline(run: RunTimeline, seconds: Range1d, adapters: Mapping[int, Mapping[str, str]]) -> figure:
    names = worker_names(run)
    lanes = {track.worker: lane for lane, track in enumerate(run.tracks)}
    lane_px = max(_LEAST_LANE_PX, min(_LANE_PX, _MOST_PX // (len(lanes) + 1)))
    plot = _figure(
        seconds,
        min(_MOST_PX, lane_px * (len(lanes) + 1)) + 160,
        name="timeline",
        title="Workers: shards above, share of the batch in use below",
        y_range=Range1d(len(lanes), -1),
    )
    ticks = {-0.5: "phases"} | {lane + 0.5: names[worker] for worker, lane in lanes.items()}
    plot.yaxis.ticker = FixedTicker(ticks=list(ticks))
    plot.yaxis.major_label_overrides = ticks
    plot.ygrid.ticker = FixedTicker(ticks=list(range(len(lanes))))
    bars: _Bars = defaultdict(lambda: defaultdict(list))
    for lane, track in enumerate(run.tracks):
        _add_shards(bars, track, lane, run.end_s, adapters)
        _add_activities(bars, track, lane, run.end_s)
    items = [_phases(plot, run)]
    for kind, (color, hatch) in _LOOKS.items():
        if kind in bars:
            items.append((kind, plot.quad(
                left="left", right="right", top="top", bottom="bottom", source=ColumnDataSource(dict(bars[kind])),
                fill_color=color, line_color="#ffffff", line_width=0.5, hatch_pattern=hatch, hatch_color="#475467",
                hatch_alpha=0.6, hatch_scale=7, name=kind,
            )))  # fmt: skip
    items += [item for item in (_moves(plot, run, lanes, adapters), _losses(plot, run, lanes)) if item]
    if len(run.coordinators) > 1:
        items.append(_coordinators(plot, run, len(lanes), names))
    legend = Legend(
        items=[LegendItem(label=label, renderers=[renderer]) for label, renderer in items if label],
        ncols=_LEGEND_COLUMNS, click_policy="hide", label_text_font_size="11px", border_line_color=None, padding=2,
        location="left", name="legend",
    )  # fmt: skip
    plot.add_layout(legend, "above")
    plot.add_tools(HoverTool(renderers=[renderer for _, renderer in items], tooltips=[("", "@title")]))
    return plot


def _phases(plot: figure, run: RunTimeline) -> tuple[str, Any]:
    spans = run.phase_spans()
    source = ColumnDataSource({
        "left": [start_s for _, start_s, _ in spans],
        "right": [end_s for *_, end_s in spans],
        "title": [f"{name}: {_interval(start_s, end_s)}" for name, start_s, end_s in spans],
        "name": [name if end - start >= _NAMED_PHASE_SHARE * run.end_s else "" for name, start, end in spans],
        "color": [_PHASES[i % len(_PHASES)] for i in range(len(spans))],
    })  # fmt: skip
    quads = plot.quad(
        left="left", right="right", top=-0.85, bottom=-0.25, source=source, color="color", line_color="#ffffff"
    )
    plot.text("left", -0.55, text="name", source=source, text_font_size="11px", text_baseline="middle", x_offset=4)
    return "", quads


def _add_shards(
    bars: _Bars, track: WorkerTrack, lane: int, end_s: float, adapters: Mapping[int, Mapping[str, str]]
) -> None:
    spans = sorted(track.spans, key=lambda span: span.start_s)
    placed = list(zip(spans, _without_overlap(spans), strict=True))
    num_rows = max((row for _, row in placed), default=0) + 1
    top, height = lane + _SHARDS[0], (_SHARDS[1] - _SHARDS[0]) / num_rows
    for span, row in _one_per_column(
        placed, end_s, lambda p: (p[0].start_s, p[1]), lambda p: p[0].end_s - p[0].start_s
    ):
        names = list(adapters.get(span.shard_id, ()))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        title = f"shard {span.shard_id}, attempt {span.attempt}: {span.ended}, {_interval(span.start_s, span.end_s)}"
        if names:
            title += f"; {', '.join(names[:4])}{more}"
        _add(bars[_ENDS[span.ended]], span.start_s, span.end_s, top + row * height, top + (row + 1) * height, title)


def _add_activities(bars: _Bars, track: WorkerTrack, lane: int, end_s: float) -> None:
    for activity in _one_per_column(track.activities, end_s, lambda a: (a.start_s, 0), lambda a: a.seconds):
        when = _interval(activity.start_s, activity.end_s)
        bottom = lane + _ACTIVITY[1]
        if activity.kind in IDLE:
            height, title = _IDLE_HEIGHT, f"{activity.kind}: {when}"
        else:
            share = activity.running_rows / (track.batch_rows or 1)
            height = max(share * (_ACTIVITY[1] - _ACTIVITY[0]), 0.02)
            title = f"{activity.kind}, {activity.running_rows:.0f} of {track.batch_rows} rows: {when}"
        kind = activity.kind if activity.kind in (*IDLE, *MODES) else "base"
        _add(bars[kind], activity.start_s, activity.end_s, bottom - height, bottom, title)


def _moves(
    plot: figure,
    run: RunTimeline,
    lanes: Mapping[str, int],
    adapters: Mapping[int, Mapping[str, str]],
) -> tuple[str, Any] | None:
    names = worker_names(run)
    known = [move for move in run.moves if move.from_worker in lanes and move.to_worker in lanes]
    if not known:
        return None
    moves: Iterable[Move] = _one_per_column(known, run.end_s, lambda move: (move.time_s, 0), lambda move: move.num_rows)
    bars: defaultdict[str, list[Any]] = defaultdict(list)
    for move in moves:
        title = f"{move.num_rows} rows of shard {move.shard_id}{_adapter_of(move, adapters)} from "
        title += f"{names[move.from_worker]} to {names[move.to_worker]}"
        values = (move.time_s, lanes[move.from_worker] + 0.47, lanes[move.to_worker] + 0.47)
        for name, value in zip(("s", "from", "to", "title"), (*values, title), strict=True):
            bars[name].append(value)
    source = ColumnDataSource(dict(bars))
    plot.segment("s", "from", "s", "to", source=source, color="#d6337c", line_width=1.5)
    return "rows moved", plot.scatter("s", "to", source=source, marker="diamond", size=9, color="#d6337c")


def _adapter_of(move: Move, adapters: Mapping[int, Mapping[str, str]]) -> str:
    """Name of the adapter of rows that moved, in brackets; nothing when they may have several."""
    of_shard = adapters.get(move.shard_id, {}).items()
    names = [name for name, adapter_id in of_shard if not move.is_selective or adapter_id == move.adapter_id]
    return f" ({names[0]})" if len(names) == 1 else ""


def _losses(plot: figure, run: RunTimeline, lanes: Mapping[str, int]) -> tuple[str, Any] | None:
    losses = [(s, lanes[track.worker] + 0.5, reason) for track in run.tracks for s, reason in track.losses]
    if not losses:
        return None
    source = ColumnDataSource({
        "s": [s for s, _, _ in losses],
        "lane": [lane for _, lane, _ in losses],
        "title": [f"worker lost at {s:,.1f} s: {reason}" for s, _, reason in losses],
    })  # fmt: skip
    return "worker lost", plot.scatter("s", "lane", source=source, marker="x", size=13, line_width=3, color="#b42318")


def _coordinators(plot: figure, run: RunTimeline, num_lanes: int, names: Mapping[str, str]) -> tuple[str, Any]:
    times = [s for s, _ in run.coordinators]
    titles = [f"coordinator started at {s:,.1f} s on {names.get(worker, worker)}" for s, worker in run.coordinators]
    source = ColumnDataSource({"s": times, "title": titles})
    drawn = plot.segment("s", -1, "s", num_lanes, source=source, color="#475467", line_dash="dashed", line_width=1.5)
    drawn.name = "coordinator started"
    return "coordinator started", drawn


def _add(bars: Mapping[str, list[Any]], left: float, right: float, top: float, bottom: float, title: str) -> None:
    for name, value in (("left", left), ("right", right), ("top", top), ("bottom", bottom), ("title", title)):
        bars[name].append(value)


def _interval(start_s: float, end_s: float) -> str:
    return f"{end_s - start_s:,.1f} s, from {start_s:,.1f} to {end_s:,.1f} s"


def _one_per_column(
    items: Iterable[ItemT],
    end_s: float,
    place_of: Callable[[ItemT], tuple[float, int]],
    size_of: Callable[[ItemT], float],
) -> list[ItemT]:
    """The largest item of each column of time and row. `place_of`: second at which an item begins, and its row."""
    largest: dict[tuple[int, int], ItemT] = {}
    for item in items:
        start_s, row = place_of(item)
        place = int(_COLUMNS * start_s / (end_s or 1.0)), row
        if place not in largest or size_of(item) > size_of(largest[place]):
            largest[place] = item
    return list(largest.values())


def _without_overlap(spans: Sequence[ShardSpan]) -> list[int]:
    """Rows for spans sorted by their begin, so that no two in a row overlap; the last row takes all that do not fit."""
    ends: list[float] = []
    rows = []
    for span in spans:
        row = next((i for i, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
        row = min(row, _SHARD_ROWS - 1)
        ends[row : row + 1] = [span.end_s]
        rows.append(row)
    return rows
