"""dLoRA's co-migration problem as an integer program (OSDI 24, section 5.2), read like the paper.

`share` is x (relaxed to reals), `is_resident` is y; the objective is the longest running time over replicas plus eta
for every adapter copy. Requests of one adapter on one replica have the same L_i, so they are one variable with a
count (`RowGroup`), which changes nothing but the size. Memory beyond a replica's capacity is swapped and costs time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pulp

from .migration_problem import MigrationSettings, Move, ReplicaLoad, RowGroup


class CoMigrationModel:
    """dLoRA's co-migration problem over selected replicas: variables, constraints, objective, decode."""

    def __init__(
        self,
        over: Sequence[ReplicaLoad],
        under: Sequence[ReplicaLoad],
        adapter_bytes: dict[str, float],
        settings: MigrationSettings,
    ) -> None:
        self._over, self._under, self._settings = list(over), list(under), settings
        self._adapter_bytes = adapter_bytes
        self.problem = pulp.LpProblem("co_migration", pulp.LpMinimize)
        # (group's owner, group number) -> replica -> share of the group's rows that run there.
        self.share = {
            (s, g): {t: self.problem.add_variable(f"share_{s}_{g}_on_{t}", 0, 1) for t in [s, *self._targets()]}
            for s, source in enumerate(self._over)
            for g in range(len(source.groups))
        }
        adapters = sorted({group.adapter for source in self._over for group in source.groups})
        self.is_resident = {
            (k, t): self.problem.add_variable(f"is_resident_{n}_on_{t}", cat=pulp.LpBinary)
            for n, k in enumerate(adapters)
            for t in self._targets()
            if k not in self._replica(t).resident
        }
        self.swapped = {
            t: self.problem.add_variable(f"swapped_bytes_on_{t}", 0)
            for t in range(len(self._over) + len(self._under))
            if self._replica(t).memory_bytes < float("inf")
        }
        self.longest = self.problem.add_variable("longest_s", 0)
        self.problem += self.longest + settings.eta_s * pulp.lpSum(self.is_resident.values())
        self._every_request_runs_somewhere()
        self._requests_need_their_adapter()
        self._no_replica_runs_longer_than_the_longest()
        self._memory_beyond_capacity_is_swapped()

    def _targets(self) -> range:
        return range(len(self._over), len(self._over) + len(self._under))

    def _replica(self, number: int) -> ReplicaLoad:
        return self._over[number] if number < len(self._over) else self._under[number - len(self._over)]

    def _group(self, key: tuple[int, int]) -> RowGroup:
        return self._over[key[0]].groups[key[1]]

    def _every_request_runs_somewhere(self) -> None:
        for (s, g), on in self.share.items():
            self.problem += pulp.lpSum(on.values()) == 1, f"group_{s}_{g}_exists"

    def _requests_need_their_adapter(self) -> None:
        for (s, g), on in self.share.items():
            for t, part in on.items():
                copy = self.is_resident.get((self._group((s, g)).adapter, t))
                if copy is not None:
                    self.problem += copy >= part, f"group_{s}_{g}_needs_its_adapter_on_{t}"

    def _no_replica_runs_longer_than_the_longest(self) -> None:
        for t in range(len(self._over) + len(self._under)):
            replica = self._replica(t)
            stays = replica.fixed_s if t < len(self._over) else replica.pending_s
            runs = []
            for key, on in self.share.items():
                if t in on:
                    group = self._group(key)
                    factor = 1.0 if key[0] == t else self._settings.gamma
                    runs.append(factor * group.num_rows * group.row_s * on[t])
            swap = self.swapped[t] * (1.0 / self._settings.swap_bytes_per_s) if t in self.swapped else 0.0
            self.problem += stays + pulp.lpSum(runs) + swap <= self.longest, f"replica_{t}_is_no_longer"

    def _memory_beyond_capacity_is_swapped(self) -> None:
        for t, swapped in self.swapped.items():
            replica = self._replica(t)
            kept = sum(self._adapter_bytes.get(name, 0.0) for name in replica.resident)
            if t >= len(self._over):
                kept += sum(group.num_rows * group.row_bytes for group in replica.groups)
            rows = [
                self._group(key).num_rows * self._group(key).row_bytes * on[t]
                for key, on in self.share.items()
                if t in on
            ]
            copies = [self._adapter_bytes.get(k, 0.0) * y for (k, at), y in self.is_resident.items() if at == t]
            used = kept + pulp.lpSum(rows) + pulp.lpSum(copies)
            self.problem += used - replica.memory_bytes <= swapped, f"replica_{t}_swaps_the_rest"

    def decode(self) -> tuple[Move, ...]:
        """Whole rows: each group is dealt out by its shares, the largest remainders first (row maximum for one)."""
        moves = []
        for key, on in self.share.items():
            group = self._group(key)
            exact = np.array([max(0.0, part.value() or 0.0) for part in on.values()]) * group.num_rows
            whole = np.floor(exact + 1e-9).astype(np.int64)
            order = np.argsort(-(exact - whole), kind="stable")
            whole[order[: group.num_rows - int(whole.sum())]] += 1
            for t, rows in zip(on, whole.tolist(), strict=True):
                if rows and t != key[0]:
                    source, target = self._replica(key[0]).replica_id, self._replica(t).replica_id
                    moves.append(Move(group.adapter, source, target, rows))
        return tuple(moves)
