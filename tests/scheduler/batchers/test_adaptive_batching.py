from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.batchers.batching import BatchView, FreeMemory
from lorabatch.scheduler.batchers.cost_batching import AdaptiveBatcher
from lorabatch.scheduler.costs.machines import DLORA_A800_LLAMA_2_7B, H200_LLAMA_3_8B

RANKS = np.array([16.0, 16.0, 64.0])


def make_batcher(cost=DLORA_A800_LLAMA_2_7B, steps=1000.0, **changes):
    return AdaptiveBatcher(cost, RANKS, steps_to_come=lambda adapter, num_rows, batch_rows: steps, **changes)


def make_view(running, waiting, *, batch=16, merged=None, free=None, paused=None, awaited=()):
    """`free`: how many more rows memory holds."""
    memory = None if free is None else FreeMemory((free,), np.ones(len(waiting), np.int64), awaited=frozenset(awaited))
    paused_steps = None if paused is None else np.asarray(paused, np.int64)
    running_adapter, waiting_adapter = np.asarray(running, np.int32), np.asarray(waiting, np.int32)
    return BatchView(running_adapter, waiting_adapter, batch, merged, paused_steps=paused_steps, memory=memory)


def test_one_adapter_that_fills_the_batch_is_merged():
    plan = make_batcher()(make_view([], [0] * 40))
    assert (plan.mode, plan.merged_adapter) == ("merged", 0)


def test_too_small_a_homogeneous_batch_is_not_merged():
    plan = make_batcher(may_mix=False)(make_view([], [0, 0] + [1, 2] * 7))
    assert plan.mode == "unmerged"
    assert len(plan.admit) == 16


def test_a_switch_that_would_hold_for_one_step_is_not_made():
    assert make_batcher(steps=1.0)(make_view([], [0] * 16)).mode == "unmerged"


def test_a_draining_merged_wave_is_filled_with_other_rows():
    kernel = replace(DLORA_A800_LLAMA_2_7B, lora_step_s=0.001)
    plan = make_batcher(kernel)(make_view([0] * 12, [1] * 10, merged=0))
    assert (plan.mode, plan.merged_adapter) == ("mixture", 0)
    assert plan.serve.all()
    assert len(plan.admit) == 4


def test_without_mixture_the_choice_is_between_the_other_two():
    plan = make_batcher(may_mix=False)(make_view([0] * 12, [1] * 10, merged=0))
    assert plan.mode in ("merged", "unmerged")


def test_equal_choices_leave_the_weights_alone():
    free_lora = replace(H200_LLAMA_3_8B, lora_step_s=0.0, adapter_s=0.0, rank_s=0.0, rank_token_s=0.0)
    for merged in (None, 0):
        plan = make_batcher(free_lora)(make_view([0] * 16, [], merged=merged))
        assert plan.merged_adapter == merged


def test_only_base_rows_need_no_adapter():
    assert make_batcher()(make_view([], [-1] * 5)).mode == "unmerged"


def test_rows_that_find_no_room_are_no_reason_to_merge_their_adapter():
    assert make_batcher()(make_view([1] * 3, [0] * 100)).merged_adapter == 0
    for free in (0, 1, 2):
        plan = make_batcher(may_mix=False)(make_view([1] * 3 + [2], [0] * 100, free=free))
        assert (plan.mode, plan.serve.all()) == ("unmerged", True)


def test_an_adapter_is_merged_once_most_rows_that_memory_holds_are_its_own():
    plan = make_batcher(may_mix=False)(make_view([1] + [0] * 9, [0] * 100, free=2))
    assert (plan.mode, plan.merged_adapter) == ("merged", 0)
    assert plan.serve.tolist() == [False] + [True] * 9


def test_rows_that_wait_for_memory_make_a_merge_hold_for_longer():
    # 48 rows are three batches of sixteen, or twelve of the four that memory holds
    seen = []

    def steps_to_come(adapter, num_rows, batch_rows):
        seen.append((adapter, batch_rows))
        return 48 / batch_rows

    batcher = AdaptiveBatcher(DLORA_A800_LLAMA_2_7B, RANKS, steps_to_come)
    batcher(make_view([], [0] * 48))
    batcher(make_view([], [0] * 48, free=4))
    assert seen == [(0, 16), (0, 4)]


def test_a_row_that_has_paused_for_long_is_served_to_its_end():
    for paused, mode in ((255, "merged"), (256, "unmerged")):
        view = make_view([1] + [0] * 9, [0] * 100, merged=0, paused=[paused] + [0] * 9)
        plan = make_batcher(may_mix=False)(view)
        assert plan.mode == mode
        assert plan.serve[0] == (mode == "unmerged")


def test_weights_are_not_switched_to_an_adapter_that_is_still_being_read():
    for awaited, merged in (((), 0), ((0,), None)):
        assert make_batcher()(make_view([1] * 3, [0] * 100, awaited=awaited, free=99)).merged_adapter == merged
    # nothing else could run meanwhile
    assert make_batcher()(make_view([], [0] * 100, awaited=(0,), free=99)).merged_adapter == 0


@settings(deadline=None, max_examples=100)
@given(
    running=st.lists(st.integers(-1, 2), max_size=16),
    waiting=st.lists(st.integers(-1, 2), max_size=30),
    merged=st.sampled_from([None, 0, 1, 2]),
    may_mix=st.booleans(),
    free=st.sampled_from([None, 0, 1, 5, 40]),
    paused=st.sampled_from([0, 10**6]),
)
def test_every_step_is_sound_and_never_idle(running, waiting, merged, may_mix, free, paused):
    view = make_view(running, waiting, merged=merged, free=free, paused=[paused] * len(running))
    plan = make_batcher(may_mix=may_mix)(view)
    plan.check_integrity(view)
    # what is planned can be done: a row that runs, or that finds room, takes part
    num_admitted = view.taking_part(len(running) + plan.admit).size
    assert plan.serve.any() or num_admitted or not (running or waiting)
    assert plan.serve.all() or not paused or len(running) > view.max_batch_rows
