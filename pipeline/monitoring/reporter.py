"""Tells where a job stands: to whoever watches, and to `state.json` for everybody else.

A job's states on their way from its coordinator to whoever follows it, by a Dask event topic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from distributed import Client

from ...jobs.errors import ErrorBudgetError, JobCancelledError, JobInterruptedError, OutputConflictError, StorageError
from ...jobs.record import JobState, Phase
from ...jobs.spec import ErrorBudget
from ...jobs.store import JobStore
from ..result import JobResult

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Whoever watches a job."""

    def update(self, state: JobState) -> None:
        """The job's latest state; called about once a second and at each change of phase."""

    def note(self, text: str) -> None:
        """A sentence worth keeping on the screen."""


class SilentProgress:
    """Watches nothing: what the Python API uses unless told otherwise."""

    def update(self, state: JobState) -> None:
        """See `Progress`."""

    def note(self, text: str) -> None:
        """See `Progress`."""


_LEAST_INTERVAL_S = 0.2
INTERRUPTED = "Interrupted. Finished rows are kept; run the same command again to go on."


class JobReporter:
    """The latest state of one run. Calling it with a state is how the coordinator reports."""

    def __init__(self, store: JobStore, progress: Progress, budget: ErrorBudget) -> None:
        self._store = store
        self._progress = progress
        self._budget = budget
        self._latest = JobState("checking", time.time())

    def __call__(self, state: JobState) -> None:
        """A new state. Raises `ErrorBudgetError` when it shows more errors than the job allows."""
        self._write(state)
        self._progress.update(state)
        self.check_budget(state.rows_error, state.rows)

    def phase(self, phase: Phase, rows: int, rows_done: int = 0) -> None:
        """A stage of the job began, or got on. A state is a write to storage: of many small steps some are told."""
        is_news = phase != self._latest.phase or rows_done >= rows
        if not is_news and time.time() - self._latest.updated_at_s < _LEAST_INTERVAL_S:
            return
        self(JobState(phase, time.time(), rows=rows, rows_done=rows_done))

    def check_budget(self, num_errors: int, num_rows: int) -> None:
        """Raise `ErrorBudgetError` when so many errors are too many."""
        if not self._budget.allows(num_errors, num_rows):
            raise ErrorBudgetError(
                f"max_errors={self._budget}: {num_errors} of {num_rows} rows ended in errors, "
                f"{self._budget.limit(num_rows)} are allowed. The column `error` of the parts says why; raise "
                "--max-errors to go on, or correct the cause. The same command then computes rows of corrected "
                "adapters again; for other rows start over with --overwrite."
            )

    def done(self, result: JobResult) -> None:
        """The last state of a job that has finished. What only a running job needs is removed before it is told: a
        scheduler that hangs lets nobody tell anything, and takes the coordinator along when it is ended."""
        last = replace(
            self._latest,
            phase="done",
            updated_at_s=time.time(),
            rows=result.num_rows,
            rows_done=result.num_rows,
            rows_error=result.num_errors,
            shards=result.num_parts,
            shards_done=result.num_parts,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            tokens_per_s=0.0,
            eta_s=0.0,
            batch_fill=result.batch_fill,
            prefix_hit_rate=result.prefix_hit_rate,
            workers=(),
        )
        self._write(last)
        self._store.clean_up()
        self._progress.update(last)

    def heard(self, state: JobState) -> None:
        """A state that another process has told and written down."""
        self._latest = state
        self._progress.update(state)

    @contextmanager
    def ending_recorded(self) -> Iterator[None]:
        """Whatever ends the run is the last state's message. Ctrl-C becomes `JobInterruptedError`."""
        try:
            yield
        except KeyboardInterrupt:
            self.ended(JobInterruptedError(INTERRUPTED))
            raise JobInterruptedError(INTERRUPTED) from None
        except Exception as error:
            self.ended(error)
            raise

    def ended(self, error: Exception) -> None:
        """The run ended by this error, unless its end was told before or the output is another job's."""
        if self._latest.is_final:
            return
        match error:
            case OutputConflictError():
                return  # the state there is another job's
            case JobCancelledError():
                phase: Phase = "cancelled"
            case JobInterruptedError():
                phase = "interrupted"
            case _:
                phase = "failed"
        self._end(phase, str(error) or type(error).__name__)

    def _write(self, state: JobState) -> None:
        self._latest = state
        try:
            self._store.write_state(state)
        except StorageError as error:
            # Storage that fails for a moment costs one update; storage that stays away fails the shards.
            logger.warning("state not written: %s", error)

    def _end(self, phase: Phase, message: str) -> None:
        last = replace(self._latest, phase=phase, updated_at_s=time.time(), message=message, workers=(), eta_s=None)
        self._latest = last
        self._progress.update(last)
        # What went wrong may be the storage itself.
        with suppress(StorageError):
            self._store.write_state(last)


# Followed by the run's id.
STATE_TOPIC = "lorabatch-state-"


class ToldProgress:
    """A `Progress` that tells followers on the cluster. `output`: of the job, free of secrets."""

    def __init__(self, client: Client, run_id: str, output: str) -> None:
        self._client = client
        self._output = output
        self._topic = state_topic(run_id)

    def update(self, state: JobState) -> None:
        """See `Progress`."""
        if self._client.status == "running":
            self._client.log_event(self._topic, {"state": state.to_json(), "output": self._output})

    def note(self, text: str) -> None:
        """See `Progress`."""
        if self._client.status == "running":
            self._client.log_event(self._topic, {"note": text})


def state_topic(run_id: str) -> str:
    """The Dask event topic of a run's states."""
    return f"{STATE_TOPIC}{run_id}"


def state_of(message: dict[str, Any]) -> JobState | None:
    """The state in a message of the topic, if it carries one."""
    return JobState.from_json(message["state"]) if "state" in message else None
