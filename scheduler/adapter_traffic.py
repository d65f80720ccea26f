"""Adapters travel before their rows: what a replica must load for a shard it is given, and what it may drop for it.

A shard is opened while the rows before it still fill the batch, so an adapter that is asked for at that moment
arrives in time. A peer that has it in memory is asked before storage (LoRAServe's distributed pool). Where memory is
short, the adapter whose next use lies furthest ahead in the plan goes first (Belady); one that no pending shard needs
goes before all others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .commands import Command, EvictAdapter, LoadAdapter
from .waves import Shard

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """`weight_bytes`: of each adapter by name. `capacity_bytes`: of one replica for adapters; None: endless."""

    weight_bytes: Mapping[str, int]
    capacity_bytes: int | None = None


class AdapterTraffic:
    """What each replica holds or has been told to fetch, and which adapters its open shards need."""

    def __init__(self, shards: Sequence[Shard], settings: TrafficSettings) -> None:
        self._settings = settings
        # Replica -> its adapters, oldest first.
        self._held: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._in_use: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._is_pending = {shard.shard_id: True for shard in shards}
        # Adapter -> its shards in the plan's order, last first; those at the end that are pending no more are dropped.
        self._uses: defaultdict[str, list[int]] = defaultdict(list)
        for shard in reversed(shards):
            for name in shard.adapters:
                self._uses[name].append(shard.shard_id)

    def opened(self, replica_id: str, shard: Shard) -> list[Command]:
        """Before a shard runs on a replica: drop what it can spare, load what it lacks."""
        self._is_pending[shard.shard_id] = False
        held, in_use = self._held[replica_id], self._in_use[replica_id]
        commands: list[Command] = []
        for name in shard.adapters:
            in_use[name] += 1
        for name in shard.adapters:
            if name not in held:
                source = self._peer_with(name)
                commands += [EvictAdapter(replica_id, victim) for victim in self._make_room(replica_id, name)]
                commands.append(LoadAdapter(replica_id, name, source))
                held[name] = None
        return commands

    def closed(self, replica_id: str, shard: Shard, *, is_pending: bool) -> None:
        """A shard is open on a replica no more; `is_pending`: it will run again."""
        self._is_pending[shard.shard_id] = is_pending
        if is_pending:
            for name in shard.adapters:
                self._uses[name].append(shard.shard_id)
        in_use = self._in_use[replica_id]
        in_use.subtract(shard.adapters)
        self._in_use[replica_id] = +in_use

    def reported(self, replica_id: str, resident: Collection[str]) -> None:
        """A replica says what it has; it may have loaded some by itself."""
        self._held[replica_id] |= dict.fromkeys(name for name in resident if name in self._settings.weight_bytes)

    def lost(self, replica_id: str) -> None:
        """A replica is gone, and its memory with it."""
        self._held.pop(replica_id, None)
        self._in_use.pop(replica_id, None)

    def _peer_with(self, name: str) -> str:
        return next((replica for replica, held in sorted(self._held.items()) if name in held), "")

    def _make_room(self, replica_id: str, name: str) -> list[str]:
        """Adapters to evict so that `name` fits; what open shards need stays, even if that is too much."""
        if self._settings.capacity_bytes is None:
            return []
        held, weight = self._held[replica_id], self._settings.weight_bytes
        used = sum(weight[other] for other in held) + weight[name]
        evicted = []
        spare = sorted((o for o in held if not self._in_use[replica_id][o]), key=lambda o: (-self._next_use(o), o))
        for victim in spare:
            if used <= self._settings.capacity_bytes:
                break
            used -= weight[victim]
            del held[victim]
            evicted.append(victim)
        return evicted

    def _next_use(self, name: str) -> int:
        uses = self._uses[name]
        while uses and not self._is_pending[uses[-1]]:
            uses.pop()
        return uses[-1] if uses else _NEVER
