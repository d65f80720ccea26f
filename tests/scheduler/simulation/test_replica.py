from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.baselines.batchers import MergedBatcher, one_at_a_time, unmerged
from lorabatch.scheduler.batchers.batching import StepPlan
from lorabatch.scheduler.batchers.cost_batching import AdaptiveBatcher
from lorabatch.scheduler.costs.cost import CostModel, StepLoad, lora_load, prompt_pairs
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B, fetch_core_seconds
from lorabatch.scheduler.costs.machines import DLORA_A800_LLAMA_2_7B as COST
from lorabatch.scheduler.simulation.memory import SimulatedMemory
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.simulation.timeline import Timeline
from lorabatch.scheduler.workload import AdapterInfo

FREE_LOADS = replace(COST, load_s=0.0, host_bytes_per_s=float("inf"))


def make_replica(
    adapter_index,
    prompts,
    outputs,
    *,
    batcher=None,
    cost=FREE_LOADS,
    ranks=(8, 8, 8),
    shared_tokens=None,
    is_drawn=None,
    is_scored=None,
    **changes,
):
    workload = make_workload(
        make_adapters(ranks),
        np.asarray(adapter_index, np.int32),
        np.asarray(prompts, np.int32),
        np.asarray(outputs, np.int32),
    )
    if shared_tokens is not None:
        workload = replace(workload, shared_tokens=np.asarray(shared_tokens, np.int32))
    if is_drawn is not None:
        workload = replace(workload, is_drawn=np.asarray(is_drawn))
    if is_scored is not None:
        workload = replace(workload, is_scored=np.asarray(is_scored))
    workload.check_integrity()
    timeline = Timeline.empty(workload.num_rows, 1)
    settings_ = ReplicaSettings(**({"max_batch_rows": 4} | changes))
    engine = SimulatedReplica(0, workload, cost, batcher or unmerged, settings_, timeline)
    engine.add(np.arange(workload.num_rows))
    return engine, timeline


def run_out(engine):
    now, finished = 0.0, []
    while engine.num_rows:
        before, (now, ended) = now, engine.step(now)
        assert now > before
        finished += ended.tolist()
        engine.check_integrity()
    return now, finished


def test_one_base_row_takes_its_prefill_and_one_pass_per_further_token():
    engine, timeline = make_replica([-1], [100], [3])
    end, _ = run_out(engine)
    prefill = float(COST.step_seconds(StepLoad(prefill_tokens=100, context_tokens=100)))
    decode = sum(float(COST.step_seconds(StepLoad(decode_rows=1, context_tokens=c))) for c in (101, 102))
    assert end == pytest.approx(prefill + decode)
    assert timeline.first_token_s[0] == pytest.approx(prefill)
    assert timeline.finish_s[0] == pytest.approx(end)


def test_an_exact_leap_gives_the_times_of_single_steps():
    given_ = ([0, 1, 0, -1, 2, 0], [10, 20, 30, 40, 50, 60], [50, 40, 80, 7, 33, 21])
    one, slow = make_replica(*given_)
    run_out(one)
    many, fast = make_replica(*given_, leap_steps=1000)
    run_out(many)
    assert fast.finish_s == pytest.approx(slow.finish_s)
    assert fast.num_steps.tolist() == slow.num_steps.tolist()


def test_a_coarse_replica_overstates_time_only_slightly():
    rng = np.random.default_rng(0)
    given_ = (rng.integers(-1, 3, 200), rng.integers(10, 300, 200), rng.integers(50, 300, 200))
    exact = run_out(make_replica(*given_, max_batch_rows=32)[0])[0]
    coarse = run_out(make_replica(*given_, max_batch_rows=32, leap_steps=8, is_coarse=True)[0])[0]
    assert exact <= coarse <= exact * 1.06


def test_the_batch_never_holds_more_rows_than_it_may():
    engine, _ = make_replica([0] * 20, [10] * 20, [5] * 20)
    engine.step(0.0)
    assert len(engine.running) == 4


class RecordingCost(CostModel):
    """Keeps what each step does."""

    def step_seconds(self, load):
        if load.decode_rows or load.prefill_tokens:
            LOADS.append((float(load.prefill_tokens), float(load.decode_rows), float(load.context_tokens)))
        return super().step_seconds(load)


LOADS: list[tuple[float, float, float]] = []


def test_a_prompt_is_begun_with_what_a_step_leaves_beside_the_rows_that_decode():
    LOADS.clear()
    cost = RecordingCost(**FREE_LOADS.to_json())
    engine, _ = make_replica([-1] * 3, [60, 100, 30], [4, 2, 2], max_step_tokens=80, cost=cost)
    run_out(engine)
    assert LOADS == [
        (80, 0, 60 + 20),
        (79, 1, 61 + 99),
        (31, 1, 62 + 100 + 30),
        (0, 3, 63 + 101 + 31),
    ]


