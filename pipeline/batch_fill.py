"""How full the engines' batches were while rows were queued. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator

from .messages import HostReport


class BatchFill:
    """Adds up what reports count since each worker had its first rows."""

    def __init__(self) -> None:
        # Worker -> (used, offered) place-seconds when it had its first rows, and the latest.
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    def reported(self, report: HostReport) -> None:
        """A worker told how it is, while rows were queued."""
        if report.open_rows or report.worker in self._first:
            counted = (report.used_place_s, report.offered_place_s)
            self._first.setdefault(report.worker, counted)
            self._last[report.worker] = counted

    @property
    def share(self) -> float | None:
        """Of all places in batches, times seconds, those that rows had; None before there was a second of it."""
        used, offered = (sum(column) for column in zip((0.0, 0.0), *self._spans(), strict=True))
        return min(1.0, used / offered) if offered > 0.0 else None

    def _spans(self) -> Iterator[tuple[float, float]]:
        for worker, (used, offered) in self._last.items():
            used_before, offered_before = self._first[worker]
            yield used - used_before, offered - offered_before
