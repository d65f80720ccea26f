"""Errors of a job, each with its exit code.

    JobError                     1
    ├── JobRequestError          2   the request itself is wrong; `problems` lists everything at once
    │   ├── OutputConflictError  2   the output holds another job or files that are not ours, or the job runs already
    │   └── InputRowsError       2   an id stands in two rows, or row groups cannot be read
    ├── StorageError             1   reading or writing failed while the job ran (disk full, …)
    │   ├── MissingFileError     1   a file that should be there is not
    │   └── DamagedRecordError   1   a file under `_lorabatch` cannot be read back
    ├── ErrorBudgetError         1   more rows ended in errors than `--max-errors` allows
    ├── JobFailedError           1   the job could not go on
    └── JobInterruptedError    130   stopped by Ctrl-C; `lorabatch resume` goes on from here
        ├── JobCancelledError  130   stopped by `lorabatch cancel`
        └── JobLimitError        5   stopped by itself: a limit or condition that it was given, or a canary to confirm

Every message names the field or file, its value, what was expected, and what to do next. No message holds a
value of `storage_options`. What a message quotes has its control characters written out. All of them survive pickling,
because they travel from Dask workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from ..system.untrusted import MALFORMED, printable, shown_name


class JobError(Exception):
    """Base of everything a job raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(item) if isinstance(item, str) else item for item in args))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles the error without its cause and context, which Dask would send along: errors of other libraries may
        hold signed URLs and requests, and often cannot be unpickled.
        """
        self.__cause__ = self.__context__ = None
        return super().__reduce__()


class JobRequestError(JobError):
    """The request is wrong. `JobRequestError("problem one", "problem two")` keeps every problem."""

    exit_code: ClassVar[int] = 2

    @property
    def problems(self) -> tuple[str, ...]:
        """Every problem found, one plain sentence each."""
        return tuple(str(problem) for problem in self.args)

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        lines = [f"{len(self.args)} problems with this job:", *(f"  - {problem}" for problem in self.args)]
        return "\n".join(lines)


class OutputConflictError(JobRequestError):
    """The output location is taken by another job, by files that are not ours, or by a run of this job."""


class InputRowsError(JobRequestError):
    """The rows of the input cannot be run as they are."""


class StorageError(JobError):
    """Storage refused or failed while the job was running."""

    #: Whether the store did not complete an operation within its time limit, so it is away for more than a moment.
    is_away: bool = False


class MissingFileError(StorageError, FileNotFoundError):
    """A file that was to be read does not exist."""


class UnansweredError(ConnectionError):
    """A store did not complete an operation within its time limit; the message counts the attempts. `has_status`: the
    store answered the last attempt, with a status that asks for another one. `storage_reason` makes a sentence of it.
    """

    def __init__(self, message: str, *, has_status: bool = False) -> None:
        super().__init__(message)
        self.has_status = has_status


class DamagedRecordError(StorageError):
    """A record under `_lorabatch` cannot be read back."""


@contextmanager
def naming_damage(what: str) -> Iterator[None]:
    """Raise `DamagedRecordError` for records of another shape than ours. `what`: name of the record that is read."""
    try:
        yield
    except JobError:
        raise
    except MALFORMED as error:
        raise DamagedRecordError(
            f"{what}: cannot be read back ({type(error).__name__}: {shown_name(str(error))}). Was it written by "
            "something else?"
        ) from error


class ErrorBudgetError(JobError):
    """More rows are errors than the job allows."""


class JobFailedError(JobError):
    """The job could not go on; the message says why and whether `resume` helps."""


class JobInterruptedError(JobError):
    """The job was asked to stop. Nothing is lost: committed parts stay."""

    exit_code: ClassVar[int] = 130


class JobCancelledError(JobInterruptedError):
    """The job was asked to stop by `lorabatch cancel`, from any machine."""


class JobLimitError(JobInterruptedError):
    """The job stopped itself: by `stop_if`, `max_cost` or `max_seconds`, or since its canary is to be confirmed."""

    exit_code: ClassVar[int] = 5


def error_of_kind(name: str, phase: str) -> type[JobError]:
    """The error class that a job's last state names. Earlier versions recorded no name: the phase decides for them."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, JobError):
        return found
    return {"cancelled": JobCancelledError, "interrupted": JobInterruptedError}.get(phase, JobFailedError)
