"""Checks that all sides of a cluster have the same version of lorabatch.

`check_versions` refuses a job before anything of lorabatch is sent to its cluster. A worker of another version that
joins while a job runs leaves again and logs why (`sent_to_workers`), instead of failing at its tasks.
"""

from __future__ import annotations

import logging
from pkgutil import resolve_name
from typing import Any

from distributed import Client, Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import dumps, loads

from ...jobs.errors import JobFailedError
from ...version import __version__

logger = logging.getLogger(__name__)
_ANSWER_LIMIT_S = 10.0
_WORKERS_SHOWN = 5
# Name of the version, which a function of the standard library looks up: a function of lorabatch cannot be loaded
# where lorabatch is missing, and one that travels by value cannot be loaded by another version of Python.
_VERSION = "lorabatch:__version__"


def check_versions(client: Client) -> None:
    """Raise `JobFailedError` naming the scheduler and the workers that lack lorabatch or have another version of it."""
    workers = _workers_versions(client)
    problem = version_problem(_scheduler_version(client), workers)
    if problem:
        raise JobFailedError(problem)


def check_scheduler(client: Client) -> None:
    """Raise `JobFailedError` if the scheduler lacks lorabatch or has another version of it. For commands that run
    nothing on workers.
    """
    problem = version_problem(_scheduler_version(client), {})
    if problem:
        raise JobFailedError(problem)


def version_problem(scheduler: str | None, workers: dict[str, str | None]) -> str:
    """A message about sides with another version (None: no lorabatch) and what to do about it; "" if all match."""
    wrong = {address: found for address, found in workers.items() if found != __version__}
    sides = [] if scheduler == __version__ else [f"the scheduler has {scheduler or 'none'}"]
    if wrong:
        shown = [f"{address} has {found or 'none'}" for address, found in list(wrong.items())[:_WORKERS_SHOWN]]
        more = ", …" if len(wrong) > _WORKERS_SHOWN else ""
        sides.append(f"{len(wrong)} of {len(workers)} workers have another or none ({', '.join(shown)}{more})")
    if not sides:
        return ""
    return (
        f"cluster: lorabatch {__version__} is expected on the scheduler and every worker; {' and '.join(sides)}. "
        f"Install lorabatch {__version__} into their environments and start them again."
    )


def _scheduler_version(client: Client) -> str | None:
    try:
        return str(client.run_on_scheduler(resolve_name, _VERSION))
    except (ImportError, AttributeError):
        return None


def _workers_versions(client: Client) -> dict[str, str | None]:
    """Worker -> its version, None if it lacks lorabatch; without workers that do not answer, such as leaving ones."""
    try:
        found: dict[str, Any] = client.sync(
            client._run, resolve_name, _VERSION, on_error="return", callback_timeout=_ANSWER_LIMIT_S
        )
    except TimeoutError:
        # A worker that hangs must not hold up the others: its shards will go to them.
        logger.warning("some workers did not reply with their version within %.0f s", _ANSWER_LIMIT_S)
        return {}
    missing = (ImportError, AttributeError)
    versions = {address: None if isinstance(reply, missing) else reply for address, reply in found.items()}
    return {address: version for address, version in versions.items() if not isinstance(version, Exception)}


class _LeavingWorker(WorkerPlugin):
    """Makes a worker leave: takes the place of a plugin that a client of another version has sent."""

    def __init__(self, version: str) -> None:
        self._version = version

    def setup(self, worker: Worker) -> None:
        """Log why the worker leaves, and make it leave. Dask calls this on the worker while it starts."""
        logger.error(
            "lorabatch=%r: a job runs on this cluster with %r, so this worker leaves. Install lorabatch %s into its "
            "environment and start it again.",
            __version__,
            self._version,
            self._version,
        )
        worker.loop.add_callback(_leave, worker)


def sent_to_workers(plugin: type[WorkerPlugin], state: dict[str, Any]) -> tuple[Any, ...]:
    """The value that `plugin.__reduce__` returns. The receiver reads the version first: another version may not know
    the classes in `state`.
    """
    return _received, (__version__, dumps((plugin, state)))


def _received(version: str, packed: bytes) -> WorkerPlugin:
    """The plugin, or a `_LeavingWorker` when a client of another version has sent it.

    An exception here would make Dask's worker and nanny wait for one another for ever.
    """
    if version != __version__:
        return _LeavingWorker(version)
    kind, state = loads(packed)
    plugin: WorkerPlugin = kind.__new__(kind)
    plugin.__dict__.update(state)
    return plugin


async def _leave(worker: Worker) -> None:
    # A worker that closes before it has started does not have its nanny close too.
    await worker
    await worker.close(reason="another version of lorabatch")