@pytest.mark.parametrize("step_tokens", [256, 512])
def test_seconds_are_continuous_in_the_length_of_prompts(step_tokens):
    """Fails where prompts that exceed a step wait for an empty batch: these jobs took 2.5 times as long."""
    lengths = range(step_tokens - 60, step_tokens + 61, 10)
    seconds = [
        run_out(
            make_replica(
                [0] * 128,
                [length] * 128,
                [60] * 128,
                cost=CPU_SMOLLM2_135M,
                max_batch_rows=64,
                max_step_tokens=step_tokens,
            )[0]
        )[0]
        for length in lengths
    ]
    growth = np.diff(seconds) / seconds[:-1]
    assert (growth > 0).all()
    assert (growth < 0.04).all()


def test_memory_limits_admission_until_rows_end():
    engine, _ = make_replica([0] * 4, [50] * 4, [50] * 4, kv_tokens=250)
    engine.step(0.0)
    assert len(engine.running) == 2
    assert sorted(run_out(engine)[1]) == [0, 1, 2, 3]


class Insisting:
    """Wants one adapter merged and alone, whatever memory allows; keeps what it was shown."""

    def __init__(self, adapter):
        self.adapter, self.views = adapter, []

    def __call__(self, view):
        self.views.append(view)
        admit = np.flatnonzero(view.waiting_adapter == self.adapter)[: view.max_batch_rows]
        if not len(admit) and not (view.running_adapter == self.adapter).any():
            return unmerged(view)
        return StepPlan("merged", self.adapter, view.running_adapter == self.adapter, admit)


def test_a_merge_for_rows_that_find_no_room_is_neither_made_nor_charged():
    batcher = Insisting(0)
    engine, timeline = make_replica([1, 0], [50, 50], [20, 5], batcher=batcher, kv_tokens=100)
    batcher.adapter = 1
    engine.step(0.0)
    batcher.adapter = 0
    for _ in range(10):
        engine.step(0.0)
    # adapter 1 was merged and left again, once
    assert timeline.switch_s[0] == pytest.approx(2 * COST.merge_s)
    assert [view.memory.gaps for view in batcher.views[:2]] == [(100,), (31,)]
    assert batcher.views[1].memory.row_pages.tolist() == [69]


def test_rows_take_whole_runs_of_pages_and_adapters_take_pages_beside_them():
    # a row of 33 tokens takes three pages, rounded to four; the adapter of 16 MB takes four pages of 4 MB
    pool = {"page_tokens": 16, "run_pages": 4, "token_bytes": 250_000, "max_batch_rows": 64}
    engine, _ = make_replica([0] * 9, [24] * 9, [10] * 9, kv_tokens=16 * 19, **pool)
    engine.step(0.0)
    # four pages for the adapter, three times four, and three for a row that finds no fourth page
    assert len(engine.running) == 4
    base, _ = make_replica([-1] * 9, [24] * 9, [10] * 9, kv_tokens=16 * 19, **pool)
    base.step(0.0)
    assert len(base.running) == 5


def test_adapters_that_no_row_uses_leave_for_rows_and_come_back_from_host_memory():
    cost = replace(COST, storage_bytes_per_s=1e6, host_bytes_per_s=1e9, load_s=0.0)
    pool = {"page_tokens": 16, "token_bytes": 250_000, "adapter_source": "storage", "max_batch_rows": 1}
    engine, timeline = make_replica([0, 1, 0], [24] * 3, [10] * 3, cost=cost, kv_tokens=16 * 8, **pool)
    run_out(engine)
    assert timeline.load_s[0] == pytest.approx(16 + 16 + 0.016, rel=0.05)


def test_rows_wait_for_their_adapter_while_others_run():
    cost = replace(COST, storage_bytes_per_s=8e6, load_s=0.0)
    engine, timeline = make_replica([-1, 0], [50] * 2, [100] * 2, cost=cost, adapter_source="storage")
    engine.step(0.0)
    assert engine.running.tolist() == [0]
    run_out(engine)
    # it was read in two seconds, in which the base model's row went on
    assert timeline.load_s[0] == 0.0
    assert 2.0 <= timeline.admit_s[1] < timeline.finish_s[0]


def test_the_last_rows_of_a_shard_are_handed_over_whether_they_run_or_wait():
    engine, _ = make_replica([-1] * 6, [10] * 6, [50, 50, 50, 2, 50, 50])
    for _ in range(2):
        engine.step(0.0)
    # row 3 has ended, 4 has taken its place, 5 waits
    assert engine.hand_over(np.array([4, 0, 3, 5, 1]), 3) == {5: 0, 1: 2, 0: 2}
    engine.check_integrity()


