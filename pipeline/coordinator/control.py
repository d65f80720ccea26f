"""What a running job's coordinator must know to stop: asked to, displaced by another, or forgotten by Dask.

Which workers have not reported for so long that they count as lost. Pure: told the time, it holds no clock.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from types import TracebackType
from typing import Any, Self

from distributed import Client, Status, Worker

from ...jobs.errors import JobCancelledError, JobFailedError, JobInterruptedError
from ...jobs.store import JobStore
from ..cluster.connect import SCHEDULER_LOST
from ..messages import CoordinatorStarted, StopRun, job_of_run
from ..monitoring.reporter import INTERRUPTED
from ..monitoring.topics import CONTROL
from .lease import CoordinatorLease

# How often CANCEL is looked for in storage.
_CANCEL_INTERVAL_S = 2.0


class DisplacedError(Exception):
    """This coordinator's worker ends, or another coordinator has taken over: leave everything as it is."""


class JobControl:
    """Asked by every stage of a running job, often. A context manager.

    `task_key`: of the coordinator's own task. When its worker has lost it, Dask has moved it, or nobody waits for the
    job any more.
    """

    def __init__(
        self, client: Client, worker: Worker, store: JobStore, run_id: str, task_key: Any, lease: CoordinatorLease
    ) -> None:
        self.coordinator_id = uuid.uuid4().hex[:6]
        self._client = client
        self._worker = worker
        self._store = store
        self._job_id = job_of_run(run_id)
        self._run_id = run_id
        self._task_key = task_key
        self._lease = lease
        self._is_stop_asked = self._is_replaced = False
        self._looked_s = time.monotonic()

    def __enter__(self) -> Self:
        CONTROL.subscribe(self._client, self._run_id, self._received)
        CONTROL.publish(self._client, self._run_id, CoordinatorStarted(self.coordinator_id))
        published = CONTROL.published(self._client, self._run_id)
        self._is_stop_asked |= any(isinstance(message, StopRun) for _, message in published)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        CONTROL.unsubscribe(self._client, self._run_id)

    def _received(self, message: StopRun | CoordinatorStarted) -> None:
        match message:
            case StopRun():
                self._is_stop_asked = True
            case CoordinatorStarted(coordinator_id):
                self._is_replaced |= coordinator_id != self.coordinator_id

    @property
    def is_displaced(self) -> bool:
        """Whether somebody else goes on with the job, or will."""
        is_leaving = self._worker.status not in (Status.running, Status.paused)
        return self._is_replaced or is_leaving or self._lease.is_lost

    def check(self) -> None:
        """Raise `DisplacedError`, `JobFailedError` when Dask's scheduler is gone, `JobInterruptedError` when the
        client asked to stop or has died, `JobCancelledError` when CANCEL lies in the output, `OutputConflictError`
        when the output is another job's by now.
        """
        if self.is_displaced:
            raise DisplacedError
        if self._client.status == "closed":
            raise JobFailedError(SCHEDULER_LOST)
        if not self._is_stop_asked and self._is_disowned():
            # A busy worker may hear late that Dask has moved the task.
            self._is_replaced = self._client.run_on_scheduler(_is_wanted, key=self._task_key)
            self._is_stop_asked = not self._is_replaced
        if self._is_replaced:
            raise DisplacedError
        if self._is_stop_asked:
            raise JobInterruptedError(INTERRUPTED)
        now_s = time.monotonic()
        if now_s - self._looked_s >= _CANCEL_INTERVAL_S:
            self._looked_s = now_s
            self._store.check_holder(self._job_id)
            if self._store.is_cancel_requested():
                raise JobCancelledError("cancelled on request. Finished rows are kept; `lorabatch resume` goes on.")

    def _is_disowned(self) -> bool:
        task = self._worker.state.tasks.get(self._task_key)
        return task is None or task.state in ("cancelled", "released", "forgotten")


def _is_wanted(dask_scheduler: Any, key: Any) -> bool:
    task = dask_scheduler.tasks.get(key)
    return task is not None and bool(task.who_wants)


# Hosts report once a second. Dask gives up a silent worker after minutes; its rows need not wait so long.
SILENCE_LIMIT_S = 20.0
# Who slept longer than this between two calls (its own process was stopped) must first hear what was said meanwhile.
_OWN_SLEEP_S = 6.0


class RollCall:
    """Told every report; `silent` names those whose rows should go to others. A worker that reports again is back."""

    def __init__(self, now_s: float) -> None:
        self._heard_s: dict[str, float] = {}
        self._called_s = now_s

    def heard(self, worker: str, now_s: float) -> None:
        """A worker reported."""
        self._heard_s[worker] = now_s

    def silent(self, workers: Collection[str], now_s: float) -> set[str]:
        """Those of `workers` that have been silent for too long. To be asked every few seconds."""
        asleep_s, self._called_s = now_s - self._called_s, now_s
        if asleep_s > _OWN_SLEEP_S:
            self._heard_s = {worker: heard_s + asleep_s for worker, heard_s in self._heard_s.items()}
        self._heard_s = {worker: self._heard_s.get(worker, now_s) for worker in workers}
        return {worker for worker, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_LIMIT_S}
