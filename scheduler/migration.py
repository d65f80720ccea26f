"""Move requests and adapters from overloaded to underloaded replicas (dLoRA section 5.2), and the job's tail.

Only the top K overloaded and top K underloaded replicas take part. A transport at the level that no plan can beat is
tried first; where its adapter copies or memory keep it from that bound, the paper's integer program decides. Either
answer is a proposal: it is in whole rows and used only if it ends sooner than doing nothing; otherwise the greedy rule
decides. All functions are pure and deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .migration_model import CoMigrationModel
from .migration_problem import MigrationSettings, Move, ReplicaLoad
from .migration_transport import level_s, transport
from .solver import solve

Method = Literal[
    "not needed", "transport", "ilp", "greedy", "greedy (ilp infeasible)", "greedy (ilp unsolved)", "nothing pays"
]
# An answer within this share of its bound is good enough, from the transport and from the solver.
_GOOD_GAP = 0.02


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Moves, how they were found, and the longest pending time before and after."""

    moves: tuple[Move, ...]
    method: Method
    before_s: float
    after_s: float


def plan_migration(
    replicas: Sequence[ReplicaLoad], adapter_bytes: dict[str, float], settings: MigrationSettings | None = None
) -> MigrationPlan:
    """Whether to move, and what. Adapters without an entry in `adapter_bytes` weigh nothing."""
    settings = settings or MigrationSettings()
    before = max((replica.pending_s for replica in replicas), default=0.0)
    over, under = select(replicas, settings)
    if not over or not under:
        return MigrationPlan((), "not needed", before, before)
    if longest_possible_gain(over, under, settings) < settings.least_gain:
        return MigrationPlan((), "nothing pays", before, before)
    method: Method = "transport"
    moves = near_the_bound(over, under, settings)
    if moves is None:
        method, moves = _by_model(over, under, adapter_bytes, settings)
    if not _pays(replicas, moves, settings, before):
        method = "greedy" if method in ("transport", "ilp") else method
        moves = move_greedily(over, under, settings)
        if not _pays(replicas, moves, settings, before):
            return MigrationPlan((), "nothing pays", before, before)
    return MigrationPlan(moves, method, before, longest_after(replicas, moves, settings))


def longest_possible_gain(
    over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings
) -> float:
    """Share of the longest pending time that even rows without size could win at most."""
    before = max(replica.pending_s for replica in over)
    return 1 - level_s(over, under, settings.gamma) / before


def near_the_bound(
    over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings
) -> tuple[Move, ...] | None:
    """The transport's moves if they are proved good: within the gap of the bound, half a row's time allowed because
    rows are whole. None where memory is limited or copies cost too much."""
    if any(replica.memory_bytes < float("inf") for replica in (*over, *under)):
        return None
    moves, num_copies = transport(over, under, settings)
    objective = longest_after([*over, *under], moves, settings) + settings.eta_s * num_copies
    row_s = max((group.row_s for replica in over for group in replica.groups), default=0.0)
    bound = level_s(over, under, settings.gamma) * (1 + _GOOD_GAP) + settings.gamma * row_s / 2
    return moves if objective <= bound else None


def _by_model(
    over: Sequence[ReplicaLoad],
    under: Sequence[ReplicaLoad],
    adapter_bytes: dict[str, float],
    settings: MigrationSettings,
) -> tuple[Method, tuple[Move, ...]]:
    model = CoMigrationModel(over, under, adapter_bytes, settings)
    outcome = solve(model.problem, max_nodes=settings.max_nodes, relative_gap=_GOOD_GAP)
    if outcome in ("infeasible", "unsolved"):
        return ("greedy (ilp infeasible)" if outcome == "infeasible" else "greedy (ilp unsolved)"), ()
    return "ilp", model.decode()


def select(replicas: Sequence[ReplicaLoad], settings: MigrationSettings) -> tuple[list[ReplicaLoad], list[ReplicaLoad]]:
    """The top K overloaded and underloaded replicas; both empty below the trigger."""
    by_load = sorted(replicas, key=lambda replica: (-replica.pending_s, replica.replica_id))
    mean = sum(replica.pending_s for replica in replicas) / max(1, len(replicas))
    if not by_load or by_load[0].pending_s <= settings.trigger * mean:
        return [], []
    over = [replica for replica in by_load if replica.pending_s > mean][: settings.top_k]
    under = [replica for replica in reversed(by_load) if replica.pending_s <= mean][: settings.top_k]
    return over, under


def longest_after(replicas: Sequence[ReplicaLoad], moves: Sequence[Move], settings: MigrationSettings) -> float:
    """Longest pending time once the moves are made, moved rows costing gamma times theirs."""
    row_s = {(r.replica_id, g.adapter): g.row_s for r in replicas for g in r.groups}
    pending = {replica.replica_id: replica.pending_s for replica in replicas}
    for move in moves:
        seconds = move.num_rows * row_s[move.from_replica_id, move.adapter]
        pending[move.from_replica_id] -= seconds
        pending[move.to_replica_id] += settings.gamma * seconds
    return max(pending.values())


def _pays(replicas: Sequence[ReplicaLoad], moves: Sequence[Move], settings: MigrationSettings, before: float) -> bool:
    return bool(moves) and longest_after(replicas, moves, settings) <= before * (1 - settings.least_gain)


def move_greedily(
    over: Sequence[ReplicaLoad], under: Sequence[ReplicaLoad], settings: MigrationSettings
) -> tuple[Move, ...]:
    """From the fullest to the emptiest until they are even, adapters already resident there first."""
    pending = {replica.replica_id: replica.pending_s for replica in [*over, *under]}
    moves: list[Move] = []
    for source in over:
        for target in under:
            for group in sorted(source.groups, key=lambda g: (g.adapter not in target.resident, g.adapter)):
                left = group.num_rows - sum(
                    m.num_rows for m in moves if (m.from_replica_id, m.adapter) == (source.replica_id, group.adapter)
                )
                surplus = pending[source.replica_id] - pending[target.replica_id]
                rows = min(left, int(surplus / (group.row_s * (1 + settings.gamma)))) if group.row_s > 0 else 0
                if rows > 0:
                    moves.append(Move(group.adapter, source.replica_id, target.replica_id, rows))
                    pending[source.replica_id] -= rows * group.row_s
                    pending[target.replica_id] += settings.gamma * rows * group.row_s
    return tuple(moves)
