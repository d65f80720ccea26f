"""Places the shapes of the timeline: pure arithmetic from seconds and rows to a grid of columns and percentages.

However long a run and however many its workers, a drawing holds a bounded number of shapes: time is cut into
`NUM_COLUMNS` columns, and workers beyond `MAX_LANES` are counted instead of drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import RunTimeline, Sample, SpanEnd, WorkerTrack

NUM_COLUMNS = 400
MAX_LANES = 64


@dataclass(frozen=True, slots=True)
class Bar:
    """Part of a lane, from `left` to `left + width` in columns (not whole numbers). `title`: what it is, for people."""

    left: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's life. `busy` and `tokens_per_s`: one number per column; `busy` is rows decoding / batch rows,
    None while the worker was not there.
    """

    worker: str
    note: str
    shards: tuple[Bar, ...]
    modes: tuple[Bar, ...]
    busy: tuple[float | None, ...]
    tokens_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """One run, ready to be painted. `tokens_per_s`: of all workers, per column. `marks_s`: times worth a tick."""

    end_s: float
    lanes: tuple[Lane, ...]
    num_hidden_lanes: int
    tokens_per_s: tuple[float, ...]
    moves: tuple[Bar, ...]
    marks_s: tuple[float, ...]

    @property
    def mean_busy(self) -> float:
        """Mean share of the batch in use, over the workers' drawn lives."""
        values = [value for lane in self.lanes for value in lane.busy if value is not None]
        return sum(values) / len(values) if values else 0.0


def draw(timeline: RunTimeline) -> Drawing:
    """Lay a run out. An empty run gives an empty drawing."""
    end_s = timeline.end_s or 1.0
    lanes = tuple(_lane(track, end_s) for track in timeline.tracks)
    total = tuple(sum(lane.tokens_per_s[i] for lane in lanes) for i in range(NUM_COLUMNS)) if lanes else ()
    moves = tuple(
        Bar(
            _column(move.time_s, end_s),
            1.0,
            "move",
            f"{move.num_rows} rows of shard {move.shard_id}"
            f" ({move.adapter or 'base model'}) from {move.from_worker} to {move.to_worker}",
        )
        for move in timeline.moves[:NUM_COLUMNS]
    )
    return Drawing(end_s, lanes[:MAX_LANES], max(0, len(lanes) - MAX_LANES), total, moves, _marks(end_s))


def _lane(track: WorkerTrack, end_s: float) -> Lane:
    columns = _per_column(track, end_s)
    lost = "" if track.lost_s is None else f", lost at {track.lost_s:.1f} s"
    num_committed = sum(span.ended == "committed" for span in track.spans)
    return Lane(
        worker=track.worker,
        note=f"{num_committed} parts, joined at {track.joined_s:.1f} s{lost}",
        shards=_shard_bars(track, end_s),
        modes=_mode_bars(columns),
        busy=tuple(sample.running_rows / track.batch_rows if sample else None for sample in columns),
        tokens_per_s=tuple(sample.tokens_per_s if sample else 0.0 for sample in columns),
    )


def _per_column(track: WorkerTrack, end_s: float) -> list[Sample | None]:
    """The latest sample at each column; None before the first and after the worker was lost."""
    columns: list[Sample | None] = [None] * NUM_COLUMNS
    for sample in track.samples:
        columns[min(NUM_COLUMNS - 1, int(_column(sample.time_s, end_s)))] = sample
    last_column = NUM_COLUMNS if track.lost_s is None else int(_column(track.lost_s, end_s))
    latest: Sample | None = None
    for i in range(NUM_COLUMNS):
        latest = columns[i] or latest
        columns[i] = latest if i <= last_column else None
    return columns


def _shard_bars(track: WorkerTrack, end_s: float) -> tuple[Bar, ...]:
    """At most one bar per column and outcome begins in a column; those it hides are counted in its title."""
    bars: dict[tuple[int, SpanEnd], Bar] = {}
    hidden: dict[tuple[int, SpanEnd], int] = {}
    for span in sorted(track.spans, key=lambda span: span.start_s):
        left, right = _column(span.start_s, end_s), _column(span.end_s, end_s)
        key = (int(left), span.ended)
        title = f"shard {span.shard_id}, attempt {span.attempt}: {span.ended}, {span.start_s:.1f}-{span.end_s:.1f} s"
        hidden[key] = hidden.get(key, -1) + 1
        if key not in bars or right - left > bars[key].width:
            bars[key] = Bar(left, max(right - left, 0.5), span.ended, title)
    return tuple(
        Bar(bar.left, bar.width, bar.kind, bar.title + (f" and {hidden[key]} more" if hidden[key] else ""))
        for key, bar in bars.items()
    )


def _mode_bars(columns: Sequence[Sample | None]) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    start = 0
    for i in range(1, NUM_COLUMNS + 1):
        if i < NUM_COLUMNS and _mode(columns[i]) == _mode(columns[start]):
            continue
        if mode := _mode(columns[start]):
            bars.append(Bar(start, i - start, mode, mode))
        start = i
    return tuple(bars)


def _mode(sample: Sample | None) -> str:
    return sample.mode if sample and sample.running_rows else ""


def _column(time_s: float, end_s: float) -> float:
    return NUM_COLUMNS * min(max(time_s / end_s, 0.0), 1.0)


def _marks(end_s: float) -> tuple[float, ...]:
    """Between four and ten round times from 0 to the end."""
    step_s = next(s for s in _steps() if end_s / s <= 10)
    return tuple(i * step_s for i in range(int(end_s / step_s) + 1))


def _steps() -> Sequence[float]:
    return [base * 10.0**power for power in range(-3, 9) for base in (1, 2, 5)]
