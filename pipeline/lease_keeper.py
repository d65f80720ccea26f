"""Has another worker coordinate a job whose coordinator hangs: on the Dask scheduler, which would take minutes.

Dask starts a task elsewhere when its worker is lost; a worker that is stopped or swapped out is lost after `worker-ttl`
only. What this relies on beside documented names: `Scheduler._reschedule`, `TaskState.worker_restrictions` and
`loose_restrictions` (`tests/pipeline/test_lease_keeper.py`).
"""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

from distributed import Client, Scheduler, Status
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from .. import __version__
from .leases import Leases

logger = logging.getLogger(__name__)

# What the scheduler answers to coordinators.
LEASE_OP = "lorabatch_lease"
_LOOK_INTERVAL_S = 1.0
# Workers send heartbeats every few seconds, in big clusters less often.
_LIVELY_WITHIN_S = 15.0


class LeaseKeeper(SchedulerPlugin):
    """Keeps the leases of all runs on a cluster."""

    name = f"lorabatch-leases-{__version__}"
    # Registering it again, as each job does, must not forget who holds what.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask on the scheduler."""
        self._scheduler = scheduler
        self._leases = Leases(time.monotonic())
        scheduler.handlers[LEASE_OP] = self._answer
        scheduler.periodic_callbacks[self.name] = look = PeriodicCallback(self._look, 1000 * _LOOK_INTERVAL_S)
        look.start()

    async def _answer(
        self, run_id: str, action: Literal["take", "renew", "end"], attempt: int = 0, limit_s: float = 0.0
    ) -> dict[str, Any]:
        now_s = time.monotonic()
        match action:
            case "take":
                return {"attempt": self._leases.take(run_id, limit_s, now_s)}
            case "renew":
                return {"is_held": self._leases.renew(run_id, attempt, now_s)}
            case "end":
                self._leases.end(run_id)
        return {}

    def _look(self) -> None:
        now_s = time.monotonic()
        for run_id in self._leases.lapsed(now_s):
            task = self._scheduler.tasks.get(job_key(run_id))
            if task is None or task.state in ("memory", "erred", "released", "forgotten"):
                self._leases.end(run_id)
            elif task.processing_on is not None:
                self._replace(run_id, task, now_s)

    def _replace(self, run_id: str, task: Any, now_s: float) -> None:
        """Start the coordinator's task on another worker; where there is none, whoever hangs may come back."""
        hung = task.processing_on.address
        others = self._lively_workers() - {hung}
        if not others:
            return
        logger.warning("the coordinator of %s on %s gives no sign of life; another takes over", run_id, hung)
        self._leases.pass_on(run_id, now_s)
        task.worker_restrictions, task.loose_restrictions = others, True
        self._scheduler._reschedule(task.key, hung, stimulus_id=f"lorabatch-lease-{time.time()}")

    def _lively_workers(self) -> set[str]:
        now_s = time.time()
        workers = self._scheduler.workers.values()
        return {w.address for w in workers if w.status is Status.running and now_s - w.last_seen < _LIVELY_WITHIN_S}


def job_key(run_id: str) -> str:
    """The key of the Dask task that coordinates a run."""
    return f"lora_job-{run_id}"


def keep_leases(client: Client) -> None:
    """Have the cluster replace coordinators that hang. Where it cannot, Dask does, later."""
    try:
        client.register_plugin(LeaseKeeper())
    except Exception as error:
        logger.warning("coordinators that hang are replaced by Dask only: %s", error or type(error).__name__)
