"""Whether an engine process still gives signs of life. Pure: told the time, it holds no clock and no process."""

from __future__ import annotations

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