def test_steps_that_a_row_sits_out_are_counted():
    batcher = Insisting(1)
    engine, timeline = make_replica([1, 0], [50, 50], [20, 5], batcher=batcher)
    engine.step(0.0)
    batcher.adapter = 0
    engine.step(0.0)
    engine.step(0.0)
    assert timeline.paused_steps.tolist() == [2, 0]
    assert batcher.views[2].paused_steps.tolist() == [1, 0]


def test_what_begins_like_another_row_is_read_but_not_computed_again():
    cost = replace(FREE_LOADS, prefill_pair_s=1e-6)
    engine, _ = make_replica([0], [100], [1], cost=cost, shared_tokens=[64])
    end, _ = run_out(engine)
    pairs = prompt_pairs(36, 64)
    load = lora_load(np.array([0]), 36, np.array([8.0]))
    load = replace(load, prefill_tokens=36, prefill_pairs=pairs, context_tokens=100)
    assert end == pytest.approx(float(cost.step_seconds(load)))


@pytest.mark.parametrize("leap", [1, 50])
def test_each_token_that_is_drawn_costs_its_draw(leap):
    rows = ([0, 0, 0], [9, 9, 9], [1, 7, 7])
    seconds = []
    for is_drawn in ([False] * 3, [True, True, False]):
        engine, _ = make_replica(*rows, is_drawn=is_drawn, cost=replace(FREE_LOADS, draw_s=0.5), leap_steps=leap)
        seconds.append(run_out(engine)[0])
    assert seconds[1] - seconds[0] == pytest.approx((1 + 7) * 0.5)


def test_prompts_that_are_scored_cost_logits():
    cost = replace(FREE_LOADS, decode_row_s=FREE_LOADS.prefill_token_s + 0.5)
    seconds, steps = [], []
    for is_scored in ([False, False], [True, False], [True, True]):
        engine, timeline = make_replica([-1, -1], [100, 100], [1, 1], is_scored=is_scored, cost=cost)
        seconds.append(run_out(engine)[0])
        steps.append(timeline.num_steps[0])
    assert steps == [1, 1, 1]
    assert seconds[1] - seconds[0] == pytest.approx(100 * 0.5)
    assert seconds[2] - seconds[0] == pytest.approx(200 * 0.5)


def test_a_steps_budget_counts_computed_tokens_only():
    engine, _ = make_replica([0] * 4, [100] * 4, [1] * 4, shared_tokens=[0, 90, 90, 90], max_step_tokens=130)
    assert len(engine.step(0.0)[1]) == 4


def test_a_row_on_loan_computes_its_whole_prompt_again():
    given_ = ([0], [100], [9])
    lent, _ = make_replica(*given_, shared_tokens=[64])
    lent.hand_over(np.array([0]), 1)
    lent.take_over({0: 5})
    whole, _ = make_replica(*given_)
    whole.hand_over(np.array([0]), 1)
    whole.take_over({0: 5})
    assert run_out(lent) == run_out(whole)


def test_switching_the_merged_adapter_is_charged():
    engine, timeline = make_replica([0, 1], [10, 10], [5, 5], batcher=MergedBatcher())
    run_out(engine)
    assert timeline.switch_s[0] == pytest.approx(2 * COST.merge_s)
    assert timeline.merged_steps[0] == timeline.num_steps[0]


def test_a_replicas_first_merge_makes_its_second_copy_of_the_weights():
    cost = replace(FREE_LOADS, first_merge_s=7.0)
    engine, timeline = make_replica([0, 1], [10, 10], [5, 5], batcher=MergedBatcher(), cost=cost)
    run_out(engine)
    assert timeline.switch_s[0] == pytest.approx(2 * COST.merge_s + 7.0)


def test_an_absent_adapter_is_loaded_once_and_again_after_eviction():
    engine, timeline = make_replica([0, 1, 0], [9] * 3, [2] * 3, cost=COST, adapter_slots=1, batcher=one_at_a_time)
    run_out(engine)
    once = COST.load_seconds(8 * 2_000_000, "host")
    assert timeline.load_s[0] == pytest.approx(2 * once)
    assert timeline.peak_adapters[0] == 1


