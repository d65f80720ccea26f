"""`JobRun`: a job as its coordinator holds it. `JobControl`: whether the coordinator must stop."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, Self

from distributed import Client, Reschedule, Status, Worker

from ...jobs.errors import JobCancelledError, JobInterruptedError
from ...jobs.opening.opened_job import OpenedJob
from ...jobs.storage.redaction import redacted_url
from ...jobs.store import JobStore
from ..cluster.connect import scheduler_lost
from ..messages import CoordinatorStarted, StopRun, job_of_run
from ..migration.peers import Peers
from ..monitoring.reporter import INTERRUPTED, JobReporter
from ..monitoring.topics import CONTROL
from ..planning.settings import RunSettings
from .lease import CoordinatorLease

# Seconds between two looks for CANCEL in storage.
_CANCEL_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job, with the objects that its coordinator works with."""

    #: Client of the cluster that the coordinator runs on.
    client: Client
    #: The job that is run.
    job: OpenedJob
    #: Id of the run.
    run_id: str
    #: Checked between any two steps: whether the coordinator must stop.
    control: JobControl
    #: Reports the state of the job.
    reporter: JobReporter
    #: Sends messages to the run's workers.
    peers: Peers
    #: Settings of the run's engines and scheduler.
    settings: RunSettings
    #: Whether a person follows the run who can be asked whether it goes on.
    can_ask: bool = False


class JobControl:
    """Finds out whether the coordinator must stop: on request, displaced by another, or forgotten by Dask.

    A context manager. `task_key`: key of the coordinator's own task. When its worker no longer has this task, Dask has
    moved it, or no client waits for the job any more.
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

    def __exit__(self, *error: object) -> None:
        CONTROL.unsubscribe(self._client, self._run_id)

    def _received(self, message: StopRun | CoordinatorStarted) -> None:
        match message:
            case StopRun():
                self._is_stop_asked = True
            case CoordinatorStarted(coordinator_id):
                self._is_replaced |= coordinator_id != self.coordinator_id

    @property
    def is_replaced(self) -> bool:
        """Whether another coordinator goes on with the job."""
        return self._is_replaced or self._lease.is_lost

    @property
    def is_displaced(self) -> bool:
        """Whether another coordinator goes on with the job, or will."""
        return self.is_replaced or self._worker.status not in (Status.running, Status.paused)

    def check_displaced(self) -> None:
        """Raise `Reschedule`, by which Dask moves the task, when the coordinator must leave everything as it is."""
        if self.is_displaced:
            raise Reschedule

    def check(self) -> None:
        """Raise an error when the coordinator must stop.

        Raises `Reschedule` as `check_displaced` does, `JobFailedError` when Dask's scheduler is gone,
        `JobInterruptedError` when the client asked to stop or has died, `JobCancelledError` when CANCEL is in the
        output, `OutputConflictError` when the output has become another job's.
        """
        self.check_displaced()
        if self._client.status == "closed":
            raise scheduler_lost(redacted_url(self._store.url))
        if not self._is_stop_asked and self._is_disowned():
            # A busy worker may learn late that Dask has moved the task.
            self._is_replaced = self._client.run_on_scheduler(_is_wanted, key=self._task_key)
            self._is_stop_asked = not self._is_replaced
        if self._is_replaced:
            raise Reschedule
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
