from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.batchers.batching import (
    BATCHERS,
    BatchView,
    FreeMemory,
    ReplicaFacts,
    StepPlan,
    admission_order,
    batcher_of,
    clustered,
    clustered_order,
    in_clusters,
    without_vain_merge,
)
from lorabatch.scheduler.batchers.cost_batching import PromptsTogether
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from lorabatch.scheduler.estimates.lengths import LengthEstimator
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import make_workload
from lorabatch.scheduler.simulation.timeline import Timeline


def make_view(running, waiting, *, batch=8, merged=None):
    return BatchView(np.asarray(running, np.int32), np.asarray(waiting, np.int32), batch, merged)


def test_adapters_already_running_are_admitted_before_new_ones():
    plan = clustered(make_view([3, 3], [7, 3, 7, 3, 9]))
    assert plan.admit.tolist() == [1, 3, 0, 2, 4]


def test_a_new_adapter_with_many_rows_beats_one_with_few():
    assert clustered_order(np.array([], np.int32), np.array([1, 2, 2], np.int32)).tolist() == [1, 2, 0]


def test_a_resident_adapter_is_finished_before_a_new_one_is_loaded():
    resident = np.array([1], np.int32)
    waiting = np.array([2, 2, 1, 3], np.int32)
    assert clustered_order(np.array([3], np.int32), waiting, resident).tolist() == [3, 2, 0, 1]


def test_base_rows_count_as_present():
    assert clustered_order(np.array([], np.int32), np.array([5, 5, -1], np.int32)).tolist() == [2, 0, 1]


def test_rows_expected_to_run_much_longer_enter_first_and_the_others_by_adapter():
    view = make_view([3], [7, 3, 7, 3, 9])
    assert admission_order(view).tolist() == [1, 3, 0, 2, 4]
    long_last = replace(view, waiting_tokens=np.array([60.0, 50.0, 55.0, 65.0, 400.0]))
    assert admission_order(long_last).tolist() == [4, 1, 3, 0, 2]
    alike = replace(view, waiting_tokens=np.array([60.0, 50.0, 55.0, 65.0, 70.0]))
    assert admission_order(alike).tolist() == admission_order(view).tolist()


@settings(deadline=None)
@given(rows=st.lists(st.tuples(st.integers(-1, 4), st.floats(1, 4096)), max_size=30))
def test_every_waiting_row_has_one_place_whatever_lengths_are_expected(rows):
    view = replace(make_view([1], [a for a, _ in rows]), waiting_tokens=np.array([t for _, t in rows]))
    order = admission_order(view)
    assert sorted(order.tolist()) == list(range(len(rows)))
    expected = view.waiting_tokens[order]
    # Nothing that is begun later is expected to run twice as long.
    assert all((expected[i + 1 :] <= 2.0001 * expected[i]).all() for i in range(len(rows)))


def test_no_more_rows_than_the_batch_holds_are_admitted():
    plan = clustered(make_view([1] * 6, [1] * 9))
    assert len(plan.admit) == 2


def test_an_empty_replica_has_an_empty_step():
    plan = clustered(make_view([], []))
    assert len(plan.admit) == len(plan.serve) == 0


class Seeing:
    """Keeps what it was shown."""

    def __call__(self, view):
        self.view = view
        return clustered(view)


def test_rows_in_clusters_keep_their_sizes():
    memory = FreeMemory((9,), np.array([1, 2, 3]))
    inner = Seeing()
    in_clusters(inner, replace(make_view([5], [7, 5, 7]), memory=memory))
    assert inner.view.waiting_adapter.tolist() == [5, 7, 7]
    assert inner.view.memory.row_pages.tolist() == [2, 1, 3]


def test_running_rows_and_those_that_find_room_take_part():
    view = replace(make_view([5, 6], [7, 5, 7]), memory=FreeMemory((3,), np.array([1, 2, 3])))
    assert view.taking_part(np.arange(5)).tolist() == [0, 1, 2, 3]
    assert view.taking_part(np.array([0, 4])).tolist() == [0, 4]


