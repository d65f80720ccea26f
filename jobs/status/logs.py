"""Reads a job's log, in order of time: its events in words, and the lines of client, workers and engines.

The log comes from the output alone, so that it does not depend on the cluster. `_EventStory` puts `events.jsonl` into
words; workers have the names that the coordinator gives them.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any

from ...scheduler.messages import BEGINNING, EVENTS_VERSION
from ...system.untrusted import MALFORMED
from ..errors import naming_damage
from ..progress import RowTotals, clock, wall_clock
from ..store import JobStore
from .job_status import JobStatus, read_status
from .worker_names import WorkerNames, file_tag

_FOLLOW_INTERVAL_S = 1.0
_REMOTE_INTERVAL_S = 5.0
_SOURCE_CHARS = 22
# Time at the head of a line of Python's logging, in the formats of Dask and of this package. Dask's has no offset from
# UTC: it is taken from earlier lines of the log, or is the reader's.
_STAMP = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)[,.](?P<ms>\d{3})(?P<offset>[+-]\d\d:\d\d)?(?: -)? (?P<text>.*)",
    re.DOTALL,
)
# Seconds since the epoch, and a line as printed.
_Line = tuple[float, str]
# Number of lines about written parts in a whole job's log, at equal steps.
_MILESTONES = 10


def log_lines(store: JobStore, *, follow: bool = False) -> Iterator[str]:
    """Lines of a job's log, at least one; with `follow`, until the job has ended or has fallen silent.

    Raises `JobRequestError` when the output holds no job, `StorageError` when it cannot be read.
    """
    reader = _LogReader(store.latest())
    interval_s = _FOLLOW_INTERVAL_S if store.location.is_local else _REMOTE_INTERVAL_S
    while True:
        # The status is read before the logs, so that the last lines of a job that ends are seen.
        status = read_status(reader.store)
        is_last = status.is_resting or not follow
        with naming_damage("the job's records"):
            lines = [line for _, line in reader.new_lines(status, is_last=is_last)]
        yield from lines
        if is_last:
            return
        time.sleep(interval_s)


@dataclass(slots=True)
class _LogReader:
    """Reads the new lines of a job's log, each time it is asked."""

    #: The job's output.
    store: JobStore
    #: The events read so far, from which their words follow.
    _story: _EventStory = field(init=False)
    #: Bytes of `events.jsonl` read so far.
    _num_event_bytes: int = 0
    #: Log -> characters read so far.
    _read: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: Log -> time of its last line with a time, in seconds since the epoch.
    _times: dict[str, float] = field(default_factory=dict)
    #: Log -> offset from UTC of its last time that has one, such as +01:00.
    _offsets: dict[str, str] = field(default_factory=dict)
    #: Time at which the job was opened, in seconds since the epoch; lines before any time have it.
    _opened_s: float = 0.0
    #: Whether the first line, about the frozen job, was given.
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._story = _EventStory()

    def new_lines(self, status: JobStatus, *, is_last: bool) -> list[_Line]:
        """The new lines, in order of time. `is_last`: lines about the job's status follow at the end."""
        lines = [] if self._has_begun else list(_frozen(status))
        self._has_begun = True
        self._opened_s = datetime.fromisoformat(status.record.created_at).timestamp()
        store = self.store.settled()
        records, self._num_event_bytes = store.read_new_events(self._num_event_bytes)
        if store.has_plan_facts() and self._story.plan is None:
            self._story.plan = store.read_plan_facts()
        for record in records:
            # Ignores a record of another shape than ours.
            with suppress(*MALFORMED):
                lines += self._story.read(record)
        for name, text in store.read_logs().items():
            lines += self._lines_of(name, text, is_last)
        lines.sort(key=itemgetter(0))
        return lines + (list(_standing(status)) if is_last else [])

    def _lines_of(self, name: str, text: str, is_last: bool) -> Iterator[_Line]:
        end = len(text) if is_last else text.rfind("\n") + 1
        fresh, self._read[name] = text[self._read[name] : end], max(end, self._read[name])
        for line in fresh.splitlines():
            stamp = _STAMP.match(line)
            if stamp:
                offset = self._offsets[name] = stamp["offset"] or self._offsets.get(name, "")
                at = datetime.fromisoformat(f"{stamp['day']} {stamp['time']}.{stamp['ms']}{offset}")
                self._times[name] = at.timestamp()
            said = stamp["text"] if stamp else line
            yield _line(self._times.get(name, self._opened_s), self._story.source(name), self._story.in_text(said))


