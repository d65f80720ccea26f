from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.adaptive_batching import AdaptiveBatcher
from lorabatch.scheduler.batching import BatchView
from lorabatch.scheduler.machines import DLORA_A800_LLAMA_2_7B, H200_LLAMA_3_8B

RANKS = np.array([16.0, 16.0, 64.0])


def make_batcher(cost=DLORA_A800_LLAMA_2_7B, steps=1000.0, **changes):
    return AdaptiveBatcher(cost, RANKS, steps_to_come=lambda adapter, num_rows: steps, **changes)


def make_view(running, waiting, *, batch=16, merged=None):
    return BatchView(np.asarray(running, np.int32), np.asarray(waiting, np.int32), batch, merged)


def test_one_adapter_that_fills_the_batch_is_merged():
    plan = make_batcher().next_step(make_view([], [0] * 40))
    assert (plan.mode, plan.merged_adapter) == ("merged", 0)


def test_too_small_a_homogeneous_batch_is_not_merged():
    plan = make_batcher(may_mix=False).next_step(make_view([], [0, 0] + [1, 2] * 7))
    assert plan.mode == "unmerged"
    assert len(plan.admit) == 16


def test_a_switch_that_would_hold_for_one_step_is_not_made():
    assert make_batcher(steps=1.0).next_step(make_view([], [0] * 16)).mode == "unmerged"


def test_a_draining_merged_wave_is_filled_with_other_rows():
    kernel = replace(DLORA_A800_LLAMA_2_7B, lora_step_s=0.001)
    plan = make_batcher(kernel).next_step(make_view([0] * 12, [1] * 10, merged=0))
    assert (plan.mode, plan.merged_adapter) == ("mixture", 0)
    assert plan.serve.all()
    assert len(plan.admit) == 4


def test_without_mixture_the_choice_is_between_the_other_two():
    plan = make_batcher(may_mix=False).next_step(make_view([0] * 12, [1] * 10, merged=0))
    assert plan.mode in ("merged", "unmerged")


def test_an_engine_that_may_not_merge_never_does():
    assert make_batcher(may_merge=False).next_step(make_view([], [0] * 40)).mode == "unmerged"


def test_equal_choices_leave_the_weights_alone():
    free_lora = replace(H200_LLAMA_3_8B, lora_step_s=0.0, adapter_s=0.0, rank_s=0.0, rank_token_s=0.0)
    for merged in (None, 0):
        plan = make_batcher(free_lora).next_step(make_view([0] * 16, [], merged=merged))
        assert plan.merged_adapter == merged


def test_only_base_rows_need_no_adapter():
    assert make_batcher().next_step(make_view([], [-1] * 5)).mode == "unmerged"


@settings(deadline=None, max_examples=100)
@given(
    running=st.lists(st.integers(-1, 2), max_size=16),
    waiting=st.lists(st.integers(-1, 2), max_size=30),
    merged=st.sampled_from([None, 0, 1, 2]),
    may_mix=st.booleans(),
)
def test_every_step_is_sound_and_never_idle(running, waiting, merged, may_mix):
    view = make_view(running, waiting, merged=merged)
    plan = make_batcher(may_mix=may_mix).next_step(view)
    plan.check_integrity(view)
    assert plan.serve.any() or len(plan.admit) or not (running or waiting)
