"""The exact makespan model, read like the problem: variables, constraints (one method each), objective, decode."""

from __future__ import annotations

import numpy as np
import pulp
from numpy.typing import NDArray

from .placement_problem import PlacementProblem


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