def _line(time_s: float, source: str, text: str) -> _Line:
    """A line of the log, with the reader's local time and its offset from UTC. `source`: "job", the name of a worker,
    or the name of a log.
    """
    return time_s, f"{wall_clock(time_s)}  {source:<{_SOURCE_CHARS}} | {text}"


def _frozen(status: JobStatus) -> Iterator[_Line]:
    record = status.record
    text = (
        f"{record.job_id}: {record.input.num_rows:,} rows, {len(record.adapters):,} adapters, model {record.model.url}"
    )
    yield _line(datetime.fromisoformat(record.created_at).timestamp(), "job", text)


def _standing(status: JobStatus) -> Iterator[_Line]:
    """Lines about the job's present status: its notes, rows, message and next step."""
    state = status.state
    if state is None:
        yield _line(time.time(), "job", "no run of it has begun")
        return
    yield from (_line(state.updated_at_s, "job", f"note: {note.strip()}") for note in state.notes)
    totals = status.totals or RowTotals(0, 0, 0, 0)
    left = f", {status.time_left}" if status.time_left else ""
    yield _line(state.updated_at_s, "job", f"{status.headline}: {totals.to_text()}{left}")
    if state.message:
        yield _line(state.updated_at_s, "job", state.message)
    if status.next_step:
        yield _line(state.updated_at_s, "job", f"next: {status.next_step}")


