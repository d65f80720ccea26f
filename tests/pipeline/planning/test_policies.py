from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from lorabatch.jobs.spec import PlacementName, PolicyName
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.policies import PLACEMENTS, POLICIES
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)

SETTINGS = RunSettings.of_machine("h200-llama-3-8b", batch_rows=32)


def make_job(num_rows=500, num_adapters=12, seed=0):
    """Every adapter is a task with a length of its own, as real jobs are."""
    rng = np.random.default_rng(seed)
    adapter = draw_adapters(rng, num_rows, power_popularity(num_adapters, 1.0))
    limit = rng.choice([50, 100, 200, 400], num_adapters)[adapter].astype(np.int32)
    output = np.maximum(1, (limit * rng.beta(2, 5, num_rows)).astype(np.int32))
    prompt = draw_lengths(rng, num_rows, 200, 0.8, 1500)
    ranks = [8, 16, 32, 64] * (num_adapters // 4)
    return make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=limit)


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_row(policy, placement):
    workload = make_job(120)
    run = prediction.simulate(SETTINGS.under(policy, placement), workload, 2)
    assert run.policy == policy
    assert np.isfinite(run.timeline.finish_s).all()
    assert run.metrics.makespan_s > 0


@pytest.mark.long
def test_a_planned_job_is_not_slower_than_the_online_policies():
    workload = make_job(1500)
    planned = prediction.simulate(SETTINGS, workload, 2).metrics.makespan_s
    for policy in ("dlora", "s-lora", "vllm-like"):
        online = prediction.simulate(SETTINGS.under(policy), workload, 2).metrics.makespan_s
        assert planned <= 1.02 * online


def test_a_job_may_ask_for_each_policy_and_placement_there_is():
    assert get_args(PolicyName) == tuple(POLICIES)
    assert get_args(PlacementName) == tuple(PLACEMENTS)
