"""`JobStatus`: the status of a job, read from its output alone, without any cluster; and waiting for its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ...system.html import facts_table
from ..errors import (
    JobError,
    JobFailedError,
    JobLimitError,
    JobRequestError,
    MissingFileError,
    error_of_kind,
    naming_damage,
)
from ..parts import in_words, missing_parts
from ..progress import RowTotals
from ..record import BEGINNING_PHASES, JobRecord, JobState
from ..storage.redaction import redacted_url
from ..store import JobStore

# Seconds without a new state after which a running job has lost its runner; states come about once a second.
STALE_AFTER_S = 30.0
_FOLLOW_INTERVAL_S = 1.0
# Seconds between looks at an object store, whose requests cost money and are limited.
_REMOTE_WAIT_INTERVAL_S = 5.0
# Seconds without a new state after which a run is lost. Another coordinator takes over from one that hangs, and writes
# a state, in less time.
_SILENCE_LIMIT_S = 120.0

#: Status of a job in one word. "waiting": no run of it has begun. "stopped": cancelled or interrupted; it can be
#: resumed. "unknown": its last state is of a running job, but old.
Outcome = Literal["done", "failed", "stopped", "waiting", "running", "unknown"]
#: Exit codes of `lorabatch wait` and `lorabatch status --json`; 2 is a wrong request, as everywhere.
EXIT_CODES: Mapping[Outcome, int] = {
    "done": 0, "failed": 1, "waiting": 3, "running": 3, "unknown": 4, "stopped": 130,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One moment of a job, as its output shows it."""

    #: URL of the output, without passwords and signatures.
    output: str
    #: The frozen job.
    record: JobRecord
    #: Latest state of its run; None before its first run.
    state: JobState | None
    #: Content of `summary.json`; None while the job has not ended.
    summary: Mapping[str, Any] | None
    #: Parts in the output.
    num_parts: int
    #: Whether the job is done and all its parts are unchanged.
    is_finished: bool
    #: Whether the job was asked to stop.
    is_cancel_requested: bool
    #: Whether its state is of a running job, but old.
    is_stale: bool
    #: Age of a stale state in seconds; else 0.
    silent_s: float = 0.0
    #: Shard id -> why its part is not as it was when the job was done, as a clause.
    changed_parts: Mapping[int, str] = field(default_factory=dict)
    #: Account of its canary (`canary.json`); None for a job without one, or while it is not counted.
    canary: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        rows = "" if self.totals is None else f", {self.totals.to_text()}"
        return f"<JobStatus: {self.headline}{rows}, {self.output}>"

    def _repr_html_(self) -> str:
        facts = {
            "output": self.output,
            "rows": None if self.totals is None else self.totals.to_text(),
            "time left": self.time_left,
            "parts": self.num_parts,
            "message": self.message,
            "next step": self.next_step,
        }
        return facts_table(f"Job {self.record.job_id}: {self.headline}", facts)

    @property
    def headline(self) -> str:
        """The status of the job in a few words."""
        if self.is_finished:
            return "done"
        if self.changed_parts:
            return "done, parts changed since"
        if self.state is None:
            return "not started"
        if self.is_stale:
            return "not started, its command ended" if self.state.is_of_command else "stopped without a word"
        if self.is_cancel_requested and not self.state.is_final:
            return "stopping"
        if isinstance(self.error, JobLimitError):
            return "stopped by itself"
        return self.state.phase

    @property
    def outcome(self) -> Outcome:
        """The status of the job in one word, for programs."""
        if self.is_finished:
            return "done"
        if self.changed_parts:
            return "failed"
        if self.state is None or self.state.phase == "queued":
            return "waiting"
        if self.is_stale:
            return "unknown"
        if not self.state.is_final:
            return "running"
        return "failed" if self.state.phase == "failed" else "stopped"

    @property
    def exit_code(self) -> int:
        """Exit code of commands for this outcome; that of its limit for a job that has stopped itself."""
        error = self.error if self.outcome == "stopped" else None
        return error.exit_code if error else EXIT_CODES[self.outcome]

    @property
    def totals(self) -> RowTotals | None:
        """The job's rows by outcome; None before its first run."""
        if self.summary and (self.is_finished or self.state is None):
            with naming_damage("summary.json"):
                return RowTotals.of_summary(self.summary)
        return None if self.state is None else self.state.totals

    @property
    def done_summary(self) -> Mapping[str, Any] | None:
        """Content of `summary.json` of a job that is done; None while its rows may still change."""
        return self.summary if self.is_finished else None

    @property
    def is_over(self) -> bool:
        """Whether its last run has ended, well or not. A silent run counts as running."""
        return self.is_finished or (self.state is not None and self.state.is_final)

    @property
    def has_ended(self) -> bool:
        """Whether its last run has ended, or has been silent for more than `_SILENCE_LIMIT_S`."""
        return self.is_over or self.silent_s > _SILENCE_LIMIT_S

    @property
    def error(self) -> JobError | None:
        """The exception that ended its last run, or one for changed parts or a lost run; None without such a reason."""
        if self.changed_parts:
            return JobFailedError(
                f"output={self.output!r}: {in_words(self.changed_parts)}; the job was done before. Go on with "
                f"`{self.next_step}`: it computes what is missing."
            )
        if self.outcome == "unknown":
            return JobFailedError(f"output={self.output!r}: {self.headline}. Go on with `{self.next_step}`.")
        if self.state is None or self.outcome not in ("failed", "stopped"):
            return None
        return error_of_kind(self.state.error, self.state.phase)(self.state.message)

    @property
    def message(self) -> str:
        """Why the job stopped, or how its parts have changed, and what to do; "" without such a reason."""
        if self.changed_parts:
            return str(self.error)
        return self.state.message if self.state else ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object for programs."""
        return {
            "job_id": self.record.job_id,
            "output": self.output,
            "headline": self.headline,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "message": self.message,
            "rows": None if self.totals is None else self.totals.to_json(),
            "time_left": self.time_left,
            "started_at": self.record.created_at,
            "num_parts": self.num_parts,
            "is_finished": self.is_finished,
            "is_cancel_requested": self.is_cancel_requested,
            "is_stale": self.is_stale,
            "next_step": self.next_step,
            "canary": self.canary,
            "state": None if self.state is None else asdict(self.state),
            "summary": self.summary,
        }

    @property
    def time_left(self) -> str:
        """The time left in words; "" when it is not known, or the job is not running."""
        return "" if self.state is None or self.is_resting else self.state.time_left

    @property
    def is_resting(self) -> bool:
        """Whether no run is at work: the job is finished, not started, ended, or its state is stale."""
        return self.is_finished or self.state is None or self.state.is_final or self.is_stale

    @property
    def next_step(self) -> str | None:
        """The command that goes on with the job; None when there is none, and the state's message says what to do."""
        can_resume = self.state is None or self.state.can_resume
        return f"lorabatch resume {self.output}" if self.is_resting and can_resume and not self.is_finished else None


