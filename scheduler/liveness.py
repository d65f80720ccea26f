"""Finds out which processes have fallen silent, from the times of their messages.

One detector serves any observer that looks every few seconds: the scheduler looks at workers, a supervisor at its
engine process, the Dask scheduler at coordinators. It holds no clock: all times are the caller's, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection


class LivenessDetector:
    """Finds named processes that have been silent for too long.

    `limit_s`: a process that is silent for longer counts as gone; `heard` may set another limit for one of them.
    `max_gap_s`: most seconds between two looks of the observer. After a longer gap the observer's own process was
    stopped, and messages sent meanwhile may not have been read yet, so that the gap does not count as silence.
    """

    def __init__(self, limit_s: float, max_gap_s: float, now_s: float) -> None:
        assert 0 < max_gap_s < limit_s, f"limit_s={limit_s}, max_gap_s={max_gap_s}: the gap must be the shorter one"
        self._limit_s = limit_s
        self._max_gap_s = max_gap_s
        self._looked_s = now_s
        self._heard_s: dict[str, float] = {}
        self._own_limit_s: dict[str, float] = {}

    def heard(self, name: str, now_s: float, *, limit_s: float | None = None) -> None:
        """Record a message of a process. `limit_s`: its own limit from now on, instead of the general one."""
        self._heard_s[name] = now_s
        if limit_s is not None:
            self._own_limit_s[name] = limit_s

    def forget(self, name: str) -> None:
        """Drop a process; if it is looked at again, its silence starts anew."""
        self._heard_s.pop(name, None)
        self._own_limit_s.pop(name, None)

    def silent(self, names: Collection[str], now_s: float) -> list[str]:
        """Names among `names` that have been silent for longer than their limit, sorted.

        To be called every few seconds. The silence of a name that was never heard of starts with the first call.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > self._max_gap_s:
            self._heard_s = {name: heard_s + gap_s for name, heard_s in self._heard_s.items()}
        return sorted(name for name in names if self._silence_s(name, now_s) > self._limit_of(name))

    def _silence_s(self, name: str, now_s: float) -> float:
        return now_s - self._heard_s.setdefault(name, now_s)

    def _limit_of(self, name: str) -> float:
        return self._own_limit_s.get(name, self._limit_s)
