"""What waiting rows may take of a replica's memory beside every row that holds some, be it running or paused."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class FreeMemory:
    """In pages, or in any other unit that all sizes share.

    `gaps`: contiguous runs that may be had; what no running row needs, adapters among it, counts as free. `row_pages`:
    int64 `[num_waiting]`, each in one run; `rounded_to`: of a multiple of so many pages where a gap is that long.
    `adapter_pages`: of adapters that lie in memory while rows of theirs run; those not named take nothing. `awaited`:
    adapters that are not at hand yet, so that none of their rows can enter beside others.
    """

    gaps: tuple[int, ...]
    row_pages: NDArray[np.int64]
    adapter_pages: Mapping[int, int] = field(default_factory=dict)
    rounded_to: int = 1
    awaited: frozenset[int] = frozenset()

    def of_rows(self, rows: NDArray[np.int64]) -> FreeMemory:
        """The same for these waiting rows, in this order."""
        return replace(self, row_pages=self.row_pages[rows])

    def num_fitting(
        self, rows: NDArray[np.int64], waiting_adapter: NDArray[np.int32], running_adapter: NDArray[np.int32]
    ) -> int:
        """How many of these waiting rows enter, in this order, before one finds no room. A replica on which nothing
        runs has room for any row.
        """
        gaps, held = sorted(self.gaps), set(running_adapter.tolist())
        for number, row in enumerate(rows.tolist()):
            adapter = int(waiting_adapter[row])
            exact = int(self.row_pages[row])
            has_room = _take(gaps, -(-exact // self.rounded_to) * self.rounded_to) or _take(gaps, exact)
            if has_room and adapter not in held:
                has_room = _take(gaps, self.adapter_pages.get(adapter, 0))
                held.add(adapter)
            if not has_room:
                return max(number, int(len(running_adapter) == 0))
        return len(rows)


def _take(gaps: list[int], size: int) -> bool:
    """Shorten the smallest of the sorted gaps that is long enough, as the pool does. False: none is."""
    place = bisect_left(gaps, size)
    if place == len(gaps):
        return size == 0
    insort(gaps, gaps.pop(place) - size)
    return True
