"""Events in order become workers' lives, spans of shards, and moves."""

from __future__ import annotations

from typing import Any

from lorabatch.jobs.report.timeline import read_timelines
from lorabatch.scheduler.messages import (
    MigrateRows,
    Progress,
    Recall,
    RemoveReplica,
    ReplicaJoined,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    Tick,
    WorkersSeen,
)


def lines(*records: Any) -> list[dict[str, Any]]:
    return [record.to_json() for record in records]


def progress(time_s: float, worker: str, running_rows: int = 4) -> Progress:
    return Progress(time_s, worker, 9, running_rows, 10.0, ("a", "b"), mode="merged")


def test_a_shard_is_a_span_from_its_command_to_its_commit() -> None:
    (run,) = read_timelines(
        lines(
            ReplicaJoined(0.5, "w", 8),
            RunShard(3, "w", 0),
            progress(2.0, "w"),
            ShardCommitted(4.0, 3, "w"),
        )
    )
    (track,) = run.tracks
    (span,) = track.spans
    assert (span.shard_id, span.attempt, span.start_s, span.end_s, span.ended) == (3, 0, 0.5, 4.0, "committed")
    assert track.samples[0].mode == "merged"
    assert run.worker_s == 3.5


def test_losing_a_worker_ends_its_spans_and_only_its() -> None:
    (run,) = read_timelines(
        lines(
            ReplicaJoined(0.0, "v", 8),
            RunShard(1, "v", 0),
            ReplicaJoined(0.0, "w", 8),
            RunShard(2, "w", 0),
            WorkersSeen(3.0, ("w",)),
            RemoveReplica("v", "its worker is gone"),
            RunShard(1, "w", 1),
            Tick(5.0),
        )
    )
    first, second = run.tracks
    assert [(s.shard_id, s.ended, s.end_s) for s in first.spans] == [(1, "lost", 3.0)]
    assert first.lost_s == 3.0
    assert [(s.shard_id, s.attempt, s.ended) for s in second.spans] == [(2, 0, "open"), (1, 1, "open")]


def test_the_record_of_an_earlier_version_is_read_too() -> None:
    lost = {"kind": "ReplicaLost", "time_s": 3.0, "replica_id": "v", "handed_over": False}
    (run,) = read_timelines([*lines(ReplicaJoined(0.0, "v", 8), RunShard(1, "v", 0)), lost])
    assert [(s.shard_id, s.ended) for s in run.tracks[0].spans] == [(1, "lost")]


def test_replicas_that_a_coordinator_found_have_tracks_of_their_own() -> None:
    found = ReplicasFound(0.1, (("v", 8, ((1, 5),), 0.5),))
    (run,) = read_timelines(lines(found, RunShard(1, "v", 0), ShardCommitted(2.0, 1, "v")))
    assert [(t.worker, t.joined_s, len(t.spans)) for t in run.tracks] == [("v", 0.1, 1)]


def test_failed_and_recalled_attempts_are_distinguished() -> None:
    (run,) = read_timelines(
        lines(
            ReplicaJoined(0.0, "w", 8),
            RunShard(1, "w", 0),
            RunShard(2, "w", 0),
            ShardFailed(1.0, 1, "w", "why"),
            Recall(2, "w"),
        )
    )
    assert [(s.shard_id, s.ended) for s in run.tracks[0].spans] == [(1, "failed"), (2, "recalled")]


def test_moved_rows_carry_the_time_of_the_event_before_them() -> None:
    (run,) = read_timelines(
        lines(ReplicaJoined(0.0, "w", 8), progress(7.0, "w"), MigrateRows(5, "w", "v", "tenant", 12))
    )
    (move,) = run.moves
    assert (move.time_s, move.shard_id, move.to_worker, move.num_rows) == (7.0, 5, "v", 12)


def test_a_clock_that_begins_anew_is_another_run() -> None:
    first, second = read_timelines(
        lines(
            ReplicaJoined(0.0, "w", 8),
            RunShard(1, "w", 0),
            Tick(30.0),
            ReplicaJoined(0.2, "w", 8),
            RunShard(1, "w", 0),
            ShardCommitted(9.0, 1, "w"),
        )
    )
    assert (first.end_s, first.tracks[0].spans[0].ended) == (30.0, "open")
    assert (second.end_s, second.tracks[0].spans[0].ended) == (9.0, "committed")


def test_no_events_no_runs_and_unknown_kinds_are_passed_over() -> None:
    assert read_timelines([]) == []
    assert read_timelines([{"kind": "Tick", "time_s": 0.0}]) == []
    (run,) = read_timelines([*lines(ReplicaJoined(0.0, "w", 8)), {"kind": "FromTheFuture", "time_s": 2.0}])
    assert run.end_s == 2.0