def test_weights_are_not_switched_to_an_adapter_of_no_row_in_the_step():
    plan = StepPlan("mixture", 2, np.ones(2, bool), np.array([0]))
    for merged_now, taking_part, mode in ((None, [1, 2], "mixture"), (2, [1], "mixture"), (None, [1], "unmerged")):
        found = without_vain_merge(plan, merged_now, np.array(taking_part, np.int32))
        assert (found.mode, found.merged_adapter) == (mode, None if mode == "unmerged" else 2)
        assert found.serve.all()


def test_a_plan_that_mixes_adapters_in_merged_mode_is_caught():
    view = make_view([1, 2], [])
    with pytest.raises(AssertionError, match="merged 1"):
        StepPlan("merged", 1, np.ones(2, bool), np.zeros(0, np.int64)).check_integrity(view)


@settings(deadline=None)
@given(
    running=st.lists(st.integers(-1, 4), max_size=8),
    waiting=st.lists(st.integers(-1, 4), max_size=30),
)
def test_every_clustered_step_is_sound_and_never_idle(running, waiting):
    view = make_view(running, waiting)
    plan = clustered(view)
    plan.check_integrity(view)
    assert plan.serve.sum() + len(plan.admit) >= min(8, len(running) + len(waiting))


def num_fitting(memory: FreeMemory, waiting: list[int], running: list[int]) -> int:
    rows = np.arange(len(waiting))
    return memory.num_fitting(rows, np.asarray(waiting, np.int32), np.asarray(running, np.int32))


def make_memory(gaps: tuple[int, ...], row_pages: list[int], **changes: object) -> FreeMemory:
    return FreeMemory(gaps, np.asarray(row_pages, np.int64), **changes)  # type: ignore[arg-type]


def test_rows_enter_in_order_until_one_finds_no_gap():
    assert num_fitting(make_memory((5, 3), [3, 5, 1]), [0, 0, 0], [0]) == 2
    # ten pages are free, but not side by side
    assert num_fitting(make_memory((5, 5), [6, 1]), [0, 0], [0]) == 0


def test_the_smallest_gap_that_is_long_enough_is_taken():
    assert num_fitting(make_memory((8, 4), [4, 8]), [0, 0], [0]) == 2


def test_an_adapter_needs_room_beside_its_first_row_only():
    memory = make_memory((10,), [2, 2, 2], adapter_pages={1: 5})
    assert num_fitting(memory, [1, 1, 1], [0]) == 2
    assert num_fitting(memory, [1, 1, 1], [1]) == 3
    assert num_fitting(memory, [-1, 2, -1], [0]) == 3


def test_rows_are_rounded_up_where_a_gap_is_that_long():
    assert num_fitting(make_memory((8,), [1, 1, 1], rounded_to=4), [0, 0, 0], [0]) == 2
    assert num_fitting(make_memory((3,), [3], rounded_to=4), [0], [0]) == 1


def test_an_idle_replica_has_room_for_any_row():
    memory = make_memory((2,), [5, 5])
    assert num_fitting(memory, [0, 0], []) == 1
    assert num_fitting(memory, [0, 0], [0]) == 0
    assert num_fitting(memory, [], []) == 0


@pytest.mark.parametrize("rows", [[2, 0], [1]])
def test_rows_may_be_chosen_and_put_in_another_order(rows):
    memory = make_memory((9,), [1, 2, 3], awaited=frozenset({4}))
    chosen = replace(make_view([], [0, 1, 2]), memory=memory).of_waiting(np.asarray(rows)).memory
    assert chosen.row_pages.tolist() == [[1, 2, 3][row] for row in rows]
    assert (chosen.gaps, chosen.awaited) == ((9,), {4})


