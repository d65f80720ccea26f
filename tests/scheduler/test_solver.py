from __future__ import annotations

import pulp

from lorabatch.scheduler.solver import solve


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
