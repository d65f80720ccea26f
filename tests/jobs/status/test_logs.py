"""A job told by its events and logs, in order of time and by the names of its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lorabatch.jobs.record import JobRecord, JobState
from lorabatch.jobs.status.logs import log_lines
from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.messages import (
    FoundReplica,
    MigrateRows,
    RemoveReplica,
    ReplicaFailed,
    ReplicaJoined,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)

from ..report.journals import append, beginning

A, B, C = "tcp://10.0.0.5:4000", "tcp://10.0.0.6:4000", "tcp://10.0.0.5:4100"
BEGAN_S = 1_735_689_700.0


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def store(tmp_path: Path, record: Callable[..., JobRecord]) -> JobStore:
    store = JobStore(str(tmp_path / "output"))
    store.freeze(record())
    return store


def said(store: JobStore) -> list[tuple[str, str]]:
    """Source and text of each line."""
    lines = [line[27:].partition(" | ") for line in log_lines(store)]
    return [(source.strip(), text) for source, _, text in lines]


def test_a_job_that_no_run_has_begun_says_so(store: JobStore) -> None:
    assert said(store) == [
        ("job", "job-1: 7 rows, 1 adapters, model /model"),
        ("job", "no run of it has begun"),
    ]


def test_plan_starts_losses_moves_and_retries_are_told_by_workers_names(store: JobStore) -> None:
    store.write_plan_facts({"shards": [{"num_rows": 4}, {"num_rows": 3}], "predicted_s": 65.0})
    append(store, beginning(BEGAN_S, coordinator=A, starting=BEGAN_S - 9, indexing=BEGAN_S - 5))
    append(store, WorkersSeen(0.0, (A, B)), ReplicaJoined(2.0, A, 8), ReplicaJoined(3.0, B, 8))
    append(store, RunShard(0, A, 0), RunShard(1, B, 0), MigrateRows(1, B, A, 3))
    append(store, ShardFailed(4.0, 1, B, "the disk is full"), RunShard(1, B, 1), Tick(5.0))
    append(store, RemoveReplica(A, f"{A} is silent"), WorkersSeen(6.0, (B, C)))
    append(store, ReplicaFailed(7.0, C, "no memory"), ShardCommitted(8.0, 1, B))
    append(store, beginning(BEGAN_S + 20, coordinator=B) | {"workers": [A, B, C], "committed": [1]})
    append(
        store,
        WorkersSeen(0.0, (B,)),
        ReplicasFound(0.1, (FoundReplica(A, 8, (), 9.0), FoundReplica(B, 8, (UnfinishedRows(0, 2),), 0.5))),
        ShardCommitted(3.0, 0, B),
    )
    w0, w1, w2 = "w0 10.0.0.5", "w1 10.0.0.6", "w2 10.0.0.5"
    assert said(store)[1:-1] == [
        ("job", "run run starts"),
        ("job", "indexing"),
        ("job", "plan: 7 rows in 2 shards, about 1:05 once engines are ready"),
        (w0, "worker at 10.0.0.5:4000"),
        (w1, "worker at 10.0.0.6:4000"),
        (w0, "engine ready, 8 rows at once"),
        (w1, "engine ready, 8 rows at once"),
        (w0, "opens the first shard"),
        (w1, f"3 rows of shard 1 move to {w0}"),
        (w1, "shard 1 failed: the disk is full"),
        (w1, "opens shard 1 again, attempt 2"),
        (w0, f"lost: {w0} is silent"),
        (w2, "worker at 10.0.0.5:4100"),
        (w0, "has left the cluster"),
        (w2, "its engine is given up: no memory"),
        ("job", "1 of 2 parts written"),
        (w1, "coordinates the job from now on, in place of a worker that is lost"),
        (w2, "has left the cluster"),
        (w1, "engine ready, 8 rows at once, shards open: 1"),
        ("job", "2 of 2 parts written"),
    ]


def test_lines_of_logs_stand_among_the_events_under_the_name_of_who_wrote_them(store: JobStore) -> None:
    append(store, beginning(BEGAN_S, starting=BEGAN_S), WorkersSeen(0.0, (A,)), ReplicaJoined(9.0, A, 8))
    # 2025-01-01 00:01:40 is BEGAN_S.
    dask_format = "2025-01-01 00:01:45,500 - lorabatch.x - WARNING - late"
    store.append_log("worker-10-0-0-5-4000", f"{dask_format}\nTraceback of it\n")
    store.append_log("engine-10-0-0-5-4000", "2025-01-01 00:01:46,000 INFO loading\n")
    store.append_log("client", f"2025-01-01 00:01:47,000 WARNING lorabatch: {A} is slow\n")
    store.write_state(JobState("failed", BEGAN_S + 60, rows=7, rows_done=3, message="no engine works."))
    shown = list(log_lines(store))
    assert shown[-4].startswith("2025-01-01 00:01:49+00:00  w0 10.0.0.5            | engine ready")
    assert said(store)[4:] == [
        ("w0 10.0.0.5", "lorabatch.x - WARNING - late"),
        ("w0 10.0.0.5", "Traceback of it"),
        ("w0 10.0.0.5 engine", "INFO loading"),
        ("client", "WARNING lorabatch: w0 10.0.0.5 is slow"),
        ("w0 10.0.0.5", "engine ready, 8 rows at once"),
        ("job", "failed: 3 of 7 rows answered"),
        ("job", "no engine works."),
        ("job", f"next: lorabatch resume {store.url}"),
    ]


def test_times_are_the_readers_though_workers_are_in_other_zones(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    append(store, beginning(BEGAN_S, starting=BEGAN_S), WorkersSeen(0.0, (A,)), ReplicaJoined(9.0, A, 8))
    # 2025-01-01 00:01:40 UTC is BEGAN_S. Lines of Dask have no offset: it is that of the worker's other lines.
    ours = "2024-12-31 19:01:45.500-05:00 - lorabatch.x - WARNING - ours"
    dasks = "2024-12-31 19:01:46,000 - distributed.worker - WARNING - Dask's"
    store.append_log("worker-10-0-0-5-4000", f"before any time\n{ours}\n{dasks}\n")
    store.append_log("engine-10-0-0-5-4000", "2025-01-01 01:01:47.000+01:00 WARNING its own\n")
    store.append_log("client", "2025-01-01 05:31:48,000 WARNING no offset\n")
    shown = [(line[:25], line.split()[-1]) for line in log_lines(store)]
    assert ("2025-01-01 05:30:00+05:30", "time") in shown, "a line before any time has that of the job"
    assert [line for line in shown if "05:31:44" < line[0][11:] < "05:31:50"] == [
        ("2025-01-01 05:31:45+05:30", "ours"),
        ("2025-01-01 05:31:46+05:30", "Dask's"),
        ("2025-01-01 05:31:47+05:30", "own"),
        ("2025-01-01 05:31:48+05:30", "offset"),
        ("2025-01-01 05:31:49+05:30", "once"),
    ]


def test_who_follows_sees_each_line_once_until_the_end(store: JobStore) -> None:
    running = JobState("running", time.time(), rows=7)
    store.write_state(running)
    append(store, beginning(BEGAN_S, starting=BEGAN_S), WorkersSeen(0.0, (A,)))
    store.append_log("client", "2025-01-01 00:01:41,000 INFO whole\nhalf of a ")

    def go_on() -> None:
        append(store, ReplicaJoined(9.0, A, 8))
        store.append_log("client", "line\n")
        store.write_state(replace(running, phase="done", rows_done=7))

    timer = threading.Timer(0.5, go_on)
    timer.start()
    lines = list(log_lines(store, follow=True))
    timer.join()
    assert [line for line in lines if "whole" in line or "half" in line] == [
        "2025-01-01 00:01:41+00:00  client                 | INFO whole",
        "2025-01-01 00:01:41+00:00  client                 | half of a line",
    ]
    assert sum("engine ready" in line for line in lines) == 1
    assert lines[-2].endswith("done: 7 of 7 rows answered")


def test_lines_of_another_shape_are_passed_over(store: JobStore) -> None:
    other = [
        {"kind": "ReplicaJoined", "replica_id": 7, "batch_rows": None},
        {"kind": "MigrateRows", "num_rows": "many", "shard_id": [], "from_replica_id": A, "to_replica_id": {}},
        {"kind": "ShardFailed", "shard_id": 1},
        {"kind": "WorkersSeen", "worker_ids": 3},
        {"kind": "SchedulerStarted", "at_s": "now", "phases": 5},
        {"kind": ["x"], "time_s": {}},
    ]
    append(store, beginning(BEGAN_S), *other, WorkersSeen(0.0, (A,)), ReplicaJoined(1.0, A, 8))
    store.append_events(b"[" * 100_000 + b"\n")
    assert [text for _, text in said(store) if "engine ready" in text] == ["engine ready, 8 rows at once"]
