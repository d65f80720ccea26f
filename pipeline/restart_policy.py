"""When an engine process has died: start another, and when, or give the engine up. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass

# Deaths in a row without one finished row between them. Finding a poison row among 4,096 takes about 16.
MAX_FRUITLESS_DEATHS = 16
# More than what preemption or a passing lack of memory may do to one engine while it loads.
MAX_FAILED_STARTS = 5
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a new process after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No new process would do better; `reason` is a plain sentence."""

    reason: str


class RestartPolicy:
    """Counts deaths that led nowhere; a start that succeeds, and a row that finishes, clear the counts."""

    def __init__(self) -> None:
        self._num_failed_starts = 0
        self._num_fruitless = 0
        self._is_started = False

    def started(self) -> None:
        """The process has loaded its model."""
        self._is_started = True
        self._num_failed_starts = 0

    def row_finished(self) -> None:
        """The process does useful work."""
        self._num_fruitless = 0

    def died(self, reason: str, is_permanent: bool) -> Restart | GiveUp:
        """The process is gone. `is_permanent`: it said that trying again is pointless."""
        was_started, self._is_started = self._is_started, False
        self._num_fruitless += 1
        self._num_failed_starts += not was_started
        if is_permanent:
            return GiveUp(reason)
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return GiveUp(f"the engine process could not be started {MAX_FAILED_STARTS} times: {reason}")
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            return GiveUp(
                f"the engine process died {MAX_FRUITLESS_DEATHS} times in a row without finishing a row, "
                f"last because {reason}"
            )
        return Restart(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self._num_fruitless - 1)))
