from __future__ import annotations

import numpy as np
import pytest

from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.baselines.policies import POLICIES, simulate_policy
from lorabatch.scheduler.cost import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)

SETTINGS = ReplicaSettings(max_batch_rows=32, max_step_tokens=4096, leap_steps=8)


def make_job(num_rows=500, num_adapters=12, seed=0):
    """Every adapter is a task with a length of its own, as real jobs are."""
    rng = np.random.default_rng(seed)
    adapter = draw_adapters(rng, num_rows, power_popularity(num_adapters, 1.0))
    limit = rng.choice([50, 100, 200, 400], num_adapters)[adapter].astype(np.int32)
    output = np.maximum(1, (limit * rng.beta(2, 5, num_rows)).astype(np.int32))
    prompt = draw_lengths(rng, num_rows, 200, 0.8, 1500)
    ranks = [8, 16, 32, 64] * (num_adapters // 4)
    return make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=limit)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_row(policy):
    workload = make_job(120)
    run = simulate_policy(policy, workload, COST, SETTINGS, 2)
    assert np.isfinite(run.timeline.finish_s).all()
    assert run.metrics.makespan_s > 0


def test_a_planned_job_is_not_slower_than_the_online_policies():
    workload = make_job(1500)
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=32)
    planned = settings.simulate(workload, 2).metrics.makespan_s
    for policy in ("dlora", "s-lora", "fcfs"):
        online = simulate_policy(policy, workload, settings.cost, settings.replica(), 2).metrics.makespan_s
        assert planned <= 1.02 * online


def test_an_unknown_policy_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="policy='magic': expected one of dlora"):
        simulate_policy("magic", make_job(10), COST, SETTINGS, 1)
