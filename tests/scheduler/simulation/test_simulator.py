from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.assignment.lending import TailSettings
from lorabatch.scheduler.baselines.batchers import unmerged
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.messages import ReplicaReported, RunShard
from lorabatch.scheduler.planning.waves import plan_shards
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.simulator import Cluster, JobSimulation
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.simulation.timeline import Timeline, job_metrics


class Recorder:
    """Passes events on and keeps them with the commands."""

    def __init__(self, scheduler):
        self.scheduler, self.log = scheduler, []

    def handle(self, event):
        commands = self.scheduler.handle(event)
        self.scheduler.check_integrity()
        self.log.append((event, commands))
        return commands


def make_job(num_rows=300, num_replicas=2, seed=0, batch=16, **cluster):
    rng = np.random.default_rng(seed)
    workload = make_workload(
        make_adapters([8, 16, 64, 8]),
        draw_adapters(rng, num_rows, power_popularity(4, 1.0)),
        draw_lengths(rng, num_rows, 100, 0.8, 1000),
        draw_lengths(rng, num_rows, 60, 0.7, 300),
    )
    plan = plan_shards(workload, batch_rows=batch, num_replicas=num_replicas)
    timeline = Timeline.empty(num_rows, num_replicas)
    settings = ReplicaSettings(max_batch_rows=batch, leap_steps=64)
    replicas = [SimulatedReplica(i, workload, COST, unmerged, settings, timeline) for i in range(num_replicas)]
    recorder = Recorder(Scheduler(plan.shards, settings=SchedulerSettings(expected_replicas=num_replicas)))
    joins = cluster.pop("join_s", (0.0,) * num_replicas)
    simulation = JobSimulation(workload, plan, recorder.handle, replicas, Cluster(joins, **cluster), timeline, settings)
    return workload, simulation, recorder


def test_a_job_ends_when_its_last_part_is_written():
    workload, simulation, _ = make_job(commit_s=0.5)
    makespan_s = simulation.run()
    assert simulation.failure is None
    assert np.isfinite(simulation.timeline.finish_s).all()
    # Commits follow the step in which a shard's last row ended.
    assert makespan_s >= simulation.timeline.finish_s.max() + 0.5
    assert makespan_s <= simulation.timeline.finish_s.max() + 1.0
    assert job_metrics(workload, simulation.timeline, makespan_s).utilisation > 0.5


@pytest.mark.long
def test_two_replicas_take_about_half_the_time_of_one():
    one, two = (make_job(2000, replicas)[1].run() for replicas in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.1)


def test_a_lost_replicas_rows_are_done_by_the_other():
    _, simulation, recorder = make_job(mishaps=((0.5, 1, "lost"),))
    simulation.run()
    assert simulation.failure is None
    assert np.isfinite(simulation.timeline.finish_s).all()
    retried = [c for _, commands in recorder.log for c in commands if isinstance(c, RunShard) and c.attempt == 1]
    assert retried
    assert {c.replica_id for c in retried} == {"0"}


def test_a_job_whose_replicas_are_all_lost_says_so():
    _, simulation, _ = make_job(mishaps=((0.1, 0, "lost"), (0.2, 1, "lost")))
    simulation.run()
    assert simulation.failure == "No engine became ready within 600 seconds."


def test_a_late_replica_still_gets_work():
    _, simulation, _ = make_job(1000, join_s=(0.0, 2.0))
    simulation.run()
    assert (simulation.timeline.replica == 1).sum() > 100


def test_the_same_job_is_always_simulated_the_same():
    a, b = (make_job(seed=3)[1] for _ in range(2))
    assert a.run() == b.run()
    assert (a.timeline.finish_s == b.timeline.finish_s).all()


def test_a_fresh_scheduler_answers_recorded_events_with_the_recorded_commands():
    _, simulation, recorder = make_job(mishaps=((0.5, 1, "lost"),))
    simulation.run()
    _, _, fresh = make_job()
    replayed = [fresh.handle(type(event).from_json(event.to_json())) for event, _ in recorder.log]
    assert replayed == [commands for _, commands in recorder.log]


def test_reports_count_every_finished_row_once():
    _, simulation, recorder = make_job(progress_s=0.05)
    simulation.run()
    events = (event for event, _ in recorder.log if isinstance(event, ReplicaReported))
    reported = sum(rows.num_rows for event in events for rows in event.finished)
    assert 150 < reported <= 300


def make_tail_job(tail, **cluster):
    """One shard of 20 long rows where steps grow with the batch; a second replica joins when all of it runs."""
    rows = np.full(20, 200, np.int32)
    workload = make_workload(make_adapters([8]), np.zeros(20, np.int32), rows, rows)
    plan = plan_shards(workload, batch_rows=32, num_replicas=1, rows_per_shard=20)
    assert len(plan.shards) == 1
    timeline = Timeline.empty(20, 2)
    settings = ReplicaSettings(max_batch_rows=32, max_step_tokens=8192)
    replicas = [SimulatedReplica(i, workload, CPU_SMOLLM2_135M, unmerged, settings, timeline) for i in range(2)]
    recorder = Recorder(Scheduler(plan.shards, settings=SchedulerSettings(tail=tail, cost=CPU_SMOLLM2_135M)))
    joins = Cluster((0.0, 16.0), progress_s=0.5, **cluster)
    return JobSimulation(workload, plan, recorder.handle, replicas, joins, timeline, settings)


def test_an_idle_replica_takes_rows_of_the_last_shards_and_the_job_ends_sooner():
    alone, shared = make_tail_job(None), make_tail_job(TailSettings())
    alone_s, shared_s = alone.run(), shared.run()
    assert alone.num_migrated == 0
    assert shared.num_migrated > 0
    assert shared.failure is None
    assert np.isfinite(shared.timeline.finish_s).all()
    assert shared_s < alone_s


@pytest.mark.parametrize("lost", [0, 1])
def test_rows_on_loan_survive_the_loss_of_their_owner_and_of_their_helper(lost):
    simulation = make_tail_job(TailSettings(), mishaps=((20.0, lost, "lost"),))
    simulation.run()
    assert simulation.num_migrated > 0
    assert simulation.failure is None
    assert np.isfinite(simulation.timeline.finish_s).all()
