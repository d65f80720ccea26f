"""`JobReporter`: shows the latest state of a job and writes it to `state.json`.

The coordinator's `show` publishes a state: the dashboard's page and the job's followers receive it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from distributed import Client

from ...jobs.errors import (
    DamagedRecordError,
    ErrorBudgetError,
    InputRowsError,
    JobCancelledError,
    JobInterruptedError,
    OutputConflictError,
    StorageError,
)
from ...jobs.opening.opened_job import OpenedJob
from ...jobs.options.values import ErrorBudget
from ...jobs.record import BEGINNING_PHASES, JobState, Phase
from ...jobs.status.job_status import is_silent
from ...jobs.status.worker_names import WorkerNames
from ...jobs.storage.redaction import redacted_url
from ...jobs.store import JobStore
from ..messages import PublishedState, StorageWait
from ..result import JobResult
from .topics import STATES

logger = logging.getLogger(__name__)
_LEAST_INTERVAL_S = 0.2
_REFRESH_INTERVAL_S = 5.0
INTERRUPTED = "Interrupted. Finished rows are kept; run the same command again to go on."


class JobReporter:
    """Reports the states of one run; called with each of them. `show`: shows a state to the job's followers. `before`:
    the state that the counters go on from.
    """

    def __init__(
        self,
        store: JobStore,
        show: Callable[[JobState], None],
        budget: ErrorBudget,
        before: JobState | None = None,
    ) -> None:
        self._store = store
        self._show = show
        self._budget = budget
        #: Notes of every state from now on.
        self.notes: tuple[str, ...] = ()
        #: Waits of workers, put from any thread and shown by `waits_shown`; None ends it.
        self.waits: queue.SimpleQueue[StorageWait | None] = queue.SimpleQueue()
        # Worker -> text about the storage that it waits for now.
        self._waiting: dict[str, str] = {}
        #: Name of each phase so far, and its beginning in seconds since the epoch.
        self.phases: list[tuple[str, float]] = []
        self._is_second = False
        self._found_at_work: JobState | None = None
        # `kept_fresh` writes from a thread of its own
        self._lock = threading.RLock()
        #: The latest state.
        self.latest = before or JobState("starting", time.time())

    @property
    def output(self) -> str:
        """URL of the job's output, without passwords and signatures."""
        return redacted_url(self._store.url)

    def __call__(self, state: JobState) -> None:
        """Report a state. Raises `ErrorBudgetError` when it has more errors than the job allows."""
        state = replace(state, notes=self._all_notes(), run_id=self.latest.run_id)
        self._write(state)
        self._show(state)
        self.check_budget(state.rows_error, state.rows)

    def phase(self, phase: Phase, rows: int, *, rows_indexed: int = 0, rows_done: int = 0) -> None:
        """Report that a phase of the job began, or its progress; counters go on from the latest state. Each report is a
        write to storage, so that progress within `_LEAST_INTERVAL_S` of the last report is left out.
        """
        is_news = phase != self.latest.phase or rows_indexed >= rows
        if phase != self.latest.phase:
            self.phases.append((phase, time.time()))
        if not is_news and time.time() - self.latest.updated_at_s < _LEAST_INTERVAL_S:
            return
        state = replace(
            self.latest,
            phase=phase,
            updated_at_s=time.time(),
            rows=rows,
            rows_indexed=rows_indexed,
            rows_done=max(rows_done, self.latest.rows_done),
            shards_done=self.latest.shards if rows_done >= rows else self.latest.shards_done,
            tokens_per_s=0.0,
            eta_s=None,
            eta_range_s=None,
            workers=(),
            notes=self._all_notes(),
        )
        self._write(state)
        self._show(state)

    def begins(self, phase: Phase) -> None:
        """Report that a run begins, unless another run is at work. The other run then reports, and a failure of this
        one is not reported as the other's end.
        """
        self._found_at_work = self._run_at_work()
        self._is_second = self._found_at_work is not None
        if not self._is_second:
            self._begin(phase)

    def takes_over(self) -> None:
        """Begin after all if the other run that was at work has not reported since. A run that has is on another
        cluster.
        """
        if self._is_second and self._run_at_work() in (None, self._found_at_work):
            self._is_second = False
            self._begin(self.latest.phase)

    def _run_at_work(self) -> JobState | None:
        """The latest state, if it is of a run that has not ended, for all that is known."""
        found = latest_state(self._store)
        return None if found is None or found.is_final or is_silent(found, time.time()) else found

    def _begin(self, phase: Phase) -> None:
        # A request to cancel was for a run before this one.
        self._store.clear_cancel()
        self._write(replace(self.latest, phase=phase, updated_at_s=time.time()))
        self._show(self.latest)

    @contextmanager
    def kept_fresh(self, is_at_work: Callable[[], bool]) -> Iterator[None]:
        """Within the block, write the latest state again when it grows old. An old state would count as a lost process,
        but some phases have nothing new to report for minutes. `is_at_work`: whether it is this process that reports;
        called before each write.
        """
        is_over = threading.Event()

        def refresh() -> None:
            while not is_over.wait(_REFRESH_INTERVAL_S):
                if not is_at_work():
                    continue
                with self._lock:
                    is_old = time.time() - self.latest.updated_at_s >= _REFRESH_INTERVAL_S
                    if is_old and not self.latest.is_final and not self._is_succeeded():
                        self._write(replace(self.latest, updated_at_s=time.time()))

        thread = threading.Thread(target=refresh, name="job reporter", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def waits_shown(self) -> Iterator[None]:
        """Within the block, show the storage that workers of the run wait for, even while this process waits for it."""

        def show() -> None:
            while (wait := self.waits.get()) is not None:
                self._waiting.pop(wait.worker, None)
                if wait.text:
                    self._waiting[wait.worker] = wait.text
                self._show(replace(self.latest, notes=self._all_notes()))

        thread = threading.Thread(target=show, name="job waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.waits.put(None)
            thread.join()

    def _all_notes(self) -> tuple[str, ...]:
        names = WorkerNames(self.latest.worker_addresses)
        # the note of a wait is left out once the wait has ended
        return self.notes + tuple(f"{names.name(worker)}: {text}" for worker, text in list(self._waiting.items()))

    @property
    def is_starting(self) -> bool:
        """Whether the run starts, and its command reports its states."""
        return self.latest.phase == "starting" and not self._is_second

    def handed_over(self) -> None:
        """Report that a cluster has the job, unless a coordinator reports already."""
        found = latest_state(self._store)
        if found is not None and found.is_of_command:
            self._write(replace(found, phase="queued", updated_at_s=time.time()))

    def check_budget(self, num_errors: int, num_rows: int) -> None:
        """Raise `ErrorBudgetError` when `num_errors` errors in `num_rows` rows exceed the job's budget."""
        if not self._budget.allows(num_errors, num_rows):
            raise ErrorBudgetError(
                f"max_errors={self._budget}: {num_errors} of {num_rows} rows ended in errors, "
                f"{self._budget.limit(num_rows)} are allowed. The column `error` of the parts says why; raise "
                "--max-errors to go on, or correct the cause. The same command then computes rows of corrected "
                "adapters again; for other rows start over with --overwrite."
            )

    def done(self, result: JobResult) -> None:
        """Report that the job has finished. Files that only a running job needs are removed before the state is shown:
        a Dask scheduler that hangs holds up the publication, and ends the coordinator when it is ended itself.

        Raises `StorageError` when the state cannot be written: another run of the job must write it.
        """
        last = replace(
            self.latest,
            phase="done",
            updated_at_s=time.time(),
            rows=result.num_rows,
            rows_done=result.num_rows,
            rows_error=result.num_errors,
            rows_reused=result.num_reused,
            shards=result.num_parts,
            shards_done=result.num_parts,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            tokens_per_s=0.0,
            eta_s=0.0,
            eta_range_s=None,
            batch_fill=result.batch_fill,
            prefix_hit_rate=result.prefix_hit_rate,
            adapter_use=result.adapter_use,
            workers=(),
            adapters=tuple(done.count for done in result.adapters if done.adapter in self.latest.adapter_rows),
        )
        with self._lock:
            self.latest = last
            self._store.settled().write_last_state(last)
        self.clean_up()
        self._show(last)

    def clean_up(self) -> None:
        """Remove files that only a running job needs. Files that cannot be removed are logged."""
        try:
            self._store.settled().clean_up()
        except StorageError as error:
            logger.warning("left in the output: %s", error)

    def received(self, state: JobState) -> None:
        """Show a state that the coordinator has published and written."""
        with self._lock:
            self.latest, self._is_second = state, False
        self._show(state)

    @contextmanager
    def ending_recorded(self) -> Iterator[None]:
        """Report the error that ends the block as the run's last state. Ctrl-C becomes `JobInterruptedError`."""
        try:
            yield
        except KeyboardInterrupt:
            self.ended(JobInterruptedError(INTERRUPTED))
            raise JobInterruptedError(INTERRUPTED) from None
        except Exception as error:
            self.ended(error)
            raise

    def ended(self, error: Exception) -> None:
        """Report that the run ended by this error, unless its end is reported already, the output is another job's, or
        another run of the job reports by now.
        """
        if self.latest.is_final or self._is_second:
            return
        if self.latest.run_id and self._is_succeeded():
            return
        match error:
            case OutputConflictError():
                return  # the output's state is another job's
            case JobCancelledError():
                phase: Phase = "cancelled"
            case JobInterruptedError():
                phase = "interrupted"
            case _:
                phase = "failed"
        last = replace(
            self.latest,
            phase=phase,
            updated_at_s=time.time(),
            message=WorkerNames(self.latest.worker_addresses).in_text(str(error)) or type(error).__name__,
            error=type(error).__name__,
            # The rows, or the budget for errors, must change first.
            can_resume=not isinstance(error, InputRowsError | ErrorBudgetError),
            workers=(),
            eta_s=None,
            eta_range_s=None,
        )
        self._show(last)
        self._write(last)

    def _is_succeeded(self) -> bool:
        """Whether another run has reported since, as far as storage says: this process was stopped, or is slow to end.
        For a command that has heard of no coordinator yet, the other run may be its own.
        """
        try:
            found = latest_state(self._store)
        except StorageError:
            return False
        if found is None or found.run_id in ("", self.latest.run_id):
            return False
        return found.updated_at_s > self.latest.updated_at_s

    def _write(self, state: JobState) -> None:
        try:
            with self._lock:
                self.latest = state
                store = self._store.settled()
                write = store.write_last_state if state.is_final else store.write_state
                write(state)
        except StorageError as error:
            # Storage that fails for a moment costs one update. Storage that stays away fails the shards; the state may
            # be the report of this failure.
            logger.warning("state not written: %s", error)


def state_before(job: OpenedJob, run_id: str = "") -> JobState:
    """The state that a coordinator of a run begins with, and the command that starts the run before it (without
    `run_id`).

    It has the counters of the latest state, unless adapters have changed since: then only the parts can say how many
    rows still hold.
    """
    found, rows = latest_state(job.store), job.record.num_asked
    spent_s = 0.0 if found is None else found.worker_s
    begins = JobState("starting", time.time(), rows=rows, run_id=run_id, worker_s=spent_s)
    is_of_this_run = found is not None and run_id != "" and (found.run_id == run_id or found.phase in BEGINNING_PHASES)
    if found is None or (job.changed_adapters and not is_of_this_run):
        return begins
    return replace(
        begins,
        rows_done=found.rows_done,
        rows_reused=found.rows_reused if is_of_this_run else found.rows_done,
        worker_addresses=found.worker_addresses if is_of_this_run else (),
        rows_error=found.rows_error,
        shards=found.shards,
        shards_done=found.shards_done,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
    )


def latest_state(store: JobStore) -> JobState | None:
    """The job's latest state; None when there is none, or it is damaged and will be replaced."""
    try:
        return store.settled().read_state()
    except DamagedRecordError:
        return None


def state_publisher(client: Client, run_id: str, output: str) -> Callable[[JobState], None]:
    """A function that publishes states to all followers of the run. `output`: URL of the output, without secrets."""

    def publish(state: JobState) -> None:
        if client.status == "running":
            STATES.publish(client, run_id, PublishedState(output, state))

    return publish
