"""Registers the plugin of a run on the workers of a cluster, and removes it at the end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from distributed import Client, Worker
from distributed.comm.core import CommClosedError
from distributed.diagnostics.plugin import WorkerPlugin

from ...jobs.store import JobStore
from ..cluster.versions import sent_to_workers
from ..messages import EngineSettings, new_run_id
from .plugin import RunPlugin, has_plugin, plugin_name

logger = logging.getLogger(__name__)
_ANSWER_LIMIT_S = 10.0


def register_plugin(
    client: Client, job_id: str, settings: EngineSettings, store: JobStore, *, starts_later: bool = False
) -> str:
    """Start an engine on every worker, including workers that join later. Returns the id of this run of the job.
    `starts_later`: whether `start_engines` starts them.

    Plugins of an earlier run of this job, whose coordinator is gone, are removed first: they have the job's record of
    the earlier run.
    """
    _take_down(client, *client.run_on_scheduler(_plugins_of_job, job_id=job_id))
    run_id = new_run_id(job_id)
    _register(client, RunPlugin(run_id, settings, store, starts_later=starts_later))
    return run_id


def start_engines(client: Client, run_id: str) -> None:
    """Start the engines of a run that starts them later. Nothing is done on workers where they were started before."""
    _register(client, _StartEngine(run_id))


class _StartEngine(WorkerPlugin):
    """Starts the engine of a run on a worker whose `RunPlugin` has not."""

    # as in `RunPlugin`
    idempotent = True

    def __init__(self, run_id: str) -> None:
        self.name = f"{plugin_name(run_id)}-engine"
        self._run_id = run_id

    def __reduce__(self) -> tuple[Any, ...]:
        return sent_to_workers(type(self), self.__dict__)

    def setup(self, worker: Worker) -> None:
        """Start the engine. Dask calls this on the worker, after it has set up the `RunPlugin`."""
        plugin: Any = worker.plugins.get(plugin_name(self._run_id))
        if isinstance(plugin, RunPlugin) and plugin.starts_later:  # else the run is over on this worker
            plugin.start_engine()


def _register(client: Client, plugin: WorkerPlugin) -> None:
    try:
        if not _answered(lambda: client.register_plugin(plugin)):
            logger.warning("some workers did not start their engines within %.0f s", _ANSWER_LIMIT_S)
    except CommClosedError:
        # Dask closes the connection when a worker is lost during the request. All other workers have had the request,
        # and later ones will; if the scheduler itself is lost, the next request fails.
        if client.status != "running":
            raise
        logger.warning("a worker was lost while it was asked to start its engine")


def unregister_plugin(client: Client, run_id: str) -> None:
    """End a run's engines on every worker; their finished rows are in `wip` afterwards."""
    _take_down(client, _StartEngine(run_id).name, plugin_name(run_id))


def is_registered(client: Client, run_id: str) -> bool:
    """Whether workers have engines of the run, or get them as they join."""
    return bool(client.run_on_scheduler(has_plugin, name=plugin_name(run_id)))


def _plugins_of_job(dask_scheduler: Any, job_id: str) -> list[str]:
    names: list[str] = list(dask_scheduler.worker_plugins)
    return [name for name in names if name.startswith("lorabatch-") and f"-{job_id}-" in name]


def _take_down(client: Client, *names: str) -> None:
    def unregister() -> None:
        for name in names:
            # A worker that is leaving answers with an error, or not at all.
            with contextlib.suppress(Exception):
                if client.run_on_scheduler(has_plugin, name=name):
                    client.unregister_worker_plugin(name)

    if names and client.status == "running" and not _answered(unregister):
        logger.warning("some workers did not stop their engines within %.0f s", _ANSWER_LIMIT_S)


def _answered(ask: Callable[[], object]) -> bool:
    """Call `ask`, which asks all workers for something. Returns whether it was done within `_ANSWER_LIMIT_S`: a worker
    that hangs must not hold up the caller.

    Raises what `ask` raises in time.
    """
    failures: list[Exception] = []

    def run() -> None:
        try:
            ask()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="ask all workers", daemon=True)
    thread.start()
    thread.join(_ANSWER_LIMIT_S)
    if failures:
        raise failures[0]
    return not thread.is_alive()
