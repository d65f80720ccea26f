"""Places shards on replicas offline so that the last replica ends soonest, with a bound of how soon it could.

A shard takes its own seconds, and a replica spends an adapter's load seconds once for each adapter it runs. The model
is exact (shards are not divisible) and written like the problem: variables, constraints (one method each), objective,
decode. Greedy longest-first with local search is its warm start and its fallback. Every result carries a lower bound,
so that `plan` can print the gap of the placement.

CBC solves it, bounded by branch-and-bound nodes and one thread, never by a clock, so that the same model always gives
the same result. Results have a status, and callers have a tested fallback for each status that is not `optimal`.

Shapes: `[num_shards]` for shards, `[num_adapters]` for load seconds. All replicas are of one speed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pulp
from numpy.typing import NDArray

Method = Literal["optimal", "improved by solver", "greedy", "greedy (solver found nothing)", "dealt out"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A replica for each shard, and how good this is."""

    #: Replica of each shard, int64 `[num_shards]`.
    replica_of: NDArray[np.int64]
    #: Seconds at which each replica ends, float64 `[num_replicas]`.
    finish_s: NDArray[np.float64]
    #: Lower bound of the makespan in seconds.
    bound_s: float
    #: How the placement was found.
    method: Method

    @property
    def makespan_s(self) -> float:
        """Seconds at which the last replica ends."""
        return float(self.finish_s.max(initial=0.0))

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a share of it; 0 is proved best."""
        return self.makespan_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0


def place_shards(
    problem: PlacementProblem, *, good_gap: float = 0.005, max_variables: int = 160, max_nodes: int = 200
) -> Placement:
    """Place shards greedily, then by local search, then by the exact model.

    The model is left out when the gap is at most `good_gap` already, or when it would have more than `max_variables`
    variables.
    """
    starts = [place_greedily(problem), place_by_adapter(problem)]
    replica_of = min(
        (improve(problem, start) for start in starts), key=lambda found: problem.finish_s(found).max(initial=0.0)
    )
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


def as_placed(problem: PlacementProblem, replica_of: NDArray[np.int64]) -> Placement:
    """Describe a placement that was made by another rule, with its bound."""
    return _described(problem, replica_of, problem.lower_bound_s(), "dealt out")


def _described(problem: PlacementProblem, replica_of: NDArray[np.int64], bound_s: float, method: Method) -> Placement:
    return Placement(replica_of, problem.finish_s(replica_of), bound_s, method)


def place_greedily(problem: PlacementProblem) -> NDArray[np.int64]:
    """Place the longest shard first, each where it would end soonest, loads included (LPT with setups)."""
    finish = np.zeros(problem.num_replicas)
    has = np.zeros((len(problem.load_s), problem.num_replicas), dtype=bool)
    replica_of = np.zeros(problem.num_shards, dtype=np.int64)
    for shard in np.argsort(-problem.shard_s, kind="stable"):
        adapters = list(problem.adapters_of[shard])
        loads = (~has[adapters] * problem.load_s[adapters, None]).sum(axis=0)
        ends = finish + problem.shard_s[shard] + loads
        chosen = int(np.argmin(ends))
        replica_of[shard] = chosen
        finish[chosen] = ends[chosen]
        has[adapters, chosen] = True
    return replica_of


def place_by_adapter(problem: PlacementProblem) -> NDArray[np.int64]:
    """Fill one replica after the other with shards in order of their adapters, up to the least common end that works.

    Each adapter is then on as few replicas as its work needs; the last replica gets what the others cannot hold.
    """
    work_of = problem.work_of_adapters()
    # Heavy adapters first; within one, long shards first.
    heaviest = [max(adapters, key=lambda a: (work_of[a], -a), default=-1) for adapters in problem.adapters_of]
    weight = np.array([work_of[a] if a >= 0 else 0.0 for a in heaviest])
    order = np.lexsort((-problem.shard_s, np.array(heaviest, dtype=np.int64), -weight))
    low = problem.lower_bound_s()
    high = 2 * low
    best, best_s = np.zeros(problem.num_shards, np.int64), float("inf")
    for _ in range(24):
        middle = (low + high) / 2
        filled = _fill(problem, order, middle)
        filled_s = float(problem.finish_s(filled).max(initial=0.0))
        if filled_s < best_s:
            best, best_s = filled, filled_s
        low, high = (low, middle) if filled_s <= middle * (1 + 1e-12) else (middle, high)
    return best


def _fill(problem: PlacementProblem, order: NDArray[np.int64], end_s: float) -> NDArray[np.int64]:
    """Give the shards to replicas in order, to the next replica whenever one would end after `end_s`."""
    replica_of = np.zeros(problem.num_shards, np.int64)
    replica, end, present = 0, 0.0, set[int]()
    for shard in order:
        needed = set(problem.adapters_of[shard])
        added = _added_s(problem, shard, needed - present)
        if end + added > end_s * (1 + 1e-12) and replica + 1 < problem.num_replicas:
            replica, end, present = replica + 1, 0.0, set()
            added = _added_s(problem, shard, needed)
        replica_of[shard] = replica
        end += added
        present |= needed
    return replica_of


def _added_s(problem: PlacementProblem, shard: int, missing: set[int]) -> float:
    return float(problem.shard_s[shard]) + sum(float(problem.load_s[adapter]) for adapter in sorted(missing))


def improve(problem: PlacementProblem, replica_of: NDArray[np.int64], max_moves: int = 200) -> NDArray[np.int64]:
    """Improve a placement by local search: move or swap shards of the last replica while that lowers its end.

    At most `max_moves` changes; each looks at the last replica's shards against the eight replicas that end first.
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
    for first in np.argsort(finish, kind="stable")[:8]:
        if first == last:
            continue
        for mine, theirs in _exchanges(problem, current, finish, last, int(first)):
            trial = current.copy()
            trial[mine] = first
            if theirs is not None:
                trial[theirs] = last
            after = finish.copy()
            for replica in (last, int(first)):
                after[replica] = problem.end_s(np.flatnonzero(trial == replica))
            if max(after[last], after[first]) < finish[last] * (1 - 1e-9):
                return trial, after
    return None


