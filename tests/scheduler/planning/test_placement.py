from __future__ import annotations

import gzip
import resource
from itertools import product
from pathlib import Path

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.planning.placement import PlacementProblem, improve, place_longest_first, place_shards, solve


def make_problem(shard_s, adapters_of=None, load_s=(), num_replicas=2):
    adapters_of = adapters_of if adapters_of is not None else [()] * len(shard_s)
    return PlacementProblem(
        np.asarray(shard_s, float),
        tuple(tuple(a) for a in adapters_of),
        np.asarray(load_s, float),
        num_replicas,
    )


def random_problem(seed, *, max_shards=7, replicas=(2, 3)):
    rng = np.random.default_rng(seed)
    num_shards, num_adapters = int(rng.integers(1, max_shards + 1)), int(rng.integers(1, 4))
    return make_problem(
        rng.integers(1, 20, num_shards),
        [(int(a),) for a in rng.integers(0, num_adapters, num_shards)],
        rng.integers(0, 6, num_adapters),
        int(rng.choice(replicas)),
    )


def brute_force_s(problem):
    return min(
        problem.finish_s(np.array(choice)).max()
        for choice in product(range(problem.num_replicas), repeat=problem.num_shards)
    )


def zipf_problem(num_rows=10_000, num_adapters=100, num_replicas=16, seed=0):
    """Shards of about 40 rows; log-normal seconds per row, adapters by Zipf's law."""
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, num_adapters + 1)
    adapter = np.sort(rng.choice(num_adapters, num_rows, p=share / share.sum()))
    seconds = rng.lognormal(0, 0.8, num_rows) * 0.05
    pieces = np.array_split(np.arange(num_rows), num_rows // 40)
    return make_problem(
        [seconds[p].sum() for p in pieces],
        [tuple(np.unique(adapter[p]).tolist()) for p in pieces],
        np.full(num_adapters, 0.02),
        num_replicas,
    )


def test_nothing_to_place_takes_no_time():
    placement = place_shards(make_problem([]))
    assert (placement.makespan_s, placement.gap) == (0.0, 0.0)


@pytest.mark.parametrize(("load_s", "makespan_s"), [([2.0, 1.0], 7.0), ([5.0, 6.0], 11.0)])
def test_one_replica_takes_everything_and_loads_while_it_computes(load_s, makespan_s):
    placement = place_shards(make_problem([3, 4], [(0,), (1,)], load_s, 1))
    assert placement.makespan_s == makespan_s
    assert placement.gap == pytest.approx(0.0, abs=1e-9)


def test_each_replica_has_its_part_of_large_and_of_small_adapters():
    """A replica with small ones alone would wait for their loads."""
    shard_s = [4.0] * 4 + [1.0] * 8
    adapters_of = [(0,), (0,), (1,), (1,), *((2 + i,) for i in range(8))]
    placement = place_shards(make_problem(shard_s, adapters_of, [1.5] * 10))
    assert placement.replica_of[0] == placement.replica_of[1] != placement.replica_of[2] == placement.replica_of[3]
    assert np.bincount(placement.replica_of[4:]).tolist() == [4, 4]


def test_an_adapter_expensive_to_load_stays_on_one_replica():
    placement = place_shards(make_problem([2, 2, 5], [(0,), (0,), (1,)], [3.0, 0.0]))
    assert placement.replica_of[0] == placement.replica_of[1] != placement.replica_of[2]


def test_the_classic_trap_of_longest_first_is_solved_exactly():
    # Longest-first gives 7; the best is 6 (3+3 and 2+2+2).
    problem = make_problem([3, 3, 2, 2, 2])
    assert problem.finish_s(place_longest_first(problem)).max() == 7
    placement = place_shards(problem)
    assert placement.makespan_s == 6
    assert placement.gap == pytest.approx(0.0, abs=1e-9)


def test_a_model_too_large_for_the_solver_falls_back_by_name():
    problem = make_problem([3, 3, 2, 2, 2], [(0,), (1,), (0,), (1,), (0,)], [1.0, 1.0])
    assert place_shards(problem, max_variables=1).method == "greedy"


def test_a_solver_without_nodes_never_makes_it_worse():
    problem = random_problem(12, max_shards=7)
    greedy_s = problem.finish_s(improve(problem, place_longest_first(problem))).max()
    assert place_shards(problem, max_nodes=0, good_gap=0.0).makespan_s <= greedy_s


@pytest.mark.parametrize("outcome", ["infeasible", "unsolved"])
def test_where_the_solver_finds_nothing_the_greedy_placement_stays(monkeypatch, outcome):
    problem = random_problem(4)  # 35 s at best, with a bound of 28 s
    monkeypatch.setattr("lorabatch.scheduler.planning.placement.solve", lambda *_, **__: outcome)
    placement = place_shards(problem)
    assert placement.method == "greedy (solver found nothing)"
    assert placement.makespan_s == pytest.approx(35.0)


@pytest.mark.long
def test_the_same_problem_is_always_placed_the_same():
    placements = [place_shards(random_problem(5)).replica_of.tolist() for _ in range(2)]
    assert placements[0] == placements[1]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_regret_against_brute_force_is_at_most_5_percent(seed):
    problem = random_problem(seed)
    best_s = brute_force_s(problem)
    placement = place_shards(problem)
    assert placement.makespan_s <= best_s * 1.05 + 1e-9
    assert placement.bound_s <= best_s + 1e-6


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_the_bound_without_a_solver_is_below_the_best(seed):
    problem = random_problem(seed, max_shards=6)
    assert problem.lower_bound_s() <= brute_force_s(problem) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_the_gap_on_zipf_work_over_16_replicas_is_at_most_2_percent(seed):
    placement = place_shards(zipf_problem(seed=seed))
    assert placement.gap <= 0.02


def test_local_search_never_ends_later():
    for seed in range(30):
        problem = random_problem(seed, max_shards=12)
        start = place_longest_first(problem)
        assert problem.finish_s(improve(problem, start)).max() <= problem.finish_s(start).max()


def test_a_solved_model_is_optimal():
    problem = pulp.LpProblem("best", pulp.LpMaximize)
    x = problem.add_variable("x", 0, 7, cat=pulp.LpInteger)
    problem += x
    problem += 2 * x <= 9
    assert solve(problem) == "optimal"
    assert x.value() == 4


def test_a_contradiction_is_infeasible():
    problem = pulp.LpProblem("never", pulp.LpMinimize)
    x = problem.add_variable("x", 0, 1)
    problem += x
    problem += x >= 2
    assert solve(problem) == "infeasible"


def test_an_unbounded_model_is_unsolved():
    problem = pulp.LpProblem("endless", pulp.LpMaximize)
    x = problem.add_variable("x", 0)
    problem += x
    problem += x >= 1
    assert solve(problem) == "unsolved"


def test_a_model_on_which_the_solver_never_ends_is_given_up(tmp_path):
    """CBC 2.10.3 finds this model's answer in its first second, and then computes for ever."""
    model = tmp_path / "model.mps"
    model.write_bytes(gzip.decompress(Path(__file__).with_name("endless_model.mps.gz").read_bytes()))
    _, problem = pulp.LpProblem.fromMPS(str(model))
    began_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert solve(problem, max_nodes=20, relative_gap=0.02, cpu_s=1) in ("unsolved", "feasible", "optimal")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began_s < 3
