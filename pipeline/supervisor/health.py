"""Decides when an engine process counts as hung, and whether to replace one that has died. Pure: no clock, no process.

`EngineHealth` finds out that a process hangs: it is silent, or one of its steps never ends. `RestartPolicy` says
whether to start another process, and when, or to give the engine up.

Some rows kill engines, and `rows.py` searches for them: suspects run alone, a group that dies is halved, a row that
dies alone twice is blamed. Deaths of the search are progress, whether or not a row finishes: each halves a group or
counts against one row, so that at most log2(suspects) + 2 of them happen between two blamed rows. They are not counted,
and the next process starts at once.

The engine is given up after:
- `MAX_FRUITLESS_DEATHS` deaths in a row apart from the search, without a finished row: the engine does not work.
- `MAX_BLAMED_ROWS` blamed rows in a row, without a finished row between them. This number of deadly rows in succession
  is less likely than a broken engine, and a broken engine must not turn a whole job into error rows.
Otherwise each row finishes once or is blamed once.
"""

from __future__ import annotations

from ...scheduler.liveness import LivenessDetector

# Longest time between two looks of the supervisor, which looks about once a second, unless its own process was stopped.
_MAX_GAP_S = 3.0
_PROCESS = "engine process"


#: Seconds of silence after which a ready process counts as hung; it sends a heartbeat every second, busy or not.
SILENCE_S = 15.0
#: Seconds of silence after which a process that starts counts as hung: while it imports its libraries and reads
#: weights, a file system may hold up all of its threads.
START_SILENCE_S = 300.0
#: Seconds of one step after which its process counts as hung; the longest step of a healthy engine is one big prefill.
STEP_S = 600.0


class EngineHealth:
    """Takes in the heartbeats of one engine process after another; `problem` says when to replace the process."""

    def __init__(self, now_s: float, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._liveness = LivenessDetector(START_SILENCE_S, _MAX_GAP_S, now_s)
        self.start(now_s)

    def start(self, now_s: float) -> None:
        """Record the start of a new process."""
        self.heard(now_s, is_ready=False)

    def heard(self, now_s: float, *, is_ready: bool, step_s: float = 0.0) -> None:
        """Record a message of the process, whose current step has run for `step_s` seconds."""
        self._limit_s = self._silence_s if is_ready else START_SILENCE_S
        self._liveness.heard(_PROCESS, now_s, limit_s=self._limit_s)
        self._step_s = step_s

    def problem(self, now_s: float) -> str | None:
        """Why the process counts as hung, or None. To be called about once a second."""
        if self._liveness.silent([_PROCESS], now_s):
            return f"it sent no heartbeat for {self._limit_s:.0f} s"
        if self._step_s > STEP_S:
            return f"one step took more than {STEP_S:.0f} s"
        return None


MAX_FRUITLESS_DEATHS = 16
# Blamed rows in succession at which the engine is given up. Fewer may be neighbours in the input, from one source.
MAX_BLAMED_ROWS = 16
# Failed starts in succession after which the engine is given up: more than preemption or a passing lack of memory may
# cause while it loads.
MAX_FAILED_STARTS = 5
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0


class RestartPolicy:
    """Counts failed starts, deaths without progress and blamed rows in succession. A start that succeeds clears the
    first count, a row that finishes the other two.
    """

    def __init__(self) -> None:
        self._num_failed_starts = 0
        self._num_fruitless = 0
        self._num_blamed = 0
        self._is_started = False

    def started(self) -> None:
        """Note that the process has loaded its model."""
        self._is_started = True
        self._num_failed_starts = 0

    def row_finished(self) -> None:
        """Note that the process has finished a row."""
        self._num_fruitless = 0
        self._num_blamed = 0

    def died(self, reason: str, is_permanent: bool, *, is_of_search: bool = False, num_blamed: int = 0) -> str | None:
        """Why the engine is given up after the death of a process, a plain sentence; None when another process is to
        start after `delay_s`. `is_permanent`: it reported that trying again is pointless. `is_of_search`: suspects ran
        alone in it. `num_blamed`: rows that are given up for this death.
        """
        was_started, self._is_started = self._is_started, False
        self._num_fruitless = 0 if is_of_search else self._num_fruitless + 1
        self._num_failed_starts += not was_started
        self._num_blamed += num_blamed
        return reason if is_permanent else self._hopeless(reason)

    @property
    def delay_s(self) -> float:
        """Seconds from the latest death to the start of another process."""
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** max(0, self._num_fruitless - 1)))

    def _hopeless(self, reason: str) -> str | None:
        """A sentence about the limit that is reached; None if none is."""
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