def _exchanges(
    problem: PlacementProblem, current: NDArray[np.int64], finish: NDArray[np.float64], last: int, first: int
) -> list[tuple[int, int | None]]:
    """The 16 most promising moves and swaps between two replicas, by the later of the two ends they would give."""
    mine, theirs = np.flatnonzero(current == last), np.flatnonzero(current == first)
    # A last column without a partner: the shard moves and nothing comes back.
    last_gets = np.append(_arriving_s(problem, theirs, mine), 0.0)
    first_gives = np.append(_leaving_s(problem, theirs), 0.0)
    last_ends = finish[last] - _leaving_s(problem, mine)[:, None] + last_gets[None, :]
    first_ends = finish[first] + _arriving_s(problem, mine, theirs)[:, None] - first_gives[None, :]
    promising = np.argsort(np.maximum(last_ends, first_ends), axis=None, kind="stable")[:16]
    pairs = [divmod(int(flat), len(theirs) + 1) for flat in promising]
    return [(int(mine[row]), int(theirs[column]) if column < len(theirs) else None) for row, column in pairs]


def _leaving_s(problem: PlacementProblem, shards: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds that each of a replica's shards takes with it: its own, and loads that no other shard there needs."""
    users = Counter(adapter for shard in shards for adapter in problem.adapters_of[shard])
    loads = [sum(float(problem.load_s[a]) for a in problem.adapters_of[s] if users[a] == 1) for s in shards]
    return np.asarray(problem.shard_s[shards] + np.array(loads))


def _arriving_s(
    problem: PlacementProblem, shards: NDArray[np.int64], present: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Seconds that each shard would add to a replica that runs the shards `present`."""
    there = {adapter for shard in present for adapter in problem.adapters_of[shard]}
    loads = [sum(float(problem.load_s[a]) for a in problem.adapters_of[s] if a not in there) for s in shards]
    return np.asarray(problem.shard_s[shards] + np.array(loads))


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
            work = pulp.lpSum(float(given.shard_s[shard]) * on[replica] for shard, on in self.runs_on.items())
            loads = pulp.lpSum(
                float(given.load_s[adapter]) * self.is_resident[adapter][replica] for adapter in self._used
            )
            self.problem += work + loads <= self.makespan, f"replica_{replica}_ends_in_time"

    def _equal_replicas_are_ordered(self) -> None:
        """Without loss the longest shard runs on the first of the replicas, which are all alike."""
        longest = int(np.argmax(self._given.shard_s))
        self.problem += self.runs_on[longest][0] == 1, "longest_shard_first"

    def decode(self) -> NDArray[np.int64]:
        """`[num_shards]`: the replica of each shard."""
        chosen = [max(on, key=lambda r: on[r].value() or 0.0) for on in self.runs_on.values()]
        return np.asarray(chosen, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """The shards to place, and the replicas to place them on."""

    #: Seconds of each shard, float64 `[num_shards]`.
    shard_s: NDArray[np.float64]
    #: Numbers of the adapters that each shard needs.
    adapters_of: tuple[tuple[int, ...], ...]
    #: Seconds to load each adapter, float64 `[num_adapters]`.
    load_s: NDArray[np.float64]
    #: Replicas, all of one speed.
    num_replicas: int

    @property
    def num_shards(self) -> int:
        """Shards to place."""
        return len(self.shard_s)

    def end_s(self, shards: NDArray[np.int64]) -> float:
        """Seconds at which a replica ends that runs these shards."""
        needed = {adapter for shard in shards for adapter in self.adapters_of[shard]}
        return float(self.shard_s[shards].sum()) + sum(float(self.load_s[adapter]) for adapter in sorted(needed))

    def finish_s(self, replica_of: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds at which each replica ends under a placement, float64 `[num_replicas]`."""
        return np.array([self.end_s(np.flatnonzero(replica_of == replica)) for replica in range(self.num_replicas)])

    def lower_bound_s(self) -> float:
        """Seconds below which no placement ends.

        The largest shard alone; or all work and all loads spread evenly, where an adapter whose work does not fit into
        one replica by that time is loaded on as many as it takes. The second is found by bisection.
        """
        if self.num_shards == 0:
            return 0.0
        alone = max(
            seconds + self.load_s[list(adapters)].sum()
            for seconds, adapters in zip(self.shard_s, self.adapters_of, strict=True)
        )
        low, high = float(alone), float(alone + self.end_s(np.arange(self.num_shards)))
        work_of = self.work_of_adapters()
        if self._may_end_by(low, work_of):
            return low
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._may_end_by(middle, work_of) else (middle, high)
        return low

    def work_of_adapters(self) -> NDArray[np.float64]:
        """Seconds of the shards that need each adapter, float64 `[num_adapters]`."""
        work = np.zeros(len(self.load_s))
        for seconds, adapters in zip(self.shard_s, self.adapters_of, strict=True):
            work[list(adapters)] += seconds
        return work

    def _may_end_by(self, end_s: float, work_of: NDArray[np.float64]) -> bool:
        """Whether a condition holds that is necessary for any placement that ends by `end_s`."""
        used = work_of > 0
        room = end_s - self.load_s[used]
        if (room <= 0).any():
            return False
        copies = np.ceil(work_of[used] / room - 1e-9)
        loads = float((copies * self.load_s[used]).sum())
        return bool(self.shard_s.sum() + loads <= end_s * self.num_replicas * (1 + 1e-12))


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
