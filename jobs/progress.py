"""Counts and words the progress of a job: its rows and the time left. Everything that shows progress uses this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RowTotals:
    """The rows of a job, counted by their outcome."""

    #: All rows.
    rows: int
    #: Rows that have an answer.
    answered: int
    #: Rows that ended in an error.
    errors: int
    #: Answered and error rows that earlier runs of the job had done.
    reused: int

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> Self:
        """The totals of a finished job, from its `summary.json`."""
        rows, errors = int(summary["num_rows"]), int(summary["num_errors"])
        return cls(rows, rows - errors, errors, int(summary.get("num_reused", 0)))

    @property
    def done(self) -> int:
        """Rows that need no more work."""
        return self.answered + self.errors

    @property
    def share_done(self) -> float:
        """Share of the rows that are done, 0 to 1; 1 for an empty job."""
        return self.done / self.rows if self.rows else 1.0

    def to_text(self) -> str:
        """The totals in words, such as "48 of 60 rows answered, 2 errors, 20 from an earlier run"."""
        parts = [f"{self.answered:,} of {self.rows:,} rows answered"]
        parts += [f"{self.errors:,} error{'' if self.errors == 1 else 's'}"] if self.errors else []
        parts += [f"{self.reused:,} from an earlier run"] if self.reused else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, int]:
        """A JSON-ready object for programs."""
        return asdict(self) | {"done": self.done}


@dataclass(frozen=True, slots=True)
class AdapterCount:
    """Counts of the rows of one adapter."""

    #: Name of the adapter; "" for the base model.
    adapter: str
    #: Rows.
    num_rows: int
    #: Rows among them that are errors.
    num_errors: int
    #: Tokens that were generated for them.
    completion_tokens: int
    #: Answers that `max_tokens` ended.
    num_cut: int = 0


def added_up(adapter: str, counts: Iterable[AdapterCount]) -> AdapterCount:
    """The rows of several counts together. `adapter`: name of the result."""
    found = list(counts)
    names = ("num_rows", "num_errors", "completion_tokens", "num_cut")
    return AdapterCount(adapter, *(sum(getattr(count, name) for count in found) for name in names))


def counted(number: int, noun: str) -> str:
    """A number of things in words: "1 line", "2,000 lines"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """The rows of an update's input, each in one of the first four counts, and the rows that have left it."""

    #: Rows that keep their answers.
    kept: int
    #: Rows whose ids the output does not have.
    new: int
    #: Rows that ask something else than before, or whose adapter, or the base model, has other content.
    changed: int
    #: Rows that are as they were and have no answer: errors, and rows that the earlier job had not come to.
    unanswered: int
    #: Rows of the output whose ids the input does not have any more.
    removed: int
    #: Why no answer can be kept, a clause each; empty when nothing stands against it.
    reasons: tuple[str, ...] = ()

    def to_text(self) -> str:
        """The counts in words, such as "update: 900 rows keep their answers, 100 new"."""
        parts = [f"{self.kept:,} rows keep their answers" if self.kept != 1 else "1 row keeps its answer"]
        parts += [f"{count:,} {word}" for word, count in (("new", self.new), ("changed", self.changed)) if count]
        parts += [f"{self.unanswered:,} without an answer so far"] if self.unanswered else []
        parts += [f"{self.removed:,} removed"] if self.removed else []
        parts += [] if self.new or self.changed or self.unanswered else ["none is computed"]
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"update: {', '.join(parts)}{why}"


def time_left(seconds: float | None, range_s: tuple[float, float] | None, *, is_loading: bool = False) -> str:
    """The time left in words, such as "about 1:15 left (0:50 to 2:00)"; "" when it is not known.

    `range_s`: rough bounds of it. `is_loading`: `seconds` counts from the moment at which engines are ready.
    """
    if seconds is None:
        return ""
    around = "" if range_s is None else " ({} to {})".format(*map(clock, range_s))
    about = f"about {clock(seconds)}"
    return f"engines load, then {about}{around}" if is_loading else f"{about} left{around}"


def wall_clock(time_s: float) -> str:
    """A time in this machine's time zone, with its offset from UTC, such as 2026-11-29 10:38:04+01:00. `time_s`:
    seconds since the epoch.
    """
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "seconds")


def clock(seconds: float) -> str:
    """A duration in minutes or hours, such as 1:15 or 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
