"""`OpenShard`: passes the results of a shard from the supervisor's thread to the thread of the shard's task."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...engine.request import ExportedRow, Result


@dataclass(frozen=True, slots=True)
class ServedRow:
    """The result of a row, and the number of engine processes that died while they worked on the row."""

    result: Result
    num_crashes: int


class OpenShard:
    """Rows given to an engine together, and their results.

    `shard_id`: None for incoming rows of another worker's shard. `rows`: rows, begun or not, with unique request ids.
    `run_id`: id of the rows' run. `rows_left`: rows of the plan, when several requests answer each; None for a shard
    whose rows are requests. `num_announced`: further rows that will come (`EngineQueue.extend`).
    """

    def __init__(
        self,
        shard_id: int | None,
        rows: Iterable[ExportedRow],
        run_id: str,
        rows_left: int | None = None,
        num_announced: int = 0,
    ) -> None:
        self.shard_id = shard_id
        self.run_id = run_id
        self.rows = tuple(rows)
        #: Rows of the plan that are not done; None where they are the shard's requests.
        self.rows_left = rows_left
        #: Unfinished rows with the tokens generated for them; known when the shard has failed.
        self.begun: tuple[ExportedRow, ...] = ()
        #: Whether results are no longer taken.
        self.is_abandoned = False
        #: Whether the rows are needed elsewhere, so that the shard gets no further ones.
        self.is_surrendered = False
        self._num_unfinished = len(self.rows)
        self._num_announced = num_announced
        self._fresh: list[ServedRow] = []
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    @property
    def num_unfinished(self) -> int:
        """Rows without a result."""
        with self._changed:
            return self._num_unfinished

    @property
    def num_announced(self) -> int:
        """Rows that are still to come."""
        with self._changed:
            return self._num_announced

    @property
    def _num_awaited(self) -> int:
        return self._num_unfinished + self._num_announced

    @property
    def planned_rows_left(self) -> int:
        """Rows of the plan that are not done."""
        if self.rows_left is not None:
            return self.rows_left
        with self._changed:
            return self._num_awaited

    def announce(self, num_rows: int) -> None:
        """Have `take` wait for further rows, which the queue will get (`EngineQueue.extend`); for fewer if `num_rows`
        is negative.
        """
        with self._changed:
            self._num_announced += num_rows
            if not self._num_awaited:
                self._changed.notify_all()

    def extend(self, num_rows: int) -> None:
        """Count rows that were announced as rows of the shard."""
        with self._changed:
            self._num_announced -= num_rows
            self._num_unfinished += num_rows

    def deliver(self, row: ServedRow) -> bool:
        """Add the result of one row. Returns whether it is the shard's last."""
        with self._changed:
            assert self._num_unfinished, f"shard {self.shard_id} has all its results, and one of a row more"
            self._num_unfinished -= 1
            self._fresh.append(row)
            if not self._num_awaited:
                self._changed.notify_all()
            return not self._num_awaited

    def fail(self, failure: Exception, begun: Iterable[ExportedRow] = ()) -> None:
        """End the shard: `take` raises `failure` once the finished rows are taken. `begun`: unfinished rows with the
        tokens generated for them.
        """
        with self._changed:
            self.begun = tuple(begun)
            self._failure = failure
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[ServedRow]:
        """Wait until all rows are finished or the shard has failed, at most `timeout_s`, and return rows finished since
        the last call.

        Raises the error that `fail` was given, when no finished row is left to take.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_awaited or self._failure is not None, timeout_s)
            fresh, self._fresh = self._fresh, []
            if self._failure is not None and self._num_awaited and not fresh:
                raise self._failure
        return fresh
