"""When running rows are worth lending: batch sizes, second prefills, slow owners and slow helpers."""

from __future__ import annotations

from dataclasses import replace

from lorabatch.scheduler.assignment.lending import Pace, TailRows, TailSettings, rows_to_lend
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M as CPU
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B

SETTINGS = TailSettings(hop_s=0.1)
PACE = Pace(64)


def running(num_rows, context_tokens, tokens_left):
    return TailRows(num_rows, 0, context_tokens, 0, tokens_left, tokens_left)


def test_a_batch_is_shared_and_the_helper_gets_less_for_its_second_prefill():
    (lent,) = rows_to_lend(running(16, 200, 300), PACE, [PACE], CPU, SETTINGS)
    assert 4 <= lent < 8


def test_rows_that_are_nearly_done_stay():
    assert rows_to_lend(running(16, 2000, 2), PACE, [PACE], CPU, SETTINGS) == [0]


def test_where_steps_cost_the_same_for_any_batch_nothing_moves():
    flat = replace(H200_LLAMA_3_8B, decode_row_s=0.0, context_token_s=0.0)
    assert rows_to_lend(running(64, 500, 500), PACE, [PACE] * 3, flat, TailSettings(hop_s=0.01)) == [0, 0, 0]


def test_rows_beyond_one_batch_move_even_there():
    flat = replace(H200_LLAMA_3_8B, decode_row_s=0.0, context_token_s=0.0)
    assert rows_to_lend(running(64, 500, 500), Pace(32), [Pace(32)], flat, TailSettings(hop_s=0.01)) == [32]


def test_a_slow_owner_gives_most_of_its_rows_away():
    (lent,) = rows_to_lend(running(40, 20, 300), Pace(64, slowness=2.0), [PACE], CPU, SETTINGS)
    assert 30 <= lent <= 38


def test_the_last_row_stays_with_an_owner_as_fast_as_others_and_leaves_a_slow_one():
    assert rows_to_lend(running(1, 20, 300), PACE, [PACE], CPU, SETTINGS) == [0]
    assert rows_to_lend(running(1, 20, 300), Pace(64, slowness=4.0), [PACE], CPU, SETTINGS) == [1]
    assert rows_to_lend(running(8, 20, 300), Pace(64, slowness=40.0), [PACE], CPU, SETTINGS) == [8]


def test_a_slow_helper_gets_less_than_a_fast_one():
    fast, slow = rows_to_lend(running(60, 20, 1000), PACE, [PACE, Pace(64, slowness=4.0)], CPU, SETTINGS)
    assert fast > 2 * slow
    assert rows_to_lend(running(8, 200, 30), PACE, [Pace(64, slowness=40.0)], CPU, SETTINGS) == [0]


def test_more_helpers_take_fewer_rows_each():
    settings = TailSettings(hop_s=0.05)
    assert rows_to_lend(running(24, 100, 1000), PACE, [PACE], CPU, settings) == [11]
    assert rows_to_lend(running(24, 100, 1000), PACE, [PACE] * 3, CPU, settings) == [6, 6, 6]


def test_a_helper_with_rows_of_its_own_gets_no_more_than_its_free_places():
    waiting, slow = TailRows(8, 18, 50, 20, 60, 30), Pace(8, slowness=4.0)
    (lent,) = rows_to_lend(waiting, slow, [Pace(8, own_rows=5)], CPU, SETTINGS)
    assert 0 < lent <= 3
    idle, busy = rows_to_lend(waiting, slow, [Pace(8), Pace(8, own_rows=5)], CPU, SETTINGS)
    assert idle > 8
    assert busy <= 3


def test_a_gain_of_too_few_seconds_is_none():
    rows = running(16, 200, 300)
    assert rows_to_lend(rows, PACE, [PACE], CPU, replace(SETTINGS, least_gain_s=1000.0)) == [0]


def test_rows_that_wait_behind_a_batch_leave_and_the_batch_stays():
    rows = TailRows(8, 8, 50, 20, 60, 30)
    assert rows_to_lend(rows, Pace(8), [Pace(8)], CPU, SETTINGS)[0] in (7, 8)
    assert rows_to_lend(rows, Pace(8, slowness=2.0), [Pace(8)], CPU, SETTINGS) == [8]


def test_how_far_running_rows_have_come_decides_whether_they_leave_a_slow_owner():
    slow, helper = Pace(8, slowness=4.0), [Pace(8)]
    assert rows_to_lend(TailRows(8, 0, 25, 20, 60, 55), slow, helper, CPU, SETTINGS)[0] >= 6
    assert rows_to_lend(TailRows(8, 0, 79, 20, 60, 1), slow, helper, CPU, replace(SETTINGS, hop_s=1.0)) == [0]


def test_a_helper_that_has_prompts_of_its_own_to_compute_is_none():
    rows = TailRows(2, 18, 401, 400, 10, 9)
    assert rows_to_lend(rows, PACE, [Pace(64, own_rows=2)], CPU, SETTINGS)[0] >= 8
    assert rows_to_lend(rows, PACE, [Pace(64, own_rows=20, own_prefill_tokens=20 * 400)], CPU, SETTINGS) == [0]
    (few,) = rows_to_lend(rows, PACE, [Pace(64, own_rows=8, own_prefill_tokens=8 * 400)], CPU, SETTINGS)
    assert 0 < few <= 6
