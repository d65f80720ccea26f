"""Ten minutes: what each section of the benchmark may take, and what is kept when it may take no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time that a section looks at before each measurement."""

    at_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(self.at_s - self.clock(), 0.0)

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0.0

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.at_s, self.clock() + seconds), self.clock)

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """`seconds` from now."""
        return cls(clock() + seconds, clock)
