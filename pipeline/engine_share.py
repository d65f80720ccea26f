"""One run's share of an engine: what a host may ask of it, from any thread, whoever else uses the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from ..engine.exported_row import ExportedRow
from .engine_rows import EngineRows, Message
from .loan_desk import Loan
from .messages import LocalAdapter
from .open_shard import OpenShard, ServedRow

# Done in the keeper's thread; returns what the process must be told then.
Action = Callable[[EngineRows], Sequence[Message] | None]


class EngineShare:
    """Made by `EngineKeeper.join`. `run`: its name among the runs of this engine. `folder`: lives as long as the
    engine; what its rows refer to belongs there. `act`: has the keeper's thread do something.
    """

    def __init__(self, run: str, folder: Path, act: Callable[[Action], None]) -> None:
        self.run = run
        self.folder = folder
        self._act = act

    @property
    def log_path(self) -> Path:
        """What the engine process prints."""
        return engine_log(self.folder)

    def open(
        self,
        shard_id: int | None,
        rows: Iterable[ExportedRow],
        adapters: Iterable[LocalAdapter],
        rows_behind: int = 0,
    ) -> OpenShard:
        """Give rows to the engine, begun or not; results arrive at the returned shard under the same request ids, which
        must be unique among all rows that this run has open here. `shard_id` None: guests. `rows_behind`: see
        `ShardTask`.
        """
        shard = OpenShard(shard_id, rows, self.run)
        self._act(partial(EngineRows.open, shard=shard, adapters=tuple(adapters), rows_behind=rows_behind))
        return shard

    def abandon(self, shard: OpenShard) -> None:
        """Nobody waits for this shard any more; its rows leave the engine."""
        self._act(partial(EngineRows.abandon, shard=shard))

    def surrender(self, shard: OpenShard) -> None:
        """Fail a shard with `ShardAbandonedError`, once the process has given up what it has generated for its rows."""
        self._act(partial(EngineRows.surrender, shard=shard))

    def lend(self, shard_id: int, num_rows: int) -> Future[Loan]:
        """Take rows of an open shard out of the engine, for another engine to go on with: at most `num_rows`, fewer
        or none where rows have finished meanwhile. `answered` or `reclaim` must follow for each.
        """
        asked: Future[Loan] = Future()
        self._act(partial(EngineRows.lend, run=self.run, shard_id=shard_id, num_rows=num_rows, asked=asked))
        return asked

    def answered(self, served: Iterable[ServedRow]) -> None:
        """Another engine has finished rows that were lent. Those that nobody waits for are dropped."""
        self._act(partial(EngineRows.answered, served=tuple(served)))

    def returned(self, rows: Iterable[ExportedRow]) -> None:
        """Another engine gives lent rows back, further on than they were. They go on here."""
        self._act(partial(EngineRows.returned, rows=tuple(rows)))

    def reclaim(self, request_ids: Iterable[str]) -> None:
        """Lent rows go on here after all, from where they were when they left."""
        self._act(partial(EngineRows.reclaim, request_ids=tuple(request_ids)))


def engine_log(folder: Path) -> Path:
    """Where an engine process prints."""
    return folder / "engine.log"