def test_the_last_rows_to_arrive_are_given_away_first():
    engine, _ = make_replica([0, 1, 0, 0], [9] * 4, [2] * 4)
    assert engine.hand_over(np.array([0, 2, 3]), 2) == {2: 0, 3: 0}
    assert engine.waiting.tolist() == [0, 1]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=25),
    st.sampled_from(["unmerged", "merged", "one", "adaptive"]),
    st.sampled_from([None, 150]),
    st.sampled_from([(1, False), (16, False), (4, True)]),
)
def test_every_row_ends_exactly_once_under_any_policy(rows, policy, kv_tokens, leap):
    batcher = {
        "unmerged": lambda: unmerged,
        "merged": MergedBatcher,
        "one": lambda: one_at_a_time,
        "adaptive": lambda: AdaptiveBatcher(COST, np.full(3, 8.0), lambda adapter, num_rows, batch_rows: 50.0),
    }[policy]()
    engine, timeline = make_replica(
        *zip(*rows, strict=True), batcher=batcher, kv_tokens=kv_tokens, leap_steps=leap[0], is_coarse=leap[1]
    )
    end, finished = run_out(engine)
    assert sorted(finished) == list(range(len(rows)))
    assert (timeline.admit_s <= timeline.first_token_s).all()
    assert (timeline.first_token_s <= timeline.finish_s + 1e-12).all()
    assert timeline.finish_s.max() <= end + 1e-9
    assert timeline.row_steps[0] == sum(max(1, output) for _, _, output in rows)


ADAPTERS = [AdapterInfo(name, 8, 10**8) for name in "xyz"]
STORED_S = H200_LLAMA_3_8B.load_seconds(10**8, "storage")


def test_an_absent_adapter_is_waited_for_once():
    memory = SimulatedMemory(ADAPTERS, H200_LLAMA_3_8B, "storage", None)
    assert memory.wait_s([0, 1], 5.0) == pytest.approx(2 * STORED_S)
    assert memory.wait_s([1, 0], 5.0) == 0.0


def test_an_adapter_on_its_way_is_waited_for_as_long_as_it_still_takes():
    memory = SimulatedMemory(ADAPTERS, H200_LLAMA_3_8B, "storage", None)
    memory.fetch(0, 1.0, "storage")
    memory.fetch(1, 1.0, "storage")
    # One link: the second comes after the first.
    assert memory.wait_s([1], 1.0 + STORED_S) == pytest.approx(STORED_S)
    assert memory.wait_s([0], 1.0 + 2 * STORED_S) == 0.0


def test_on_cpu_an_adapter_that_has_come_beside_steps_has_taken_their_time():
    memory = SimulatedMemory(ADAPTERS, H200_LLAMA_3_8B, "storage", None, is_beside=False)
    memory.fetch(0, 1.0, "storage")
    memory.fetch(1, 1.0, "storage")
    # The second is awaited for longer than it takes: the first comes before it.
    assert memory.wait_s([1], 1.0) == pytest.approx(2 * STORED_S)
    assert memory.wait_s([0], 1.0 + 3 * STORED_S) == pytest.approx(STORED_S)
    assert memory.wait_s([0, 1], 1.0 + 3 * STORED_S) == 0.0


@pytest.mark.parametrize("cores", [None, 1, 4])
def test_an_adapter_of_a_store_takes_cores_from_steps_once(cores):
    adapters = [replace(ADAPTERS[0], is_fetched=True), ADAPTERS[1]]
    memory = SimulatedMemory(adapters, H200_LLAMA_3_8B, "storage", 1, host_tier_bytes=0, fetch_cores=cores)
    fetch_s = 0.0 if cores is None else fetch_core_seconds(10**8) / cores
    assert memory.wait_s([0], 0.0) == pytest.approx(STORED_S + fetch_s)
    assert memory.wait_s([1], 0.0) == pytest.approx(STORED_S)
    assert memory.wait_s([0], 0.0) == pytest.approx(STORED_S), "its copy stays on the disk"


def test_the_least_recently_used_goes_but_nothing_that_is_needed():
    memory = SimulatedMemory(ADAPTERS, H200_LLAMA_3_8B, "host", 2)
    for needed in ([0], [1], [0], [2]):
        memory.wait_s(needed, 0.0)
    assert memory.resident == [0, 2]
    memory.wait_s([0, 1, 2], 0.0)
    assert sorted(memory.resident) == [0, 1, 2]


def test_what_was_lost_is_loaded_again():
    memory = SimulatedMemory(ADAPTERS, H200_LLAMA_3_8B, "storage", None)
    memory.wait_s([0, 1], 0.0)
    memory.clear()
    assert memory.resident == []
    assert memory.wait_s([0], 0.0) == pytest.approx(STORED_S)


@pytest.mark.parametrize(("kept", "expected"), [(None, "host"), (2, "host"), (1, "storage"), (0, "storage")])
def test_an_adapter_comes_back_from_where_host_memory_has_left_it(kept, expected):
    """One place in the pool: 0 leaves for 1, then 1 for 2, and 0 comes back."""
    size = ADAPTERS[0].weight_bytes
    limit = None if kept is None else kept * size
    memory = SimulatedMemory(ADAPTERS, H200_LLAMA_3_8B, "storage", 1, host_tier_bytes=limit)
    for adapter in (0, 1, 2):
        assert memory.wait_s([adapter], 0.0) == pytest.approx(STORED_S)
    assert memory.wait_s([0], 0.0) == pytest.approx(H200_LLAMA_3_8B.load_seconds(size, expected))
