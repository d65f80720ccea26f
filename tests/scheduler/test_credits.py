from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.credits import Credits


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
