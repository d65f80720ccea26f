"""Reads `events.jsonl` into timelines: phases of a run; and the activities, open shards and losses of each worker.

Pure: events and commands in, records out. A journal may hold several runs of one job (each `resume` is one), and a run
may have several coordinators. All times are seconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, Literal

from ...scheduler.messages import BEGINNING, EVENTS_VERSION
from ...system.untrusted import MALFORMED
from ..status.worker_names import WorkerNames

SpanEnd = Literal["committed", "failed", "recalled", "lost", "open"]
MODES = ("base", "unmerged", "merged", "mixture")
#: Phase in which a command audits adapters, reads the input's footers and starts or joins a cluster.
OPENING_JOB = "opening"
STARTING, OPENING, WAITING = "engine starting", "opening a shard", "waiting for a shard"
LENT, NONE_LEFT, SILENT = "its rows lent", "no shard left", "no report"
#: Activity in which a worker computes nothing -> its short name.
IDLE = {
    STARTING: "starting",
    OPENING: "opening",
    WAITING: "waiting",
    LENT: "rows lent",
    NONE_LEFT: "none left",
    SILENT: "silent",
}
# Seconds without a report after which a worker counts as silent; reports come once a second.
_SILENT_S = 5.0
# Levels of the share of the batch in use: successive reports of one level are one activity.
_LEVELS = 8


@dataclass(frozen=True, slots=True)
class Activity:
    """One activity of a worker: computing in one mode, or being idle for one reason."""

    #: Mode of the steps, or one of `IDLE`.
    kind: str
    #: Begin, in seconds since the run began.
    start_s: float
    #: End, in seconds since the run began.
    end_s: float
    #: Mean number of rows in the batch.
    running_rows: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the activity."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """One attempt at a shard on a worker."""

    #: The shard.
    shard_id: int
    #: Number of the attempt.
    attempt: int
    #: Begin, in seconds since the run began.
    start_s: float
    #: End, in seconds since the run began.
    end_s: float
    #: How the attempt ended.
    ended: SpanEnd


@dataclass(frozen=True, slots=True)
class Move:
    """One migration: rows of a shard lent by one worker to another."""

    #: Time, in seconds since the run began.
    time_s: float
    #: Shard of the rows.
    shard_id: int
    #: Address of the worker that lends the rows.
    from_worker: str
    #: Address of the worker that takes the rows.
    to_worker: str
    #: Rows that move.
    num_rows: int
    #: Whether only rows of one adapter move.
    is_selective: bool = False
    #: Content hash of this adapter; None for the base model, and when rows of any adapter move.
    adapter_id: str | None = None


@dataclass(slots=True)
class WorkerTrack:
    """One worker of a run."""

    #: Its Dask address.
    worker: str
    #: Most rows of its engine's batch; 0 before its engine was ready.
    batch_rows: int = 0
    #: Its activities in order; they cover the time in which the cluster had the worker.
    activities: list[Activity] = field(default_factory=list)
    #: Its attempts at shards, by their end.
    spans: list[ShardSpan] = field(default_factory=list)
    #: (time, reason) of each loss of the worker or its engine.
    losses: list[tuple[float, str]] = field(default_factory=list)

    @property
    def worker_s(self) -> float:
        """Seconds for which the cluster had the worker."""
        return sum(activity.seconds for activity in self.activities)

    def seconds_by_kind(self) -> dict[str, float]:
        """Kind of activity -> seconds."""
        total: dict[str, float] = {}
        for activity in self.activities:
            total[activity.kind] = total.get(activity.kind, 0.0) + activity.seconds
        return total


@dataclass(slots=True)
class RunTimeline:
    """One run of a job: its phases, its workers, and the rows that moved between them."""

    #: Every worker that any coordinator of the run saw.
    tracks: list[WorkerTrack] = field(default_factory=list)
    #: Migrations, in order of time.
    moves: list[Move] = field(default_factory=list)
    #: (name, begin in seconds) of each phase, in order; the last one lasts until `end_s`.
    phases: list[tuple[str, float]] = field(default_factory=list)
    #: (start in seconds, address of its worker) of each coordinator.
    coordinators: list[tuple[float, str]] = field(default_factory=list)
    #: (time in seconds, tokens per second of all workers together) at each change.
    rates: list[tuple[float, float]] = field(default_factory=list)
    #: End, in seconds since the run began.
    end_s: float = 0.0
    #: Names of its workers.
    names: WorkerNames = field(default_factory=WorkerNames)
    #: Whether its events are of another version, some of which are not read.
    is_in_part: bool = False

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
        """(name, begin, end) of each phase, in seconds."""
        bounds = pairwise([*self.phases, ("", self.end_s)])
        return [(name, start_s, end_s) for (name, start_s), (_, end_s) in bounds]


def read_timelines(records: Iterable[Mapping[str, Any]], ended_at_s: float | None = None) -> list[RunTimeline]:
    """The runs in a journal of events and commands, in order; unknown kinds of records are ignored.

    `ended_at_s`: when the last run ended, in seconds since the epoch; None when it has not, or that is not known.
    """
    runs: list[_RunReader] = []
    for record in records:
        is_beginning = record.get("kind") == BEGINNING
        if not runs or (is_beginning and record.get("run_id", "") != runs[-1].run_id):
            runs.append(_RunReader(record.get("run_id")))
        # Ignores a record of another shape than ours.
        with suppress(*MALFORMED):
            runs[-1].read(record)
    closed = [run.closed(ended_at_s if run is runs[-1] else None) for run in runs]
    return [timeline for timeline in closed if timeline.tracks]


@dataclass(slots=True)
class _Current:
    """The present activity of a worker, while a journal is read."""

    #: Mode of the steps, or one of `IDLE`.
    kind: str
    #: Share of the batch in use, in `_LEVELS` levels.
    level: int
    #: Begin, in seconds since the run began.
    start_s: float
    #: Time of the worker's latest report.
    seen_s: float
    #: Rows in the batch at the latest report.
    running_rows: int = 0
    #: Running rows times seconds, from `start_s` to `seen_s`.
    row_s: float = 0.0


class _RunReader:
    """Builds one `RunTimeline`; a command happens at the time of the event before it."""

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self.timeline = RunTimeline()
        # Begin of the run in seconds since the epoch; None before its first coordinator.
        self._origin_s: float | None = None
        # Start of the latest coordinator, whose events count time from 0, in seconds since the run began.
        self._offset_s = 0.0
        self._tracks: dict[str, WorkerTrack] = {}
        # Address -> activity of each worker that the cluster has.
        self._current: dict[str, _Current] = {}
        self._rates: dict[str, float] = {}
        # (shard id, worker) -> attempt, start
        self._open: dict[tuple[int, str], tuple[int, float]] = {}
        self._last_opened_s = 0.0
        # The cluster's workers at the latest look; None before the first one.
        self._seen: set[str] | None = None

    def read(self, record: Mapping[str, Any]) -> None:
        """Take in one event or command."""
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
            case {"kind": "ReplicaReported", "replica_id": worker} if worker in self._current:
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
        """The run's timeline; attempts and activities that are still open end with the run."""
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
        """The activity, or the two parts of a wait: before the last shard was opened, and after it."""
        last_s = max(activity.start_s, self._last_opened_s)
        if activity.kind != WAITING or last_s >= activity.end_s:
            return [activity]
        waiting = Activity(WAITING, activity.start_s, last_s)
        return [waiting] * (waiting.seconds > 0) + [Activity(NONE_LEFT, last_s, activity.end_s)]

    def _begin(self, record: Mapping[str, Any]) -> None:
        """A coordinator starts. Its predecessor's shards stay open until the new coordinator has looked."""
        timeline = self.timeline
        timeline.is_in_part |= record.get("version") != EVENTS_VERSION
        timeline.names.see(record.get("workers", ()))
        before_s = timeline.end_s
        phases = [(name, at_s) for name, at_s in record.get("phases", ())]
        began_at_s = record.get("at_s", 0.0)
        if self._origin_s is None:
            self._origin_s = min([began_at_s, *(at_s for _, at_s in phases)])
        self._offset_s = timeline.end_s = max(before_s, began_at_s - self._origin_s)
        for name, at_s in phases:
            if timeline.coordinators and name == "opening":
                continue  # the command opened the job once, for its first coordinator
            shown = "restarting" if timeline.coordinators and name == "starting" else name
            timeline.phases.append((shown, max(before_s, at_s - self._origin_s)))
        timeline.coordinators.append((self._offset_s, record.get("coordinator", "")))
        for shard_id in record.get("committed", ()):
            self._end_spans(timeline.end_s, "committed", int(shard_id))

    def _see(self, workers: Iterable[str], now_s: float) -> None:
        # The scheduler removes only replicas that it knows, not those of an earlier coordinator.
        workers = list(workers)
        self._seen = set(workers)
        for worker in self._current.keys() - self._seen:
            self._lose(worker, now_s, "its worker is gone")
        self.timeline.names.see(workers)
        is_first = not self._tracks
        for worker in workers:
            if worker not in self._tracks:
                # Workers of the first look were in the cluster while rows were indexed, but not yet while a command
                # opened the job.
                began_s = next((at_s for name, at_s in self.timeline.phases if name != OPENING_JOB), 0.0)
                self._enter(worker, began_s if is_first else now_s, STARTING)

    def _find(self, found: Iterable[Any], now_s: float) -> None:
        still_open = set()
        for replica in found:
            worker = replica["replica_id"]
            if self._seen is not None and worker not in self._seen:
                continue  # its last report is found, but the worker is gone
            self._join(worker, replica["batch_rows"], now_s)
            still_open |= {(rows["shard_id"], worker) for rows in replica["open_shards"]}
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
        """Begin an activity of a worker, or extend the present one when kind and level are the same."""
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
        """End the present activity of a worker; time without reports becomes an activity of its own."""
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
    """The activity of a worker with this report: its mode, or why it computes nothing."""
    if record["running_rows"] and record.get("mode"):
        return str(record["mode"])
    open_rows = record["open_rows"]
    if open_rows and open_rows == sum(rows["num_rows"] for rows in record.get("lent_shards", ())):
        return LENT
    return OPENING if open_rows or record.get("incoming_rows") or record["running_rows"] else WAITING


def _move(now_s: float, record: Mapping[str, Any]) -> Move:
    return Move(
        time_s=now_s,
        shard_id=record["shard_id"],
        from_worker=record["from_replica_id"],
        to_worker=record["to_replica_id"],
        num_rows=record["num_rows"],
        is_selective=record["is_selective"],
        adapter_id=record["adapter_id"],
    )
