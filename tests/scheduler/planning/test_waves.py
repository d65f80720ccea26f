from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.planning.waves import (
    MAX_BATCHES,
    MIN_ROWS,
    SHARDS_PER_REPLICA,
    Shard,
    dealt_shards,
    pays_to_merge,
    plan_shards,
    with_whole_groups,
)
from lorabatch.scheduler.workload import BASE_MODEL, AdapterInfo, Workload


def make_workload(adapter_index, *, ranks=(8, 8, 16), max_tokens=100, prompt_tokens=50, prefix_hash=0):
    num_rows = len(adapter_index)

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype=dtype), (num_rows,)).copy()

    workload = Workload(
        adapters=tuple(AdapterInfo(f"adapter-{i}", rank, rank * 1000) for i, rank in enumerate(ranks)),
        adapter_index=np.asarray(adapter_index, dtype=np.int32),
        prompt_tokens=column(prompt_tokens, np.int32),
        max_tokens=column(max_tokens, np.int32),
        prefix_hash=column(prefix_hash, np.uint64),
    )
    workload.check_integrity()
    return workload


def test_no_rows_give_no_shards():
    plan = plan_shards(make_workload([]), batch_rows=64, num_replicas=2)
    plan.check_integrity()
    assert plan.shards == ()


def test_rows_without_engine_work_come_last_in_shards_of_their_own():
    workload = make_workload([0] * 40 + [1] * 40, max_tokens=[0, 10] * 40)
    plan = plan_shards(workload, batch_rows=8, num_replicas=1)
    plan.check_integrity()
    modes = [shard.mode for shard in plan.shards]
    assert modes == sorted(modes, key="none".__eq__)
    idle = [s for s in plan.shards if not s.has_engine_work]
    assert sum(s.num_rows for s in idle) == 40
    assert all(s.adapters == () and s.predicted_output_tokens == 0 for s in idle)


def test_the_base_model_has_its_own_wave_and_mode():
    plan = plan_shards(make_workload([BASE_MODEL] * 100 + [0] * 100), batch_rows=8, num_replicas=2)
    base = [shard for shard in plan.shards if shard.mode == "base"]
    assert sum(shard.num_rows for shard in base) == 100
    assert {shard.wave_id for shard in base}.isdisjoint(s.wave_id for s in plan.shards if s.mode != "base")


def test_small_adapters_of_all_ranks_share_a_wave_so_that_loads_are_alike():
    ranks = (8, 64) * 50
    plan = plan_shards(make_workload(np.arange(100).repeat(3), ranks=ranks), batch_rows=16, num_replicas=1)
    plan.check_integrity()
    rank_of = {f"adapter-{i}": rank for i, rank in enumerate(ranks)}
    assert len({shard.wave_id for shard in plan.shards}) == 1
    for shard in plan.shards:
        assert {rank_of[name] for name in shard.adapters} == {8, 64}


def test_within_an_adapter_the_longest_rows_come_first():
    lengths = np.random.default_rng(1).integers(1, 500, 400)
    plan = plan_shards(make_workload([0] * 400, max_tokens=lengths), batch_rows=16, num_replicas=2)
    longest = [lengths[plan.rows_of(shard.shard_id)].max() for shard in plan.shards]
    for shard in plan.shards:
        rows = plan.rows_of(shard.shard_id)
        assert (np.diff(lengths[rows]) <= 0).all()
    assert longest[0] == lengths.max()


def test_shards_are_numbered_by_falling_work():
    lengths = np.random.default_rng(2).integers(1, 500, 1000)
    plan = plan_shards(make_workload([0] * 900 + [1] * 100, max_tokens=lengths), batch_rows=16, num_replicas=2)
    work = [shard.predicted_output_tokens + 0.1 * shard.prompt_tokens for shard in plan.shards]
    assert all(later <= earlier + max(work) / 4 for earlier, later in pairwise(work))
    assert min(work[:-4]) >= max(work[-2:]) - max(work) / 4


def test_a_shared_prefix_stays_together_when_its_end_is_near():
    prefix = np.arange(1, 65).repeat(10)
    plan = plan_shards(make_workload([0] * 640, prefix_hash=prefix), batch_rows=16, num_replicas=1)
    split = [set(prefix[plan.rows_of(s.shard_id)]) for s in plan.shards]
    torn = sum(len(a & b) > 0 for i, a in enumerate(split) for b in split[i + 1 :])
    assert torn <= len(plan.shards) // 2


def test_every_replica_gets_work_even_from_a_tiny_job():
    plan = plan_shards(make_workload([0] * 6), batch_rows=64, num_replicas=3)
    assert len(plan.shards) >= 3


def test_shards_stay_between_the_limits():
    workload = make_workload(np.random.default_rng(3).integers(0, 3, 20_000))
    plan = plan_shards(workload, batch_rows=64, num_replicas=4)
    sizes = np.diff(plan.shard_offsets)
    assert len(plan.shards) >= 4 * SHARDS_PER_REPLICA * 0.8
    assert sizes.max() <= 2 * MAX_BATCHES * 64
    assert sizes.min() >= MIN_ROWS