@pytest.mark.parametrize("batcher", BATCHERS)
def test_every_batcher_serves_the_rows_at_hand_and_gives_forced_adapters_a_wave(batcher):
    facts = ReplicaFacts(
        cost=CPU_SMOLLM2_135M,
        ranks=lambda: np.full(3, 8.0),
        must_merge=lambda adapter: adapter == 2,
        max_batch_rows=8,
        lengths=LengthEstimator.of_rows(np.array([120]), np.array([0])),
    )
    merges_first = batcher in ("merged-only", "peft-like")
    for waiting, expected in (
        ([0, 1, 0, 1], ("merged", 2) if merges_first else ("unmerged", 4)),
        ([2, 2], ("merged", 2)),
    ):
        view = make_view([], waiting)
        plan = batcher_of(batcher, facts)(view)
        plan.check_integrity(view)
        assert (plan.mode, len(plan.admit)) == expected


def test_an_unknown_batcher_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"batcher='lifo': expected one of cost, .*dlora"):
        batcher_of("lifo", None)


# A mixed step wastes nearly what three whole steps take.
MIXED = replace(CPU_SMOLLM2_135M, mixed_step_s=2.9 * CPU_SMOLLM2_135M.step_s)


def together():
    return PromptsTogether(clustered, MIXED, lambda: np.zeros(1))


def test_rows_are_held_back_until_empty_places_have_wasted_what_a_mixed_step_costs():
    batcher = together()
    # One of four places is empty: each step wastes a quarter of itself.
    plans = [batcher(make_view([-1] * 3, [-1] * 9, batch=4)) for _ in range(24)]
    assert [plan.holds_back for plan in plans] == ([True] * 11 + [False]) * 2
    assert {len(plan.admit) for plan in plans} == {1}
    half = [batcher(make_view([-1] * 2, [-1] * 9, batch=4)).holds_back for _ in range(6)]
    assert half == [True] * 5 + [False]


@pytest.mark.parametrize(
    "changes",
    [
        {"waiting_adapter": np.full(1, -1, np.int32)},
        {"running_adapter": np.zeros(0, np.int32)},
        {"has_prompts": True},
        {"merged_adapter": 0},
    ],
    ids=["no others wait", "nothing runs", "prompts are computed anyway", "weights are switched"],
)
def test_rows_enter_at_once_where_holding_them_back_gains_nothing(changes):
    view = make_view([-1] * 3, [-1] * 9, batch=4)
    assert together()(view).holds_back
    assert not together()(replace(view, **changes)).holds_back


def test_rows_without_memory_or_adapter_waste_nothing():
    view = make_view([-1] * 3, [0] * 9, batch=4)
    for memory in (FreeMemory((1,), np.full(9, 2)), FreeMemory((99,), np.full(9, 2), awaited=frozenset({0}))):
        batcher = together()
        plans = [batcher(replace(view, memory=memory)) for _ in range(50)]
        assert not any(plan.holds_back for plan in plans)


class InGroups:
    """Unmerged; rows enter in groups of one size."""

    def __init__(self, size):
        self._size = size

    def __call__(self, view):
        plan = clustered(view)
        is_enough = len(plan.admit) >= min(self._size, len(view.waiting_adapter))
        return replace(plan, holds_back=len(view.running_adapter) > 0 and not is_enough)


@pytest.mark.long
@pytest.mark.parametrize("output_tokens", [20, pytest.param(100, marks=pytest.mark.long)])
def test_no_fixed_size_of_groups_is_better_than_what_rows_held_back_waste(output_tokens):
    generator, num_rows = np.random.default_rng(output_tokens), 1_000
    lengths = generator.integers(1, 2 * output_tokens, num_rows)
    workload = make_workload((), np.full(num_rows, -1, np.int32), np.full(num_rows, 20), lengths, max_tokens=200)

    def seconds(batcher):
        settings = ReplicaSettings(max_batch_rows=64, max_step_tokens=4096)
        replica = SimulatedReplica(0, workload, H200_LLAMA_3_8B, batcher, settings, Timeline.empty(num_rows, 1))
        replica.add(np.arange(num_rows))
        end_s = 0.0
        while replica.num_rows:
            end_s, _ = replica.step(end_s)
        return end_s

    ours = seconds(PromptsTogether(clustered, H200_LLAMA_3_8B, lambda: np.zeros(0)))
    fixed = {size: seconds(InGroups(size)) for size in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)}
    assert ours < 0.9 * fixed[1]
    assert ours < 1.02 * min(fixed.values())
