from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.forecast import JobSample, forecast_job
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)

SETTINGS = RunSettings.of_machine("h200-llama-3-8b", batch_rows=32)


def make_job(adapter_index, *, max_tokens=200, output=100):
    num_rows = len(adapter_index)
    return make_workload(
        make_adapters([16, 16, 64]),
        np.asarray(adapter_index, np.int32),
        np.full(num_rows, 300, np.int32),
        np.full(num_rows, output, np.int32),
        max_tokens=max_tokens,
    )


def forecast(workload, num_replicas=2, max_rows=10_000, **changes):
    share = changes.pop("length_share", None)
    return prediction.forecast(
        replace(SETTINGS, **changes), workload, num_replicas, max_rows=max_rows, length_share=share
    )


def in_mode(mode):
    return {"engine": replace(SETTINGS.engine, mode=mode)}


@pytest.mark.long
def test_a_forecast_with_the_right_lengths_is_the_simulated_makespan():
    workload = make_job([0] * 600 + [1] * 300)
    found = forecast(workload)
    assert found.simulated_rows == 900
    assert (
        found.predicted_s
        == prediction.simulate(SETTINGS, prediction.with_answers(SETTINGS, workload), 2).metrics.makespan_s
    )
    known = make_job([0] * 600 + [1] * 300, output=200)
    settings = replace(SETTINGS, length_share=1.0)
    assert forecast(known, length_share=1.0).predicted_s == prediction.simulate(settings, known, 2).metrics.makespan_s


@pytest.mark.long
def test_shorter_expected_answers_change_the_forecast():
    workload = make_job([0] * 400, max_tokens=1000, output=50)
    assert forecast(workload, length_share=0.05).predicted_s < forecast(workload).predicted_s / 4


def large_job(num_rows, num_adapters, seed=0):
    rng = np.random.default_rng(seed)
    adapter = draw_adapters(rng, num_rows, power_popularity(num_adapters, 1.0))
    prompt, output = draw_lengths(rng, num_rows, 500, 0.9, 3000), np.full(num_rows, 20, np.int32)
    return make_workload(make_adapters([8, 64] * num_adapters)[:num_adapters], adapter, prompt, output, max_tokens=40)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_rows", "num_adapters", "num_replicas"),
    [
        (6_000, 40, 12),
        *(pytest.param(*long, marks=pytest.mark.long) for long in ((6_000, 3, 2), (6_000, 200, 4), (4_000, 1, 1))),
    ],
)
def test_of_a_large_job_a_sample_is_played_and_gives_nearly_the_same_seconds(num_rows, num_adapters, num_replicas):
    workload = large_job(num_rows, num_adapters)
    cut = prediction.cut_rows(SETTINGS, workload, num_replicas)
    whole, sampled = (
        forecast_job(workload, cut, SETTINGS.cost, num_replicas, partial(prediction.play_expected, SETTINGS), rows)
        for rows in (num_rows, 1_500)
    )
    assert sampled.simulated_rows < whole.simulated_rows / 2
    assert sampled.predicted_s == pytest.approx(whole.predicted_s, rel=0.1)
    if num_replicas >= 8:
        # the placement lacks the end of the job
        assert sampled.placement.makespan_s >= sampled.placement.bound_s > 0
    else:
        assert sampled.placement is None


@pytest.mark.long
def test_blocks_of_a_large_job_give_the_seconds_of_the_whole():
    workload = large_job(6_000, 40)
    order = np.argsort(workload.adapter_index, kind="stable")
    sample = JobSample(6_000, 4, 1_500)
    for rows in np.array_split(order, 3):
        columns = ("adapter_index", "prompt_tokens", "max_tokens", "prefix_hash", "output_tokens")
        block = replace(workload, **{name: getattr(workload, name)[rows] for name in columns})
        sample.add(block, prediction.cut_rows(SETTINGS, block, 4, 6_000))
    assert sample.num_rows < 2_000
    assert sample.predict(partial(prediction.play_expected, SETTINGS)) == pytest.approx(
        forecast(workload, 4).predicted_s, rel=0.1
    )


def test_an_empty_job_takes_no_time():
    found = forecast(make_job([]))
    assert (found.predicted_s, found.plan.shards, len(found.predicted)) == (0.0, (), 0)


def test_big_waves_of_one_adapter_are_planned_merged_and_small_ones_not():
    plan = prediction.cut_rows(SETTINGS, make_job([0] * 3000 + [1] * 20 + [2] * 20), 2).plan
    modes = {shard.adapters: shard.mode for shard in plan.shards}
    assert modes[("adapter-00000-r16",)] == "merged"
    assert all(mode == "unmerged" for adapters, mode in modes.items() if adapters != ("adapter-00000-r16",))


def test_a_mode_that_was_asked_for_is_every_waves():
    workload = make_job([0] * 3000 + [1] * 20 + [-1] * 20)
    for mode, expected in (("merged", "merged"), ("unmerged", "unmerged"), ("exact", "unmerged")):
        plan = prediction.cut_rows(replace(SETTINGS, **in_mode(mode)), workload, 2).plan
        assert {shard.mode for shard in plan.shards} == {expected, "base"}
