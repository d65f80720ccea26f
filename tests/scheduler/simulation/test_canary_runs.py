"""Simulated jobs that answer a canary first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorabatch.scheduler.assignment.lending import TailSettings
from lorabatch.scheduler.baselines.batchers import unmerged
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.estimates.canary import canary_rows
from lorabatch.scheduler.messages import (
    CanaryAnswered,
    Event,
    ReplicaJoined,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    Tick,
    WorkersSeen,
)
from lorabatch.scheduler.planning.waves import ShardPlan, plan_shards
from lorabatch.scheduler.policies import make_scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.scheduler.simulation.replay import replay
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.simulator import Cluster, JobSimulation
from lorabatch.scheduler.simulation.synthetic import draw_adapters, draw_lengths, make_adapters, make_workload
from lorabatch.scheduler.simulation.timeline import Timeline

NUM_ROWS, BATCH = 400, 16


def planned():
    """Rows of three adapters with answers of different lengths, and a plan whose first two shards are a canary."""
    rng = np.random.default_rng(3)
    adapter = draw_adapters(rng, NUM_ROWS, np.array([0.6, 0.3, 0.1]))
    output = np.clip(draw_lengths(rng, NUM_ROWS, 30, 0.5, 200) * (1 + 2 * adapter), 1, 200).astype(np.int32)
    prompt = draw_lengths(rng, NUM_ROWS, 60, 0.5, 300)
    workload = make_workload(make_adapters([8, 16, 64]), adapter, prompt, output, max_tokens=200)
    is_canary = canary_rows(workload, 8)
    plans, orders = [], []
    for mine, size in ((is_canary, 12), (~is_canary, None)):
        rows = np.flatnonzero(mine)
        plan = plan_shards(workload.part(rows), batch_rows=BATCH, num_replicas=2, rows_per_shard=size)
        plans.append(plan)
        orders.append(rows[plan.row_order])
    first = len(plans[0].shards)
    shards = [replace(shard, is_canary=True) for shard in plans[0].shards]
    shards += [replace(s, shard_id=first + s.shard_id, wave_id=100 + s.wave_id) for s in plans[1].shards]
    offsets = np.concatenate([plans[0].shard_offsets, is_canary.sum() + plans[1].shard_offsets[1:]])
    plan = ShardPlan(np.concatenate(orders), offsets, tuple(shards))
    plan.check_integrity()
    return workload, plan


def simulate(workload, plan, settings, **cluster):
    log = []
    timeline = Timeline.empty(workload.num_rows, 2)

    def handle_of(committed):
        scheduler = make_scheduler(plan.shards, committed=committed, settings=settings)
        log.append(scheduler.beginning())

        def handle(event):
            commands = scheduler.handle(event)
            scheduler.check_integrity()
            log.extend(record.to_json() for record in (event, *commands))
            return commands

        return handle

    limits = ReplicaSettings(max_batch_rows=BATCH, leap_steps=64)
    replicas = [SimulatedReplica(i, workload, COST, unmerged, limits, timeline) for i in range(2)]
    times = Cluster((0.0, 0.0), **cluster)
    simulation = JobSimulation(workload, plan, handle_of(()), replicas, times, timeline, limits, handle_of)
    simulation.run()
    assert simulation.failure is None
    assert np.isfinite(timeline.finish_s).all()
    return log


@pytest.mark.parametrize("tail", [None, TailSettings(0.05)])
def test_the_canary_is_opened_first_and_told_once_it_is_committed(tail):
    workload, plan = planned()
    log = simulate(workload, plan, SchedulerSettings(expected_replicas=2, cost=COST, tail=tail))
    canary = {shard.shard_id for shard in plan.shards if shard.is_canary}
    opened = [line["shard_id"] for line in log if line["kind"] == "RunShard"]
    assert set(opened[: len(canary)]) == canary
    assert sorted(opened) == list(range(len(plan.shards)))
    (told,) = [line for line in log if line["kind"] == "CanaryAnswered"]
    answers = Event.from_json(told).answers
    assert sum(rows.num_rows for rows in answers) == 24
    done = [line["shard_id"] for line in log[: log.index(told)] if line["kind"] == "ShardCommitted"]
    assert canary <= set(done)
    assert replay(plan.shards, log).first_difference is None


def test_other_rows_are_held_until_the_job_goes_on():
    _, plan = planned()
    settings = SchedulerSettings(expected_replicas=1, holds_rest=True)
    scheduler = make_scheduler(plan.shards, settings=settings)
    opened = []
    canary = [shard.shard_id for shard in plan.shards if shard.is_canary]
    events = [WorkersSeen(0.0, ("a",)), ReplicasFound(0.0, ()), ReplicaJoined(0.0, "a", 64)]
    events += [ShardCommitted(1.0, shard_id, "a") for shard_id in canary]
    for event in events:
        opened += [c.shard_id for c in scheduler.handle(event) if isinstance(c, RunShard)]
        scheduler.check_integrity()
    assert sorted(opened) == canary
    assert scheduler.is_canary_due
    assert scheduler.canary_rows_left == 0
    assert not [c for c in scheduler.handle(CanaryAnswered(2.0, (), goes_on=False)) if isinstance(c, RunShard)]
    assert not [c for c in scheduler.handle(Tick(3.0)) if isinstance(c, RunShard)]
    assert [c for c in scheduler.handle(CanaryAnswered(4.0, ())) if isinstance(c, RunShard)]
    assert not scheduler.is_canary_due


def test_another_coordinator_counts_the_canary_again_or_takes_it_with_its_settings():
    workload, plan = planned()
    settings = SchedulerSettings(expected_replicas=2, cost=COST)
    log = simulate(workload, plan, settings, takeovers_s=(0.4, 2.0))
    assert [line["kind"] for line in log].count("CanaryAnswered") >= 1
    told = Event.from_json(next(line for line in log if line["kind"] == "CanaryAnswered"))
    with_canary = replace(settings, canary=told)
    assert SchedulerSettings.from_json(with_canary.to_json()) == with_canary
    canary = [shard.shard_id for shard in plan.shards if shard.is_canary]
    scheduler = make_scheduler(plan.shards, committed=canary, settings=with_canary)
    assert not scheduler.is_canary_due
    scheduler.check_integrity()
