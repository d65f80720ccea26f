"""What each shard's task is told, from the plan and from what the scheduler has commanded so far. Pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..scheduler.commands import LoadAdapter, RunShard
from ..scheduler.wave_outlook import rows_behind
from ..scheduler.waves import Shard
from .run_shard import ShardTask


class ShardBriefing:
    """Commanded loads travel with the shards that need them: a shard is opened well before its rows run, and one
    message cannot overtake the other.
    """

    def __init__(self, run_id: str, shards: Iterable[Shard], num_workers: int) -> None:
        self._run_id = run_id
        self._shards = {shard.shard_id: shard for shard in shards}
        self._rows_behind = rows_behind(tuple(self._shards.values()), num_workers)
        # Worker -> adapter -> the worker that has it.
        self._sources: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def load(self, command: LoadAdapter) -> None:
        """A worker shall get an adapter, from now on, where the command says."""
        if command.source_replica_id:
            self._sources[command.replica_id][command.adapter] = command.source_replica_id

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._sources.pop(worker, None)

    def task(self, command: RunShard) -> ShardTask:
        """What the shard's task is told."""
        shard, sources = self._shards[command.shard_id], self._sources[command.replica_id]
        return ShardTask(
            self._run_id,
            command.shard_id,
            command.attempt,
            self._rows_behind.get(command.shard_id, 0),
            {name: sources[name] for name in shard.adapters if name in sources},
        )
