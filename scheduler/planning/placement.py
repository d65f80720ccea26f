"""Places shards on replicas before a job, so that the last replica ends soonest, with a bound of how soon it could.

Replicas load adapters while they compute, so a replica ends when both its shards are computed and the adapters that
they need are loaded, each once. Replicas open their own shards first (`dispatch.ShardQueue`).

Shards are placed adapter by adapter, so that few adapters are on many replicas. Where this ends more than 2 % after the
lower bound, local search and then an exact model are tried. The model is written like the problem: variables,
constraints (one method each), objective, decode. CBC solves it, bounded by branch-and-bound nodes and one thread, not
by a clock, so that the same model gives the same result. A limit of processor seconds ends the models on which CBC's
heuristics never end. Results have a status, and callers have a tested fallback for each status that is not `optimal`.

Shapes: `[num_shards]` for shards, `[num_adapters]` for load seconds. All replicas are of one speed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pulp
from numpy.typing import NDArray

from ...system.local_cache import temporary_folder

#: Share of the lower bound by which a placement may end later and is still good: less than predictions are off.
_GOOD_GAP = 0.02

#: Share by which sums of the same seconds in another order may differ.
_ROUNDING = 1e-9

#: Seconds of the processor after which CBC is ended: it takes less than one for the models of this package.
_SOLVER_CPU_S = 20

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
    problem: PlacementProblem, *, good_gap: float = _GOOD_GAP, max_variables: int = 160, max_nodes: int = 200
) -> Placement:
    """Place shards adapter by adapter, then by local search, then by the exact model.

    What comes later is left out as soon as the gap is at most `good_gap`, and the model also when it would have more
    than `max_variables` variables.
    """
    bound_s = problem.lower_bound_s()
    good_s = bound_s * (1 + good_gap)
    greedy = _described(problem, improve(problem, place_by_adapter(problem), good_s), bound_s, "greedy")
    if greedy.gap > good_gap:
        other = _described(problem, improve(problem, place_longest_first(problem), good_s), bound_s, "greedy")
        greedy = min(greedy, other, key=lambda found: found.makespan_s)
    if greedy.gap <= good_gap or problem.num_shards * problem.num_replicas > max_variables:
        return greedy
    model = _MakespanModel(problem)
    outcome = solve(model.problem, max_nodes=max_nodes)
    if outcome not in ("optimal", "feasible"):
        return _described(problem, greedy.replica_of, bound_s, "greedy (solver found nothing)")
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


def place_by_adapter(problem: PlacementProblem) -> NDArray[np.int64]:
    """Place the shards of the adapter with most work first, each where it adds the fewest load seconds.

    Only replicas count that would not end after the others' mean by more than 2 %. Where none is left, the shard goes
    where it would end soonest. Each replica then has its part of adapters with much work and with little, so that it
    loads the latter while it computes the former.
    """
    work_of = problem.work_of_adapters()
    heaviest = [max(adapters, key=lambda a: (work_of[a], -a), default=-1) for adapters in problem.adapters_of]
    weight = np.array([work_of[a] if a >= 0 else 0.0 for a in heaviest])
    order = np.lexsort((-problem.shard_s, np.array(heaviest, dtype=np.int64), -weight))
    return _place_in_order(problem, order, problem.shard_s.sum() / problem.num_replicas)


def place_longest_first(problem: PlacementProblem) -> NDArray[np.int64]:
    """Place the longest shard first, each where it would end soonest (LPT with setups)."""
    return _place_in_order(problem, np.argsort(-problem.shard_s, kind="stable"), 0.0)


def _place_in_order(problem: PlacementProblem, order: NDArray[np.int64], mean_work_s: float) -> NDArray[np.int64]:
    """Place shards in this order. `mean_work_s`: mean seconds of a replica's shards; 0 places each where it ends
    soonest, whatever it adds.
    """
    work, loads = np.zeros(problem.num_replicas), np.zeros(problem.num_replicas)
    has = np.zeros((len(problem.load_s), problem.num_replicas), dtype=bool)
    replica_of = np.zeros(problem.num_shards, dtype=np.int64)
    for shard in order:
        adapters = list(problem.adapters_of[shard])
        added = (~has[adapters] * problem.load_s[adapters, None]).sum(axis=0)
        ends = np.maximum(work + problem.shard_s[shard], loads + added)
        mean_s = max(mean_work_s, float(loads.sum() + added.min()) / problem.num_replicas)
        fits = ends <= mean_s * (1 + _GOOD_GAP) if mean_work_s else np.zeros(len(ends), bool)
        chosen = int(np.lexsort((ends, np.where(fits, added, np.inf)))[0])
        replica_of[shard] = chosen
        work[chosen] += problem.shard_s[shard]
        loads[chosen] += added[chosen]
        has[adapters, chosen] = True
    return replica_of


def improve(
    problem: PlacementProblem, replica_of: NDArray[np.int64], good_s: float = 0.0, max_moves: int = 200
) -> NDArray[np.int64]:
    """Improve a placement by local search: move or swap shards of the last replica while that lowers its end, until all
    end by `good_s` seconds, since each move may cost a load more.

    At most `max_moves` changes; each looks at the last replica's shards against the eight replicas that end first.
    """
    current = replica_of.copy()
    finish = problem.finish_s(current)
    for _ in range(max_moves):
        if finish.max(initial=0.0) <= good_s:
            break
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
        for mine, theirs in _exchanges(problem, current, last, int(first)):
            trial = current.copy()
            trial[mine] = first
            if theirs is not None:
                trial[theirs] = last
            after = finish.copy()
            for replica in (last, int(first)):
                after[replica] = problem.end_s(np.flatnonzero(trial == replica))
            if max(after[last], after[first]) < finish[last] * (1 - _ROUNDING):
                return trial, after
    return None


def _exchanges(
    problem: PlacementProblem, current: NDArray[np.int64], last: int, first: int
) -> list[tuple[int, int | None]]:
    """The 16 most promising moves and swaps between two replicas, by the later of the two ends they would give."""
    mine, theirs = np.flatnonzero(current == last), np.flatnonzero(current == first)
    # A last column without a partner: the shard moves and nothing comes back.
    work_back = np.append(problem.shard_s[theirs], 0.0)
    loads_back = np.append(_arriving_load_s(problem, theirs, mine), 0.0)
    loads_gone = np.append(_leaving_load_s(problem, theirs), 0.0)
    gained = work_back[None, :] - problem.shard_s[mine][:, None]
    last_ends = np.maximum(
        problem.work_s(mine) + gained,
        problem.loads_s(mine) - _leaving_load_s(problem, mine)[:, None] + loads_back[None, :],
    )
    first_ends = np.maximum(
        problem.work_s(theirs) - gained,
        problem.loads_s(theirs) + _arriving_load_s(problem, mine, theirs)[:, None] - loads_gone[None, :],
    )
    promising = np.argsort(np.maximum(last_ends, first_ends), axis=None, kind="stable")[:16]
    pairs = [divmod(int(flat), len(theirs) + 1) for flat in promising]
    return [(int(mine[row]), int(theirs[column]) if column < len(theirs) else None) for row, column in pairs]


def _leaving_load_s(problem: PlacementProblem, shards: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds of the loads that no other shard of the replica needs, for each of its shards."""
    users = Counter(adapter for shard in shards for adapter in problem.adapters_of[shard])
    return np.array([sum(float(problem.load_s[a]) for a in problem.adapters_of[s] if users[a] == 1) for s in shards])


