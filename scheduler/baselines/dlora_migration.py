"""dLoRA's migration of requests and adapters from overloaded to underloaded replicas (OSDI 24, section 5.2).

Only the top K overloaded and top K underloaded replicas take part. A transport at the level that no plan can beat is
tried first; where its adapter copies or memory keep it from that bound, the paper's integer program decides. Either
answer is a proposal: it is in whole rows and used only if it ends sooner than doing nothing; otherwise the greedy rule
decides. All functions are pure and deterministic.

In the integer program `share` is x (relaxed to reals), `is_resident` is y. The objective is the largest sum, over
replicas, of running time, swapping of what exceeds the memory, and eta for every adapter on the replica ("Min." in
section 5.2). Requests of one adapter on one replica have the same L_i, so they are one variable with a count
(`AdapterRows`), which changes nothing but the size. An adapter of which all rows leave a replica may leave it too; one
without rows that may move stays. Rows of underloaded replicas stay. `dlora_reactive.py` has the program decide in a
job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import pulp

from ..planning.placement import solve


class CoMigrationModel:
    """dLoRA's co-migration problem over selected replicas: variables, constraints, objective, decode."""

    def __init__(
        self,
        over: Sequence[ReplicaLoad],
        under: Sequence[ReplicaLoad],
        adapter_bytes: Mapping[str | None, float],
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
        adapters = sorted(
            {group.adapter_id for source in self._over for group in source.groups}, key=lambda key: key or ""
        )
        # Adapters of rows that may leave, and copies that may be made; the others on a replica stay (`_num_kept`).
        self.is_resident: dict[tuple[str | None, int], pulp.LpVariable] = {
            (k, t): self.problem.add_variable(f"is_resident_{n}_on_{t}", cat=pulp.LpBinary)
            for n, k in enumerate(adapters)
            for t in range(len(self._over) + len(self._under))
            if k is not None and (k in self._replica(t).adapters) == (t < len(self._over))
        }
        self.swapped = {
            t: self.problem.add_variable(f"swapped_bytes_on_{t}", 0)
            for t in range(len(self._over) + len(self._under))
            if self._replica(t).memory_bytes < float("inf")
        }
        self.longest = self.problem.add_variable("longest_s", 0)
        self.problem += self.longest
        self._every_request_runs_somewhere()
        self._requests_need_their_adapter()
        self._no_replica_runs_longer_than_the_longest()
        self._memory_beyond_capacity_is_swapped()

    def _targets(self) -> range:
        return range(len(self._over), len(self._over) + len(self._under))

    def _replica(self, number: int) -> ReplicaLoad:
        return self._over[number] if number < len(self._over) else self._under[number - len(self._over)]

    def _group(self, key: tuple[int, int]) -> AdapterRows:
        return self._over[key[0]].groups[key[1]]

    def _kept(self, t: int) -> frozenset[str]:
        """Adapters that stay on a replica whatever moves."""
        replica = self._replica(t)
        return replica.adapters - {k for k, at in self.is_resident if at == t and k is not None}

    def _every_request_runs_somewhere(self) -> None:
        """The shares of each group add up to all of its rows."""
        for (s, g), on in self.share.items():
            self.problem += pulp.lpSum(on.values()) == 1, f"group_{s}_{g}_exists"

    def _requests_need_their_adapter(self) -> None:
        """A replica that takes rows of a group has the group's adapter, or gets a copy of it."""
        for (s, g), on in self.share.items():
            for t, part in on.items():
                copy = self.is_resident.get((self._group((s, g)).adapter_id, t))
                if copy is not None:
                    self.problem += copy >= part, f"group_{s}_{g}_needs_its_adapter_on_{t}"

    def _no_replica_runs_longer_than_the_longest(self) -> None:
        """Rows that stay on a replica, rows that come to it, its swaps and eta for each of its adapters take the
        longest time at most.
        """
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
            copies = [y for (_, at), y in self.is_resident.items() if at == t]
            affinity = self._settings.eta_s * (len(self._kept(t)) + pulp.lpSum(copies))
            self.problem += stays + pulp.lpSum(runs) + swap + affinity <= self.longest, f"replica_{t}_is_no_longer"

    def _memory_beyond_capacity_is_swapped(self) -> None:
        """Bytes of rows and adapters that a replica's memory does not hold are swapped."""
        for t, swapped in self.swapped.items():
            replica = self._replica(t)
            kept = sum(self._adapter_bytes.get(name, 0.0) for name in self._kept(t))
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

    def decode(self) -> tuple[Transfer, ...]:
        """Moves of whole rows: each group is dealt out by its shares, the largest remainders first (row maximum for
        one).
        """
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
                    moves.append(Transfer(group.adapter_id, source, target, rows))
        return tuple(moves)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Movable rows of one adapter on one replica."""

    #: Id of the adapter; None for the base model.
    adapter_id: str | None
    #: Rows that may move.
    num_rows: int
    #: Seconds of one row: L_i.
    row_s: float
    #: Bytes of one row's KV: M_i.
    row_bytes: float = 0.0

    @property
    def place(self) -> str:
        """Key by which groups are in order, that of the base model first."""
        return self.adapter_id or ""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as the planner of migrations sees it."""

    #: Id of the replica.
    replica_id: str
    #: Rows that may move, by adapter.
    groups: tuple[AdapterRows, ...]
    #: Adapters in its memory; None for the base model.
    resident: frozenset[str | None] = frozenset()
    #: Seconds of work that cannot move.
    fixed_s: float = 0.0
    #: Bytes for KV and adapters together (infinite: never swaps).
    memory_bytes: float = float("inf")

    @property
    def adapters(self) -> frozenset[str]:
        """Adapters that are on it: those in its memory and those of its rows."""
        return frozenset(name for name in (*self.resident, *(g.adapter_id for g in self.groups)) if name is not None)

    @property
    def pending_s(self) -> float:
        """Seconds until it is done with everything it has."""
        return self.fixed_s + sum(group.num_rows * group.row_s for group in self.groups)

    def held_bytes(self, adapter_bytes: Mapping[str | None, float]) -> float:
        """Bytes that its rows and adapters take."""
        rows = sum(group.num_rows * group.row_bytes for group in self.groups)
        return rows + sum(adapter_bytes.get(name, 0.0) for name in self.adapters)


@dataclass(frozen=True, slots=True)
class Transfer:
    """`num_rows` rows of an adapter (None: of the base model), from one replica to another."""

    adapter_id: str | None
    from_replica_id: str
    to_replica_id: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """Prices and limits by which migrations are planned."""

    #: Factor by which a moved row costs more: its hop and second prefill.
    gamma: float = 1.1
    #: Price of each adapter on a replica, in seconds (affinity factor).
    eta_s: float = 0.01
    #: Replicas considered on each side.
    top_k: int = 8
    #: Rows may move when the fullest replica has more than this many times the mean pending time.
    trigger: float = 1.2
    #: Rows may also move when a replica has more than this share of its memory in use.
    memory_trigger: float = 0.9
    #: Share of the longest pending time that a migration must win.
    least_gain: float = 0.03
    #: Bytes per second at which a replica swaps what exceeds its memory.
    swap_bytes_per_s: float = 1.2e10
    #: Most branch-and-bound nodes of the integer program.
    max_nodes: int = 20


Method = Literal[
    "not needed", "transport", "ilp", "greedy", "greedy (ilp infeasible)", "greedy (ilp unsolved)", "nothing pays"
]
# An answer within this share of its bound is good enough, from the transport and from the solver.
_GOOD_GAP = 0.02


def plan_migration(
    replicas: Sequence[ReplicaLoad],
    adapter_bytes: Mapping[str | None, float],
    settings: MigrationSettings | None = None,
) -> tuple[tuple[Transfer, ...], Method]:
    """Decide whether rows move, and which; returns the moves, and how they were found. Adapters without an entry in
    `adapter_bytes` weigh nothing.
    """
    settings = settings or MigrationSettings()
    over, under = select(replicas, settings, adapter_bytes)
    if not over or not under:
        return (), "not needed"
    before = longest_after(replicas, (), settings, adapter_bytes)
    if 1 - level_s(over, under, settings) / before < settings.least_gain:
        return (), "nothing pays"

    def pays(moves: Sequence[Transfer]) -> bool:
        after = longest_after(replicas, moves, settings, adapter_bytes)
        return bool(moves) and after <= before * (1 - settings.least_gain)

    method: Method = "transport"
    moves = near_the_bound(over, under, settings, adapter_bytes)
    if moves is None:
        method, moves = _by_model(over, under, adapter_bytes, settings)
    if not pays(moves):
        method = "greedy" if method in ("transport", "ilp") else method
        moves = move_greedily(over, under, settings)
        if not pays(moves):
            return (), "nothing pays"
    return moves, method


def near_the_bound(
    over: Sequence[ReplicaLoad],
    under: Sequence[ReplicaLoad],
    settings: MigrationSettings,
    adapter_bytes: Mapping[str | None, float] = MappingProxyType({}),
) -> tuple[Transfer, ...] | None:
    """The transport's moves if they are proved good, else None.

    They may miss the bound by the gap, and by half a row's time because rows are whole. The bound swaps nothing, so
    that moves which must swap much are not proved.
    """
    moves = transport(over, under, settings)
    row_s = max((group.row_s for replica in over for group in replica.groups), default=0.0)
    bound = level_s(over, under, settings) * (1 + _GOOD_GAP) + settings.gamma * row_s / 2
    return moves if longest_after([*over, *under], moves, settings, adapter_bytes) <= bound else None


def _by_model(
    over: Sequence[ReplicaLoad],
    under: Sequence[ReplicaLoad],
    adapter_bytes: Mapping[str | None, float],
    settings: MigrationSettings,
) -> tuple[Method, tuple[Transfer, ...]]:
    model = CoMigrationModel(over, under, adapter_bytes, settings)
    outcome = solve(model.problem, max_nodes=settings.max_nodes, relative_gap=_GOOD_GAP)
    if outcome in ("infeasible", "unsolved"):
        return ("greedy (ilp infeasible)" if outcome == "infeasible" else "greedy (ilp unsolved)"), ()
    return "ilp", model.decode()


def select(
    replicas: Sequence[ReplicaLoad],
    settings: MigrationSettings,
    adapter_bytes: Mapping[str | None, float] = MappingProxyType({}),
) -> tuple[list[ReplicaLoad], list[ReplicaLoad]]:
    """The top K overloaded and underloaded replicas, by running time and swapping; both empty below the triggers."""
    seconds = seconds_after(replicas, (), replace(settings, eta_s=0.0), adapter_bytes)
    by_load = sorted(replicas, key=lambda replica: (-seconds[replica.replica_id], replica.replica_id))
    mean = sum(seconds.values()) / max(1, len(replicas))
    is_full = any(r.held_bytes(adapter_bytes) > settings.memory_trigger * r.memory_bytes for r in replicas)
    if not by_load or (seconds[by_load[0].replica_id] <= settings.trigger * mean and not is_full):
        return [], []
    over = [replica for replica in by_load if seconds[replica.replica_id] > mean][: settings.top_k]
    under = [replica for replica in reversed(by_load) if seconds[replica.replica_id] <= mean][: settings.top_k]
    return over, under


def seconds_after(
    replicas: Sequence[ReplicaLoad],
    moves: Sequence[Transfer],
    settings: MigrationSettings,
    adapter_bytes: Mapping[str | None, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Seconds of each replica once the moves are made, by replica id: the sum whose largest the program minimises.

    Moved rows cost gamma times theirs, what exceeds a replica's memory is swapped, and each adapter on it costs eta.
    """
    groups = {(r.replica_id, g.adapter_id): g for r in replicas for g in r.groups}
    rows = {key: group.num_rows for key, group in groups.items()}
    seconds = {replica.replica_id: replica.pending_s for replica in replicas}
    row_bytes = {r.replica_id: sum(g.num_rows * g.row_bytes for g in r.groups) for r in replicas}
    for move in moves:
        source, target = (move.from_replica_id, move.adapter_id), (move.to_replica_id, move.adapter_id)
        group = groups[source]
        rows[source] -= move.num_rows
        rows[target] = rows.get(target, 0) + move.num_rows
        seconds[move.from_replica_id] -= move.num_rows * group.row_s
        seconds[move.to_replica_id] += settings.gamma * move.num_rows * group.row_s
        row_bytes[move.from_replica_id] -= move.num_rows * group.row_bytes
        row_bytes[move.to_replica_id] += move.num_rows * group.row_bytes
    adapters = {replica.replica_id: set(replica.adapters) for replica in replicas}
    for (replica_id, name), num_rows in rows.items():
        if num_rows and name is not None:
            adapters[replica_id].add(name)
        elif (replica_id, name) in groups:
            # all of its rows have left
            adapters[replica_id] -= {name}
    for replica in replicas:
        on = replica.replica_id
        held = row_bytes[on] + sum(adapter_bytes.get(name, 0.0) for name in adapters[on])
        swapped = max(0.0, held - replica.memory_bytes)
        seconds[on] += swapped / settings.swap_bytes_per_s + settings.eta_s * len(adapters[on])
    return seconds


def longest_after(
    replicas: Sequence[ReplicaLoad],
    moves: Sequence[Transfer],
    settings: MigrationSettings,
    adapter_bytes: Mapping[str | None, float] = MappingProxyType({}),
) -> float:
    """The longest of `seconds_after`."""
    return max(seconds_after(replicas, moves, settings, adapter_bytes).values())


def move_greedily(
    over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings
) -> tuple[Transfer, ...]:
    """Move rows from the fullest to the emptiest replica until they are even.

    Rows whose adapters are already resident there move first.
    """
    pending = {replica.replica_id: replica.pending_s for replica in [*over, *under]}
    moves: list[Transfer] = []
    for source in over:
        for target in under:
            for group in sorted(source.groups, key=lambda g: (g.adapter_id not in target.resident, g.place)):
                key = (source.replica_id, group.adapter_id)
                left = group.num_rows - sum(m.num_rows for m in moves if (m.from_replica_id, m.adapter_id) == key)
                surplus = pending[source.replica_id] - pending[target.replica_id]
                rows = min(left, int(surplus / (group.row_s * (1 + settings.gamma)))) if group.row_s > 0 else 0
                if rows > 0:
                    moves.append(Transfer(group.adapter_id, source.replica_id, target.replica_id, rows))
                    pending[source.replica_id] -= rows * group.row_s
                    pending[target.replica_id] += settings.gamma * rows * group.row_s
    return tuple(moves)


def level_s(over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings) -> float:
    """A lower bound of the program: rows may be split, and are moved to where their adapters are.

    An overloaded replica that gives rows of S seconds away is rid of S / w adapters at most, w being the seconds of the
    smallest group, so that it gains S * (1 + eta / w). The rows take gamma * S elsewhere.
    """
    eta_s, sizes = settings.eta_s, [group.num_rows * group.row_s for replica in over for group in replica.groups]
    gamma = settings.gamma / (1 + eta_s / min((size for size in sizes if size > 0), default=float("inf")))
    idle_s = [replica.pending_s + eta_s * len(replica.adapters) for replica in under]
    free = [{g.adapter_id for g in r.groups if not g.num_rows * g.row_s} for r in over]
    pending = sorted(
        (r.pending_s + eta_s * len(r.adapters - weightless) for r, weightless in zip(over, free, strict=True)),
        reverse=True,
    )
    kept_s = [r.fixed_s + eta_s * len(r.adapters - {g.adapter_id for g in r.groups}) for r in over]
    floor = max(kept_s + idle_s)
    for giving in range(1, len(pending) + 1):
        level = (gamma * sum(pending[:giving]) + sum(idle_s)) / (gamma * giving + len(under))
        if giving == len(pending) or level >= pending[giving]:
            return max(floor, level)
    return floor


def transport(
    over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings
) -> tuple[Transfer, ...]:
    """Moves that bring every replica near the level, to replicas that have the adapter where they can."""
    filling = _Filling(over, under, settings)
    for may_copy in (False, True):
        for source in over:
            for group in sorted(source.groups, key=lambda g: (-g.num_rows * g.row_s, g.place)):
                filling.pour(source, group, may_copy=may_copy)
    filling.even_out()
    return filling.moves()


class _Filling:
    """Surplus above the level, room below it, and which adapter is where."""

    def __init__(self, over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings) -> None:
        self._gamma, self._eta_s = settings.gamma, settings.eta_s
        level = level_s(over, under, settings)
        priced_s = {r.replica_id: r.pending_s + settings.eta_s * len(r.adapters) for r in (*over, *under)}
        self._surplus = {replica.replica_id: priced_s[replica.replica_id] - level for replica in over}
        self._room = {replica.replica_id: level - priced_s[replica.replica_id] for replica in under}
        # The base model is everywhere.
        self._resident: dict[str, set[str | None]] = {r.replica_id: {None, *r.adapters} for r in under}
        self._groups = {replica.replica_id: replica.groups for replica in over}
        self._left = {(r.replica_id, g.adapter_id): g.num_rows for r in over for g in r.groups}
        self._moved: dict[tuple[str | None, str, str], int] = {}

    def pour(self, source: ReplicaLoad, group: AdapterRows, *, may_copy: bool) -> None:
        """Move rows of a group while its replica has a surplus; the roomiest targets first."""
        mine = source.replica_id
        for target in sorted(self._room, key=lambda t: (group.adapter_id not in self._resident[t], -self._room[t], t)):
            if group.row_s <= 0 or not (may_copy or group.adapter_id in self._resident[target]):
                return
            # Half a row beyond the level, here or there, is nearer to it than none.
            wanted = math.floor(self._surplus[mine] / group.row_s + 0.5)
            fits = math.floor(self._room[target] / (self._gamma * group.row_s) + 0.5)
            self._move(group, mine, target, min(self._left[mine, group.adapter_id], wanted, fits))

    def even_out(self) -> None:
        """Move what rounding has left: single rows from the fullest to the emptiest while that helps."""
        for _ in range(sum(self._left.values())):
            mine = max(self._surplus, key=lambda s: self._surplus[s])
            target = max(self._room, key=lambda t: self._room[t])
            groups = [g for g in self._groups[mine] if self._left[mine, g.adapter_id] and g.row_s > 0]
            if not groups:
                return
            group = min(groups, key=lambda g: (g.adapter_id not in self._resident[target], g.row_s, g.place))
            if self._gamma * group.row_s - self._room[target] >= self._surplus[mine]:
                return
            self._move(group, mine, target, 1)

    def _move(self, group: AdapterRows, mine: str, target: str, num_rows: int) -> None:
        if num_rows <= 0:
            return
        self._left[mine, group.adapter_id] -= num_rows
        self._surplus[mine] -= num_rows * group.row_s
        self._room[target] -= self._gamma * num_rows * group.row_s
        if group.adapter_id not in self._resident[target]:
            self._resident[target].add(group.adapter_id)
            self._room[target] -= self._eta_s
        key = (group.adapter_id, mine, target)
        self._moved[key] = self._moved.get(key, 0) + num_rows

    def moves(self) -> tuple[Transfer, ...]:
        return tuple(Transfer(*key, num_rows) for key, num_rows in self._moved.items())