class _EventStory:
    """Puts events and commands into words. A journal may hold several runs, and a run may have several coordinators.

    `plan`: content of `plan.json`; None before it is written.
    """

    def __init__(self) -> None:
        self.plan: Mapping[str, Any] | None = None
        self._names = WorkerNames()
        self._run_id: str | None = None
        # Start of the coordinator, and time of its latest event, in seconds since the epoch.
        self._began_s = self._now_s = 0.0
        self._in_cluster: set[str] = set()
        self._attempts: dict[int, int] = {}
        self._done: set[int] = set()
        self._milestone = 0
        # Tag in the name of a log -> name of the worker, of all runs: logs of earlier workers stay.
        self._name_of_tag: dict[str, str] = {}

    def source(self, log: str) -> str:
        """The source shown for a log: a worker's name for `worker-127-0-0-1-4000`, else the name of the log."""
        kind, _, tag = log.partition("-")
        name = self._name_of_tag.get(tag)
        return log if name is None else name if kind == "worker" else f"{name} {kind}"

    def in_text(self, text: str) -> str:
        """A text with names in place of addresses."""
        return self._names.in_text(text)

    def read(self, record: Mapping[str, Any]) -> Iterator[_Line]:
        """Lines for one event or command; most have none. A command has the time of the event before it."""
        if record.get("kind") == BEGINNING:
            yield from self._begin(record)
            return
        self._now_s = self._began_s + record["time_s"] if "time_s" in record else self._now_s
        for source, text in self._told(record):
            yield _line(self._now_s, source, self.in_text(text))

    def _told(self, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        match record:
            case {"kind": "WorkersSeen", "worker_ids": workers}:
                yield from self._see(workers)
            case {"kind": "ReplicaJoined", "replica_id": worker, "batch_rows": batch_rows}:
                yield from self._see([*self._in_cluster, worker])
                yield self._names.name(worker), f"engine ready, {batch_rows} rows at once"
            case {"kind": "ReplicasFound", "replicas": found}:
                # The last report of a worker that is lost may be there.
                for replica in (each for each in found if each["replica_id"] in self._in_cluster):
                    num_open = len(replica["open_shards"])
                    at_work = f", shards open: {num_open}" if num_open else ""
                    ready = f"engine ready, {replica['batch_rows']} rows at once{at_work}"
                    yield self._names.name(replica["replica_id"]), ready
            case {"kind": "ReplicaLeft", "replica_id": worker}:
                yield self._names.name(worker), "leaves; its rows go on elsewhere"
            case {"kind": "ReplicaFailed", "replica_id": worker, "reason": reason}:
                yield self._names.name(worker), f"its engine is given up: {reason}"
            case {"kind": "RemoveReplica", "replica_id": worker, "reason": reason}:
                yield self._names.name(worker), f"lost: {reason}"
            case {"kind": "MigrateRows"}:
                yield self._moved(record)
            case {"kind": "CanaryAnswered"}:
                yield "job", "the canary is counted" + ("" if record.get("goes_on", True) else "; other rows wait")
            case {"kind": "FailJob", "reason": reason}:
                yield "job", f"fails: {reason}"
            case {"shard_id": shard_id, "kind": kind}:
                yield from self._of_shard(kind, shard_id, record)

    def _of_shard(self, kind: str, shard_id: int, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        worker = self._names.name(record["replica_id"])
        match kind:
            case "RunShard":
                if not self._attempts:
                    yield worker, "opens the first shard"
                attempt = self._attempts[shard_id] = self._attempts.get(shard_id, 0) + 1
                if attempt > 1:
                    yield worker, f"opens shard {shard_id} again, attempt {attempt}"
            case "ShardFailed":
                yield worker, f"shard {shard_id} failed: {record['reason']}"
            case "Recall":
                yield worker, f"gives shard {shard_id} back: another worker has written its part"
            case "ShardCommitted":
                self._done.add(shard_id)
                yield from self._milestones()

    def _milestones(self) -> Iterator[tuple[str, str]]:
        total = len(self.plan["shards"]) if self.plan else 0
        reached = _MILESTONES * len(self._done) // total if total else 0
        if reached > self._milestone:
            self._milestone = reached
            yield "job", f"{len(self._done):,} of {total:,} parts written"

    def _moved(self, record: Mapping[str, Any]) -> tuple[str, str]:
        num_rows = record["num_rows"]
        rows = "1 row" if num_rows == 1 else f"{num_rows:,} rows"
        to = self._names.name(record["to_replica_id"])
        return self._names.name(record["from_replica_id"]), f"{rows} of shard {record['shard_id']} move to {to}"

    def _begin(self, record: Mapping[str, Any]) -> Iterator[_Line]:
        """Lines for the start of a coordinator, of a new run or in place of another coordinator."""
        self._began_s = self._now_s = record.get("at_s", self._now_s)
        is_new = self._run_id != record.get("run_id", "")
        self._done |= set(map(int, record.get("committed", ())))
        if is_new:
            self._run_id = record.get("run_id", "")
            self._names, self._in_cluster, self._attempts = WorkerNames(), set(), {}
        self._name(record.get("workers", ()))
        phases = [(name, at_s) for name, at_s in record.get("phases", ())]
        if is_new:
            yield _line(phases[0][1] if phases else self._now_s, "job", f"run {self._run_id} starts")
            if record.get("version") != EVENTS_VERSION:
                yield _line(self._now_s, "job", "its events are of another version: some of them are not shown")
            yield from (_line(at_s, "job", name) for name, at_s in phases[1:])
            yield _line(self._now_s, "job", self._planned(len(record.get("committed", ()))))
        else:
            worker = self._names.name(record.get("coordinator", ""))
            yield _line(self._now_s, worker, "coordinates the job from now on, in place of a worker that is lost")

    def _planned(self, num_committed: int) -> str:
        shards = self.plan["shards"] if self.plan else []
        text = f"plan: {sum(shard['num_rows'] for shard in shards):,} rows in {len(shards):,} shards"
        if self.plan and self.plan.get("predicted_s") is not None:
            text += f", about {clock(self.plan['predicted_s'])} once engines are ready"
        return text + (f"; {num_committed:,} parts are there" if num_committed else "")

    def _name(self, workers: Any) -> None:
        self._names.see(workers)
        for address in workers:
            self._name_of_tag[file_tag(address)] = self._names.name(address)

    def _see(self, workers: list[str]) -> Iterator[tuple[str, str]]:
        self._name(workers)
        for address in workers:
            if address not in self._in_cluster:
                self._in_cluster.add(address)
                yield self._names.name(address), f"worker at {address.rpartition('://')[2]}"
        for address in sorted(self._in_cluster.difference(workers)):
            yield self._names.name(address), "has left the cluster"
        self._in_cluster = set(workers)