def test_a_shard_survives_json():
    shard = Shard(3, 1, "unmerged", ("a", "b"), 10, 500, 700)
    assert Shard.from_json(json.loads(json.dumps(shard.to_json()))) == shard


@settings(max_examples=60, deadline=None)
@given(
    adapters=st.lists(st.integers(-1, 5), max_size=200),
    batch_rows=st.integers(1, 70),
    num_replicas=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_every_row_is_in_exactly_one_shard(adapters, batch_rows, num_replicas, seed):
    rng = np.random.default_rng(seed)
    num_rows = len(adapters)
    workload = make_workload(
        adapters,
        ranks=(8, 8, 8, 16, 16, 64),
        max_tokens=rng.integers(0, 300, num_rows),
        prompt_tokens=rng.integers(0, 300, num_rows),
        prefix_hash=rng.integers(0, 4, num_rows),
    )
    plan = plan_shards(workload, batch_rows=batch_rows, num_replicas=num_replicas)
    plan.check_integrity()
    for shard in plan.shards:
        rows = plan.rows_of(shard.shard_id)
        served = workload.adapter_index[rows][workload.max_tokens[rows] > 0]
        named = {f"adapter-{index}" for index in served if index >= 0}
        assert named == set(shard.adapters)
        assert shard.has_engine_work == (len(served) > 0)


@given(
    sizes=st.lists(st.integers(1, 7), max_size=60),
    rows_per_shard=st.integers(1, 9),
    is_dealt=st.booleans(),
    seed=st.integers(0, 9),
)
def test_groups_are_whole_in_their_shards(sizes, rows_per_shard, is_dealt, seed):
    rng = np.random.default_rng(seed)

    def of_groups(values):
        return np.repeat(values, sizes)

    count = len(sizes)
    workload = make_workload(
        of_groups(rng.integers(-1, 3, count)),
        max_tokens=rng.integers(1, 50, sum(sizes)) * of_groups(rng.random(count) < 0.8),
        prompt_tokens=of_groups(rng.integers(1, 50, count)),
        prefix_hash=of_groups(rng.integers(0, 3, count)),
    )
    groups = of_groups(np.arange(count)).astype(np.int64)
    output = workload.max_tokens / 2
    if is_dealt:
        replica_of = rng.integers(0, 2, workload.num_rows)
        plan = dealt_shards(
            workload, replica_of, 2, rows_per_shard=rows_per_shard, predicted_output_tokens=output, mode="merged"
        )
    else:
        plan = plan_shards(workload, batch_rows=4, num_replicas=2, rows_per_shard=rows_per_shard)
    assert with_whole_groups(plan, workload, output) is plan
    whole = with_whole_groups(plan, replace(workload, groups=groups), output)
    whole.check_integrity()
    found = [groups[whole.rows_of(shard.shard_id)] for shard in whole.shards]
    starts = [group for of_shard in found for group, _ in groupby(of_shard.tolist())]
    assert sorted(starts) == list(range(count)), "each group is in one shard, in one piece"
    for shard in whole.shards:
        rows = whole.rows_of(shard.shard_id)
        assert all(b > a for a, b in pairwise(rows.tolist()) if groups[a] == groups[b])
        assert shard.has_engine_work == bool(workload.max_tokens[rows].any())
        assert shard.prompt_tokens == workload.prompt_tokens[rows].sum()
        names = {
            workload.adapters[i].adapter_id
            for i in workload.adapter_index[rows[workload.max_tokens[rows] > 0]]
            if i >= 0
        }
        assert set(shard.adapters) == names
        if is_dealt and shard.has_engine_work:
            assert sum(shard.adapter_rows) == shard.num_rows
    if (np.array(sizes) == 1).all():
        assert (whole.row_order == plan.row_order).all()


def make_wave(num_shards, *, rows=256, length=100):
    return [Shard(i, 0, "unmerged", ("a",), rows, rows * 300, rows * length) for i in range(num_shards)]


def pays(shards, cost=COST, num_replicas=2):
    return pays_to_merge(shards, 16, cost, batch_rows=64, num_replicas=num_replicas)


def test_a_large_wave_is_worth_its_switches():
    assert pays(make_wave(20))


def test_a_wave_that_does_not_fill_two_batches_is_not():
    assert not pays(make_wave(1, rows=100, length=10_000))


def test_switches_that_cost_too_much_are_not_made():
    assert not pays(make_wave(20), replace(COST, merge_s=10.0))


def test_more_replicas_switch_more_often():
    costly = replace(COST, merge_s=0.3)
    shards = make_wave(8)
    assert pays(shards, costly, num_replicas=1)
    assert not pays(shards, costly, num_replicas=8)
