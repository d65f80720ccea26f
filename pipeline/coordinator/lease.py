"""Leases of runs: a coordinator that has been silent for too long is replaced on another worker.

Dask starts a task elsewhere when its worker is lost, but a worker that is stopped or swapped out is lost only after
`worker-ttl`, which takes minutes, and one whose threads have other users' tasks keeps the task until they end.
`LeasePlugin` on the Dask scheduler therefore holds a lease of each run, from the moment at which its task is sent to a
worker. The coordinator takes and renews it (`CoordinatorLease`). Beside documented names it uses
`Scheduler._reschedule`, `TaskState.worker_restrictions` and `loose_restrictions`; the test of this file says what is
relied on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import Any, Self

from distributed import Client, Scheduler, Status
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from ...scheduler.liveness import LivenessDetector
from ...version import __version__
from ..cluster.clock import follow_clock, parts_of_server
from ..messages import BEGIN_LIMIT_S, JOB_PREFIX, job_key

logger = logging.getLogger(__name__)
_LEASE_LIMIT_S = 20.0
_LOOK_INTERVAL_S = 1.0
# Longest time between two looks at the leases, unless the scheduler's own process was stopped.
_MAX_GAP_S = 6.0
# A worker counts as alive up to this age of its last heartbeat. Workers send them every few seconds, in big clusters
# less often.
_ALIVE_WITHIN_S = 15.0
_RENEWALS_PER_LIMIT = 5
_REPLY_LIMIT_S = 5.0
# Operations of the scheduler that coordinators call.
_TAKE_OP, _RENEW_OP, _END_OP = "lorabatch_take_lease", "lorabatch_renew_lease", "lorabatch_end_lease"


class Leases:
    """Counts the attempts to coordinate each run; the latest one holds the run's lease. Holds no clock."""

    def __init__(self, now_s: float) -> None:
        self._attempts: dict[str, int] = {}
        self._liveness = LivenessDetector(_LEASE_LIMIT_S, _MAX_GAP_S, now_s)

    def sent(self, run_id: str, now_s: float) -> None:
        """Expect a coordinator that was sent to a worker within `BEGIN_LIMIT_S`."""
        self._attempts.setdefault(run_id, -1)
        self._liveness.heard(run_id, now_s, limit_s=BEGIN_LIMIT_S)

    def take(self, run_id: str, limit_s: float, now_s: float) -> int:
        """Give the lease to a new attempt and return its number, which is higher than all before. Earlier attempts no
        longer hold the lease.
        """
        attempt = self._attempts[run_id] = self._attempts.get(run_id, -1) + 1
        self._liveness.heard(run_id, now_s, limit_s=limit_s)
        return attempt

    def renew(self, run_id: str, attempt: int, now_s: float) -> bool:
        """Renew the lease and return True if the attempt still holds it. If not, it must leave everything as it is."""
        if self._attempts.get(run_id) != attempt:
            return False
        self._liveness.heard(run_id, now_s)
        return True

    def lapsed(self, now_s: float) -> list[str]:
        """Runs whose coordinators have been silent for too long. To be called every few seconds."""
        return self._liveness.silent(self._attempts, now_s)

    def pass_on(self, run_id: str, now_s: float) -> None:
        """Take the lease from the coordinator that is being replaced. The next one gets the time to start."""
        self._attempts[run_id] += 1
        self._liveness.heard(run_id, now_s)

    def end(self, run_id: str) -> None:
        """Forget a run that is over."""
        self._attempts.pop(run_id, None)
        self._liveness.forget(run_id)


