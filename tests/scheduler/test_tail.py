from __future__ import annotations

from dataclasses import replace

from lorabatch.scheduler.commands import MigrateRows
from lorabatch.scheduler.events import Progress
from lorabatch.scheduler.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from lorabatch.scheduler.tail import TailRows, TailSettings, lend, rows_to_lend
from lorabatch.scheduler.waves import Shard


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


def make_progress(running):
    return Progress(9.0, "slow", running, running, 10.0, ())


def test_the_shard_with_most_rows_left_is_shared_with_every_helper():
    shards = [Shard(i, 0, "unmerged", ("x",), 20, 4000, 12_000) for i in range(2)]
    lent = lend(make_progress(18), shards, {0: 4, 1: 18}, ["a", "b"], TailSettings(CPU_SMOLLM2_135M))
    assert [(m.shard_id, m.to_replica_id, m.adapter) for m in lent] == [(1, "a", "x"), (1, "b", "x")]
    assert all(isinstance(m, MigrateRows) and 0 < m.num_rows <= 6 for m in lent)


def test_without_helpers_or_work_nothing_is_lent():
    settings = TailSettings(CPU_SMOLLM2_135M)
    idle = Shard(0, 0, "none", (), 20, 0, 0)
    assert lend(make_progress(9), [idle], {0: 0}, ["a"], settings) == ()
    busy = Shard(0, 0, "unmerged", ("x",), 20, 4000, 12_000)
    assert lend(make_progress(9), [busy], {0: 9}, [], settings) == ()
