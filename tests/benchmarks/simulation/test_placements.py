from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.benchmarks.simulation.placements import (
    burst_tolerance,
    cheapest_assignment,
    extrapolate,
    permute_assignment,
    place_contiguous,
    place_random,
    place_round_robin,
    replicate_for_bursts,
)
from lorabatch.scheduler.baselines.loraserve import assign_loraserve

POINTS = {8: 1000.0, 16: 900.0, 32: 800.0, 64: 600.0, 128: 400.0}


def place(ranks, demand, num_servers):
    return assign_loraserve(np.array(ranks), np.array(demand, float), POINTS, num_servers)


def moved_bytes(routing, previous, weight_bytes):
    is_new = (routing > 0) & ~(previous > 0)
    return float((is_new * weight_bytes[:, None]).sum())


def test_moves_are_avoided_when_nothing_changed():
    ranks, demand = [8, 8, 16, 128, 128, 64], [900, 300, 500, 100, 200, 300]
    first = place(ranks, demand, 4)
    shuffled = first[:, [2, 0, 3, 1]]
    again = permute_assignment(place(ranks, demand, 4), shuffled, np.ones(6))
    assert moved_bytes(again, shuffled, np.ones(6)) == 0
    assert np.allclose(again, shuffled)


def test_big_adapters_stay_when_something_must_move():
    previous = np.array([[1.0, 0.0], [0.0, 1.0]])
    routing = permute_assignment(place([8, 128], [1000, 400], 2), previous, np.array([1.0, 100.0]))
    assert routing[1, 1] == 1.0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 10**6))
def test_permuting_never_moves_more_than_leaving_names_alone(num_adapters, num_servers, seed):
    rng = np.random.default_rng(seed)
    ranks = rng.choice(sorted(POINTS), num_adapters)
    size = rng.integers(1, 100, num_adapters).astype(float)
    before = place(ranks, rng.random(num_adapters) + 0.01, num_servers)
    demand = rng.random(num_adapters) + 0.01
    plain = place(ranks, demand, num_servers)
    permuted = permute_assignment(plain, before, size)
    assert moved_bytes(permuted, before, size) <= moved_bytes(plain, before, size) + 1e-9


RANKS = np.array([128, 8, 64, 8, 16, 32])


@pytest.mark.parametrize(
    "routing",
    [
        place_random(6, 4, np.random.default_rng(0)),
        place_contiguous(RANKS, 4),
        place_round_robin(6, 4),
    ],
)
def test_every_baseline_routes_every_request(routing):
    assert np.allclose(routing.sum(axis=1), 1.0)


def test_contiguous_keeps_neighbouring_ranks_together_in_equal_numbers():
    fraction = place_contiguous(RANKS, 3)
    assert [sorted(RANKS[fraction[:, s] > 0].tolist()) for s in range(3)] == [[8, 8], [16, 32], [64, 128]]


def test_random_placement_depends_on_its_generator_only():
    a, b = (place_random(50, 7, np.random.default_rng(3)) for _ in range(2))
    assert (a == b).all()


def test_burst_tolerance_is_free_memory_in_requests_over_load():
    is_resident = np.array([[True, False], [True, True]])
    tolerance = burst_tolerance(is_resident, np.array([2.0, 10.0]), np.array([10.0, 20.0]), np.full(2, 100.0), 10.0)
    # Server 0 has 70 free, server 1 has 80: 7 requests over load 2; 15 over load 10.
    assert tolerance.tolist() == [3.5, 1.5]


def test_an_adapter_without_load_tolerates_any_burst():
    assert burst_tolerance(np.ones((1, 1), bool), np.zeros(1), np.ones(1), np.ones(1), 1.0)[0] == np.inf


def test_the_least_tolerant_adapter_is_replicated_first():
    placed = replicate_for_bursts(
        np.array([[True, False, False], [False, True, False]]),
        np.array([10.0, 1.0]),
        np.array([10.0, 10.0]),
        np.full(3, 100.0),
        1.0,
    )
    assert placed[0].all()


def test_replication_ends_before_memory_is_what_limits():
    heavy = replicate_for_bursts(np.eye(2, dtype=bool), np.ones(2), np.full(2, 60.0), np.full(2, 100.0), 1.0)
    assert heavy.tolist() == np.eye(2, dtype=bool).tolist()


def test_tied_adapters_are_replicated_although_the_minimum_stays():
    # dLoRA, section 5.1: "until the minimum burst tolerance decreases". One copy leaves the other adapter's tolerance
    # as it is, since a third server takes it; the second copy raises the minimum.
    resident = np.array([[True, False, False, False], [False, True, False, False]])
    placed = replicate_for_bursts(resident, np.ones(2), np.full(2, 10.0), np.full(4, 100.0), 1.0)
    assert placed.sum(axis=1).min() > 1


def test_replication_never_lowers_the_least_tolerance():
    rng = np.random.default_rng(5)
    for _ in range(20):
        resident = np.zeros((6, 4), dtype=bool)
        resident[np.arange(6), rng.integers(0, 4, 6)] = True
        given = (rng.random(6) + 0.1, rng.random(6) * 20, np.full(4, 100.0), 1.0)
        after = replicate_for_bursts(resident, *given)
        assert (after >= resident).all()
        assert burst_tolerance(after, *given).min() >= burst_tolerance(resident, *given).min()


def test_an_adapter_too_big_for_the_other_replicas_stays_where_it_is():
    resident = np.array([[True, False, False], [False, True, False]])
    memory = np.array([200.0, 90.0, 90.0])
    # However much it is wanted, and although its copy would leave others as they are.
    too_big = replicate_for_bursts(resident, np.array([50.0, 1.0]), np.array([100.0, 1.0]), memory, 1.0)
    assert too_big.tolist() == resident.tolist()
    small = replicate_for_bursts(resident, np.array([50.0, 1.0]), np.array([10.0, 1.0]), memory, 1.0)
    assert small[0].all()


def test_no_adapters_need_no_replicas():
    empty = np.zeros((0, 3), dtype=bool)
    assert replicate_for_bursts(empty, np.zeros(0), np.zeros(0), np.ones(3), 1.0).shape == (0, 3)


def test_no_rows_need_no_columns():
    assert len(cheapest_assignment(np.zeros((0, 0)))) == 0


def test_a_known_instance():
    cost = np.array([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])
    assert cheapest_assignment(cost).tolist() == [1, 0, 2]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_it_is_as_cheap_as_the_cheapest_of_all_permutations(n, seed):
    cost = np.random.default_rng(seed).integers(-9, 9, (n, n)).astype(float)
    columns = cheapest_assignment(cost)
    assert sorted(columns) == list(range(n))
    best = min(sum(cost[i, p[i]] for i in range(n)) for p in permutations(range(n)))
    assert cost[np.arange(n), columns].sum() == best


def test_one_time_step_is_repeated():
    assert extrapolate([[3.0, 5.0]]).tolist() == [3.0, 5.0]


def test_a_steady_rise_goes_on():
    assert extrapolate([[10, 8], [20, 8], [30, 8]]) == pytest.approx([40, 8])


def test_a_fall_stops_at_zero():
    assert extrapolate([[30.0], [15.0], [0.0]]).tolist() == [0.0]
