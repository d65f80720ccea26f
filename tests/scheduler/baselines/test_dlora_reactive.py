"""dLoRA's reactive mechanism in a job: when it acts, which rows it moves, and that no row is lost by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.assignment.lending import TailSettings
from lorabatch.scheduler.assignment.migration import ReplicaMemory
from lorabatch.scheduler.baselines.dlora_reactive import CoMigration
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.messages import MigrateRows, ReplicaJoined, ReplicaReported
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.policies import make_scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.scheduler.simulation import run as simulated
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.tests.scheduler.unfinished import unfinished

# Shard 0 is dealt to the first replica, shard 1 to the second: 12 rows of x, 6 of y, 2 of the base model each.
SHARDS = [Shard(i, i, "unmerged", ("x", "y"), 20, 2000, 2000, i, (12, 6, 2)) for i in range(2)]
SETTINGS = SchedulerSettings(
    policy="dlora",
    is_dealt=True,
    open_batches=64,
    tail=TailSettings(),
    cost=COST,
    memory=ReplicaMemory(1 << 34, 1 << 17, {"x": 1 << 20, "y": 1 << 20}),
)


def begun(settings=SETTINGS):
    scheduler = make_scheduler(SHARDS, settings=settings)
    for name in "ab":
        scheduler.handle(ReplicaJoined(0.0, name, 8))
    return scheduler


def report(scheduler, time_s, name, left, **more):
    event = ReplicaReported(
        time_s, name, left, min(8, left), 9.0, ("x", "y"), unfinished((int(name == "b"), left)), **more
    )
    return [command for command in scheduler.handle(event) if isinstance(command, MigrateRows)]


def test_even_replicas_move_nothing():
    scheduler = begun()
    assert not any(report(scheduler, time_s, name, 20 - int(time_s)) for time_s in np.arange(1.0, 9.0) for name in "ab")


def test_rows_move_one_adapter_at_a_time_once_the_trigger_holds():
    scheduler = begun()
    assert report(scheduler, 2.1, "a", 20) == []
    moves = report(scheduler, 2.2, "b", 2)
    assert {(move.from_replica_id, move.to_replica_id, move.is_selective) for move in moves} == {("a", "b", True)}
    moved = {key: sum(move.num_rows for move in moves if move.adapter_id == key) for key in ("x", "y", None)}
    assert 7 <= sum(moved.values()) <= 10
    assert all(moved[adapter] <= held for adapter, held in (("x", 12), ("y", 6), (None, 2)))
    # What has moved is waited for, and nothing is looked at more often than every two seconds.
    assert report(scheduler, 2.3, "a", 20) == []
    assert report(scheduler, 3.9, "b", 1) == []


def test_no_rows_move_where_the_job_forbids_it():
    scheduler = begun(replace(SETTINGS, tail=None))
    report(scheduler, 2.1, "a", 20)
    assert report(scheduler, 2.2, "b", 0) == []


def test_rows_that_have_moved_are_not_moved_again():
    scheduler = begun()
    report(scheduler, 2.1, "b", 2, incoming_rows=16)
    moves = report(scheduler, 2.2, "a", 20, lent_shards=unfinished((0, 18)))
    assert sum(move.num_rows for move in moves) <= 2


@given(st.integers(0, 10**6), st.integers(0, 20), st.integers(0, 20), st.integers(16, 40))
def test_no_more_rows_of_an_adapter_move_than_may_be_there(seed, left_a, left_b, pool_bits):
    memory = ReplicaMemory(1 << pool_bits, 1 << 17, {"x": 1 << 20, "y": 1 << 20})
    rule = CoMigration(SHARDS, replace(SETTINGS, memory=memory))
    scheduler = begun(replace(SETTINGS, memory=memory))
    assert rule.share("a", 9.0, {}, lambda replica: SHARDS) == []
    report(scheduler, 2.1, "a", left_a)
    for move in report(scheduler, 2.2, "b", left_b):
        left = left_a if move.from_replica_id == "a" else left_b
        held = {"x": 12, "y": 6, None: 2}[move.adapter_id]
        assert 0 < move.num_rows <= min(left, -(-held * left // 20))


@pytest.mark.long
@pytest.mark.parametrize("slow", [None, 4.0])
def test_a_simulated_job_under_dlora_serves_every_row_and_moves_rows_off_a_slow_replica(monkeypatch, slow):
    rng = np.random.default_rng(1)
    workload = make_workload(
        make_adapters([8, 16, 32]),
        rng.integers(-1, 3, 120).astype(np.int32),
        np.full(120, 200, np.int32),
        rng.integers(100, 900, 120).astype(np.int32),
    )
    moved = []
    monkeypatch.setattr(simulated, "JobSimulation", counting(simulated.JobSimulation, moved))
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=16).under("dlora")
    run = prediction.simulate(settings, workload, 2, None if slow is None else (1.0, slow))
    assert np.isfinite(run.timeline.finish_s).all()
    if slow is not None:
        assert sum(moved) > 0
        still = prediction.simulate(replace(settings, migrates=False), workload, 2, (1.0, slow))
        assert run.metrics.makespan_s < still.metrics.makespan_s


def counting(simulation, moved):
    """`JobSimulation` that appends how many rows have moved."""

    class Counting(simulation):
        def run(self):
            makespan_s = super().run()
            moved.append(self.num_migrated)
            return makespan_s

    return Counting
