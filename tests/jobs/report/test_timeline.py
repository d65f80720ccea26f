"""Events in order become workers' lives, spans of shards, and moves."""

from __future__ import annotations

import pytest

from lorabatch.jobs.report.timeline import Activity, read_timelines
from lorabatch.scheduler.messages import (
    FoundReplica,
    MigrateRows,
    Recall,
    RemoveReplica,
    ReplicaFailed,
    ReplicaJoined,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)

from .journals import beginning, busy_run, lines


def progress(time_s: float, worker: str, running_rows: int = 4) -> ReplicaReported:
    return ReplicaReported(time_s, worker, 9, running_rows, 10.0, ("a", "b"), (UnfinishedRows(1, 9),), mode="merged")


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
    assert track.activities == [
        Activity("opening a shard", 0.5, 2.0),
        Activity("merged", 2.0, 4.0, 4.0),
    ]
    assert run.worker_s == 3.5
    assert run.mean_busy == 4 * 2 / (8 * 3.5)


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
    assert first.losses == [(3.0, "its worker is gone")]
    assert [(s.shard_id, s.attempt, s.ended) for s in second.spans] == [(2, 0, "open"), (1, 1, "open")]


def test_the_record_of_an_earlier_version_is_read_too() -> None:
    lost = {"kind": "ReplicaLost", "time_s": 3.0, "replica_id": "v", "handed_over": False}
    (run,) = read_timelines([*lines(ReplicaJoined(0.0, "v", 8), RunShard(1, "v", 0)), lost])
    assert [(s.shard_id, s.ended) for s in run.tracks[0].spans] == [(1, "lost")]


def test_replicas_that_a_coordinator_found_have_tracks_of_their_own() -> None:
    found = ReplicasFound(0.1, (FoundReplica("v", 8, (UnfinishedRows(1, 5),), 0.5),))
    (run,) = read_timelines(lines(found, RunShard(1, "v", 0), ShardCommitted(2.0, 1, "v")))
    assert [(t.worker, t.activities[0].start_s, len(t.spans)) for t in run.tracks] == [("v", 0.1, 1)]


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
    (run,) = read_timelines(lines(ReplicaJoined(0.0, "w", 8), progress(7.0, "w"), MigrateRows(5, "w", "v", 12)))
    (move,) = run.moves
    assert (move.time_s, move.shard_id, move.to_worker, move.num_rows) == (7.0, 5, "v", 12)


def test_a_run_begins_where_its_scheduler_does_unless_it_is_the_same_run() -> None:
    first, second = read_timelines(
        lines(
            beginning(100.0, "a", starting=90.0),
            ReplicaJoined(0.0, "w", 8),
            RunShard(1, "w", 0),
            Tick(30.0),
            beginning(500.0, "b", starting=480.0),
            ReplicaJoined(0.2, "w", 8),
            RunShard(1, "w", 0),
            ShardCommitted(9.0, 1, "w"),
            {"kind": "FinishJob"},
        ),
        ended_at_s=511.0,
    )
    assert (first.end_s, first.tracks[0].spans[0].ended) == (40.0, "open")
    assert (second.end_s, second.tracks[0].spans[0].ended) == (31.0, "committed")
    assert second.phase_spans() == [("starting", 0.0, 29.0), ("finishing", 29.0, 31.0)]


