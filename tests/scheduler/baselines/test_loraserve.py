from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.baselines.loraserve import assign_loraserve, server_budget

POINTS = {8: 1000.0, 16: 900.0, 32: 800.0, 64: 600.0, 128: 400.0}


def place(ranks, demand, num_servers, leftovers="whole"):
    routing = assign_loraserve(np.array(ranks), np.array(demand, float), POINTS, num_servers, leftovers)
    assert (routing >= 0).all()
    assert np.allclose(routing.sum(axis=1), 1.0)
    return routing


def utilisation_of(routing, ranks, demand):
    return (np.array(demand) / [POINTS[r] for r in ranks]) @ routing


def utilisation_at_max_rank(routing, ranks, demand):
    max_rank = np.where(routing > 0, np.array(ranks)[:, None], 0).max(axis=0)
    speed = np.array([POINTS.get(int(rank), np.inf) for rank in max_rank])
    return np.array(demand) @ routing / speed


def test_step_1_and_2_give_each_rank_its_share_of_servers():
    # Utilisation 2.0 at rank 8 and 2.0 at rank 128 over four servers: two servers each.
    ranks, utilisation = np.array([8, 8, 128]), np.array([1.5, 0.5, 2.0])
    assert server_budget(ranks, utilisation, 4) == {8: 2, 128: 2}


def test_rounding_never_hands_out_more_servers_than_there_are():
    ranks = np.array([8, 16, 32, 64])
    assert sum(server_budget(ranks, np.full(4, 1.5), 6).values()) == 6


def test_each_leftover_is_whole_on_the_server_of_the_highest_rank_with_room():
    # Algorithm 1, lines 24 to 28. Utilisation 1.1, 0.3 and 0.6: the target is 2/3, the budgets 2, 0 and 1. Rank 64 is
    # left over; rank 128's server has no room for 0.3, so that it goes to a server of rank 8, the least utilised.
    ranks, demand = [8, 8, 64, 128], [850, 250, 180, 240]
    routing = place(ranks, demand, 3)
    assert sorted(routing[2].tolist()) == [0.0, 0.0, 1.0]
    server_of_128, server_of_64 = int(np.argmax(routing[3])), int(np.argmax(routing[2]))
    assert server_of_64 != server_of_128
    without = utilisation_of(np.delete(routing, 2, axis=0), [8, 8, 128], [850, 250, 240])
    assert server_of_64 == int(np.argmin(np.where(np.arange(3) == server_of_128, np.inf, without)))
    # With room there, it is whole on rank 128's server: it prefers the highest rank to the least utilised server.
    roomy = place([8, 64, 128], [1500, 60, 200], 3)
    assert roomy[1, int(np.argmax(roomy[2]))] == 1.0


@settings(deadline=None, max_examples=80)
@given(
    ranks=st.lists(st.sampled_from(sorted(POINTS)), min_size=1, max_size=40),
    num_servers=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_no_adapter_of_a_rank_without_servers_is_split(ranks, num_servers, seed):
    # Algorithm 1, line 26: "for each adapter in leftovers", one call, one server.
    demand = np.random.default_rng(seed).pareto(1.2, len(ranks)) + 0.01
    routing = place(ranks, demand, num_servers)
    utilisation = demand / np.array([POINTS[rank] for rank in ranks])
    budget = server_budget(np.array(ranks), utilisation, num_servers)
    for adapter, rank in enumerate(ranks):
        assert (routing[adapter] > 0).sum() <= max(1, budget[rank] + 1)


def test_ranks_with_a_budget_are_kept_apart():
    routing = place([8, 8, 128, 128], [500, 500, 200, 200], 2)
    for server in range(2):
        present = np.flatnonzero(routing[:, server])
        assert len({(8, 8, 128, 128)[a] for a in present}) == 1


def test_a_popular_adapter_is_split_over_servers():
    routing = place([8, 8], [3000, 1000], 4)
    assert (routing[0] > 0).sum() == 3
    assert utilisation_of(routing, [8, 8], [3000, 1000]) == pytest.approx([1.0] * 4)


def test_a_rank_without_a_budget_joins_the_server_of_the_next_higher_one():
    # Rank 64 wants 0.1 of a server, so it is left over; rank 128's server has room and is not slowed by it.
    ranks, demand = [8, 64, 128], [1000, 60, 360]
    routing = place(ranks, demand, 2, "levelled")
    server_of_128 = int(np.argmax(routing[2]))
    assert routing[1, server_of_128] > 0.5
    assert routing[0, server_of_128] < 0.1


def test_one_server_takes_everything():
    assert place([8, 64, 128], [1, 2, 3], 1).tolist() == [[1.0], [1.0], [1.0]]


def test_no_adapter_is_an_empty_routing():
    assert place([], [], 3).shape == (0, 3)


def test_without_any_demand_adapters_are_still_spread():
    routing = place([8] * 8, [0.0] * 8, 4)
    assert (routing > 0).sum(axis=0).max() <= 3


def test_an_unprofiled_rank_is_named():
    with pytest.raises(KeyError, match="24"):
        place([24], [1.0], 1)


@settings(deadline=None, max_examples=80)
@given(
    ranks=st.lists(st.sampled_from(sorted(POINTS)), min_size=1, max_size=40),
    num_servers=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_requests_are_never_lost_and_load_is_even(ranks, num_servers, seed):
    rng = np.random.default_rng(seed)
    demand = rng.pareto(1.2, len(ranks)) * rng.integers(0, 2, len(ranks))
    place(ranks, demand, num_servers)
    routing = place(ranks, demand, num_servers, "levelled")
    if demand.any():
        used = utilisation_at_max_rank(routing, ranks, demand)
        # Every server at the highest rank would be the worst that mixing can cost.
        assert used.max() <= demand.sum() / POINTS[max(ranks)] / num_servers * (1 + 1e-6) + 1e-9
        if len(set(ranks)) == 1:
            assert used.max() <= used.sum() / num_servers * (1 + 1e-6) + 1e-9


def test_a_mixed_server_counts_its_load_at_its_highest_rank():
    # Utilisation 2.4, 1.0, 0.36 and 0.24 on four servers. By their own ranks the leftovers fill the fourth exactly; at
    # rank 128 they would take it 1.96 times as long as there is.
    ranks, demand = [8, 16, 32, 128], [2400, 900, 288, 96]
    routing = place(ranks, demand, 4, "levelled")
    assert utilisation_at_max_rank(routing, ranks, demand).max() <= 1.15
    assert (routing[3] > 0).sum() == 1
