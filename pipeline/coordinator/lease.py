"""Who coordinates each run, by the number of the attempt, and whose coordinator has not been heard of for too long.

Pure: told the time, it holds no clock.

Has another worker coordinate a job whose coordinator hangs: on the Dask scheduler, which would take minutes.

Dask starts a task elsewhere when its worker is lost; a worker that is stopped or swapped out is lost after `worker-ttl`
only. What this relies on beside documented names: `Scheduler._reschedule`, `TaskState.worker_restrictions` and
`loose_restrictions` (`tests/pipeline/test_lease_keeper.py`).

A coordinator's lease of its run: renewed by a thread of its own, and looked at before anything is done.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from distributed import Client, Scheduler, Status
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from ...version import __version__
from ..messages import job_key

logger = logging.getLogger(__name__)
# Who looks every few seconds and slept longer than this (its own process was stopped) must first hear what was said.
_OWN_SLEEP_S = 6.0


@dataclass(slots=True)
class _Lease:
    """Held by the coordinator of this attempt; it lapses `limit_s` after it was `heard_s` of last."""

    attempt: int
    limit_s: float
    heard_s: float


class Leases:
    """One per run. A coordinator takes it, which ends those before it, and renews it while it works."""

    def __init__(self, now_s: float) -> None:
        self._leases: dict[str, _Lease] = {}
        self._looked_s = now_s

    def take(self, run_id: str, limit_s: float, now_s: float) -> int:
        """A coordinator begins: the number of its attempt, higher than all before it."""
        before = self._leases.get(run_id)
        attempt = before.attempt + 1 if before is not None else 0
        self._leases[run_id] = _Lease(attempt, limit_s, now_s)
        return attempt

    def renew(self, run_id: str, attempt: int, now_s: float) -> bool:
        """A coordinator is at work. False: another has taken over, and it must leave everything as it is."""
        lease = self._leases.get(run_id)
        if lease is None or lease.attempt != attempt:
            return False
        lease.heard_s = now_s
        return True

    def lapsed(self, now_s: float) -> list[str]:
        """Runs whose coordinators were silent for too long. To be asked every few seconds."""
        asleep_s, self._looked_s = now_s - self._looked_s, now_s
        if asleep_s > _OWN_SLEEP_S:
            for lease in self._leases.values():
                lease.heard_s += asleep_s
        return [run_id for run_id, lease in self._leases.items() if now_s - lease.heard_s > lease.limit_s]

    def pass_on(self, run_id: str, now_s: float) -> None:
        """The run's coordinator is being replaced: from now on it holds nothing, and the next has time to begin."""
        lease = self._leases[run_id]
        lease.attempt += 1
        lease.heard_s = now_s

    def end(self, run_id: str) -> None:
        """The run is over."""
        self._leases.pop(run_id, None)


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


def keep_leases(client: Client) -> None:
    """Have the cluster replace coordinators that hang. Where it cannot, Dask does, later."""
    try:
        client.register_plugin(LeaseKeeper())
    except Exception as error:
        logger.warning("coordinators that hang are replaced by Dask only: %s", error or type(error).__name__)


_RENEWALS_PER_LIMIT = 5
_ANSWER_LIMIT_S = 5.0


class CoordinatorLease:
    """A context manager. Without a `LeaseKeeper` on the scheduler it is never lost."""

    def __init__(self, client: Client, run_id: str, limit_s: float) -> None:
        self._client = client
        self._run_id = run_id
        self._limit_s = limit_s
        self._is_lost = False
        self._is_over = threading.Event()
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="coordinator lease", daemon=True)

    def __enter__(self) -> Self:
        self.attempt: int | None = self._ask("take", limit_s=self._limit_s).get("attempt")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()

    def end(self) -> None:
        """The run is over; nobody must take over."""
        self._is_over.set()
        self._ask("end")

    @property
    def is_lost(self) -> bool:
        """Whether another coordinator has taken over. Who has slept meanwhile asks first, and waits for the answer."""
        if not self._is_lost and time.monotonic() - self._renewed_s > self._limit_s / 2:
            self._renew()
        return self._is_lost

    def _keep(self) -> None:
        while not self._is_over.wait(self._limit_s / _RENEWALS_PER_LIMIT) and not self._is_lost:
            self._renew()

    def _renew(self) -> None:
        if self.attempt is not None:
            asked_s = time.monotonic()
            answer = self._ask("renew", attempt=self.attempt)
            self._is_lost |= not answer.get("is_held", True)
            if answer:
                self._renewed_s = asked_s

    def _ask(self, action: str, **content: Any) -> dict[str, Any]:
        """The scheduler's answer; nothing when it gives none."""
        call = getattr(self._client.scheduler, LEASE_OP)
        try:
            found = self._client.sync(
                call, run_id=self._run_id, action=action, callback_timeout=_ANSWER_LIMIT_S, **content
            )
        except Exception as error:
            logger.debug("no answer about the lease: %s", error)
            return {}
        return found if isinstance(found, dict) and "status" not in found else {}
