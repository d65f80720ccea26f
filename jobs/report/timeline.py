"""Reads `events.jsonl` into timelines: phases of a run, and per worker what it did, which shards it had open, when it
was lost.

Pure: events and commands in, records out. A journal may hold several runs of one job (each `resume` is one), and a run
several coordinators. All times are seconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, Literal

from ...engine.untrusted import MALFORMED
from ...scheduler.scheduler import BEGINNING
from ..status.worker_names import WorkerNames

SpanEnd = Literal["committed", "failed", "recalled", "lost", "open"]
MODES = ("base", "unmerged", "merged", "mixture")
STARTING, OPENING, WAITING = "engine starting", "opening a shard", "waiting for a shard"
LENT, NONE_LEFT, SILENT = "its rows lent", "no shard left", "no report"
#: Why a worker computed nothing -> the same in a word or two.
IDLE = {
    STARTING: "starting",
    OPENING: "opening",
    WAITING: "waiting",
    LENT: "rows lent",
    NONE_LEFT: "none left",
    SILENT: "silent",
}
# Reports come once a second; after so long without one nothing is known of a worker.
_SILENT_S = 5.0
# Reports with so equal a share of the batch are one activity.
_LEVELS = 8


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker did for some time: a mode, or one of `IDLE`. `running_rows`: the mean."""

    kind: str
    start_s: float
    end_s: float
    running_rows: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """One attempt at a shard on a worker, from `start_s` to `end_s`."""

    shard_id: int
    attempt: int
    start_s: float
    end_s: float
    ended: SpanEnd


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a shard lent by one worker to another. `adapter`: "" is the base model."""

    time_s: float
    shard_id: int
    from_worker: str
    to_worker: str
    adapter: str
    num_rows: int


@dataclass(slots=True)
class WorkerTrack:
    """One worker of a run. `activities` cover the time in which the cluster had it. `losses`: (time, reason)."""

    worker: str
    batch_rows: int = 0
    activities: list[Activity] = field(default_factory=list)
    spans: list[ShardSpan] = field(default_factory=list)
    losses: list[tuple[float, str]] = field(default_factory=list)

    @property
    def worker_s(self) -> float:
        """Seconds for which it was there."""
        return sum(activity.seconds for activity in self.activities)

    def seconds_by_kind(self) -> dict[str, float]:
        """Activity -> its seconds."""
        total: dict[str, float] = {}
        for activity in self.activities:
            total[activity.kind] = total.get(activity.kind, 0.0) + activity.seconds
        return total


@dataclass(slots=True)
class RunTimeline:
    """One run: every worker that any of its coordinators saw, what moved between them, and its phases.

    `phases`: (name, seconds at which it began), in order; the last lasts until `end_s`. `coordinators`: (when it
    started, its worker). `rates`: (time, tokens per second of all workers). `names`: of its workers.
    """

    tracks: list[WorkerTrack] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
    coordinators: list[tuple[float, str]] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)
    end_s: float = 0.0
    names: WorkerNames = field(default_factory=WorkerNames)

    @property
    def worker_s(self) -> float:
        """Seconds for which workers were held, summed over workers."""
        return sum(track.worker_s for track in self.tracks)

    @property
    def mean_busy(self) -> float:
        """Mean share of the batch in use, while engines were ready."""
        ready = [(t, a) for t in self.tracks for a in t.activities if a.kind != STARTING]
        offered = sum(track.batch_rows * activity.seconds for track, activity in ready)
        return sum(activity.running_rows * activity.seconds for _, activity in ready) / offered if offered else 0.0

    def phase_spans(self) -> list[tuple[str, float, float]]:
        """Name, begin and end of each phase."""
        bounds = pairwise([*self.phases, ("", self.end_s)])
        return [(name, start_s, end_s) for (name, start_s), (_, end_s) in bounds]


def read_timelines(records: Iterable[Mapping[str, Any]], ended_at_s: float | None = None) -> list[RunTimeline]:
    """The runs that a journal of events and commands tells of, in order; kinds not known here are passed over.

    `ended_at_s`: when the last run ended, in seconds since the epoch; None when it has not, or that is not known.
    """
    runs: list[_RunReader] = []
    for record in records:
        is_beginning = record.get("kind") == BEGINNING
        if not runs or (is_beginning and record.get("run_id", "") != runs[-1].run_id):
            runs.append(_RunReader(record.get("run_id")))
        # A line that says something else than ours is passed over, as a torn one is.
        with suppress(*MALFORMED):
            runs[-1].read(record)
    closed = [run.closed(ended_at_s if run is runs[-1] else None) for run in runs]
    return [timeline for timeline in closed if timeline.tracks]


@dataclass(slots=True)
class _Current:
    """What a worker does now. `level`: its share of the batch, roughly. `seen_s`: of its last report; `row_s`: running
    rows times seconds until then.
    """

    kind: str
    level: int
    start_s: float
    seen_s: float
    running_rows: int = 0
    row_s: float = 0.0


class _RunReader:
    """Builds one `RunTimeline`; a command happens at the time of the event before it."""

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self.timeline = RunTimeline()
        # Seconds since the epoch at 0; seconds at which the clock of the coordinator began.
        self._origin_s: float | None = None
        self._offset_s = 0.0
        self._tracks: dict[str, WorkerTrack] = {}
        # Of workers that are there.
        self._current: dict[str, _Current] = {}
        self._rates: dict[str, float] = {}
        # (shard id, worker) -> attempt, start
        self._open: dict[tuple[int, str], tuple[int, float]] = {}
        self._last_opened_s = 0.0
        # The cluster's workers; None before they were looked for.
        self._seen: set[str] | None = None

    def read(self, record: Mapping[str, Any]) -> None:
        """Take in one line."""
        now_s = self.timeline.end_s = max(self.timeline.end_s, self._offset_s + record.get("time_s", 0.0))
        match record:
            case {"kind": kind} if kind == BEGINNING:
                self._begin(record)
            case {"kind": "WorkersSeen", "worker_ids": workers}:
                self._see(workers, now_s)
            case {"kind": "ReplicaJoined", "replica_id": worker, "batch_rows": batch_rows}:
                self.timeline.names.see([worker])
                self._join(worker, batch_rows, now_s)
            case {"kind": "ReplicasFound", "replicas": found}:
                self._find(found, now_s)
            case {"kind": "RemoveReplica" | "ReplicaLost", "replica_id": worker}:  # the second up to version 0.1
                self._lose(worker, now_s, record.get("reason", "lost"))
            case {"kind": "ReplicaFailed", "replica_id": worker}:
                self._lose(worker, now_s, record["reason"])
            case {"kind": "Progress", "replica_id": worker} if worker in self._current:
                self._enter(worker, now_s, _activity(record), record["running_rows"])
                self._rate(worker, record["tokens_per_s"], now_s)
            case {"kind": "RunShard", "shard_id": shard_id, "replica_id": worker, "attempt": attempt}:
                self._open.setdefault((shard_id, worker), (attempt, now_s))
                self._last_opened_s = now_s
                if worker in self._current and self._current[worker].kind == WAITING:
                    self._enter(worker, now_s, OPENING)
            case {"kind": "ShardCommitted", "shard_id": shard_id, "replica_id": worker}:
                self._end_spans(now_s, "committed", shard_id, worker)
            case {"kind": "ShardFailed", "shard_id": shard_id, "replica_id": worker}:
                self._end_spans(now_s, "failed", shard_id, worker)
            case {"kind": "Recall", "shard_id": shard_id, "replica_id": worker}:
                self._end_spans(now_s, "recalled", shard_id, worker)
            case {"kind": "MigrateRows"}:
                self.timeline.moves.append(_move(now_s, record))
            case {"kind": "FinishJob"}:
                self.timeline.phases.append(("finishing", now_s))

    def closed(self, ended_at_s: float | None) -> RunTimeline:
        """The run; what is still open ends with it."""
        timeline = self.timeline
        if ended_at_s is not None and self._origin_s is not None:
            timeline.end_s = max(timeline.end_s, ended_at_s - self._origin_s)
        self._end_spans(timeline.end_s, "open")
        for worker in list(self._current):
            self._leave(worker, timeline.end_s)
        for track in timeline.tracks:
            track.activities = [part for activity in track.activities for part in self._named(activity)]
        return timeline

    def _named(self, activity: Activity) -> list[Activity]:
        """An activity; one that waited beyond the last shard in two."""
        last_s = max(activity.start_s, self._last_opened_s)
        if activity.kind != WAITING or last_s >= activity.end_s:
            return [activity]
        waiting = Activity(WAITING, activity.start_s, last_s)
        return [waiting] * (waiting.seconds > 0) + [Activity(NONE_LEFT, last_s, activity.end_s)]

    def _begin(self, record: Mapping[str, Any]) -> None:
        """A coordinator starts. What the one before it had open is open until the new one has looked."""
        timeline = self.timeline
        timeline.names.see(record.get("workers", ()))
        before_s = timeline.end_s
        phases = [(name, at_s) for name, at_s in record.get("phases", ())]
        began_at_s = record.get("at_s", 0.0)
        if self._origin_s is None:
            self._origin_s = min([began_at_s, *(at_s for _, at_s in phases)])
        self._offset_s = timeline.end_s = max(before_s, began_at_s - self._origin_s)
        for name, at_s in phases:
            shown = "restarting" if timeline.coordinators and name == "starting" else name
            timeline.phases.append((shown, max(before_s, at_s - self._origin_s)))
        timeline.coordinators.append((self._offset_s, record.get("coordinator", "")))
        for shard_id in record.get("committed", ()):
            self._end_spans(timeline.end_s, "committed", int(shard_id))

    def _see(self, workers: Iterable[str], now_s: float) -> None:
        # The scheduler removes replicas that it knows; those of a coordinator before it, it never met.
        workers = list(workers)
        self._seen = set(workers)
        for worker in self._current.keys() - self._seen:
            self._lose(worker, now_s, "its worker is gone")
        self.timeline.names.see(workers)
        is_first = not self._tracks
        for worker in workers:
            if worker not in self._tracks:
                # Those of the first look have been there while rows were indexed.
                self._enter(worker, 0.0 if is_first else now_s, STARTING)

    def _find(self, found: Iterable[Any], now_s: float) -> None:
        still_open = set()
        for worker, batch_rows, open_shards, *_ in found:
            if self._seen is not None and worker not in self._seen:
                continue  # its last report is there, and it is not
            self._join(worker, batch_rows, now_s)
            still_open |= {(shard_id, worker) for shard_id, _ in open_shards}
        for shard_id, worker in self._open.keys() - still_open:
            self._end_spans(now_s, "lost", shard_id, worker)

    def _join(self, worker: str, batch_rows: int, now_s: float) -> None:
        if worker not in self._current or self._current[worker].kind == STARTING:
            self._enter(worker, now_s, WAITING)
        self._tracks[worker].batch_rows = batch_rows
        phases = self.timeline.phases
        if phases and phases[-1][0] == "loading engines":
            phases.append(("running", now_s))

    def _enter(self, worker: str, now_s: float, kind: str, running_rows: int = 0) -> None:
        """A worker does something from now on, or is reported to do it still."""
        if worker not in self._tracks:
            self._tracks[worker] = WorkerTrack(worker)
            self.timeline.tracks.append(self._tracks[worker])
        batch_rows = self._tracks[worker].batch_rows or 1
        current = self._current.get(worker)
        level = ceil(_LEVELS * running_rows / batch_rows)
        if current and (current.kind, current.level) == (kind, level) and now_s - current.seen_s <= _SILENT_S:
            current.row_s += current.running_rows * (now_s - current.seen_s)
            current.seen_s, current.running_rows = now_s, running_rows
            return
        if current:
            self._leave(worker, now_s)
        self._current[worker] = _Current(kind, level, now_s, now_s, running_rows)

    def _leave(self, worker: str, now_s: float) -> None:
        """End what a worker does."""
        current, activities = self._current.pop(worker), self._tracks[worker].activities
        is_silent = now_s - current.seen_s > _SILENT_S and current.kind != STARTING
        until_s = current.seen_s if is_silent else now_s
        row_s = current.row_s + current.running_rows * (until_s - current.seen_s)
        if until_s > current.start_s:
            mean = row_s / (until_s - current.start_s)
            activities.append(Activity(current.kind, current.start_s, until_s, mean))
        if is_silent:
            activities.append(Activity(SILENT, until_s, now_s))

    def _lose(self, worker: str, now_s: float, reason: str) -> None:
        self._end_spans(now_s, "lost", worker=worker)
        if worker in self._current:
            self._leave(worker, now_s)
            self._tracks[worker].losses.append((now_s, reason))
            self._rate(worker, 0.0, now_s)

    def _rate(self, worker: str, tokens_per_s: float, now_s: float) -> None:
        self._rates[worker] = tokens_per_s
        self.timeline.rates.append((now_s, sum(self._rates.values())))

    def _end_spans(self, now_s: float, ended: SpanEnd, shard_id: int | None = None, worker: str | None = None) -> None:
        for key in [k for k in self._open if shard_id in (None, k[0]) and worker in (None, k[1])]:
            attempt, start_s = self._open.pop(key)
            if track := self._tracks.get(key[1]):
                track.spans.append(ShardSpan(key[0], attempt, start_s, now_s, ended))


def _activity(record: Mapping[str, Any]) -> str:
    """What a worker that reports this does."""
    if record["running_rows"] and record.get("mode"):
        return str(record["mode"])
    open_rows = record["open_rows"]
    if open_rows and open_rows == sum(rows for _, rows in record.get("lent_shards", ())):
        return LENT
    return OPENING if open_rows or record.get("incoming_rows") or record["running_rows"] else WAITING


def _move(now_s: float, record: Mapping[str, Any]) -> Move:
    return Move(
        time_s=now_s,
        shard_id=record["shard_id"],
        from_worker=record["from_replica_id"],
        to_worker=record["to_replica_id"],
        adapter=record["adapter"],
        num_rows=record["num_rows"],
    )
