"""Run an optimisation model through CBC so that the same model always gives the same answer.

The solver is bounded by branch-and-bound nodes and one thread, never by a clock. Its answers come under a
name, and callers have a tested fallback for each name that is not `optimal`.
"""

from __future__ import annotations

from typing import Literal

import pulp

Outcome = Literal["optimal", "feasible", "infeasible", "unsolved"]


def solve(problem: pulp.LpProblem, *, max_nodes: int = 200, relative_gap: float = 0.0) -> Outcome:
    """Solve in place. `feasible`: integral, but the nodes ran out before it was proved best.

    `unsolved`: the nodes ran out before any integral answer was found, or the model is unbounded.
    `relative_gap`: stop when the answer is proved to be within this share of the best.
    """
    command = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, threads=1, maxNodes=max_nodes, gapRel=relative_gap or None
    )
    problem.solve(command)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return "optimal"
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return "feasible"
    return "infeasible" if problem.status == pulp.LpStatusInfeasible else "unsolved"
