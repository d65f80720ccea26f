from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.scheduler.estimates.canary import canary_rows, mean_lengths, with_canary
from lorabatch.scheduler.messages import CanaryAnswered, FinishedRows
from lorabatch.scheduler.planning.waves import Shard, dispatch_order
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.workload import BASE_MODEL


def workload_of(adapter, prompt=None, max_tokens=8, **columns):
    adapter = np.array(adapter, np.int32)
    prompt = np.arange(1, len(adapter) + 1, dtype=np.int32) if prompt is None else np.array(prompt, np.int32)
    output = np.full(len(adapter), 4, np.int32)
    limit = np.broadcast_to(np.asarray(max_tokens, np.int32), adapter.shape)
    found = make_workload(make_adapters([8, 8, 16]), adapter, prompt, output, max_tokens=limit)
    return replace(found, **columns)


def counts(workload, chosen):
    numbers, found = np.unique(workload.adapter_index[chosen], return_counts=True)
    return dict(zip(numbers.tolist(), found.tolist(), strict=True))


@given(st.lists(st.integers(-1, 2), max_size=60), st.integers(1, 9), st.data())
def test_each_adapter_and_the_base_model_have_their_rows_or_all_they_have(adapter, num_each, data):
    has_work = data.draw(st.lists(st.booleans(), min_size=len(adapter), max_size=len(adapter)))
    workload = workload_of(adapter, max_tokens=np.where(has_work, 8, 0))
    chosen = canary_rows(workload, num_each)
    of_work = counts(workload, np.array(has_work, bool))
    assert counts(workload, chosen) == {number: min(num_each, rows) for number, rows in of_work.items()}
    assert (workload.max_tokens[chosen] > 0).all()
    assert (canary_rows(workload, num_each) == chosen).all()


def test_the_rows_are_spread_over_tasks_and_lengths_of_prompts():
    prompts = np.arange(1, 1001)
    chosen = canary_rows(workload_of([0] * 1000, prompts), 10)
    assert [np.count_nonzero(chosen[start : start + 100]) for start in range(0, 1000, 100)] == [1] * 10
    task = np.array([7] * 900 + [9] * 100, np.uint64)
    chosen = canary_rows(workload_of([0] * 1000, [5] * 1000, task=task), 10)
    assert np.count_nonzero(chosen[900:]) == 1


def test_rows_of_one_group_are_chosen_together():
    groups = np.repeat(np.arange(20), 3)
    chosen = canary_rows(workload_of([0] * 60, groups=groups), 4)
    assert chosen.reshape(20, 3).all(axis=1).sum() == 4
    assert chosen.sum() == 12


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16))
def test_blocks_of_a_job_choose_together_what_the_whole_would(sizes, num_each):
    total, before, chosen = {1: sum(sizes)}, {1: 0}, 0
    for size in sizes:
        chosen += int(canary_rows(workload_of([1] * size), num_each, before, total).sum())
        before[1] += size
    assert chosen == min(num_each, sum(sizes))


def shard(shard_id, adapters, rows=10, tokens=1000, *, wave=None, is_canary=False, mode="unmerged"):
    wave = shard_id if wave is None else wave
    return Shard(shard_id, wave, mode, adapters, rows, 50, tokens, longest_output_tokens=200, is_canary=is_canary)


def test_other_shards_are_predicted_as_long_as_the_canarys_answers():
    shards = (
        shard(0, ("a", "b"), is_canary=True),
        shard(1, ("a",), tokens=2000),
        shard(2, ("a",), tokens=1000),
        shard(3, ()),
        shard(4, ("a", "c")),
        shard(5, ("c",)),
        shard(6, (), mode="none"),
    )
    answers = (FinishedRows("a", 1000, 30_000), FinishedRows(None, 500, 5_000), FinishedRows(None, 500, 15_000))
    answered = CanaryAnswered(1.0, answers, merged_waves=(2,))
    found = with_canary(shards, answered)
    lengths = mean_lengths(answered)
    assert 29.5 < lengths["a"] < 30.5
    assert 19.5 < lengths[None] < 20.5
    tokens = [one.predicted_output_tokens for one in found]
    # canary and error rows stay; the longer shard of an adapter stays twice as long as the other; an adapter that the
    # canary lacks stays as it was
    assert tokens[0] == 1000
    assert tokens[5:] == [1000, 1000]
    assert abs(tokens[1] - 400) <= 2
    assert abs(tokens[2] - 200) <= 1
    assert abs(tokens[3] - 200) <= 2
    assert abs(tokens[4] - 300) <= 2
    assert [one.mode for one in found] == ["unmerged"] * 2 + ["merged"] + ["unmerged"] * 3 + ["none"]
    assert [one.shard_id for one in found] == list(range(7))
    again = with_canary(found, answered)
    assert all(
        abs(a.predicted_output_tokens - b.predicted_output_tokens) <= 1 for a, b in zip(found, again, strict=True)
    )
    assert with_canary(shards, None) == shards
    assert with_canary(shards, CanaryAnswered(1.0, ())) == shards


def test_the_canary_comes_first_in_the_order_of_dispatch():
    shards = [shard(0, ("a",), tokens=9000), shard(1, ("b",), tokens=10, is_canary=True), shard(2, (), mode="none")]
    assert dispatch_order(shards) == [1, 0, 2]


def test_rows_of_the_base_model_are_a_stratum():
    workload = workload_of([BASE_MODEL] * 50 + [0] * 3)
    assert counts(workload, canary_rows(workload, 5)) == {BASE_MODEL: 5, 0: 3}
