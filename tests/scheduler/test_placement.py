from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.placement import (
    burst_tolerance,
    place_contiguous,
    place_everywhere,
    place_random,
    place_round_robin,
    replicate_for_bursts,
)

RANKS = np.array([128, 8, 64, 8, 16, 32])


@pytest.mark.parametrize(
    "routing",
    [
        place_random(6, 4, np.random.default_rng(0)),
        place_contiguous(RANKS, 4),
        place_round_robin(6, 4),
        place_everywhere(6, 4),
    ],
)
def test_every_baseline_routes_every_request(routing):
    routing.check_integrity()


def test_contiguous_keeps_neighbouring_ranks_together_in_equal_numbers():
    fraction = place_contiguous(RANKS, 3).fraction
    assert [sorted(RANKS[fraction[:, s] > 0].tolist()) for s in range(3)] == [[8, 8], [16, 32], [64, 128]]


def test_random_placement_depends_on_its_generator_only():
    a, b = (place_random(50, 7, np.random.default_rng(3)).fraction for _ in range(2))
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
