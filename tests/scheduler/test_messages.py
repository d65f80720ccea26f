from __future__ import annotations

import json

import pytest

from lorabatch.scheduler.messages import (
    Command,
    Event,
    FailJob,
    FinishJob,
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
    Tick,
    WorkersSeen,
)


@pytest.mark.parametrize(
    "event",
    [
        ReplicaJoined(1.0, "a", 64),
        WorkersSeen(1.5, ("a", "b")),
        ReplicaLeft(2.0, "a"),
        ReplicaFailed(2.0, "a", "why"),
        ReplicasFound(2.5, (("a", 64, ((7, 9),), 0.5), ("b", 64, (), 0.0))),
        ShardCommitted(3.0, 7, "a"),
        ShardFailed(4.0, 7, "a", "why"),
        ReplicaReported(5.0, "a", 9, 8, 1.5, ("x", "y"), ((7, 9),), (("x", 2, 80),)),
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
        MigrateRows(1, "a", "b", "x", 3),
        RunShard(1, "a", 0, (("x", "b"), ("y", "")), 32),
        RemoveReplica("a", "why"),
        FinishJob(),
        FailJob("why"),
    ],
)
def test_a_command_survives_json(command):
    assert Command.from_json(json.loads(json.dumps(command.to_json()))) == command


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="kind='RunShard': expected one of ReplicaFailed"):
        Event.from_json({"kind": "RunShard"})
