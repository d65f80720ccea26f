"""Which workers have not reported for so long that they count as lost. Pure: told the time, it holds no clock."""

from __future__ import annotations

from collections.abc import Collection

# Hosts report once a second. Dask gives up a silent worker after minutes; its rows need not wait so long.
SILENCE_LIMIT_S = 20.0
# Who slept longer than this between two calls (its own process was stopped) must first hear what was said meanwhile.
_OWN_SLEEP_S = 6.0


class RollCall:
    """Told every report; `silent` names those whose rows should go to others. A worker that reports again is back."""

    def __init__(self, now_s: float) -> None:
        self._heard_s: dict[str, float] = {}
        self._called_s = now_s

    def heard(self, worker: str, now_s: float) -> None:
        """A worker reported."""
        self._heard_s[worker] = now_s

    def silent(self, workers: Collection[str], now_s: float) -> set[str]:
        """Those of `workers` that have been silent for too long. To be asked every few seconds."""
        asleep_s, self._called_s = now_s - self._called_s, now_s
        if asleep_s > _OWN_SLEEP_S:
            self._heard_s = {worker: heard_s + asleep_s for worker, heard_s in self._heard_s.items()}
        self._heard_s = {worker: self._heard_s.get(worker, now_s) for worker in workers}
        return {worker for worker, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_LIMIT_S}