def _arriving_load_s(
    problem: PlacementProblem, shards: NDArray[np.int64], present: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Load seconds that each shard would add to a replica that runs the shards `present`."""
    there = {adapter for shard in present for adapter in problem.adapters_of[shard]}
    return np.array([sum(float(problem.load_s[a]) for a in problem.adapters_of[s] if a not in there) for s in shards])


class _MakespanModel:
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
        self._no_replica_computes_after_the_makespan()
        self._no_replica_loads_after_the_makespan()
        self._equal_replicas_are_ordered()

    def _every_shard_runs_once(self) -> None:
        """Each shard runs on exactly one replica."""
        for shard, on in self.runs_on.items():
            self.problem += pulp.lpSum(on.values()) == 1, f"shard_{shard}_runs_once"

    def _adapters_are_loaded_where_needed(self) -> None:
        """A replica that runs a shard has every adapter of the shard."""
        for shard, adapters in enumerate(self._given.adapters_of):
            for adapter in adapters:
                for replica, runs in self.runs_on[shard].items():
                    name = f"shard_{shard}_needs_{adapter}_on_{replica}"
                    self.problem += self.is_resident[adapter][replica] >= runs, name

    def _no_replica_computes_after_the_makespan(self) -> None:
        """The shards of each replica take the makespan at most."""
        for replica in range(self._given.num_replicas):
            work = pulp.lpSum(float(self._given.shard_s[shard]) * on[replica] for shard, on in self.runs_on.items())
            self.problem += work <= self.makespan, f"replica_{replica}_computes_in_time"

    def _no_replica_loads_after_the_makespan(self) -> None:
        """The adapters that each replica loads, one after the other, take the makespan at most."""
        for replica in range(self._given.num_replicas):
            loads = pulp.lpSum(
                float(self._given.load_s[adapter]) * self.is_resident[adapter][replica] for adapter in self._used
            )
            self.problem += loads <= self.makespan, f"replica_{replica}_loads_in_time"

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

    def work_s(self, shards: NDArray[np.int64]) -> float:
        """Seconds in which a replica computes these shards."""
        return float(self.shard_s[shards].sum())

    def loads_s(self, shards: NDArray[np.int64]) -> float:
        """Seconds in which a replica loads the adapters of these shards."""
        needed = {adapter for shard in shards for adapter in self.adapters_of[shard]}
        return sum(float(self.load_s[adapter]) for adapter in sorted(needed))

    def end_s(self, shards: NDArray[np.int64]) -> float:
        """Seconds at which a replica ends that runs these shards: it loads adapters while it computes."""
        return max(self.work_s(shards), self.loads_s(shards))

    def finish_s(self, replica_of: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds at which each replica ends under a placement, float64 `[num_replicas]`."""
        return np.array([self.end_s(np.flatnonzero(replica_of == replica)) for replica in range(self.num_replicas)])

    def lower_bound_s(self) -> float:
        """Seconds below which no placement ends.

        The largest shard alone, or all work spread evenly; and all loads spread evenly, where an adapter whose work
        does not fit into one replica by that time is loaded on as many as it takes. The latter is found by bisection.
        """
        if self.num_shards == 0:
            return 0.0
        low = max(
            float(self.shard_s.sum()) / self.num_replicas,
            max(self.end_s(np.array([shard])) for shard in range(self.num_shards)),
        )
        work_of = self.work_of_adapters()
        if self._may_load_by(low, work_of):
            return low
        high = max(low, self.loads_s(np.arange(self.num_shards)))
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._may_load_by(middle, work_of) else (middle, high)
        return low

    def work_of_adapters(self) -> NDArray[np.float64]:
        """Seconds of the shards that need each adapter, float64 `[num_adapters]`."""
        work = np.zeros(len(self.load_s))
        for seconds, adapters in zip(self.shard_s, self.adapters_of, strict=True):
            work[list(adapters)] += seconds
        return work

    def _may_load_by(self, end_s: float, work_of: NDArray[np.float64]) -> bool:
        """Whether loads can end by `end_s`, which is necessary for any placement that ends by then."""
        if end_s <= 0:
            return not self.load_s[work_of > 0].any()
        copies = np.ceil(work_of / end_s - _ROUNDING)
        return bool((copies * self.load_s).sum() <= end_s * self.num_replicas * (1 + 1e-12))


Outcome = Literal["optimal", "feasible", "infeasible", "unsolved"]


def solve(
    problem: pulp.LpProblem, *, max_nodes: int = 200, relative_gap: float = 0.0, cpu_s: int = _SOLVER_CPU_S
) -> Outcome:
    """Solve in place. `feasible`: integral, but the nodes ran out before it was proved best.

    `unsolved`: the nodes or the `cpu_s` seconds of the processor ran out before any integral answer was found, or the
    model is unbounded. `relative_gap`: stop when the answer is proved to be within this share of the best.
    """
    with temporary_folder(prefix="solver-") as folder:
        model, answer = folder / "model.mps", folder / "answer"
        variables, names, rows, _ = problem.writeMPS(str(model), rename=True)
        command = [pulp.PULP_CBC_CMD.pulp_cbc_path, model, "-threads", "1", "-maxNodes", str(max_nodes)]
        command += ["-max"] if problem.sense == pulp.LpMaximize else []
        command += ["-ratio", str(relative_gap)] if relative_gap else []
        if not _has_ended([*command, "-solve", "-printingOptions", "all", "-solution", answer], cpu_s):
            return "unsolved"
        status, values, *_, solution_status = pulp.COIN_CMD().readsol_MPS(str(answer), problem, variables, names, rows)
    problem.assignVarsVals(values)
    problem.assignStatus(status, solution_status)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return "optimal"
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return "feasible"
    return "infeasible" if problem.status == pulp.LpStatusInfeasible else "unsolved"


def _has_ended(command: Sequence[str | Path], cpu_s: int) -> bool:
    """Run a process with a limit of processor seconds, and return whether it ended by itself, without an error.

    The limit is the process's own: it holds when this process is killed, and does not depend on the machine's load.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        if sys.platform == "linux":
            with suppress(ProcessLookupError):
                resource.prlimit(run.pid, resource.RLIMIT_CPU, (cpu_s, cpu_s))
        try:
            return run.wait(None if sys.platform == "linux" else cpu_s) == 0
        except subprocess.TimeoutExpired:
            run.kill()
            return False