def read_status(store: JobStore, now_s: float | None = None) -> JobStatus:
    """Read a job's status. `store`: that of the output, or of an update (`JobStore.latest`). `now_s`: seconds since the
    epoch, by default the clock's.

    Raises `JobRequestError` when the output holds no job, `StorageError` when it cannot be read.
    """
    store = store.settled()
    try:
        record = store.read_record()
    except MissingFileError:
        raise JobRequestError(
            f"output={redacted_url(store.url)!r}: no job there. Check the URL; it must be the --output of a job."
        ) from None
    # The state is read before the listing: `_SUCCESS` is written before the state "done", so a job that ends meanwhile
    # is seen as finished.
    state = store.read_state()
    contents = store.contents()
    age_s = 0.0 if state is None else (time.time() if now_s is None else now_s) - state.updated_at_s
    is_stale = state is not None and is_silent(state, state.updated_at_s + age_s)
    # A run whose adapters have changed removes `_SUCCESS` when it has planned its rows.
    begins_anew = state is not None and not is_stale and state.phase in BEGINNING_PHASES
    summary = store.read_summary()
    # The summary is written before `_SUCCESS`. Without it, and without the state that follows, `_SUCCESS` was copied
    # from elsewhere.
    has_ended = summary is not None or (state is not None and state.phase == "done")
    # The answers of an update count once they are in OUTPUT.
    was_finished = contents.is_finished and not begins_anew and has_ended and not store.update
    changed = missing_parts(store, contents) if was_finished else {}
    return JobStatus(
        output=redacted_url(store.url),
        record=record,
        state=state,
        summary=summary,
        num_parts=len(contents.parts),
        is_finished=was_finished and not changed,
        is_cancel_requested=store.is_cancel_requested(),
        is_stale=is_stale,
        silent_s=age_s if is_stale else 0.0,
        changed_parts=changed,
        canary=store.read_canary() if state is not None and state.is_canary_counted else None,
    )


def is_silent(state: JobState, now_s: float) -> bool:
    """Whether the state of a run at work is older than `STALE_AFTER_S`, so that the run is taken for lost. A queued job
    is never silent: no process of it could write.
    """
    return not state.is_final and state.phase != "queued" and now_s - state.updated_at_s > STALE_AFTER_S


def wait_for_end(
    store: JobStore, timeout_s: float | None = None, show: Callable[[JobState], None] = lambda state: None
) -> JobStatus:
    """Waits until a job `has_ended` or `timeout_s` have passed; returns its status. `show` gets each state meanwhile.

    Raises what `read_status` raises.
    """
    give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    began_s = time.monotonic()
    while True:
        status = read_status(store.latest())
        if status.state is not None:
            # The job is finished before its state says so.
            show(replace(status.state, phase="done") if status.is_finished else status.state)
        if status.has_ended or time.monotonic() >= give_up_s:
            return status
        now_s = time.monotonic()
        time.sleep(max(0.0, min(wait_interval_s(store, now_s - began_s), give_up_s - now_s)))


def wait_interval_s(store: JobStore, waited_s: float) -> float:
    """Seconds until the next look at a job that has been waited for during `waited_s`: a short job is seen soon."""
    most_s = _FOLLOW_INTERVAL_S if store.location.is_local else _REMOTE_WAIT_INTERVAL_S
    return min(most_s, max(_FOLLOW_INTERVAL_S, waited_s / 4))


def request_cancel(store: JobStore) -> bool:
    """Ask the run of a job to stop; False when it has ended already. Raises what `read_status` raises."""
    store = store.latest()
    if read_status(store).is_over:
        return False
    store.request_cancel()
    return True
