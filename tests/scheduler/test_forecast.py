from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.cost import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.forecast import forecast_job
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.run import run_planned
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload

SETTINGS = ReplicaSettings(max_batch_rows=32, max_step_tokens=4096, leap_steps=8)


def make_job(adapter_index, *, max_tokens=200, output=100):
    num_rows = len(adapter_index)
    return make_workload(
        make_adapters([16, 16, 64]),
        np.asarray(adapter_index, np.int32),
        np.full(num_rows, 300, np.int32),
        np.full(num_rows, output, np.int32),
        max_tokens=max_tokens,
    )


def test_rows_and_tokens_are_accounted_per_adapter_and_for_the_base_model():
    found = forecast_job(make_job([0] * 30 + [2] * 10 + [-1] * 5), COST, SETTINGS, 2)
    assert {(a.name, a.num_rows) for a in found.adapters} == {
        ("adapter-00000-r16", 30),
        ("adapter-00002-r64", 10),
        ("", 5),
    }
    assert sum(a.prompt_tokens for a in found.adapters) == 45 * 300
    assert sum(a.predicted_output_tokens for a in found.adapters) == 45 * 100


def test_a_forecast_with_the_right_lengths_is_the_simulated_makespan():
    workload = make_job([0] * 600 + [1] * 300)
    found = forecast_job(workload, COST, SETTINGS, 2)
    actual = run_planned(workload, found.plan, COST, SETTINGS, 2).metrics.makespan_s
    assert found.is_simulated
    assert found.predicted_s == pytest.approx(actual, rel=0.01)


def test_shorter_expected_answers_change_the_forecast():
    workload = make_job([0] * 400, max_tokens=1000, output=50)
    half = forecast_job(workload, COST, SETTINGS, 2).predicted_s
    assert forecast_job(workload, COST, SETTINGS, 2, length_share=0.05).predicted_s < half / 4


def test_a_large_job_gets_the_placements_makespan_and_a_bound():
    found = forecast_job(make_job([0, 1, 2] * 400), COST, SETTINGS, 4, max_simulated_rows=100)
    assert not found.is_simulated
    assert found.predicted_s == found.placement.makespan_s >= found.placement.bound_s > 0


def test_an_empty_job_takes_no_time():
    found = forecast_job(make_job([]), COST, SETTINGS, 2)
    assert (found.predicted_s, found.adapters, found.plan.shards) == (0.0, (), ())


def test_big_waves_of_one_adapter_are_planned_merged_and_small_ones_not():
    found = forecast_job(make_job([0] * 3000 + [1] * 20 + [2] * 20), COST, SETTINGS, 2)
    modes = {shard.adapters: shard.mode for shard in found.plan.shards}
    assert modes[("adapter-00000-r16",)] == "merged"
    assert all(mode == "unmerged" for adapters, mode in modes.items() if adapters != ("adapter-00000-r16",))


def test_a_mode_that_was_asked_for_is_every_waves():
    workload = make_job([0] * 3000 + [1] * 20 + [-1] * 20)
    merged = forecast_job(workload, COST, SETTINGS, 2, mode="merged").plan.shards
    assert {shard.mode for shard in merged} == {"merged", "base"}
    unmerged = forecast_job(workload, COST, SETTINGS, 2, mode="unmerged").plan.shards
    assert {shard.mode for shard in unmerged} == {"unmerged", "base"}
