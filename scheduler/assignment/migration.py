"""Tail migration: moves running rows from busy replicas to idle ones once no shard is queued.

Moving a row costs a hop and a second prefill of its prompt and of what it has generated. It pays when steps of the
smaller batch are faster, when the helper is faster, or when the owner has more rows than it decodes together. The owner
keeps the shard; a row on a helper counts as lent there and as incoming here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..costs.cost import CostModel
from ..estimates.lengths import LengthEstimator
from ..estimates.pace import PaceEstimator
from ..messages import MigrateRows, ReplicaReported, UnfinishedRows
from ..planning.waves import Shard
from .dispatch import ReplicaState
from .lending import Pace, TailRows, TailSettings, rows_to_lend, shares_of

# Seconds after which a helper that has reported no incoming rows is taken to have got none.
HELP_PATIENCE_S = 5.0
# Replicas with the most left to do that are considered as owners when another one has nothing to do.
_MAX_OWNERS = 4
# Most helpers in one decision. A replica that is not idle helps another as fast as itself when this share of its batch
# is free.
_MAX_HELPERS, _LEAST_FREE = 8, 0.25
# Replicas whose paces differ by this factor are not alike.
_FASTER = 1.25
# All replicas are looked at again once the decisions since the last look exceed a sixteenth of the replicas, so that a
# decision costs the same on a large cluster. At most sixteen replicas with room are kept.
_LOOK_PART = 16
OpenShards = Callable[[ReplicaState], Sequence[Shard]]


class MigrationRule(Protocol):
    """Decides which rows move, from reports."""

    def reported(self, replica: ReplicaState, report: ReplicaReported) -> None:
        """Take in a report."""

    def removed(self, replica_id: str) -> None:
        """Drop a replica."""

    def share(
        self, replica_id: str, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> Sequence[MigrateRows]:
        """Moves to make after an event, once no shard is queued.

        `replica_id`: the replica that has reported, has joined or has committed a shard.
        """

    def relieve(
        self, owner: str, num_rows: int, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> Sequence[MigrateRows]:
        """Moves of `num_rows` rows away from a replica that has too many for its pace, while shards are queued."""

    def rows_at_work(self, replica: ReplicaState) -> int:
        """Unfinished rows that a replica works on itself, its own and others'."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """A replica's pool, and what rows and adapters take of it."""

    #: Bytes of the pool.
    pool_bytes: int
    #: Bytes of each token of a row.
    token_bytes: int
    #: Bytes of each adapter, by its id.
    adapter_bytes: Mapping[str, int]


class TailMigration:
    """Decides which rows move, from reports and when replicas run out of work."""

    def __init__(self, cost: CostModel, settings: TailSettings, lengths: LengthEstimator, paces: PaceEstimator) -> None:
        self._cost = cost
        self._settings = settings
        self._lengths = lengths
        self._paces = paces
        # The last report of each replica; dropped once rows have left it.
        self._reports: dict[str, ReplicaReported] = {}
        # Replicas that were given rows of others and have not reported them -> seconds at which they were given them.
        self._given: dict[str, float] = {}
        # Replicas with room and those with most left when all were last looked at, and the decisions since.
        self._with_room: dict[str, None] = {}
        self._owners: list[str] = []
        self._num_since: float = math.inf

    def reported(self, replica: ReplicaState, report: ReplicaReported) -> None:
        """Take in a report, and whether its replica is done helping."""
        self._reports[replica.replica_id] = report
        given_s = self._given.get(replica.replica_id)
        if given_s is not None and (report.incoming_rows or report.time_s - given_s > HELP_PATIENCE_S):
            del self._given[replica.replica_id]

    def removed(self, replica_id: str) -> None:
        """Drop a replica."""
        self._reports.pop(replica_id, None)
        self._given.pop(replica_id, None)
        self._num_since = math.inf

    def share(
        self, replica_id: str, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> tuple[MigrateRows, ...]:
        """Moves to make after an event of this replica, once no shard is queued.

        Its own rows move or, if it has nothing to do, rows of the replicas that have most left.
        """
        self._num_since += 1
        if self._num_since * _LOOK_PART > len(replicas):
            self._look(replicas)
        # A replica whose rows are all done writes its last part, and may help meanwhile.
        is_done = not replicas[replica_id].rows_left or not self.rows_at_work(replicas[replica_id])
        if is_done:
            self._with_room[replica_id] = None
        helpers = self._helpers(replicas, open_shards)
        if not helpers:
            return ()
        for owner in self._owners if is_done else [replica_id]:
            moves = self._moves(owner, helpers, replicas, open_shards)
            if moves:
                return self._given_away(owner, moves, time_s)
        return ()

    def relieve(
        self, owner: str, num_rows: int, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> tuple[MigrateRows, ...]:
        """Moves of `num_rows` rows of a slow replica to the fastest ones.

        The rows move as if they came from the queue: whether they find a place at once does not matter.
        """
        report, limit = self._reports.get(owner), _FASTER * self._paces.compare(replicas.keys())[0]
        if report is None or self._paces.slowness(owner) <= limit:
            return ()
        fastest = (name for name in replicas if self._paces.slowness(name) <= limit and name not in self._given)
        report = _brought_up(report, replicas[owner], open_shards(replicas[owner]))
        ranked = heapq.nsmallest(
            min(num_rows, _MAX_HELPERS), fastest, key=lambda n: (self.rows_at_work(replicas[n]), n)
        )
        helpers = {name: self._pace(replicas[name]) for name in ranked}
        if not helpers:
            return ()
        shares = shares_of(num_rows, list(helpers.values()))
        return self._given_away(owner, _moves_of(report, open_shards(replicas[owner]), helpers, shares), time_s)

    def _given_away(self, owner: str, moves: tuple[MigrateRows, ...], time_s: float) -> tuple[MigrateRows, ...]:
        for move in moves:
            self._given.setdefault(move.to_replica_id, time_s)
        if moves:
            del self._reports[owner]
        return moves

    def _helpers(self, replicas: Mapping[str, ReplicaState], open_shards: OpenShards) -> dict[str, Pace]:
        """Replicas that have room, the fastest first.

        None is much slower than the fastest of all, or works at a pace that is not known yet: rows that have moved do
        not move again, and some of them turn out to be long.
        """
        limit = _FASTER * self._paces.compare(replicas.keys())[0]
        found = []
        for name in self._with_room:
            rows, slowness = self.rows_at_work(replicas[name]), self._paces.slowness(name)
            is_known = not rows or (name in self._reports and self._paces.is_known(name))
            if is_known and rows < replicas[name].batch_rows and slowness <= limit and name not in self._given:
                found.append((round(slowness, 1), rows, name))
        # One more than needed: the owner may be among them.
        return {name: self._helper(replicas[name], open_shards) for *_, name in sorted(found)[: _MAX_HELPERS + 1]}

    def _helper(self, replica: ReplicaState, open_shards: OpenShards) -> Pace:
        """Pace of a helper, with the rows that it has to work on itself."""
        report, rows, pace = self._reports.get(replica.replica_id), self.rows_at_work(replica), self._pace(replica)
        if report is None or not rows:
            return pace
        shards = [shard for shard in open_shards(replica) if shard.has_engine_work]
        report = _brought_up(report, replica, shards)
        _, tokens_left = self._tokens_of(report, shards)
        return replace(pace, own_rows=rows, own_prefill_tokens=report.prefill_tokens_left, own_tokens_left=tokens_left)

    def _tokens_of(self, report: ReplicaReported, shards: Sequence[Shard]) -> tuple[float, float]:
        """Expected output tokens of the reporting replica's waiting rows, and tokens that its decoding rows still have
        to generate, both per row; 0 without shards.
        """
        if not shards:
            return 0.0, 0.0
        left = rows_here(report)
        weight = sum(left.get(shard.shard_id, 0) for shard in shards)
        output = sum(left.get(shard.shard_id, 0) * self._output_tokens(shard) for shard in shards) / max(1, weight)
        generated = report.running_tokens / max(1, report.running_rows - report.prefilling_rows)
        planned = sum(shard.predicted_output_tokens for shard in shards) / sum(shard.num_rows for shard in shards)
        return output, self._lengths.left(generated, planned / self._settings.length_share)

    def _look(self, replicas: Mapping[str, ReplicaState]) -> None:
        """Find the fastest replicas with most room and those with most left, among all."""
        rows = {name: self.rows_at_work(replica) for name, replica in replicas.items()}
        free = (name for name, replica in replicas.items() if rows[name] < replica.batch_rows)
        ranked = heapq.nsmallest(_LOOK_PART, free, key=lambda n: (round(self._paces.slowness(n), 1), rows[n], n))
        self._with_room = dict.fromkeys(ranked)

        def left(name: str) -> float:
            return sum(rows_here(self._reports[name]).values()) * self._paces.slowness(name)

        self._owners = heapq.nlargest(_MAX_OWNERS, (name for name in replicas if name in self._reports), key=left)
        self._num_since = 0

    def rows_at_work(self, replica: ReplicaState) -> int:
        """Unfinished rows that a replica works on itself, its own and others'."""
        report = self._reports.get(replica.replica_id)
        if report is None:
            return replica.open_rows
        lent = sum(rows.num_rows for rows in report.lent_shards)
        return max(0, replica.open_rows - lent) + report.incoming_rows

    def _moves(
        self, owner: str, helpers: Mapping[str, Pace], replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> tuple[MigrateRows, ...]:
        report = self._reports.get(owner)
        shards = [shard for shard in open_shards(replicas[owner]) if shard.has_engine_work]
        if report is None or not shards:
            return ()
        report = _brought_up(report, replicas[owner], shards)
        left = rows_here(report)
        weight = sum(left.get(shard.shard_id, 0) for shard in shards)
        waits = weight > report.running_rows - report.prefilling_rows
        # More helpers than rows are of no use.
        mine = self._pace(replicas[owner])
        chosen = [name for name, pace in helpers.items() if name != owner and _may_help(pace, mine, waits=waits)]
        paces = {name: helpers[name] for name in chosen[: min(weight, _MAX_HELPERS)]}
        rows = tail_rows(report, shards, *self._tokens_of(report, shards))
        return lend(report, shards, rows, mine, paces, self._cost, self._settings)

    def _output_tokens(self, shard: Shard) -> float:
        """Expected output tokens of a row of this shard: as measured for its adapters, else as planned."""
        measured = self._lengths.measured_together(shard.adapters)
        return shard.predicted_output_tokens / shard.num_rows if measured is None else measured

    def _pace(self, replica: ReplicaState) -> Pace:
        return Pace(replica.batch_rows, self._paces.slowness(replica.replica_id))


def _brought_up(report: ReplicaReported, replica: ReplicaState, shards: Sequence[Shard]) -> ReplicaReported:
    """A report brought up to now: with the shards that the replica has opened since, whose rows wait, and without those
    that have been committed.
    """
    known = {rows.shard_id for rows in report.open_shards}
    new_tokens = sum(shard.prompt_tokens for shard in shards if shard.shard_id not in known)
    return replace(
        report,
        open_shards=tuple(UnfinishedRows(shard.shard_id, replica.rows_left[shard.shard_id]) for shard in shards),
        prefill_tokens_left=report.prefill_tokens_left + new_tokens,
    )


def _may_help(helper: Pace, owner: Pace, *, waits: bool) -> bool:
    """Whether rows may join the helper's batch: any free place of a faster helper will do. Among equals, running rows
    gain little beside others, and rows that wait soon have a place where they are.
    """
    if _FASTER * helper.slowness < owner.slowness:
        return True
    return not helper.own_rows or (waits and helper.free_rows >= _LEAST_FREE * helper.batch_rows)


def lend(
    report: ReplicaReported,
    open_shards: Sequence[Shard],
    rows: TailRows,
    owner: Pace,
    helpers: Mapping[str, Pace],
    cost: CostModel,
    settings: TailSettings,
) -> tuple[MigrateRows, ...]:
    """Rows of the reporting replica that `helpers` should take; empty when it does not pay.

    `open_shards`: its shards in the order in which they were opened; rows of the last ones have most of their way to go
    and move first. `rows`: unfinished rows of these shards.
    """
    if not helpers or not rows.num_rows:
        return ()
    shares = rows_to_lend(rows, owner, list(helpers.values()), cost, settings)
    return _moves_of(report, open_shards, helpers, shares)


def _moves_of(
    report: ReplicaReported, open_shards: Sequence[Shard], helpers: Iterable[str], shares: Sequence[int]
) -> tuple[MigrateRows, ...]:
    """Commands that lend each helper its share of rows, from the shards that were opened last."""
    here = rows_here(report)
    commands = []
    for helper, share in zip(helpers, shares, strict=True):
        for shard in reversed(open_shards):
            num_rows = min(share, here.get(shard.shard_id, 0))
            if num_rows:
                commands.append(MigrateRows(shard.shard_id, report.replica_id, helper, num_rows))
                share -= num_rows
                here[shard.shard_id] -= num_rows
    return tuple(commands)


def rows_here(report: ReplicaReported) -> dict[int, int]:
    """Unfinished rows of each open shard that are not lent to other replicas, by shard id."""
    lent = {rows.shard_id: rows.num_rows for rows in report.lent_shards}
    return {rows.shard_id: rows.num_rows - lent.get(rows.shard_id, 0) for rows in report.open_shards}


def tail_rows(
    report: ReplicaReported, open_shards: Sequence[Shard], output_tokens: float, tokens_left: float
) -> TailRows:
    """Rows of its own shards that the reporting replica's engine still has to work on.

    `output_tokens`: expected of a row that waits. `tokens_left`: expected still of a row that decodes.
    """
    total = sum(shard.num_rows for shard in open_shards)
    left = sum(rows_here(report).values())
    if not total or left <= 0:
        return TailRows(0, 0, 0.0, 0.0, 0.0, 0.0)
    prompt = sum(shard.prompt_tokens for shard in open_shards) / total
    num_decoding = report.running_rows - report.prefilling_rows
    num_waiting = left + report.incoming_rows - num_decoding
    running = min(num_decoding, left)
    context = prompt + report.running_tokens / max(1, num_decoding)
    if report.prefill_tokens_left:
        prompt = report.prefill_tokens_left / max(1, num_waiting)
    return TailRows(running, left - running, context, prompt, output_tokens, tokens_left)
