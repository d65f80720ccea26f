"""A shard that an engine works on: its results, on their way from the supervisor's thread to that of the task."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...engine.request import ExportedRow, Result


@dataclass(frozen=True, slots=True)
class ServedRow:
    """One result, and how many engine processes died while they worked on the row."""

    result: Result
    num_crashes: int


class OpenShard:
    """Rows given to an engine together, and their results.

    `shard_id` None: incoming rows, of another worker's shard. `rows`: begun or not, with request ids that are unique
    among them. `run_id`: the run whose rows they are.
    """

    def __init__(self, shard_id: int | None, rows: Iterable[ExportedRow], run_id: str) -> None:
        self.shard_id = shard_id
        self.run_id = run_id
        self.rows = tuple(rows)
        #: Unfinished rows with tokens; known when the shard has failed.
        self.begun: tuple[ExportedRow, ...] = ()
        #: No result is taken any more.
        self.is_abandoned = False
        self._num_unfinished = len(self.rows)
        self._fresh: list[ServedRow] = []
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    @property
    def num_unfinished(self) -> int:
        """Rows without a result."""
        with self._changed:
            return self._num_unfinished

    def deliver(self, row: ServedRow) -> bool:
        """Add the result of one row; whether it is the last."""
        with self._changed:
            assert self._num_unfinished, f"shard {self.shard_id} has all its results, and one of a row more"
            self._num_unfinished -= 1
            self._fresh.append(row)
            if not self._num_unfinished:
                self._changed.notify_all()
            return not self._num_unfinished

    def fail(self, failure: Exception, begun: Iterable[ExportedRow] = ()) -> None:
        """End the shard: `take` raises `failure` once the finished rows are taken. `begun`: what was generated for the
        others.
        """
        with self._changed:
            self.begun = tuple(begun)
            self._failure = failure
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[ServedRow]:
        """Rows finished since the last call, after at most `timeout_s` seconds, sooner when all are done.

        Raises what `fail` was given, when no finished row is left to take.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_unfinished or self._failure is not None, timeout_s)
            fresh, self._fresh = self._fresh, []
            if self._failure is not None and self._num_unfinished and not fresh:
                raise self._failure
        return fresh
