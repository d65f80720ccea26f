from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.baselines.dlora_batching import (
    DECREMENT,
    LEAST_THRESHOLD,
    MULTIPLIER,
    PERIOD,
    Credits,
    DynamicBatcher,
    Period,
    dynamic_batching,
    merge_candidate,
    tune_alpha,
    tune_beta,
)
from lorabatch.scheduler.batchers.batching import BatchView

ALL_RUNNING = np.ones(4, dtype=bool)


def types_of(text):
    """One letter per row, in order of arrival: "aab." is two rows of adapter 0, one of 1, one of the base."""
    return np.array([-1 if letter == "." else ord(letter) - ord("a") for letter in text], dtype=np.int32)


def decide(text, *, max_rows=4, merged=None, legal=ALL_RUNNING, alpha=1.2, beta=0.6):
    batch, state = dynamic_batching(types_of(text), max_rows, merged, legal, alpha, beta)
    return batch.tolist(), state


def test_unmerged_stays_first_come_first_served_below_alpha():
    assert decide("aabbc") == ([0, 1, 2, 3], None)


def test_enough_rows_of_one_adapter_switch_to_merged():
    # Six rows of b against a batch of four: 1.5 > alpha = 1.2.
    assert decide("abbbbbb") == ([1, 2, 3, 4], 1)


def test_the_ratio_must_exceed_alpha_not_reach_it():
    assert decide("bbbb", alpha=1.0) == ([0, 1, 2, 3], None)


def test_merged_stays_merged_above_beta():
    assert decide("abbbcc", merged=1) == ([1, 2, 3], 1)


def test_merged_falls_back_below_beta():
    assert decide("abcbcc", merged=1) == ([0, 1, 2, 3], None)


def test_an_adapter_without_legal_standing_is_neither_merged_nor_kept():
    legal = np.array([True, False, True, True])
    assert decide("abbbbbb", legal=legal) == ([0, 1, 2, 3], None)
    assert decide("bbbb", merged=1, legal=legal) == ([0, 1, 2, 3], None)


def test_base_rows_are_never_a_merge_candidate():
    assert merge_candidate(types_of("....a"), ALL_RUNNING) == 0
    assert merge_candidate(types_of("...."), ALL_RUNNING) is None


def test_ties_go_to_the_first_adapter():
    assert merge_candidate(types_of("bbaa"), ALL_RUNNING) == 0


def paper_period(iterations):
    """Section 4.2's example: merged iterations take 50 ms, unmerged 100 ms, with the same rows in each."""
    period = Period()
    for _ in range(iterations):
        period.add(8, 0.050, 8, 0.100)
    return period


def test_switching_pays_over_the_papers_three_iterations_but_not_over_one():
    assert tune_alpha(1.0, paper_period(3), 0.100) == pytest.approx(1.0 - DECREMENT)
    assert tune_alpha(1.0, paper_period(1), 0.100) == pytest.approx(1.0 * MULTIPLIER)


def test_beta_rises_when_unmerging_would_have_been_faster():
    few_merged = Period()
    for _ in range(10):
        few_merged.add(2, 0.05, 16, 0.1)
    assert tune_beta(0.5, few_merged, 0.1) > 0.5
    assert tune_beta(0.5, paper_period(10), 0.1) < 0.5


def test_thresholds_stay_in_their_range():
    alpha = 0.06
    for _ in range(50):
        alpha = tune_alpha(alpha, paper_period(3), 0.0)
    assert alpha == LEAST_THRESHOLD


def make_batcher(initial=100.0, starve_above=200.0, lora_factor=1.4):
    def iteration_s(types, merged):
        return 0.05 * (1.0 if merged is not None else lora_factor)

    account = Credits(3, initial=initial, starve_above=starve_above, normal_below=initial)
    return DynamicBatcher(iteration_s, account, 0.1)


def view_of(waiting, *, running="", merged=None, max_rows=4):
    return BatchView(types_of(running), types_of(waiting), max_rows, merged)


def test_a_dominant_adapter_is_merged_and_others_wait():
    plan = make_batcher()(view_of("abbbbbb"))
    assert (plan.mode, plan.merged_adapter, plan.admit.tolist()) == ("merged", 1, [1, 2, 3, 4])


def test_running_rows_of_others_pause_while_one_is_merged():
    plan = make_batcher()(view_of("bbbbb", running="ab"))
    assert plan.serve.tolist() == [False, True]
    assert plan.merged_adapter == 1


def test_no_adapter_starves_behind_a_dominant_adapter():
    batcher = make_batcher(initial=4.0, starve_above=6.0)
    merged, steps_until_served = None, None
    for step in range(50):
        plan = batcher(view_of("a" + "b" * 20, merged=merged))
        merged = plan.merged_adapter
        if 0 in plan.admit:
            steps_until_served = step
            break
    assert steps_until_served is not None
    assert steps_until_served > 0


def test_alpha_learns_that_merging_pays():
    batcher = make_batcher(lora_factor=3.0)
    batcher.alpha, batcher.beta = 1.6, 0.1
    merged = None
    for _ in range(40 * PERIOD):
        merged = batcher(view_of("abbbbb", merged=merged)).merged_adapter
        if merged is not None:
            break
    assert merged == 1


