from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.baselines.dlora_batching import dlora_batcher
from lorabatch.scheduler.batchers.batching import Batcher, BatchView, MergeWaveBatcher, clustered, in_clusters
from lorabatch.scheduler.batchers.cost_batching import CostBatcher
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M, DLORA_A800_LLAMA_2_7B, H200_LLAMA_3_8B
from lorabatch.scheduler.estimates.lengths import LengthEstimator
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.simulation.timeline import Timeline
from lorabatch.scheduler.workload import Workload

RANKS = np.array([8.0, 16.0, 64.0, 32.0])


def expecting(output_tokens: float, prompt_tokens: int = 0) -> LengthEstimator:
    """Of rows that are all expected to generate so many tokens, none of which has finished."""
    return LengthEstimator.of_rows(np.array([2 * output_tokens]), np.array([prompt_tokens]))


BATCH = 64


def make_view(running, waiting, *, batch=16, merged=None):
    return BatchView(np.asarray(running, np.int32), np.asarray(waiting, np.int32), batch, merged)


def draw_workload(seed: int, num_rows: int, popularity: np.ndarray) -> Workload:
    generator = np.random.default_rng(seed)
    return make_workload(
        make_adapters([8, 16, 64, 32]),
        draw_adapters(generator, num_rows, popularity),
        draw_lengths(generator, num_rows, 100, 0.5, 400),
        draw_lengths(generator, num_rows, 60, 0.7, 200),
        max_tokens=200,
    )


def simulated(workload: Workload, cost: CostModel, batcher: Batcher, **settings_: int) -> Timeline:
    """One replica that has all rows from the start."""
    timeline = Timeline.empty(workload.num_rows, 1)
    replica = SimulatedReplica(0, workload, cost, batcher, ReplicaSettings(BATCH, **settings_), timeline)
    replica.add(np.arange(workload.num_rows))
    now_s = 0.0
    while replica.num_rows:
        now_s, _ = replica.step(now_s)
    return timeline


def makespan_s(workload: Workload, cost: CostModel, batcher: Batcher, **settings_: int) -> float:
    return float(simulated(workload, cost, batcher, **settings_).finish_s.max())


