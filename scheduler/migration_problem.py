"""What a migration is decided from: the rows of each replica that may move, and what moving costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Movable rows of one adapter on one replica. `row_s`: L_i. `row_bytes`: M_i, of one row's KV."""

    adapter: str
    num_rows: int
    row_s: float
    row_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as the planner of migrations sees it. `resident`: adapters in its memory.

    `fixed_s`: work that cannot move. `memory_bytes`: for KV and adapters together (infinite: never swaps).
    """

    replica_id: str
    groups: tuple[RowGroup, ...]
    resident: frozenset[str] = frozenset()
    fixed_s: float = 0.0
    memory_bytes: float = float("inf")

    @property
    def pending_s(self) -> float:
        """Time until it is done with everything it has."""
        return self.fixed_s + sum(group.num_rows * group.row_s for group in self.groups)


@dataclass(frozen=True, slots=True)
class Move:
    """`num_rows` rows of an adapter, from one replica to another."""

    adapter: str
    from_replica_id: str
    to_replica_id: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """`gamma`: a moved row costs this much more (its hop and second prefill). `eta_s`: price of an adapter copy.

    `top_k`: replicas considered on each side. `trigger`: only when the fullest replica has this many times the mean
    pending time. `least_gain`: share of the longest pending time that must be won.
    """

    gamma: float = 1.1
    eta_s: float = 0.01
    top_k: int = 8
    trigger: float = 1.2
    least_gain: float = 0.03
    swap_bytes_per_s: float = 1.2e10
    max_nodes: int = 20
