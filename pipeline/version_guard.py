"""A worker of another version that joins while a job runs leaves again and says why, instead of failing at its tasks.

Those that are there when a job starts are asked by `versions.check_versions`.
"""

from __future__ import annotations

import logging
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import dumps, loads

from .. import __version__

logger = logging.getLogger(__name__)


class LeavingWorker(WorkerPlugin):
    """Set up in place of a plugin that a client of another version has sent."""

    def __init__(self, version: str) -> None:
        self._version = version

    def setup(self, worker: Worker) -> None:
        """Called by Dask on the worker while it starts."""
        logger.error(
            "lorabatch=%r: a job runs on this cluster with %r, so this worker leaves. Install lorabatch %s into its "
            "environment and start it again.",
            __version__,
            self._version,
            self._version,
        )
        worker.loop.add_callback(_leave, worker)


def sent_to_workers(plugin: type[WorkerPlugin], state: dict[str, Any]) -> tuple[Any, ...]:
    """What `plugin.__reduce__` returns: the version is read first, as others may not know the classes in `state`."""
    return _received, (__version__, dumps((plugin, state)))


def _received(version: str, packed: bytes) -> WorkerPlugin:
    """The plugin, or what stands in for it when a client of another version has sent it.

    An exception here would have Dask's worker and nanny wait for one another for ever.
    """
    if version != __version__:
        return LeavingWorker(version)
    kind, state = loads(packed)
    plugin: WorkerPlugin = kind.__new__(kind)
    plugin.__dict__.update(state)
    return plugin


async def _leave(worker: Worker) -> None:
    # Until it has started, its nanny does not hear that it is to end too.
    await worker
    await worker.close(reason="another version of lorabatch")