@pytest.mark.parametrize("merge_s", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("num_rows", [100, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("popularity", [np.eye(4)[2], power_popularity(4, 1.5), power_popularity(4, 0.0)])
def test_on_a_cpu_choosing_by_cost_is_never_slower_than_unmerged(merge_s, num_rows, popularity):
    cost = replace(CPU_SMOLLM2_135M, merge_s=merge_s)
    workload = draw_workload(1, num_rows, popularity)
    unmerged = makespan_s(workload, cost, partial(in_clusters, clustered))
    chosen = makespan_s(workload, cost, partial(in_clusters, CostBatcher(cost, lambda: RANKS, expecting(60))))
    assert chosen <= unmerged * 1.001


def test_where_lora_is_dear_choosing_by_cost_gains_what_dlora_gains():
    cost = DLORA_A800_LLAMA_2_7B
    workload = draw_workload(2, 500, power_popularity(4, 1.5))
    unmerged = makespan_s(workload, cost, partial(in_clusters, clustered))
    chosen = makespan_s(workload, cost, partial(in_clusters, CostBatcher(cost, lambda: RANKS, expecting(60))))
    dlora = makespan_s(workload, cost, dlora_batcher(cost, lambda: RANKS, BATCH))
    assert chosen < unmerged * 0.95
    assert chosen < dlora * 1.05


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("cost", [CPU_SMOLLM2_135M, H200_LLAMA_3_8B, DLORA_A800_LLAMA_2_7B])
def test_where_memory_holds_few_rows_choosing_by_cost_comes_near_the_better_of_merged_and_unmerged(cost, seed):
    generator = np.random.default_rng(seed)
    workload = draw_workload(seed, 150, power_popularity(4, seed / 2))
    if seed % 2:
        in_turn = np.sort(workload.adapter_index)
        workload = replace(workload, adapter_index=in_turn)
    # rows reserve 300 tokens on average: from 4 to 16 at once
    kv_tokens = int(generator.integers(1200, 5000))
    batchers = (
        partial(in_clusters, clustered),
        MergeWaveBatcher(clustered, lambda adapter: False, min_rows=1),
        partial(in_clusters, CostBatcher(cost, lambda: RANKS, expecting(60))),
    )
    *others, chosen = (simulated(workload, cost, batcher, kv_tokens=kv_tokens) for batcher in batchers)
    assert chosen.num_steps[0] <= min(other.num_steps[0] for other in others) * 1.2
    assert chosen.finish_s.max() <= min(other.finish_s.max() for other in others) * 1.1
    assert chosen.switch_s[0] <= chosen.finish_s.max() * 0.1
    # a row sits out at most as many steps as it is expected to take
    assert chosen.paused_steps.max() <= 60


def test_a_merge_must_pay_for_the_way_back_too():
    # Steps take 1 s, or 1.1 s with any adapter unmerged; twenty tokens are expected, so ten steps save 1 s.
    nothing = {name: 0.0 for name in CPU_SMOLLM2_135M.to_json() if name.endswith("_s") and "bytes" not in name}
    for merge_s, mode in ((0.4, "merged"), (0.6, "unmerged")):
        cost = replace(CPU_SMOLLM2_135M, **(nothing | {"step_s": 1.0, "lora_step_s": 0.1, "merge_s": merge_s}))
        batcher = CostBatcher(cost, lambda: RANKS, expecting(20))
        assert batcher(make_view([], [0] * 16)).mode == mode


def test_prompts_count_in_what_a_merge_saves():
    # A token of an adapter costs 0.01 s. Twenty tokens are expected: ten steps of 16 rows save 1.6 s without prompts.
    nothing = {name: 0.0 for name in CPU_SMOLLM2_135M.to_json() if name.endswith("_s") and "bytes" not in name}
    cost = replace(CPU_SMOLLM2_135M, **(nothing | {"step_s": 1.0, "lora_token_s": 0.01, "merge_s": 1.0}))
    for prompt_tokens, reused_tokens, mode in ((0, 0, "unmerged"), (20, 0, "merged"), (300, 300, "unmerged")):
        lengths = expecting(20, prompt_tokens)
        lengths.finished(20, reused_tokens=reused_tokens)
        batcher = CostBatcher(cost, lambda: RANKS, lengths)
        assert batcher(make_view([], [0] * 16)).mode == mode


def test_adapters_may_become_known_between_steps():
    ranks = [np.array([8.0])]
    batchers = (
        CostBatcher(CPU_SMOLLM2_135M, lambda: ranks[0], expecting(10)),
        dlora_batcher(CPU_SMOLLM2_135M, lambda: ranks[0], 16),
    )
    for batcher in batchers:
        ranks[0] = np.array([8.0])
        assert len(batcher(make_view([], [0, 0, -1])).admit) == 3
        ranks[0] = np.array([8.0, 16.0, 4.0])
        plan = batcher(make_view([0, 0, -1], [2, 1, 2]))
        assert plan.serve.any() or len(plan.admit)


@settings(deadline=None, max_examples=60)
@given(
    running=st.lists(st.integers(-1, 3), max_size=16),
    waiting=st.lists(st.integers(-1, 3), max_size=30),
    merged=st.sampled_from([None, 0, 3]),
    output_tokens=st.integers(1, 10_000),
    prompt_tokens=st.integers(0, 10_000),
)
def test_every_step_is_sound_and_never_idle(running, waiting, merged, output_tokens, prompt_tokens):
    view = make_view(running, waiting, merged=merged)
    for inner in (
        CostBatcher(DLORA_A800_LLAMA_2_7B, lambda: RANKS, expecting(output_tokens, prompt_tokens)),
        dlora_batcher(DLORA_A800_LLAMA_2_7B, lambda: RANKS, 16),
    ):
        plan = in_clusters(inner, view)
        plan.check_integrity(view)
        assert plan.serve.any() or len(plan.admit) or not (running or waiting)


def test_rows_that_are_announced_make_a_merge_worth_its_price():
    cost = replace(CPU_SMOLLM2_135M, merge_s=60.0)
    view = make_view([2] * 16, [2] * 16)

    def mode(rows_to_come):
        batcher = CostBatcher(cost, lambda: RANKS, expecting(40), lambda adapter: rows_to_come if adapter == 2 else 0)
        return batcher(view).mode

    assert mode(0) == "unmerged"
    assert mode(100_000) == "merged"
