"""Names of a journal's segments, where a store cannot append: sorted, they are in the order of writing. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable


def segments_of(journal: str, names: Iterable[str]) -> list[str]:
    """Those of a folder's names that hold a part of this journal, in order."""
    return sorted(name for name in names if name == journal or name.startswith(f"{journal}."))


class SegmentNames:
    """One writer's names for the segments it adds.

    Segments are numbered by the clock, but never before those that were there when the writer came: a coordinator that
    takes over may have a clock that is behind.
    """

    def __init__(self) -> None:
        # Journal -> the highest number used, by this writer or before it.
        self._last: dict[str, int] = {}

    def next(self, journal: str, now_ns: int, list_names: Callable[[], Iterable[str]]) -> str:
        """A new segment's name. `journal`: without its folder, of which `list_names` gives the names."""
        last = self._last.get(journal)
        if last is None:
            last = max((_number(journal, name) for name in segments_of(journal, list_names())), default=0)
        self._last[journal] = number = max(now_ns, last + 1)
        return f"{journal}.{number:020d}-{uuid.uuid4().hex[:8]}"


def _number(journal: str, segment: str) -> int:
    digits = segment[len(journal) + 1 :].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