def test_starving_adapters_that_unmerge_end_the_merged_period():
    # Section 4.2: "replica switching" is a break point, and a merged period tunes beta (Algorithm 2). Algorithm 3, line
    # 15, switches as Algorithm 1 does.
    batcher = make_batcher(initial=100.0, starve_above=101.5, lora_factor=3.0)
    merged, states = None, []
    for _ in range(2):
        merged = batcher(view_of("abbbbbb", merged=merged)).merged_adapter
        states.append(merged)
    assert states == [1, 1]
    alpha, beta = batcher.alpha, batcher.beta
    plan = batcher(view_of("abbbbbb", merged=1))
    assert (plan.merged_adapter, plan.admit.tolist()) == (None, [0])
    assert (batcher.alpha, batcher.beta) == (alpha, pytest.approx(beta / MULTIPLIER))


def test_each_threshold_is_tuned_by_its_own_periods_alone():
    # Algorithm 2 returns alpha after an unmerged period; no line keeps it above beta.
    batcher = make_batcher(lora_factor=3.0)
    batcher.alpha, batcher.beta = 1.3, 1.28
    for _ in range(PERIOD + 1):
        batcher(view_of("aabbb"))
    assert (batcher.alpha, batcher.beta) == (pytest.approx(1.25), 1.28)


def test_only_an_adapter_that_can_pay_is_the_merged_batch_that_is_tried():
    # Algorithm 1, line 7, takes R_merge among L, which Algorithm 3, line 18, makes the eligible adapters.
    tried = []

    def iteration_s(types, merged):
        tried.append(merged)
        return 0.05

    account = Credits(3, initial=100.0, starve_above=200.0, normal_below=100.0)
    account.balance[1] = 0.0
    DynamicBatcher(iteration_s, account, 0.1)(view_of("aabbbb"))
    assert tried == [0, None]


def test_an_empty_replica_keeps_its_state():
    plan = make_batcher()(view_of("", merged=2))
    assert plan.merged_adapter == 2
    assert len(plan.admit) == 0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.text("abc.", max_size=8), st.text("abc.", max_size=12)), min_size=1, max_size=25))
def test_every_step_is_sound_never_idle_and_conserves_credit(queues):
    batcher = make_batcher(initial=3.0, starve_above=5.0)
    merged = None
    for running, waiting in queues:
        view = view_of(waiting, running=running[:4], merged=merged)
        plan = batcher(view)
        plan.check_integrity(view)
        batcher.credits.check_integrity(4 * 3.0)
        assert plan.serve.any() or len(plan.admit) or not (running[:4] or waiting)
        merged = plan.merged_adapter


def make_credits(**changes):
    return Credits(2, **({"initial": 2.0, "starve_above": 4.0, "normal_below": 1.0} | changes))


def test_queue_jumpers_pay_those_they_passed():
    account = make_credits()
    types = np.array([0, 1, 1], np.int32)
    account.transfer(served=np.array([1, 2]), fcfs=np.array([0, 1]), types=types)
    assert account.balance.tolist() == [3.0, 1.0, 2.0]


def test_a_row_served_in_turn_pays_nothing():
    account = make_credits()
    account.transfer(np.array([0, 1]), np.array([0, 1]), np.array([0, 1], np.int32))
    assert account.balance.tolist() == [2.0, 2.0, 2.0]


def test_a_batch_that_leaves_places_empty_pays_for_them():
    account = make_credits()
    account.transfer(np.array([0]), np.array([0, 1]), np.array([0, 1], np.int32))
    assert account.balance.tolist() == [1.0, 3.0, 2.0]


def test_an_adapter_starves_above_one_threshold_until_below_the_other():
    account = make_credits()
    account.balance[0] = 4.5
    assert account.starving().tolist() == [True, False, False]
    account.balance[0] = 2.0
    assert account.starving()[0]
    account.balance[0] = 0.5
    assert not account.starving()[0]


def test_only_who_can_pay_may_be_served_alone():
    account = make_credits()
    account.balance[:2] = [1.0, 5.0]
    # Alone, 0 would pass over two rows of 1; 1 would pass over two rows of 0.
    fcfs, types = np.arange(4), np.array([0, 0, 1, 1], np.int32)
    assert account.eligible(fcfs, types)[:2].tolist() == [False, True]


def test_base_rows_have_an_account_too():
    account = make_credits()
    account.transfer(np.array([1]), np.array([0]), np.array([-1, 0], np.int32))
    assert account.balance.tolist() == [1.0, 2.0, 3.0]


@settings(deadline=None)
@given(st.lists(st.integers(-1, 1), min_size=1, max_size=20), st.integers(0, 2**20 - 1), st.integers(1, 8))
def test_credit_is_never_made_or_lost(types, mask, batch):
    account = make_credits()
    types = np.array(types, np.int32)
    served = np.flatnonzero([(mask >> i) & 1 for i in range(len(types))])
    account.transfer(served, np.arange(min(batch, len(types))), types)
    account.check_integrity(6.0)


def test_an_adapter_that_comes_later_starts_like_the_others_and_changes_no_account():
    account = make_credits()
    account.transfer(np.array([1]), np.array([0]), np.array([-1, 0], np.int32))
    account.extend(4)
    account.extend(3)
    assert account.balance.tolist() == [1.0, 2.0, 2.0, 2.0, 3.0]
    assert account.starving().tolist() == [False] * 5
    account.check_integrity(5 * 2.0)
