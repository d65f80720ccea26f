"""Which adapters a simulated replica holds, and how long rows wait for one that it lacks.

An adapter is either fetched ahead, beside the work, or when its first row is admitted, which holds the step up.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cost import AdapterSource, CostModel
from .workload import AdapterInfo


class SimulatedMemory:
    """`source`: of adapters that nobody fetched ahead. `slots`: adapters at once, least recently used goes first; None:
    endless.
    """

    def __init__(
        self, adapters: Sequence[AdapterInfo], cost: CostModel, source: AdapterSource, slots: int | None
    ) -> None:
        self._adapters, self._cost, self._source, self._slots = adapters, cost, source, slots
        # Least recently used first.
        self._resident: dict[int, None] = {}
        # Adapters on their way -> when each is there; one after the other.
        self._arriving: dict[int, float] = {}
        self._link_free_s = 0.0

    @property
    def resident(self) -> list[int]:
        """Adapters that are there, least recently used first."""
        return list(self._resident)

    def fetch(self, adapter: int, now_s: float, source: AdapterSource) -> None:
        """Begin to load an adapter beside the work."""
        if adapter not in self._resident and adapter not in self._arriving:
            self._link_free_s = max(now_s, self._link_free_s) + self._load_s(adapter, source)
            self._arriving[adapter] = self._link_free_s

    def drop(self, adapter: int) -> None:
        """Forget an adapter, there or on its way."""
        self._resident.pop(adapter, None)
        self._arriving.pop(adapter, None)

    def clear(self) -> None:
        """Everything is lost."""
        self._resident, self._arriving, self._link_free_s = {}, {}, 0.0

    def wait_s(self, needed: Sequence[int], now_s: float) -> float:
        """Seconds until these are all there; afterwards they are, and others may have gone for them."""
        seconds = 0.0
        for adapter in needed:
            if adapter in self._resident:
                del self._resident[adapter]
            elif adapter in self._arriving:
                seconds += max(0.0, self._arriving.pop(adapter) - now_s - seconds)
            else:
                seconds += self._load_s(adapter, self._source)
            self._resident[adapter] = None
        while self._slots is not None and len(self._resident) > max(self._slots, len(needed)):
            del self._resident[next(iter(self._resident))]
        return seconds

    def _load_s(self, adapter: int, source: AdapterSource) -> float:
        return self._cost.load_seconds(self._adapters[adapter].weight_bytes, source)
