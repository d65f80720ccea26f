from __future__ import annotations

from dataclasses import replace

from lorabatch.scheduler.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from lorabatch.scheduler.tail import TailRows, rows_to_lend


def test_a_slow_batch_is_shared_and_the_helper_gets_less_for_its_second_prefill():
    assert 4 <= rows_to_lend(TailRows(16, 200, 300), 1, CPU_SMOLLM2_135M, hop_s=0.1) < 8


def test_rows_that_are_nearly_done_stay():
    assert rows_to_lend(TailRows(16, 2000, 2), 1, CPU_SMOLLM2_135M, hop_s=0.1) == 0


def test_where_steps_cost_the_same_for_any_batch_nothing_moves():
    flat = replace(H200_LLAMA_3_8B, decode_row_s=0.0, context_token_s=0.0)
    assert rows_to_lend(TailRows(64, 500, 500), 3, flat, hop_s=0.01) == 0


def test_one_row_has_nobody_to_share_with():
    assert rows_to_lend(TailRows(1, 100, 1000), 4, CPU_SMOLLM2_135M, hop_s=0.0) == 0


def test_more_helpers_take_fewer_rows_each():
    rows = TailRows(24, 100, 1000)
    one, three = (rows_to_lend(rows, helpers, CPU_SMOLLM2_135M, hop_s=0.05) for helpers in (1, 3))
    assert one == 12
    assert three == 6
