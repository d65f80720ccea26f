"""Registers the plugin of a run on the workers of a cluster, and removes it at the end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from distributed import Client
from distributed.comm.core import CommClosedError

from ...jobs.store import JobStore
from ..messages import EngineSettings, new_run_id
from .plugin import RunPlugin, has_plugin, plugin_name

logger = logging.getLogger(__name__)
_ANSWER_LIMIT_S = 10.0


def register_plugin(client: Client, job_id: str, settings: EngineSettings, store: JobStore) -> str:
    """Start an engine on every worker, including workers that join later. Returns the id of this run of the job.

    Plugins of an earlier run of this job, whose coordinator is gone, are removed first: they have the job's record of
    the earlier run.
    """
    for name in client.run_on_scheduler(_plugins_of_job, job_id=job_id):
        _take_down(client, name)
    run_id = new_run_id(job_id)
    plugin = RunPlugin(run_id, settings, store)
    try:
        if not _answered(lambda: client.register_plugin(plugin)):
            logger.warning("some workers did not start their engines within %.0f s", _ANSWER_LIMIT_S)
    except CommClosedError:
        # Dask closes the connection when a worker is lost during the request. All other workers have had the request,
        # and later ones will; if the scheduler itself is lost, the next request fails.
        if client.status != "running":
            raise
        logger.warning("a worker was lost while it was asked to start its engine")
    return run_id


def unregister_plugin(client: Client, run_id: str) -> None:
    """End a run's engines on every worker; their finished rows are in `wip` afterwards."""
    _take_down(client, plugin_name(run_id))


def is_registered(client: Client, run_id: str) -> bool:
    """Whether workers have engines of the run, or get them as they join."""
    return bool(client.run_on_scheduler(has_plugin, name=plugin_name(run_id)))


def _plugins_of_job(dask_scheduler: Any, job_id: str) -> list[str]:
    names: list[str] = list(dask_scheduler.worker_plugins)
    return [name for name in names if name.startswith("lorabatch-") and f"-{job_id}-" in name]


def _take_down(client: Client, name: str) -> None:
    def unregister() -> None:
        # A worker that is leaving answers with an error, or not at all.
        with contextlib.suppress(Exception):
            client.unregister_worker_plugin(name)

    if client.status == "running" and not _answered(unregister):
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
