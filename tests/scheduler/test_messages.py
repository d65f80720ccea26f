from __future__ import annotations

import json

import pytest

from lorabatch.scheduler.messages import (
    AdapterFetch,
    CanaryAnswered,
    Command,
    Event,
    FailJob,
    FinishedRows,
    FinishJob,
    FoundReplica,
    MigrateRows,
    Recall,
    RemoveReplica,
    ReplicaFailed,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    StepTotals,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)


@pytest.mark.parametrize(
    "event",
    [
        ReplicaJoined(1.0, "a", 64),
        WorkersSeen(1.5, ("a", "b")),
        ReplicaLeft(2.0, "a"),
        ReplicaFailed(2.0, "a", "why"),
        ReplicasFound(2.5, (FoundReplica("a", 64, (UnfinishedRows(7, 9),), 0.5), FoundReplica("b", 64, (), 0.0))),
        ShardCommitted(3.0, 7, "a"),
        ShardFailed(4.0, 7, "a", "why"),
        ReplicaReported(
            5.0,
            "a",
            9,
            8,
            1.5,
            ("x", "y"),
            (UnfinishedRows(7, 9),),
            (FinishedRows("x", 2, 80), FinishedRows(None, 1, 4)),
            lent_shards=(UnfinishedRows(7, 1),),
            steps=StepTotals(3, 40, 5, rank_sum=1.5),
        ),
        CanaryAnswered(5.5, (FinishedRows("x", 2, 80), FinishedRows(None, 1, 4)), (3, 4), goes_on=False),
        CanaryAnswered(5.5, ()),
        Tick(6.0),
    ],
)
def test_an_event_survives_json(event):
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


@pytest.mark.parametrize(
    "command",
    [
        RunShard(1, "a", 0),
        Recall(1, "a"),
        MigrateRows(1, "a", "b", 3),
        MigrateRows(1, "a", "b", 3, is_selective=True, adapter_id="x"),
        MigrateRows(1, "a", "b", 3, is_selective=True),
        RunShard(1, "a", 0, (AdapterFetch("x", "b"), AdapterFetch("y", None)), 32),
        RemoveReplica("a", "why"),
        FinishJob(),
        FailJob("why"),
    ],
)
def test_a_command_survives_json(command):
    assert Command.from_json(json.loads(json.dumps(command.to_json()))) == command


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="kind='RunShard': expected one of CanaryAnswered"):
        Event.from_json({"kind": "RunShard"})


def test_a_record_with_other_fields_than_its_kind_has_is_refused():
    with pytest.raises(ValueError, match="Tick: missing fields \\['time_s'\\], unknown fields \\['now'\\]"):
        Event.from_json({"kind": "Tick", "now": 1.0})
