"""Offline placement: which replica runs which shards so that the last one ends soonest, and how far from the
best.

A shard takes its own seconds, and a replica spends an adapter's load seconds once for each adapter it meets.
The model is exact (shards are not divisible); greedy longest-first with local search is its warm start and
its fallback. Every answer carries a lower bound, so that `plan` can print the optimality gap.

Shapes: `[num_shards]` for shards, `[num_adapters]` for load seconds, `[num_replicas]` for speeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pulp
from numpy.typing import NDArray

from .solver import solve

Method = Literal["optimal", "improved by solver", "greedy", "greedy (solver found nothing)"]


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """What is to be placed. `adapters_of`: per shard, the adapters it needs. `speed`: 1.0 is the cost
    model's.
    """

    shard_s: NDArray[np.float64]
    adapters_of: tuple[tuple[int, ...], ...]
    load_s: NDArray[np.float64]
    speed: NDArray[np.float64]

    @property
    def num_shards(self) -> int:
        """Shards to place."""
        return len(self.shard_s)

    @property
    def num_replicas(self) -> int:
        """Replicas to place them on."""
        return len(self.speed)

    def end_s(self, shards: NDArray[np.int64], replica: int) -> float:
        """When a replica ends that runs these shards."""
        needed = {adapter for shard in shards for adapter in self.adapters_of[shard]}
        loads = sum(float(self.load_s[adapter]) for adapter in sorted(needed))
        return float(self.shard_s[shards].sum() / self.speed[replica]) + loads

    def finish_s(self, replica_of: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[num_replicas]`: when each replica ends under a placement."""
        return np.array(
            [self.end_s(np.flatnonzero(replica_of == replica), replica) for replica in range(self.num_replicas)]
        )

    def lower_bound_s(self) -> float:
        """No placement ends sooner: all work and one load of each adapter, spread evenly; or the largest
        shard.
        """
        if self.num_shards == 0:
            return 0.0
        used = sorted({adapter for adapters in self.adapters_of for adapter in adapters})
        # A fast replica loads no faster; a load costs least where it keeps least speed waiting.
        even = (self.shard_s.sum() + self.load_s[used].sum() * self.speed.min()) / self.speed.sum()
        alone = [
            seconds / self.speed.max() + self.load_s[list(adapters)].sum()
            for seconds, adapters in zip(self.shard_s, self.adapters_of, strict=True)
        ]
        return float(max(even, *alone))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """`replica_of` int64 `[num_shards]`, and how good it is: `makespan_s`, `bound_s`, and how it was found."""

    replica_of: NDArray[np.int64]
    makespan_s: float
    bound_s: float
    method: Method

    @property
    def gap(self) -> float:
        """How far above the lower bound, as a share of it; 0 is proved best."""
        return self.makespan_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0


def place_shards(
    problem: PlacementProblem, *, good_gap: float = 0.005, max_variables: int = 600, max_nodes: int = 500
) -> Placement:
    """Greedy, then local search; then the exact model, unless the gap is good or the model is too large for
    it.
    """
    replica_of = improve(problem, place_greedily(problem))
    bound_s = problem.lower_bound_s()
    greedy = _described(problem, replica_of, bound_s, "greedy")
    if greedy.gap <= good_gap or problem.num_shards * problem.num_replicas > max_variables:
        return greedy
    model = MakespanModel(problem)
    outcome = solve(model.problem, max_nodes=max_nodes)
    if outcome not in ("optimal", "feasible"):
        return _described(problem, replica_of, bound_s, "greedy (solver found nothing)")
    found = model.decode()
    if outcome == "optimal":
        best_s = float(problem.finish_s(found).max())
        return _described(problem, found, best_s, "optimal")
    return min(greedy, _described(problem, found, bound_s, "improved by solver"), key=lambda p: p.makespan_s)


def _described(problem: PlacementProblem, replica_of: NDArray[np.int64], bound_s: float, method: Method) -> Placement:
    return Placement(replica_of, float(problem.finish_s(replica_of).max(initial=0.0)), bound_s, method)


def place_greedily(problem: PlacementProblem) -> NDArray[np.int64]:
    """Longest shard first, each to the replica where it would end soonest, loads included (LPT with setups)."""
    finish = np.zeros(problem.num_replicas)
    has = np.zeros((len(problem.load_s), problem.num_replicas), dtype=bool)
    replica_of = np.zeros(problem.num_shards, dtype=np.int64)
    for shard in np.argsort(-problem.shard_s, kind="stable"):
        adapters = list(problem.adapters_of[shard])
        loads = (~has[adapters] * problem.load_s[adapters, None]).sum(axis=0)
        ends = finish + problem.shard_s[shard] / problem.speed + loads
        chosen = int(np.argmin(ends))
        replica_of[shard] = chosen
        finish[chosen] = ends[chosen]
        has[adapters, chosen] = True
    return replica_of


