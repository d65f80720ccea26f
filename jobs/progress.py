"""How progress is counted and worded: rows of a job, the time left. Whatever shows progress takes it from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RowTotals:
    """Rows of a job. `answered`: have an answer. `errors`: ended in an error. `reused`: of both together, those that
    earlier runs of the job had done.
    """

    rows: int
    answered: int
    errors: int
    reused: int

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> Self:
        """Of a finished job."""
        rows, errors = int(summary["num_rows"]), int(summary["num_errors"])
        return cls(rows, rows - errors, errors, int(summary.get("num_reused", 0)))

    @property
    def done(self) -> int:
        """Rows that need no more work."""
        return self.answered + self.errors

    @property
    def share_done(self) -> float:
        """From 0 to 1; an empty job is done."""
        return self.done / self.rows if self.rows else 1.0

    def to_text(self) -> str:
        """Such as "48 of 60 rows answered, 2 errors, 20 from an earlier run"."""
        parts = [f"{self.answered:,} of {self.rows:,} rows answered"]
        parts += [f"{self.errors:,} error{'' if self.errors == 1 else 's'}"] if self.errors else []
        parts += [f"{self.reused:,} from an earlier run"] if self.reused else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, int]:
        """A JSON-ready object for programs."""
        return asdict(self) | {"done": self.done}


def time_left(seconds: float | None, range_s: tuple[float, float] | None, *, is_loading: bool = False) -> str:
    """Such as "about 1:15 left (0:50 to 2:00)"; "" where it is not known. `range_s`: rough. `is_loading`: the seconds
    count from when engines are ready.
    """
    if seconds is None:
        return ""
    around = "" if range_s is None else " ({} to {})".format(*map(clock, range_s))
    about = f"about {clock(seconds)}"
    return f"engines load, then {about}{around}" if is_loading else f"{about} left{around}"


def clock(seconds: float) -> str:
    """Such as 1:15 or 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
