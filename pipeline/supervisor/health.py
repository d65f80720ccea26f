"""Whether an engine process still gives signs of life. Pure: told the time, it holds no clock and no process.

When an engine process has died: start another, and when, or give the engine up. Pure: no clock, no process.

Some rows kill engines, and `row_ledger.py` searches for them: suspects run alone, a group that dies is halved, a row
that dies alone twice is blamed. Deaths of the search are progress, whether or not a row finishes: each halves a group
or counts against one row, so that at most log2(suspects) + 2 of them lie between two blamed rows. They are not
counted, and the next process starts at once.

What ends then:
- Deaths apart from the search without a finished row, `MAX_FRUITLESS_DEATHS` in a row: the engine does not work.
- Rows blamed without a finished row between them, `MAX_BLAMED_ROWS` in a row: that so many rows in succession kill an
  engine is less likely than that the engine is broken, and a broken one must not make error rows of a whole job.
- All else: each row finishes once or is blamed once.
"""

from __future__ import annotations

from dataclasses import dataclass

# Between two pulses lies a second. Stopped, swapped-out or deadlocked processes are silent; busy ones are not.
SILENCE_LIMIT_S = 15.0
# While a process imports its libraries and reads weights, a file system may hold up all of its threads.
START_SILENCE_LIMIT_S = 300.0
# The longest step of a healthy engine is one big prefill.
STEP_LIMIT_S = 600.0
# The watcher wakes up about once a second. After a longer sleep (its own process was stopped) nothing can be held
# against the engine: what it said meanwhile may still be on its way.
_OWN_SLEEP_S = 3.0


class EnginePulse:
    """Told every message of one process after another; `problem` says when to replace it."""

    def __init__(self, now_s: float) -> None:
        self.start(now_s)

    def start(self, now_s: float) -> None:
        """A new process begins."""
        self._heard_s = self._watched_s = now_s
        self._step_s = 0.0

    def heard(self, now_s: float, step_s: float) -> None:
        """The process said something; its current step has run for `step_s` seconds."""
        self._heard_s = now_s
        self._step_s = step_s

    def problem(self, now_s: float, *, is_ready: bool) -> str | None:
        """Why the process must be taken for hung, or None. To be asked about once a second."""
        asleep_s, self._watched_s = now_s - self._watched_s, now_s
        if asleep_s > _OWN_SLEEP_S:
            self._heard_s += asleep_s
        limit_s = SILENCE_LIMIT_S if is_ready else START_SILENCE_LIMIT_S
        if now_s - self._heard_s > limit_s:
            return f"it gave no sign of life for {limit_s:.0f} s"
        if self._step_s > STEP_LIMIT_S:
            return f"one step took more than {STEP_LIMIT_S:.0f} s"
        return None


MAX_FRUITLESS_DEATHS = 16
# Neighbours in the input that share what kills engines: a few from one source, say.
MAX_BLAMED_ROWS = 16
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
    """Counts deaths that led nowhere, and rows blamed in succession; a start that succeeds, and a row that finishes,
    clear the counts.
    """

    def __init__(self) -> None:
        self._num_failed_starts = 0
        self._num_fruitless = 0
        self._num_blamed = 0
        self._is_started = False

    def started(self) -> None:
        """The process has loaded its model."""
        self._is_started = True
        self._num_failed_starts = 0

    def row_finished(self) -> None:
        """The process does useful work."""
        self._num_fruitless = 0
        self._num_blamed = 0

    def died(
        self, reason: str, is_permanent: bool, *, is_of_search: bool = False, num_blamed: int = 0
    ) -> Restart | GiveUp:
        """The process is gone. `is_permanent`: it said that trying again is pointless. `is_of_search`: suspects ran
        alone in it, and rows of them, `num_blamed`, are given up now.
        """
        was_started, self._is_started = self._is_started, False
        self._num_fruitless = 0 if is_of_search else self._num_fruitless + 1
        self._num_failed_starts += not was_started
        self._num_blamed += num_blamed
        hopeless = reason if is_permanent else self._hopeless(reason)
        if hopeless is not None:
            return GiveUp(hopeless)
        return Restart(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** max(0, self._num_fruitless - 1)))

    def _hopeless(self, reason: str) -> str | None:
        """Which limit is reached, as a sentence."""
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return f"the engine process could not be started {MAX_FAILED_STARTS} times: {reason}"
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            return (
                f"the engine process died {MAX_FRUITLESS_DEATHS} times in a row without finishing a row, "
                f"last because {reason}"
            )
        if self._num_blamed >= MAX_BLAMED_ROWS:
            return (
                f"{MAX_BLAMED_ROWS} rows in succession killed the engine process, each alone, and no row finished "
                f"between them: the engine or its machine is more likely at fault than the rows; last because {reason}"
            )
        return None
