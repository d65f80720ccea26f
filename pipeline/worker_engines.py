"""The engines of one Dask worker. Runs whose engines would be the same share one: its weights lie in memory once."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Worker

from .engine_keeper import EngineKeeper, Reporter
from .engine_share import EngineShare
from .messages import EngineIdentity, EngineSettings

_EXTENSION = "lorabatch-engines"


@dataclass(slots=True)
class _Engine:
    """An engine that runs, the folder of its files, and who uses it."""

    keeper: EngineKeeper
    folder: tempfile.TemporaryDirectory[str]
    runs: set[str] = field(default_factory=set)


class WorkerEngines:
    """Starts an engine for the first run that needs it and ends it with the last. Any thread may call.

    `folder`: which Dask clears of what killed workers leave behind. `address`: of the worker.
    """

    def __init__(self, folder: str, address: str) -> None:
        self._folder = folder
        self._address = address
        self._lock = threading.Lock()
        self._engines: dict[EngineIdentity, _Engine] = {}
        self._engine_of: dict[str, _Engine] = {}

    def join(
        self, run: str, settings: EngineSettings, find_model: Callable[[], Path], send_report: Reporter
    ) -> EngineShare:
        """A share of the engine that these settings ask for. An engine that was given up is no use to new runs."""
        with self._lock:
            engine = self._engines.get(settings.identity)
            if engine is None or engine.keeper.has_failed:
                folder = tempfile.TemporaryDirectory(prefix="lorabatch-engine-", dir=self._folder)
                engine = _Engine(EngineKeeper(settings, find_model, Path(folder.name), self._address), folder)
                self._engines[settings.identity] = engine
            engine.runs.add(run)
            self._engine_of[run] = engine
            return engine.keeper.join(run, send_report)

    def leave(self, run: str, timeout_s: float) -> tempfile.TemporaryDirectory[str] | None:
        """A run is over: its open shards fail with `ShardAbandonedError`, and nobody else's. With the last run the
        engine ends; what is returned then is its folder, to be removed when its log has been read.
        """
        with self._lock:
            engine = self._engine_of.pop(run)
            engine.runs.discard(run)
            is_last = not engine.runs
            if is_last:
                self._engines = {known: other for known, other in self._engines.items() if other is not engine}
        engine.keeper.leave(run, timeout_s)
        if not is_last:
            return None
        engine.keeper.close(timeout_s)
        return engine.folder


def engines_of(worker: Worker) -> WorkerEngines:
    """The engines of a worker."""
    found = worker.extensions.setdefault(_EXTENSION, WorkerEngines(worker.local_directory, worker.address))
    assert isinstance(found, WorkerEngines)
    return found
