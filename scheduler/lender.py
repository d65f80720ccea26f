"""Who may help whom at a job's end: measured paces and lengths, and replicas that have guests already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .commands import MigrateRows
from .events import Progress
from .job_state import ReplicaState
from .tail import Pace, TailSettings, lend, measured_pace, rows_here
from .waves import Shard

# A helper that reports no guests for so long never got any.
HELP_PATIENCE_S = 5.0
# Replicas with the most left to do that are asked for rows when another one has nothing to do.
_OWNERS_ASKED = 4
# As many as take part in one decision; a replica that is not idle is a helper with so large a share of its batch free.
_MAX_HELPERS, _LEAST_FREE = 8, 0.25
# Finished rows of an adapter from which its mean length counts for more than the plan's guess.
_LENGTHS_KNOWN = 8

OpenShards = Callable[[ReplicaState], Sequence[Shard]]


@dataclass(slots=True)
class _Help:
    """A replica was given guests at `since_s`. `has_begun`: it has reported them."""

    since_s: float
    has_begun: bool = False


class Lender:
    """Decides on loans, from reports and when replicas run out of work."""

    def __init__(self, shards: Sequence[Shard], settings: TailSettings) -> None:
        self._settings = settings
        self._context_tokens = _mean_context(shards)
        self._paces: dict[str, Pace] = {}
        # What each replica said last; dropped when rows have left since.
        self._reports: dict[str, Progress] = {}
        # Replicas that were given guests and have not said that they are done with them.
        self._helping: dict[str, _Help] = {}
        # Adapter -> rows finished so far and their output tokens.
        self._finished: dict[str, tuple[int, int]] = {}

    def hear(self, replica: ReplicaState, report: Progress) -> None:
        """Learn how fast a replica is, from reports in which it was busy, how long rows are, and whether its guests
        are done.
        """
        self._reports[replica.replica_id] = report
        for adapter, num_rows, output_tokens in report.finished:
            rows, tokens = self._finished.get(adapter, (0, 0))
            self._finished[adapter] = (rows + num_rows, tokens + output_tokens)
        if 2 * report.running_rows >= replica.batch_rows:
            pace = measured_pace(report, replica.batch_rows, self._context_tokens, self._settings.cost)
            if pace is not None:
                before = self._paces.get(replica.replica_id, pace)
                self._paces[replica.replica_id] = replace(pace, slowness=(before.slowness + pace.slowness) / 2)
        help_given = self._helping.get(replica.replica_id)
        if help_given is not None:
            help_given.has_begun |= report.guest_rows > 0
            is_overdue = report.time_s - help_given.since_s > HELP_PATIENCE_S
            if not report.guest_rows and (help_given.has_begun or is_overdue):
                del self._helping[replica.replica_id]

    def lost(self, replica_id: str) -> None:
        """A replica is gone."""
        self._reports.pop(replica_id, None)
        self._helping.pop(replica_id, None)

    def share(
        self, replica_id: str, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> tuple[MigrateRows, ...]:
        """What should move because this replica has told something or has nothing to do: rows of its own, or of those
        that have most left.
        """
        helpers = self._helpers(replicas)
        if not helpers:
            return ()
        owners = [replica_id] if replicas[replica_id].rows_left else self._most_left(replicas)
        for owner in owners:
            lent = self._lend(owner, helpers, replicas, open_shards)
            if lent:
                self._helping |= {command.to_replica_id: _Help(time_s) for command in lent}
                del self._reports[owner]
                return lent
        return ()

    def _helpers(self, replicas: Mapping[str, ReplicaState]) -> dict[str, Pace]:
        """Replicas without guests that have room, those with most of it first."""
        own = {name: self._own_rows(replica) for name, replica in replicas.items() if name not in self._helping}
        has_room = (n for n, rows in own.items() if rows <= (1 - _LEAST_FREE) * replicas[n].batch_rows)
        # One more than needed: the owner may be among them.
        ranked = sorted(has_room, key=lambda name: (own[name], name))[: _MAX_HELPERS + 1]
        return {name: replace(self._pace(replicas[name]), own_rows=own[name]) for name in ranked}

    def _own_rows(self, replica: ReplicaState) -> int:
        """Unfinished rows of its own shards that it works on itself."""
        report = self._reports.get(replica.replica_id)
        lent = sum(rows for _, rows in report.lent_shards) if report is not None else 0
        return max(0, replica.open_rows - lent)

    def _most_left(self, replicas: Mapping[str, ReplicaState]) -> list[str]:
        def left(name: str) -> float:
            return sum(rows_here(self._reports[name]).values()) * self._pace(replicas[name]).slowness

        return sorted((name for name in replicas if name in self._reports), key=left, reverse=True)[:_OWNERS_ASKED]

    def _lend(
        self, owner: str, helpers: Mapping[str, Pace], replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> tuple[MigrateRows, ...]:
        report = self._reports.get(owner)
        shards = [shard for shard in open_shards(replicas[owner]) if shard.has_engine_work]
        if report is None or not shards:
            return ()
        # Shards may have been committed since.
        ids = {shard.shard_id for shard in shards}
        report = replace(report, open_shards=tuple(entry for entry in report.open_shards if entry[0] in ids))
        left = rows_here(report)
        weight = sum(left.get(shard.shard_id, 0) for shard in shards)
        output = sum(left.get(shard.shard_id, 0) * self._output_tokens(shard) for shard in shards) / max(1, weight)
        waits = weight > report.running_rows
        # Rows that run gain little beside rows of others. More helpers than rows are of no use.
        chosen = [name for name, pace in helpers.items() if name != owner and (waits or not pace.own_rows)]
        paces = {name: helpers[name] for name in chosen[: min(weight, _MAX_HELPERS)]}
        return lend(report, shards, output, self._pace(replicas[owner]), paces, self._settings)

    def _output_tokens(self, shard: Shard) -> float:
        """Of a row of this shard, when it is done: what rows of its adapters came to, else what was planned."""
        known = [self._finished[name] for name in shard.adapters or ("",) if name in self._finished]
        means = [tokens / rows for rows, tokens in known if rows >= _LENGTHS_KNOWN]
        return sum(means) / len(means) if means else shard.predicted_output_tokens / shard.num_rows

    def _pace(self, replica: ReplicaState) -> Pace:
        """As measured; where nothing was, as the others on average."""
        if replica.replica_id in self._paces:
            return replace(self._paces[replica.replica_id], batch_rows=replica.batch_rows)
        known = [pace.slowness for pace in self._paces.values()]
        return Pace(replica.batch_rows, sum(known) / len(known) if known else 1.0)


def _mean_context(shards: Sequence[Shard]) -> float:
    """Tokens of a row that has generated half of what was predicted, on average."""
    num_rows = sum(shard.num_rows for shard in shards)
    tokens = sum(shard.prompt_tokens + shard.predicted_output_tokens / 2 for shard in shards)
    return tokens / num_rows if num_rows else 0.0
