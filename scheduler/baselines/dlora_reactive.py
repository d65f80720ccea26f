"""dLoRA's reactive mechanism (OSDI 24, section 5.2) as the rule by which a job's scheduler moves rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ..assignment.dispatch import ReplicaState
from ..assignment.migration import OpenShards, rows_here
from ..estimates.lengths import PRIOR_SHARE, LengthEstimator
from ..estimates.pace import planned_work
from ..messages import MigrateRows, ReplicaReported
from ..planning.waves import Shard
from ..settings import SchedulerSettings
from .dlora_migration import AdapterRows, MigrationSettings, ReplicaLoad, Transfer, plan_migration

# Seconds between two looks at the cluster's load.
_PERIOD_S = 2.0


class CoMigration:
    """Looks at the loads that replicas have reported every two seconds, and moves rows as `plan_migration` says.

    A row's seconds are the cost model's share of a full batch, for the lengths of finished rows. Rows hold memory while
    they run, at most a batch of them. How many rows of each adapter a shard has left is estimated from how many it had.
    """

    def __init__(
        self, shards: Sequence[Shard], settings: SchedulerSettings, migration: MigrationSettings | None = None
    ) -> None:
        assert settings.cost is not None, "dLoRA needs a cost model"
        assert settings.memory is not None, "dLoRA needs the replicas' memory"
        self._cost, self._memory = settings.cost, settings.memory
        self._settings = migration or MigrationSettings()
        self._lengths = LengthEstimator()
        work = planned_work(shards)
        self._lengths.asked(round(work.output_tokens / PRIOR_SHARE), round(work.num_rows))
        # The last report of each replica; dropped when rows have moved since.
        self._reports: dict[str, ReplicaReported] = {}
        self._looked_s = 0.0

    def reported(self, replica: ReplicaState, report: ReplicaReported) -> None:
        """Keep a report, and take in the lengths of the rows that have finished."""
        self._reports[replica.replica_id] = report
        for rows in report.finished:
            self._lengths.finished(rows.output_tokens, rows.num_rows, rows.adapter_id)

    def removed(self, replica_id: str) -> None:
        """Drop a replica."""
        self._reports.pop(replica_id, None)

    def rows_at_work(self, replica: ReplicaState) -> int:
        """Unfinished rows of the replica's own shards."""
        return replica.open_rows

    def relieve(
        self, owner: str, num_rows: int, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> Sequence[MigrateRows]:
        """No moves: rows are dealt out, not shared by pace."""
        return ()

    def share(
        self, replica_id: str, time_s: float, replicas: Mapping[str, ReplicaState], open_shards: OpenShards
    ) -> Sequence[MigrateRows]:
        """Moves of a new plan, every two seconds once every replica has reported since rows moved last."""
        if time_s - self._looked_s < _PERIOD_S or replicas.keys() - self._reports.keys():
            return ()
        self._looked_s = time_s
        rows_of = {name: self._rows_left(name, open_shards(replicas[name])) for name in sorted(replicas)}
        loads = [self._load(replicas[name], rows) for name, rows in rows_of.items()]
        adapter_bytes: dict[str | None, float] = dict(self._memory.adapter_bytes.items())
        moves, _ = plan_migration(loads, adapter_bytes, self._settings)
        commands = [command for move in moves for command in _commands(move, rows_of[move.from_replica_id])]
        if commands:
            self._reports.clear()
        return commands

    def _rows_left(self, name: str, shards: Sequence[Shard]) -> dict[tuple[Shard, str | None], int]:
        """Rows of each open shard and adapter that its replica works on itself, in the order of opening."""
        left = rows_here(self._reports[name])
        return {
            (shard, adapter_id): num_rows
            for shard in shards
            for adapter_id, num_rows in zip(
                (*shard.adapters, None), _shares(shard, left.get(shard.shard_id, 0)), strict=False
            )
            if num_rows
        }

    def _load(self, replica: ReplicaState, rows_left: Mapping[tuple[Shard, str | None], int]) -> ReplicaLoad:
        report = self._reports[replica.replica_id]
        num_rows, tokens = Counter[str | None](), Counter[str | None]()
        for (shard, adapter_id), rows in rows_left.items():
            num_rows[adapter_id] += rows
            tokens[adapter_id] += round(rows * shard.prompt_tokens / shard.num_rows)
        total = num_rows.total()
        mean_output = self._lengths.mean()
        # A part of the running rows' work is done.
        undone = 1 - min(0.9, report.running_tokens / (mean_output * max(1, total + report.incoming_rows)))
        running = min(1.0, replica.batch_rows / max(1, total))
        groups = []
        for adapter_id, rows in sorted(num_rows.items(), key=lambda group: group[0] or ""):
            prompt, output = tokens[adapter_id] / rows, self._lengths.measured(adapter_id) or mean_output
            row_s = undone * float(self._cost.row_seconds(prompt, output, batch_rows=replica.batch_rows))
            groups.append(AdapterRows(adapter_id, rows, row_s, running * self._memory.token_bytes * (prompt + output)))
        mean_prompt = tokens.total() / max(1, total)
        incoming_s = float(self._cost.row_seconds(mean_prompt, mean_output, batch_rows=replica.batch_rows))
        return ReplicaLoad(
            replica.replica_id,
            tuple(groups),
            frozenset((*report.resident_adapters, None)),
            undone * incoming_s * report.incoming_rows,
            self._memory.pool_bytes,
        )


def _shares(shard: Shard, num_left: int) -> list[int]:
    """Rows of each adapter among those that a shard has left, the base model's last: in proportion to all its rows, the
    largest remainders rounded up."""
    exact = np.array(shard.adapter_rows, np.float64) * num_left / shard.num_rows
    whole = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: num_left - int(whole.sum())]] += 1
    return [int(rows) for rows in whole]


def _commands(move: Transfer, rows_left: dict[tuple[Shard, str | None], int]) -> list[MigrateRows]:
    """Commands for a move: they take rows of the shards that were opened last, which have most of their way to go."""
    commands, wanted = [], move.num_rows
    for (shard, adapter_id), there in reversed(rows_left.items()):
        num_rows = min(wanted, there)
        if adapter_id == move.adapter_id and num_rows:
            commands.append(
                MigrateRows(
                    shard.shard_id,
                    move.from_replica_id,
                    move.to_replica_id,
                    num_rows,
                    is_selective=True,
                    adapter_id=adapter_id,
                )
            )
            rows_left[shard, adapter_id] -= num_rows
            wanted -= num_rows
    return commands
