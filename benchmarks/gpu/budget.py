"""Ten minutes: what each section of the benchmark may take, and the names of what there was no time for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time that a section looks at before each measurement. `left_out`: what came too late for it."""

    at_s: float
    clock: Callable[[], float] = time.monotonic
    left_out: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(self.at_s - self.clock(), 0.0)

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0.0

    def allows(self, name: str) -> bool:
        """Whether there is time left for a measurement. One that comes too late is kept in `left_out`."""
        is_late = self.has_passed
        if is_late:
            self.left_out.append(name)
        return not is_late

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.at_s, self.clock() + seconds), self.clock)

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """`seconds` from now."""
        return cls(clock() + seconds, clock)
