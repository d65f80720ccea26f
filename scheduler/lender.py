"""Who may help whom at a job's end: measured paces, and replicas that have guests already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .commands import MigrateRows
from .events import Progress
from .job_state import ReplicaState
from .tail import Pace, TailSettings, lend, measured_pace
from .waves import Shard

# A helper that reports no guests for so long never got any.
HELP_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Help:
    """A replica was given guests at `since_s`. `has_begun`: it has reported them."""

    since_s: float
    has_begun: bool = False


class Lender:
    """Decides on loans from reports."""

    def __init__(self, shards: Sequence[Shard], settings: TailSettings) -> None:
        self._settings = settings
        self._context_tokens = _mean_context(shards)
        self._paces: dict[str, Pace] = {}
        # Replicas that were given guests and have not said that they are done with them.
        self._helping: dict[str, _Help] = {}

    def hear(self, replica: ReplicaState, report: Progress) -> None:
        """Learn how fast a replica is, from reports in which it was busy, and whether its guests are done."""
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

    def lend(
        self, report: Progress, open_shards: Sequence[Shard], replicas: Mapping[str, ReplicaState]
    ) -> tuple[MigrateRows, ...]:
        """Rows of the reporting replica for those that have neither shards nor guests."""
        idle = sorted(name for name, r in replicas.items() if not r.rows_left and name not in self._helping)
        helpers = {name: self._pace(replicas[name]) for name in idle}
        lent = lend(report, open_shards, self._pace(replicas[report.replica_id]), helpers, self._settings)
        self._helping |= {command.to_replica_id: _Help(report.time_s) for command in lent}
        return lent

    def _pace(self, replica: ReplicaState) -> Pace:
        """As measured; where nothing was, as the others on average."""
        if replica.replica_id in self._paces:
            return self._paces[replica.replica_id]
        known = [pace.slowness for pace in self._paces.values()]
        return Pace(replica.batch_rows, sum(known) / len(known) if known else 1.0)


def _mean_context(shards: Sequence[Shard]) -> float:
    """Tokens of a row that has generated half of what was predicted, on average."""
    num_rows = sum(shard.num_rows for shard in shards)
    tokens = sum(shard.prompt_tokens + shard.predicted_output_tokens / 2 for shard in shards)
    return tokens / num_rows if num_rows else 0.0
