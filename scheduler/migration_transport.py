"""Co-migration without a solver: fill the underloaded replicas up to the level that no plan can beat.

With every adapter copy allowed and rows divisible, the problem of `migration_model.py` is a transport problem between
complete sides, whose best longest time has a closed form (`level_s`). It bounds the integer program from below. Whole
rows are dealt out at that level, adapters that are resident at their target first, so that few copies are made; an
answer within the wanted gap of the bound needs no search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .migration_problem import MigrationSettings, Move, ReplicaLoad, RowGroup


def level_s(over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], gamma: float) -> float:
    """A lower bound of the longest pending time: moved work takes `gamma` times as long and nothing else costs."""
    floor = max([replica.fixed_s for replica in over] + [replica.pending_s for replica in under])
    pending = sorted((replica.pending_s for replica in over), reverse=True)
    idle = sum(replica.pending_s for replica in under)
    for giving in range(1, len(pending) + 1):
        level = (gamma * sum(pending[:giving]) + idle) / (gamma * giving + len(under))
        if giving == len(pending) or level >= pending[giving]:
            return max(floor, level)
    return floor


def transport(
    over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings
) -> tuple[tuple[Move, ...], int]:
    """Moves that bring every replica near the level, and how many adapter copies they need."""
    filling = _Filling(over, under, level_s(over, under, settings.gamma), settings.gamma)
    for may_copy in (False, True):
        for source in over:
            for group in sorted(source.groups, key=lambda g: (-g.num_rows * g.row_s, g.adapter)):
                filling.pour(source, group, may_copy=may_copy)
    filling.even_out()
    return filling.moves(), filling.num_copies


class _Filling:
    """Surplus above the level, room below it, and which adapter is where."""

    def __init__(self, over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], level: float, gamma: float) -> None:
        self._gamma = gamma
        self._surplus = {replica.replica_id: replica.pending_s - level for replica in over}
        self._room = {replica.replica_id: level - replica.pending_s for replica in under}
        self._resident = {replica.replica_id: set(replica.resident) for replica in under}
        self._groups = {replica.replica_id: replica.groups for replica in over}
        self._left = {(r.replica_id, g.adapter): g.num_rows for r in over for g in r.groups}
        self._moved: dict[tuple[str, str, str], int] = {}
        self.num_copies = 0

    def pour(self, source: ReplicaLoad, group: RowGroup, *, may_copy: bool) -> None:
        """Move rows of a group while its replica has a surplus; the roomiest targets first."""
        mine = source.replica_id
        for target in sorted(self._room, key=lambda t: (group.adapter not in self._resident[t], -self._room[t], t)):
            if group.row_s <= 0 or not (may_copy or group.adapter in self._resident[target]):
                return
            # Half a row beyond the level, here or there, is nearer to it than none.
            wanted = math.floor(self._surplus[mine] / group.row_s + 0.5)
            fits = math.floor(self._room[target] / (self._gamma * group.row_s) + 0.5)
            self._move(group, mine, target, min(self._left[mine, group.adapter], wanted, fits))

    def even_out(self) -> None:
        """Single rows from the fullest to the emptiest while that helps: what rounding has left."""
        for _ in range(sum(self._left.values())):
            mine = max(self._surplus, key=lambda s: self._surplus[s])
            target = max(self._room, key=lambda t: self._room[t])
            groups = [g for g in self._groups[mine] if self._left[mine, g.adapter] and g.row_s > 0]
            if not groups:
                return
            group = min(groups, key=lambda g: (g.adapter not in self._resident[target], g.row_s, g.adapter))
            if self._gamma * group.row_s - self._room[target] >= self._surplus[mine]:
                return
            self._move(group, mine, target, 1)

    def _move(self, group: RowGroup, mine: str, target: str, num_rows: int) -> None:
        if num_rows <= 0:
            return
        self._left[mine, group.adapter] -= num_rows
        self._surplus[mine] -= num_rows * group.row_s
        self._room[target] -= self._gamma * num_rows * group.row_s
        self.num_copies += group.adapter not in self._resident[target]
        self._resident[target].add(group.adapter)
        key = (group.adapter, mine, target)
        self._moved[key] = self._moved.get(key, 0) + num_rows

    def moves(self) -> tuple[Move, ...]:
        return tuple(Move(*key, num_rows) for key, num_rows in self._moved.items())
