"""Who coordinates each run, by the number of the attempt, and whose coordinator has not been heard of for too long.

Pure: told the time, it holds no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

# Who looks every few seconds and slept longer than this (its own process was stopped) must first hear what was said.
_OWN_SLEEP_S = 6.0


@dataclass(slots=True)
class _Lease:
    """Held by the coordinator of this attempt; it lapses `limit_s` after it was `heard_s` of last."""

    attempt: int
    limit_s: float
    heard_s: float


class Leases:
    """One per run. A coordinator takes it, which ends those before it, and renews it while it works."""

    def __init__(self, now_s: float) -> None:
        self._leases: dict[str, _Lease] = {}
        self._looked_s = now_s

    def take(self, run_id: str, limit_s: float, now_s: float) -> int:
        """A coordinator begins: the number of its attempt, higher than all before it."""
        before = self._leases.get(run_id)
        attempt = before.attempt + 1 if before is not None else 0
        self._leases[run_id] = _Lease(attempt, limit_s, now_s)
        return attempt

    def renew(self, run_id: str, attempt: int, now_s: float) -> bool:
        """A coordinator is at work. False: another has taken over, and it must leave everything as it is."""
        lease = self._leases.get(run_id)
        if lease is None or lease.attempt != attempt:
            return False
        lease.heard_s = now_s
        return True

    def lapsed(self, now_s: float) -> list[str]:
        """Runs whose coordinators were silent for too long. To be asked every few seconds."""
        asleep_s, self._looked_s = now_s - self._looked_s, now_s
        if asleep_s > _OWN_SLEEP_S:
            for lease in self._leases.values():
                lease.heard_s += asleep_s
        return [run_id for run_id, lease in self._leases.items() if now_s - lease.heard_s > lease.limit_s]

    def pass_on(self, run_id: str, now_s: float) -> None:
        """The run's coordinator is being replaced: from now on it holds nothing, and the next has time to begin."""
        lease = self._leases[run_id]
        lease.attempt += 1
        lease.heard_s = now_s

    def end(self, run_id: str) -> None:
        """The run is over."""
        self._leases.pop(run_id, None)
