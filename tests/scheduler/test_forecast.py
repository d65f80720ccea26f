from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.cost import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.forecast import LengthModel, extrapolate, forecast_job
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.run import run_planned
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.workload import AdapterInfo, Workload

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


def test_lengths_learned_from_finished_rows_change_the_forecast():
    workload = make_job([0] * 400, max_tokens=1000, output=50)
    learned = LengthModel([a.name for a in workload.adapters])
    learned.observe([("adapter-00000-r16", 1, 50)] * 100)
    blind = forecast_job(workload, COST, SETTINGS, 2).predicted_s
    assert forecast_job(workload, COST, SETTINGS, 2, lengths=learned).predicted_s < blind / 4


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


def make_demand(adapter_index, max_tokens):
    num_rows = len(adapter_index)
    return Workload(
        adapters=(AdapterInfo("short", 8, 1), AdapterInfo("long", 8, 1)),
        adapter_index=np.asarray(adapter_index, np.int32),
        prompt_tokens=np.full(num_rows, 10, np.int32),
        max_tokens=np.asarray(max_tokens, np.int32),
        prefix_hash=np.zeros(num_rows, np.uint64),
    )


def test_before_anything_finished_a_row_uses_half_its_limit():
    model = LengthModel(["short", "long"])
    assert model.predict(make_demand([0, 1, -1], [100, 200, 300])).tolist() == [50, 100, 150]


def test_finished_rows_correct_their_adapter():
    model = LengthModel(["short", "long"])
    model.observe([("short", 1, 20)] * 100 + [("long", 1, 400)] * 100)
    short, long = model.predict(make_demand([0, 1], [1000, 1000]))
    assert short == pytest.approx(20, rel=0.2)
    assert long == pytest.approx(400, rel=0.2)


def test_an_adapter_nobody_has_seen_borrows_from_the_others():
    model = LengthModel(["short", "long"])
    model.observe([("short", 1, 20)] * 100)
    assert model.predict(make_demand([1, -1], [1000, 1000])) == pytest.approx([20, 20], rel=0.2)


def test_a_prediction_never_exceeds_the_rows_limit():
    model = LengthModel(["short", "long"])
    model.observe([("long", 10, 4000)])
    assert model.predict(make_demand([1], [64])).tolist() == [64]


def test_high_quantiles_lie_above_low_ones():
    model = LengthModel(["short", "long"])
    model.observe([("long", 1, tokens) for tokens in range(10, 1000)])
    low, middle, high = (model.quantiles(q)[1] for q in (0.1, 0.5, 0.9))
    assert low < middle < high
    assert middle == pytest.approx(500, rel=0.2)


def test_a_bucket_of_rows_counts_as_that_many_rows():
    one_by_one, together = LengthModel(["a"]), LengthModel(["a"])
    one_by_one.observe([("a", 1, 50)] * 8)
    together.observe([("a", 8, 400)])
    assert one_by_one.num_finished == together.num_finished == 8
    assert one_by_one.quantiles(0.5) == pytest.approx(together.quantiles(0.5))


def test_unknown_names_are_ignored():
    model = LengthModel(["a"])
    model.observe([("somebody else", 5, 100)])
    assert model.num_finished == 0


def test_one_time_step_is_repeated():
    assert extrapolate([[3.0, 5.0]]).tolist() == [3.0, 5.0]


def test_a_steady_rise_goes_on():
    assert extrapolate([[10, 8], [20, 8], [30, 8]]) == pytest.approx([40, 8])


def test_a_fall_stops_at_zero():
    assert extrapolate([[30.0], [15.0], [0.0]]).tolist() == [0.0]
