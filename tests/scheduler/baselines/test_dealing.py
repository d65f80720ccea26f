"""Rows are dealt out before a job: each row once, as each system's rule says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.baselines.dealing import by_pending_time, by_routing, in_turn, routing_of
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B as COST
from lorabatch.scheduler.estimates.lengths import expected_tokens
from lorabatch.scheduler.forecast import row_seconds
from lorabatch.scheduler.policies import PLACEMENTS, POLICIES, RowsToDeal
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload

RANKS = (8, 16, 64, 128)


@st.composite
def rows_to_deal(draw, least_rows=0):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    num_rows, num_adapters = draw(st.integers(least_rows, 80)), draw(st.integers(1, 12))
    workload = make_workload(
        make_adapters([int(rng.choice(RANKS)) for _ in range(num_adapters)]),
        rng.integers(-1, num_adapters, num_rows).astype(np.int32),
        rng.integers(1, 900, num_rows).astype(np.int32),
        rng.integers(1, 90, num_rows).astype(np.int32),
        max_tokens=rng.choice([0, 20, 90], num_rows, p=[0.1, 0.4, 0.5]).astype(np.int32),
    )
    output = expected_tokens(workload.max_tokens)
    row_s = row_seconds(workload, output, COST, 16)
    return RowsToDeal(workload, output, row_s, COST, draw(st.integers(1, 5)), 16, draw(st.integers(1, 9)))


def shards_of(rows, policy, placement):
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=16).under(policy, placement)
    return prediction.cut_rows(settings, rows.workload, rows.num_replicas).plan


@given(rows=rows_to_deal(), policy=st.sampled_from(list(POLICIES)), placement=st.sampled_from(list(PLACEMENTS)))
def test_every_row_is_dealt_once(rows, policy, placement):
    plan = shards_of(rows, policy, placement)
    plan.check_integrity()
    is_dealt = placement in ("planned", "loraserve", "loraserve-levelled") or policy != "planner"
    for shard in plan.shards:
        of_shard = plan.rows_of(shard.shard_id)
        assert shard.has_engine_work == bool((rows.workload.max_tokens[of_shard] > 0).all())
        assert (shard.replica is not None) == (is_dealt and shard.has_engine_work)
        if shard.adapter_rows:
            assert len(shard.adapter_rows) == len(shard.adapters) + 1
            assert sum(shard.adapter_rows) == shard.num_rows
    assert all(0 <= shard.replica < rows.num_replicas for shard in plan.shards if shard.replica is not None)


@given(rows=rows_to_deal())
def test_shards_of_rows_in_input_order_go_to_one_replica_after_the_other(rows):
    replica_of = in_turn(rows)
    with_work = np.flatnonzero(rows.workload.max_tokens > 0)
    expected = np.arange(len(with_work)) // rows.rows_per_shard % rows.num_replicas
    assert replica_of[with_work].tolist() == expected.tolist()


def test_rows_keep_the_order_of_the_input_which_need_not_be_theirs():
    workload = make_workload((), np.full(7, -1, np.int32), np.full(7, 5, np.int32), np.full(7, 9, np.int32))
    object.__setattr__(workload, "input_place", np.array([3, 1, 0, 2, 6, 5, 4]))
    plan = prediction.cut_rows(RunSettings.of_machine("h200-llama-3-8b").under("s-lora"), workload, 2, 7).plan
    assert [plan.rows_of(i).tolist() for i in range(len(plan.shards))] == [[2], [1], [3], [0], [6], [5], [4]]


@given(rows=rows_to_deal())
def test_pending_time_decides_row_by_row(rows):
    replica_of, workload = by_pending_time(rows), rows.workload
    queue_s, resident = np.zeros(rows.num_replicas), set()
    for row in np.flatnonzero(workload.max_tokens > 0).tolist():
        adapter, replica = int(workload.adapter_index[row]), int(replica_of[row])
        load_s = COST.load_seconds(workload.adapters[adapter].weight_bytes, "storage") if adapter >= 0 else 0.0
        pending = [s + (load_s if (adapter, r) not in resident else 0.0) for r, s in enumerate(queue_s.tolist())]
        assert pending[replica] == pytest.approx(min(pending))
        # dLoRA, section 5.1: pending time "includes the time to load the LoRA adapter", of rows before this one too.
        queue_s[replica] = pending[replica] + rows.row_s[row]
        resident.add((adapter, replica))


@given(rows=rows_to_deal(least_rows=1), leftovers=st.sampled_from(["whole", "levelled"]))
def test_the_fractions_of_a_placement_are_kept_within_a_row(rows, leftovers):
    # LoRAServe, section IV: a request goes to a server "with probability phi", which counts requests.
    routing, replica_of, workload = routing_of(rows, leftovers), by_routing(rows, leftovers), rows.workload
    assert (routing >= 0).all()
    assert np.allclose(routing.sum(axis=1), 1.0)
    for adapter in range(len(workload.adapters)):
        mine = (workload.adapter_index == adapter) & (workload.max_tokens > 0)
        if mine.any():
            got = np.bincount(replica_of[mine], minlength=rows.num_replicas)
            assert (got <= routing[adapter] * got.sum() + 1 + 1e-9).all()
            assert not got[routing[adapter] == 0].any()
