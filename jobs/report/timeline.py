"""Reads `events.jsonl` into timelines per worker: when it lived, which shards it had open, how busy it was.

Pure: events and commands in, frozen records out. A journal may hold several runs of one job (each `resume` is one,
and so is a coordinator that was started again elsewhere); their clocks all begin at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SpanEnd = Literal["committed", "failed", "recalled", "lost", "open"]
# Clocks of one run never step back; a step of more than this (seconds) is a new run.
_NEW_RUN_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A worker at one time. `mode`: how its latest step served its rows, "" when unknown."""

    time_s: float
    running_rows: int
    tokens_per_s: float
    mode: str


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
    """One worker of a run. `lost_s`: when it was given up, None when it lived to the end."""

    worker: str
    batch_rows: int
    joined_s: float
    lost_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    spans: list[ShardSpan] = field(default_factory=list)


@dataclass(slots=True)
class RunTimeline:
    """One run: its workers in the order they joined, what moved between them, and its last event's time."""

    tracks: list[WorkerTrack] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def worker_s(self) -> float:
        """Seconds for which workers were held, summed over workers."""
        return sum((self.end_s if t.lost_s is None else t.lost_s) - t.joined_s for t in self.tracks)


def read_timelines(records: Iterable[Mapping[str, Any]]) -> list[RunTimeline]:
    """The runs that a journal of events and commands tells of, in order; kinds not known here are passed over."""
    runs: list[_RunReader] = []
    for record in records:
        time_s = record.get("time_s")
        if not runs or (time_s is not None and time_s < runs[-1].timeline.end_s - _NEW_RUN_STEP_S):
            runs.append(_RunReader())
        runs[-1].read(record)
    return [run.closed() for run in runs if run.timeline.tracks]


class _RunReader:
    """Builds one `RunTimeline`; a command happens at the time of the event before it."""

    def __init__(self) -> None:
        self.timeline = RunTimeline()
        self._alive: dict[str, WorkerTrack] = {}
        # (shard id, worker) -> attempt, start
        self._open: dict[tuple[int, str], tuple[int, float]] = {}

    def read(self, record: Mapping[str, Any]) -> None:
        """Take in one line."""
        now_s = self.timeline.end_s = max(self.timeline.end_s, record.get("time_s", 0.0))
        match record:
            case {"kind": "ReplicaJoined", "replica_id": worker, "batch_rows": batch_rows}:
                self._join(worker, batch_rows, now_s)
            case {"kind": "ReplicasFound", "replicas": found}:
                for worker, batch_rows, *_ in found:
                    self._join(worker, batch_rows, now_s)
            case {"kind": "RemoveReplica" | "ReplicaLost", "replica_id": worker}:  # the second up to version 0.1
                self._end_spans(now_s, "lost", worker=worker)
                if track := self._alive.pop(worker, None):
                    track.lost_s = now_s
            case {"kind": "Progress", "replica_id": worker} if worker in self._alive:
                self._alive[worker].samples.append(_sample(record))
            case {"kind": "RunShard", "shard_id": shard_id, "replica_id": worker, "attempt": attempt}:
                self._open[(shard_id, worker)] = (attempt, now_s)
            case {"kind": "ShardCommitted", "shard_id": shard_id, "replica_id": worker}:
                self._end_spans(now_s, "committed", shard_id, worker)
            case {"kind": "ShardFailed", "shard_id": shard_id, "replica_id": worker}:
                self._end_spans(now_s, "failed", shard_id, worker)
            case {"kind": "Recall", "shard_id": shard_id, "replica_id": worker}:
                self._end_spans(now_s, "recalled", shard_id, worker)
            case {"kind": "MigrateRows"}:
                self.timeline.moves.append(_move(now_s, record))

    def _join(self, worker: str, batch_rows: int, now_s: float) -> None:
        self._alive[worker] = WorkerTrack(worker, batch_rows, now_s)
        self.timeline.tracks.append(self._alive[worker])

    def closed(self) -> RunTimeline:
        """The run; what is still open ends with it."""
        self._end_spans(self.timeline.end_s, "open")
        return self.timeline

    def _end_spans(self, now_s: float, ended: SpanEnd, shard_id: int | None = None, worker: str | None = None) -> None:
        for key in [k for k in self._open if shard_id in (None, k[0]) and worker in (None, k[1])]:
            attempt, start_s = self._open.pop(key)
            if track := self._alive.get(key[1]):
                track.spans.append(ShardSpan(key[0], attempt, start_s, now_s, ended))


def _sample(record: Mapping[str, Any]) -> Sample:
    return Sample(
        time_s=record["time_s"],
        running_rows=record["running_rows"],
        tokens_per_s=record["tokens_per_s"],
        mode=record.get("mode", ""),
    )


def _move(now_s: float, record: Mapping[str, Any]) -> Move:
    return Move(
        time_s=now_s,
        shard_id=record["shard_id"],
        from_worker=record["from_replica_id"],
        to_worker=record["to_replica_id"],
        adapter=record["adapter"],
        num_rows=record["num_rows"],
    )