class LeasePlugin(SchedulerPlugin):
    """Holds the leases of all runs on a cluster, and starts another coordinator where one has lapsed."""

    name = f"lorabatch-leases-{__version__}"
    # Each job registers the plugin again, which must not forget the leases.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations on leases and the periodic look. Dask calls this on the scheduler."""
        self._scheduler = scheduler
        self._leases = Leases(time.monotonic())
        scheduler.handlers |= {_TAKE_OP: self._take, _RENEW_OP: self._renew, _END_OP: self._end}
        scheduler.periodic_callbacks[self.name] = look = PeriodicCallback(self._look, 1000 * _LOOK_INTERVAL_S)
        look.start()
        self._clock = asyncio.create_task(follow_clock(partial(parts_of_server, scheduler)))

    async def close(self) -> None:
        """Look at the clock no more. Dask calls this when the scheduler ends."""
        self._clock.cancel()

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Begin the lease of a run whose task goes to a worker. Dask calls this for every task of every user."""
        if finish == "processing" and isinstance(key, str) and key.startswith(JOB_PREFIX):
            self._leases.sent(key.removeprefix(JOB_PREFIX), time.monotonic())

    async def _take(self, run_id: str, limit_s: float) -> int:
        """Number of the coordinator's attempt, which holds the lease until it has been silent for `limit_s`."""
        return self._leases.take(run_id, limit_s, time.monotonic())

    async def _renew(self, run_id: str, attempt: int) -> bool:
        """Whether the attempt holds the lease, which is renewed then."""
        return self._leases.renew(run_id, attempt, time.monotonic())

    async def _end(self, run_id: str, attempt: int) -> None:
        """Drop the lease of a run that is over, if the attempt holds it."""
        if self._leases.renew(run_id, attempt, time.monotonic()):
            self._leases.end(run_id)

    def _look(self) -> None:
        now_s = time.monotonic()
        for run_id in self._leases.lapsed(now_s):
            task = self._scheduler.tasks.get(job_key(run_id))
            if task is None or task.state in ("memory", "erred", "released", "forgotten"):
                self._leases.end(run_id)
            elif task.processing_on is not None:
                self._replace(run_id, task, now_s)

    def _replace(self, run_id: str, task: Any, now_s: float) -> None:
        """Start the coordinator's task on another worker. Without another worker alive it does nothing: the silent one
        may come back.
        """
        silent = task.processing_on.address
        others = self._alive_workers() - {silent}
        if not others:
            return
        logger.warning("the coordinator of %s on %s is silent; another takes over", run_id, silent)
        self._leases.pass_on(run_id, now_s)
        task.worker_restrictions, task.loose_restrictions = others, True
        self._scheduler._reschedule(task.key, silent, stimulus_id=f"lorabatch-lease-{time.time()}")
        # The task has its new worker. If that is lost while there is no other, a worker that joins later must do.
        task.worker_restrictions, task.loose_restrictions = None, False

    def _alive_workers(self) -> set[str]:
        now_s = time.time()
        workers = self._scheduler.workers.values()
        return {w.address for w in workers if w.status is Status.running and now_s - w.last_seen < _ALIVE_WITHIN_S}


def keep_leases(client: Client) -> None:
    """Have the cluster replace silent coordinators. If the plugin cannot be registered, Dask alone does so, later."""
    try:
        client.register_plugin(LeasePlugin())
    except Exception as error:
        logger.warning("silent coordinators are replaced by Dask only: %s", str(error) or type(error).__name__)


class CoordinatorLease:
    """Holds a run's lease while the block runs, and renews it in a thread of its own.

    `renew_interval_s`: by default `limit_s` divided by `_RENEWALS_PER_LIMIT`. Without a `LeasePlugin` on the scheduler
    the lease is never lost.
    """

    def __init__(self, client: Client, run_id: str, limit_s: float, renew_interval_s: float | None = None) -> None:
        self._client = client
        self._run_id = run_id
        self._limit_s = limit_s
        self._renew_interval_s = renew_interval_s or limit_s / _RENEWALS_PER_LIMIT
        self._is_lost = False
        self._is_over = threading.Event()
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="coordinator lease", daemon=True)

    def __enter__(self) -> Self:
        #: Number of this coordinator's attempt; None when the scheduler keeps no leases.
        self.attempt = self._ask(_TAKE_OP, limit_s=self._limit_s)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def end(self) -> None:
        """Give the lease up, since the run is over; no other coordinator must take over."""
        self._is_over.set()
        if self.attempt is not None:
            self._ask(_END_OP, attempt=self.attempt)

    @property
    def is_lost(self) -> bool:
        """Whether another coordinator has taken over. It renews the lease first when the last renewal is half of
        `limit_s` old.
        """
        if not self._is_lost and time.monotonic() - self._renewed_s > self._limit_s / 2:
            self._renew()
        return self._is_lost

    def _keep(self) -> None:
        while not self._is_over.wait(self._renew_interval_s) and not self._is_lost:
            self._renew()

    def _renew(self) -> None:
        if self.attempt is None:
            return
        asked_s = time.monotonic()
        is_held = self._ask(_RENEW_OP, attempt=self.attempt)
        if is_held is not None:
            self._is_lost |= not is_held
            self._renewed_s = asked_s

    def _ask(self, operation: str, **arguments: float) -> int | None:
        """Call an operation on the run's lease and return its number or truth value; None when there is no reply."""
        try:
            call = getattr(self._client.scheduler, operation)
            reply = self._client.sync(call, run_id=self._run_id, **arguments, callback_timeout=_REPLY_LIMIT_S)
        except Exception as error:
            logger.debug("no reply about the lease: %s", error)
            return None
        # Dask replies with a string when its scheduler serves no such operation.
        return reply if isinstance(reply, int) else None
