from __future__ import annotations

import json

import numpy as np
import pytest

from lorabatch.scheduler.cost import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.messages import ReplicaJoined, Tick
from lorabatch.scheduler.migration import TailSettings
from lorabatch.scheduler.scheduler import Scheduler, SchedulerSettings
from lorabatch.scheduler.simulation.replay import replay
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.run import planner_batcher
from lorabatch.scheduler.simulation.simulator import Cluster, JobSimulation
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.simulation.timeline import Timeline
from lorabatch.scheduler.waves import plan_shards


class Recorder:
    """The scheduler, and a journal of it as a run writes one."""

    def __init__(self, scheduler):
        self.scheduler, self.lines = scheduler, [json.dumps(scheduler.beginning())]

    def handle(self, event):
        commands = self.scheduler.handle(event)
        self.lines += [json.dumps(record.to_json()) for record in (event, *commands)]
        return commands

    def journal(self):
        return [json.loads(line) for line in self.lines]


def recorded_run(losses=()):
    """A job of two adapters on three replicas, tail migration included."""
    rng = np.random.default_rng(4)
    output = rng.integers(20, 200, 300).astype(np.int32)
    workload = make_workload(
        make_adapters([8, 16]), rng.integers(0, 2, 300).astype(np.int32), np.full(300, 50, np.int32), output
    )
    settings = ReplicaSettings(max_batch_rows=16)
    plan = plan_shards(workload, batch_rows=16, num_replicas=3)
    timeline = Timeline.empty(300, 3)
    chosen = SchedulerSettings(expected_replicas=3, tail=TailSettings(COST))
    recorder = Recorder(Scheduler(plan.shards, settings=chosen))
    replicas = [
        SimulatedReplica(i, workload, COST, planner_batcher(workload, COST, settings, 3), settings, timeline)
        for i in range(3)
    ]
    cluster = Cluster((0.0, 0.1, 0.2), losses=losses, progress_s=0.2)
    outcome = JobSimulation(workload, plan, recorder, replicas, cluster, timeline, settings).run()
    assert outcome.failure is None
    return plan.shards, recorder.journal()


@pytest.mark.parametrize("losses", [(), ((0.7, 1),)])
def test_recorded_events_give_the_recorded_commands(losses):
    shards, journal = recorded_run(losses)
    found = replay(shards, journal)
    assert found.first_difference is None
    assert found.num_events + found.num_commands + 1 == len(journal)
    assert found.num_commands >= len(shards)


def test_a_command_that_was_not_given_is_found_with_its_event():
    shards, journal = recorded_run()
    number = next(i for i, line in enumerate(journal) if line["kind"] == "RunShard")
    journal[number]["replica_id"] = "another"
    difference = replay(shards, journal).first_difference
    assert difference is not None
    assert difference[1][0]["replica_id"] == "another"
    assert difference[2][0]["replica_id"] != "another"


def test_each_run_of_a_resumed_job_is_replayed_from_its_own_beginning():
    shards, journal = recorded_run()
    second = Recorder(Scheduler(shards, committed=[1, 0]))
    second.handle(ReplicaJoined(0.0, "0", 16))
    found = replay(shards, [*journal, *second.journal()])
    assert found.first_difference is None


def test_a_journal_without_a_beginning_is_refused():
    with pytest.raises(ValueError, match="does not say how its scheduler began"):
        replay((), [Tick(0.0).to_json()])