def improve(problem: PlacementProblem, replica_of: NDArray[np.int64], max_moves: int = 200) -> NDArray[np.int64]:
    """Local search: while the last replica's end can be lowered by moving one of its shards or swapping it,
    do.

    At most `max_moves` changes; each looks at the last replica's shards against the three that end first.
    """
    current = replica_of.copy()
    finish = problem.finish_s(current)
    for _ in range(max_moves):
        better = _better_neighbour(problem, current, finish)
        if better is None:
            break
        current, finish = better
    return current


def _better_neighbour(
    problem: PlacementProblem, current: NDArray[np.int64], finish: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    last = int(np.argmax(finish))
    for first in np.argsort(finish, kind="stable")[:3]:
        if first == last:
            continue
        for mine, theirs in _exchanges(problem, current, finish, last, int(first)):
            trial = current.copy()
            trial[mine] = first
            if theirs is not None:
                trial[theirs] = last
            after = finish.copy()
            for replica in (last, int(first)):
                after[replica] = problem.end_s(np.flatnonzero(trial == replica), replica)
            if max(after[last], after[first]) < finish[last] * (1 - 1e-9):
                return trial, after
    return None


def _exchanges(
    problem: PlacementProblem, current: NDArray[np.int64], finish: NDArray[np.float64], last: int, first: int
) -> list[tuple[int, int | None]]:
    """Moves and swaps whose change in work comes nearest to evening out the two replicas; at most 16."""
    wanted = (finish[last] - finish[first]) / 2
    mine, theirs = np.flatnonzero(current == last), np.flatnonzero(current == first)
    moved = problem.shard_s[mine]
    exchanges: list[tuple[float, int, int | None]] = [
        (abs(float(s) - wanted), int(i), None) for i, s in zip(mine, moved, strict=True)
    ]
    if len(theirs):
        change = moved[:, None] - problem.shard_s[theirs][None, :]
        for flat in np.argsort(abs(change - wanted), axis=None, kind="stable")[:16]:
            row, column = divmod(int(flat), len(theirs))
            exchanges.append((abs(float(change[row, column]) - wanted), int(mine[row]), int(theirs[column])))
    exchanges.sort(key=lambda e: (e[0], e[1], -1 if e[2] is None else e[2]))
    return [(mine_id, theirs_id) for _, mine_id, theirs_id in exchanges[:16]]


class MakespanModel:
    """The exact model: variables, constraints (one method each), objective, decode."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._given = problem
        self.problem = pulp.LpProblem("makespan", pulp.LpMinimize)
        shards, replicas = range(problem.num_shards), range(problem.num_replicas)
        self._used = sorted({a for adapters in problem.adapters_of for a in adapters})
        self.runs_on = self.problem.add_variable_dicts("runs_on", (shards, replicas), cat=pulp.LpBinary)
        self.is_resident = self.problem.add_variable_dicts("is_resident", (self._used, replicas), 0, 1)
        self.makespan = self.problem.add_variable("makespan", lowBound=problem.lower_bound_s())
        self.problem += self.makespan
        self._every_shard_runs_once()
        self._adapters_are_loaded_where_needed()
        self._no_replica_ends_later_than_the_makespan()
        self._equal_replicas_are_ordered()

    def _every_shard_runs_once(self) -> None:
        for shard, on in self.runs_on.items():
            self.problem += pulp.lpSum(on.values()) == 1, f"shard_{shard}_runs_once"

    def _adapters_are_loaded_where_needed(self) -> None:
        for shard, adapters in enumerate(self._given.adapters_of):
            for adapter in adapters:
                for replica, runs in self.runs_on[shard].items():
                    name = f"shard_{shard}_needs_{adapter}_on_{replica}"
                    self.problem += self.is_resident[adapter][replica] >= runs, name

    def _no_replica_ends_later_than_the_makespan(self) -> None:
        given = self._given
        for replica in range(given.num_replicas):
            work = pulp.lpSum(
                float(given.shard_s[shard] / given.speed[replica]) * on[replica] for shard, on in self.runs_on.items()
            )
            loads = pulp.lpSum(
                float(given.load_s[adapter]) * self.is_resident[adapter][replica] for adapter in self._used
            )
            self.problem += work + loads <= self.makespan, f"replica_{replica}_ends_in_time"

    def _equal_replicas_are_ordered(self) -> None:
        """Without loss the longest shard runs on the first of the replicas that are all alike."""
        if np.ptp(self._given.speed) == 0:
            longest = int(np.argmax(self._given.shard_s))
            self.problem += self.runs_on[longest][0] == 1, "longest_shard_first"

    def decode(self) -> NDArray[np.int64]:
        """`[num_shards]`: the replica of each shard."""
        chosen = [max(on, key=lambda r: on[r].value() or 0.0) for on in self.runs_on.values()]
        return np.asarray(chosen, dtype=np.int64)
