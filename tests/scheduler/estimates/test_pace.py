"""Paces of replicas, from totals in their reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M as CPU
from lorabatch.scheduler.estimates.pace import PaceEstimator, StepBudget, planned_work
from lorabatch.scheduler.estimates.time_left import Work
from lorabatch.scheduler.messages import ReplicaReported, StepTotals
from lorabatch.scheduler.planning.waves import Shard

WORK = Work(100, 4000, 2000)
#: Seconds of a step of ten decoding rows whose contexts are the mean row's.
STEP_S = CPU.step_s + 10 * (CPU.decode_row_s + 50 * CPU.context_token_s)


def report(name: str, *, num_steps: int, engine_s: float, **others: float) -> ReplicaReported:
    """A report of steps of ten decoding rows. `others`: further totals."""
    totals = StepTotals(num_steps, decode_rows=10 * num_steps, context_tokens=500 * num_steps)
    return ReplicaReported(1.0, name, 0, 0, 0.0, (), engine_s=engine_s, steps=replace(totals, **others))


def test_a_replica_that_takes_three_times_as_long_is_three_times_as_slow() -> None:
    paces = PaceEstimator(CPU, WORK)
    for num_steps in range(10, 1000, 10):
        paces.reported(report("slow", num_steps=num_steps, engine_s=3 * STEP_S * num_steps))
        paces.reported(report("fast", num_steps=num_steps, engine_s=STEP_S * num_steps))
    assert paces.slowness("slow") == pytest.approx(3.0, rel=0.01)
    assert paces.slowness("fast") == pytest.approx(1.0, rel=0.02)
    assert paces.compare({"slow", "fast"})[1] == {"slow": pytest.approx(3.0, rel=0.03), "fast": 1.0}


def test_prompts_do_not_make_a_replica_look_slow() -> None:
    paces = PaceEstimator(CPU, WORK)
    prompt_s = 5000 * CPU.prefill_token_s
    paces.reported(report("a", num_steps=100, engine_s=100 * STEP_S + prompt_s, prefill_tokens=5000))
    assert paces.slowness("a") == pytest.approx(1.0)


def test_adapters_and_long_prompts_do_not_make_a_replica_look_slow() -> None:
    paces = PaceEstimator(CPU, WORK)
    lora_s = 100 * (CPU.lora_step_s + 8 * CPU.adapter_s) + 1000 * (CPU.lora_token_s + 16 * CPU.rank_token_s)
    did = {"num_lora_steps": 100, "num_adapters": 800, "lora_tokens": 1000, "rank_tokens": 16_000.0}
    pairs = {"prefill_pairs": 2e6}
    seconds = 100 * STEP_S + lora_s + 2e6 * CPU.prefill_pair_s
    paces.reported(report("a", num_steps=100, engine_s=seconds, **did, **pairs))
    assert paces.slowness("a") == pytest.approx(1.0)


def test_a_replica_without_steps_counts_as_the_others() -> None:
    paces = PaceEstimator(CPU, WORK)
    assert paces.slowness("new") == 1.0
    paces.reported(report("a", num_steps=1000, engine_s=2000 * STEP_S))
    assert paces.slowness("new") == pytest.approx(2.0)
    assert (paces.is_known("a"), paces.is_known("new")) == (True, False)


def test_small_differences_are_none() -> None:
    paces = PaceEstimator(CPU, WORK)
    paces.reported(report("a", num_steps=1000, engine_s=1000 * STEP_S))
    paces.reported(report("b", num_steps=1000, engine_s=1100 * STEP_S))
    assert paces.compare({"a", "b"})[1] == {"a": 1.0, "b": 1.0}


def test_an_engine_that_starts_again_counts_from_there() -> None:
    paces = PaceEstimator(CPU, WORK)
    paces.reported(report("a", num_steps=1000, engine_s=1000 * STEP_S))
    paces.reported(report("a", num_steps=5, engine_s=5 * STEP_S))
    paces.reported(report("a", num_steps=105, engine_s=105 * STEP_S))
    assert paces.slowness("a") == pytest.approx(1.0)


def test_a_machine_that_becomes_busy_is_noticed_within_a_minute() -> None:
    paces = PaceEstimator(CPU, WORK)
    engine_s = 0.0
    for second in range(600):
        engine_s += STEP_S * (10 if second < 300 else 100)
        paces.reported(report("a", num_steps=10 * (second + 1), engine_s=engine_s))
        if second == 300 + int(60 / (100 * STEP_S)):
            break
    assert paces.slowness("a") > 5.0


def test_without_a_cost_model_all_are_alike() -> None:
    paces = PaceEstimator(None, WORK)
    paces.reported(report("a", num_steps=1000, engine_s=1e6))
    assert paces.compare({"a", "b"})[1] == {"a": 1.0, "b": 1.0}
    assert paces.is_known("b")
    assert paces.row_seconds(10, 8) == (0.0, 0.0)


def test_the_planned_work_leaves_out_shards_without_engine_work() -> None:
    busy = Shard(0, 0, "unmerged", ("x",), 4, 400, 80)
    assert planned_work([busy, replace(busy, shard_id=1, mode="none", num_rows=9)]) == Work(4, 400, 80)
    assert planned_work([]) == Work()


def test_a_cost_model_that_is_wrong_by_orders_of_magnitude_serves_too() -> None:
    paces = PaceEstimator(CPU.scaled(1e-4), WORK)
    for num_steps in range(10, 200, 10):
        paces.reported(report("slow", num_steps=num_steps, engine_s=3 * STEP_S * num_steps))
        paces.reported(report("fast", num_steps=num_steps, engine_s=STEP_S * num_steps))
    assert paces.is_known("slow")
    assert paces.compare({"slow", "fast"})[1] == {"slow": pytest.approx(3.0, rel=0.1), "fast": 1.0}


def test_steps_grow_until_they_are_full_or_take_a_second() -> None:
    fast, slow = StepBudget(16384), StepBudget(16384)
    for _ in range(12):
        fast.took(fast.tokens, fast.tokens, 3e-5 * fast.tokens)
        slow.took(slow.tokens, slow.tokens, 6e-4 * slow.tokens)
    assert fast.tokens == 16384
    assert slow.tokens == pytest.approx(1 / 6e-4, rel=0.01)


def test_the_first_step_is_small_and_none_is_too_small_to_be_worth_it() -> None:
    budget = StepBudget(512)
    assert budget.tokens == 256
    budget.took(256, 256, 100.0)
    assert (budget.tokens, StepBudget(32).tokens) == (256, 32)


def test_a_step_that_is_not_full_says_nothing() -> None:
    budget = StepBudget(16384)
    budget.took(100, 256, 0.001)
    assert budget.tokens == 256


def test_two_steps_of_one_budget_change_it_once() -> None:
    """An engine that launches ahead reads the first of them when the second is on its way."""
    budget = StepBudget(16384)
    for seconds in (0.1, 0.1):
        budget.took(256, 256, seconds)
    assert budget.tokens == 512
    for seconds in (1.25, 1.25):
        budget.took(512, 512, seconds)
    assert budget.tokens == 409
    budget.took(450, 512, 0.1)
    assert budget.tokens == 409, "it was not full when it was launched"


def test_rows_whose_adapters_take_longer_to_load_than_they_run_count_more() -> None:
    cost = replace(CPU, load_s=0.0, storage_bytes_per_s=1e9)
    paces = PaceEstimator(cost, WORK)
    each_s, _ = paces.row_seconds(20.0, 16)
    rows_s = 10 * each_s
    shards = [
        Shard(0, 0, "unmerged", ("a", "b"), 10, 400, 200, adapter_bytes=int(3e9 * rows_s)),
        Shard(1, 0, "unmerged", ("c", "d"), 10, 400, 200, adapter_bytes=int(0.5e9 * rows_s)),
        Shard(2, 1, "unmerged", ("e",), 10, 400, 200, adapter_bytes=int(3e9 * rows_s)),
    ]
    weights = paces.row_weights(shards, 16)
    assert weights == {0: pytest.approx(3.0, rel=1e-3), 1: pytest.approx(1.0), 2: pytest.approx(1.0)}
    assert PaceEstimator(None, WORK).row_weights(shards, 16) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_rows_with_long_prompts_count_more_and_those_without_engine_work_nothing() -> None:
    shards = [
        Shard(0, 0, "unmerged", ("a",), 10, 4000, 200),
        Shard(1, 0, "unmerged", ("a",), 10, 400, 200),
        Shard(2, 1, "none", (), 10, 0, 0),
    ]
    weights = PaceEstimator(CPU, WORK).row_weights(shards, 16)
    each_s, _ = PaceEstimator(CPU, WORK).row_seconds(20.0, 16)
    assert weights == {0: pytest.approx(float(CPU.row_seconds(400.0, 20.0, batch_rows=16)) / each_s), 1: 1.0}
    assert weights[0] > 5
