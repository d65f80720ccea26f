from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from lorabatch.scheduler.assignment.lending import TailSettings
from lorabatch.scheduler.batchers.batching import clustered
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.messages import ReplicaJoined, Tick
from lorabatch.scheduler.planning.waves import plan_shards
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.scheduler.simulation.replay import replay
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.simulator import Cluster, JobSimulation
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.simulation.timeline import Timeline


class Recorder:
    """The scheduler, and the event log that a run writes of it."""

    def __init__(self, scheduler, lines):
        self.scheduler, self.lines = scheduler, lines
        self.lines.append(json.dumps(scheduler.beginning()))

    def handle(self, event):
        commands = self.scheduler.handle(event)
        self.lines += [json.dumps(record.to_json()) for record in (event, *commands)]
        return commands


def recorded_run(**cluster):
    """A job of two adapters on three replicas, tail migration included."""
    rng = np.random.default_rng(4)
    output = rng.integers(20, 200, 300).astype(np.int32)
    workload = make_workload(
        make_adapters([8, 16]), rng.integers(0, 2, 300).astype(np.int32), np.full(300, 50, np.int32), output
    )
    settings = ReplicaSettings(max_batch_rows=16, leap_steps=16)
    plan = plan_shards(workload, batch_rows=16, num_replicas=3)
    timeline = Timeline.empty(300, 3)
    chosen = SchedulerSettings(expected_replicas=3, tail=TailSettings(), cost=COST, shares_adapters=True)
    lines = []

    def coordinator(committed=()):
        return Recorder(Scheduler(plan.shards, committed=committed, settings=chosen), lines).handle

    replicas = [SimulatedReplica(i, workload, COST, clustered, settings, timeline) for i in range(3)]
    chosen_cluster = Cluster((0.0, 0.1, 0.2), progress_s=0.2, **cluster)
    simulation = JobSimulation(workload, plan, coordinator(), replicas, chosen_cluster, timeline, settings, coordinator)
    simulation.run()
    return plan.shards, [json.loads(line) for line in lines], simulation


WHOLE_LIVES = {
    "calm": {},
    "a worker is lost": {"mishaps": ((0.7, 1, "lost"),)},
    "a worker leaves": {"mishaps": ((0.7, 1, "left"),)},
    "a worker falls silent": {"mishaps": ((0.7, 1, "silent"),)},
    "an engine fails": {"mishaps": ((0.7, 1, "failed"),)},
    "another coordinator takes over": {"takeovers_s": (0.7,)},
    "much happens": {
        "mishaps": ((0.5, 1, "silent"), (0.9, 2, "failed")),
        "takeovers_s": (0.7, 1.1),
    },
}


@pytest.mark.parametrize("life", WHOLE_LIVES)
def test_recorded_events_give_the_recorded_commands(life):
    shards, event_log, simulation = recorded_run(**WHOLE_LIVES[life])
    assert simulation.failure is None
    assert np.isfinite(simulation.timeline.finish_s).all()
    kinds = Counter(line["kind"] for line in event_log)
    assert kinds["RemoveReplica"] == len(WHOLE_LIVES[life].get("mishaps", ()))
    assert kinds["ReplicasFound"] == len(WHOLE_LIVES[life].get("takeovers_s", ()))
    found = replay(shards, event_log)
    assert found.first_difference is None
    num_beginnings = 1 + len(WHOLE_LIVES[life].get("takeovers_s", ()))
    assert found.num_events + found.num_commands + num_beginnings == len(event_log)
    assert found.num_commands >= len(shards)


def test_the_end_of_a_job_without_any_engine_is_replayed_too():
    shards, event_log, simulation = recorded_run(mishaps=tuple((0.3, number, "failed") for number in range(3)))
    assert simulation.failure == "No engine works: its engine failed."
    assert event_log[-1]["kind"] == "FailJob"
    assert replay(shards, event_log).first_difference is None


def test_a_command_that_was_not_given_is_found_with_its_event():
    shards, event_log, _ = recorded_run()
    number = next(i for i, line in enumerate(event_log) if line["kind"] == "RunShard")
    event_log[number]["replica_id"] = "another"
    difference = replay(shards, event_log).first_difference
    assert difference is not None
    assert difference[1][0]["replica_id"] == "another"
    assert difference[2][0]["replica_id"] != "another"


def test_each_run_of_a_resumed_job_is_replayed_from_its_own_beginning():
    shards, event_log, _ = recorded_run()
    lines = []
    Recorder(Scheduler(shards, committed=[1, 0]), lines).handle(ReplicaJoined(0.0, "0", 16))
    found = replay(shards, [*event_log, *map(json.loads, lines)])
    assert found.first_difference is None


def test_events_of_another_version_are_passed_over():
    shards, event_log, _ = recorded_run()
    old = [{"kind": "SchedulerStarted", "committed": [], "settings": {"traffic": None}}]
    old += [{"kind": "ReplicaLost", "time_s": 1.0, "replica_id": "a", "handed_over": False}]
    found = replay(shards, [*old, *event_log])
    assert (found.num_passed_over, found.first_difference) == (1, None)
    assert found.num_events == replay(shards, event_log).num_events


def test_an_event_log_without_a_beginning_is_refused():
    with pytest.raises(ValueError, match="does not say how its scheduler began"):
        replay((), [Tick(0.0).to_json()])