def test_a_second_coordinator_goes_on_with_the_workers_of_the_first_and_misses_the_lost_one() -> None:
    (run,) = read_timelines(
        lines(
            beginning(100.0, coordinator="v", starting=98.0, running=99.0),
            WorkersSeen(0.0, ("v", "w")),
            ReplicaJoined(1.0, "v", 8),
            ReplicaJoined(1.0, "w", 8),
            RunShard(1, "v", 0),
            RunShard(2, "w", 0),
            RunShard(3, "w", 0),
            Tick(10.0),
            beginning(120.0, coordinator="w", starting=98.0, running=119.0) | {"committed": [3]},
            WorkersSeen(0.0, ("w",)),
            ReplicasFound(
                0.5,
                (
                    FoundReplica("v", 8, (UnfinishedRows(1, 5),), 9.0),
                    FoundReplica("w", 8, (UnfinishedRows(2, 5),), 0.5),
                ),
            ),
            RunShard(1, "w", 0),
            RunShard(2, "w", 0),
            ShardCommitted(8.0, 2, "w"),
        )
    )
    v, w = run.tracks
    assert run.coordinators == [(2.0, "v"), (22.0, "w")]
    assert v.losses == [(22.0, "its worker is gone")]
    assert [(s.shard_id, s.start_s, s.end_s, s.ended) for s in v.spans] == [(1, 3.0, 22.0, "lost")]
    assert [(s.shard_id, s.start_s, s.end_s, s.ended) for s in w.spans] == [
        (3, 3.0, 22.0, "committed"),
        (2, 3.0, 30.0, "committed"),
        (1, 22.5, 30.0, "open"),
    ]
    assert [name for name, _ in run.phases] == ["starting", "running", "restarting", "running"]


def test_idle_time_has_a_name() -> None:
    report = progress(5.0, "w", 0)
    nothing = ReplicaReported(9.0, "w", 0, 0, 0.0, ())
    rows = (UnfinishedRows(1, 9),)
    lent = ReplicaReported(12.0, "w", 9, 0, 0.0, (), rows, lent_shards=rows)
    (run,) = read_timelines(
        lines(
            WorkersSeen(2.0, ("w", "x")),
            ReplicaJoined(3.0, "w", 8),
            RunShard(1, "w", 0),
            report,
            nothing,
            Tick(10.0),
            RunShard(2, "w", 0),
            lent,
            ReplicaReported(14.0, "w", 0, 0, 0.0, ()),
            Tick(15.0),
            ReplicaReported(16.0, "w", 0, 0, 0.0, ()),
            Tick(30.0),
            ReplicaFailed(30.0, "x", "out of memory"),
        )
    )
    w, x = run.tracks
    assert [(a.kind, a.start_s, a.end_s) for a in w.activities] == [
        ("engine starting", 0.0, 3.0),
        ("opening a shard", 3.0, 9.0),
        ("waiting for a shard", 9.0, 10.0),
        ("opening a shard", 10.0, 12.0),
        ("its rows lent", 12.0, 14.0),
        ("no shard left", 14.0, 16.0),
        ("no report", 16.0, 30.0),
    ]
    assert [(a.kind, a.end_s) for a in x.activities] == [("engine starting", 30.0)]
    assert x.losses == [(30.0, "out of memory")]


def test_reports_that_say_about_the_same_are_one_activity_with_their_mean() -> None:
    (run,) = read_timelines(
        lines(ReplicaJoined(0.0, "w", 80), *(progress(float(i), "w", 79 + i % 2) for i in range(1, 6)), Tick(6.0))
    )
    (activity,) = run.tracks[0].activities[1:]
    assert (activity.kind, activity.seconds) == ("merged", 5.0)
    assert activity.running_rows == pytest.approx(79.6)


def test_throughput_is_the_sum_over_workers_that_are_there() -> None:
    (run,) = read_timelines(
        lines(
            *(ReplicaJoined(0.0, worker, 8) for worker in "vw"),
            progress(1.0, "v"),
            progress(2.0, "w"),
            Tick(3.0),
            RemoveReplica("v", "lost"),
        )
    )
    assert run.rates == [(1.0, 10.0), (2.0, 20.0), (3.0, 10.0)]


def test_no_events_no_runs_and_unknown_kinds_are_passed_over() -> None:
    assert read_timelines([]) == []
    assert read_timelines([{"kind": "Tick", "time_s": 0.0}]) == []
    (run,) = read_timelines([*lines(ReplicaJoined(0.0, "w", 8)), {"kind": "FromTheFuture", "time_s": 2.0}])
    assert run.end_s == 2.0


def test_a_journal_that_lacks_a_line_is_still_a_timeline() -> None:
    records = lines(*busy_run(num_shards=3, num_workers=2))
    for missing in range(len(records)):
        read_timelines([record for place, record in enumerate(records) if place != missing])
