"""A shard that an engine works on: where its results arrive and where its task waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...engine.request import ExportedRow, Request, Result


@dataclass(frozen=True, slots=True)
class ServedRow:
    """One result, and how many engine processes had died under the row before it came."""

    result: Result
    num_crashes: int

    @classmethod
    def given_up(cls, request: Request, error: str, num_crashes: int) -> ServedRow:
        """The error row of a request that no engine survives."""
        return cls(Result.refused(request, error), num_crashes)


class OpenShard:
    """Results of one shard, handed from the engine's thread to the task's thread.

    `shard_id` None: guests, rows of another worker's shard. `run`: whose shard it is; in the engine the rows' names
    begin with it, because the rows of other runs may have the same.
    """

    def __init__(self, shard_id: int | None, rows: Iterable[ExportedRow], run: str = "") -> None:
        self.shard_id = shard_id
        self.run = run
        self.rows = tuple(_renamed(row, f"{run}/{row.request.request_id}") for row in rows)
        self._unfinished = set(self.request_ids)
        self._fresh: list[ServedRow] = []
        self._failure: Exception | None = None
        # Unfinished rows with tokens, under their own names; known when the shard has failed.
        self.begun: tuple[ExportedRow, ...] = ()
        # Nobody takes results any more.
        self.is_abandoned = False
        self._changed = threading.Condition()

    @property
    def request_ids(self) -> list[str]:
        """Of all its rows as the engine knows them, in the plan's order."""
        return [row.request.request_id for row in self.rows]

    @property
    def num_unfinished(self) -> int:
        """Rows without a result."""
        with self._changed:
            return len(self._unfinished)

    def deliver(self, row: ServedRow) -> None:
        """A row is done. A second result for the same row is dropped."""
        with self._changed:
            if row.result.request_id in self._unfinished:
                self._unfinished.remove(row.result.request_id)
                self._fresh.append(row)
                if not self._unfinished:
                    self._changed.notify_all()

    def fail(self, failure: Exception, begun: Iterable[ExportedRow] = ()) -> None:
        """No more results will come; whoever waits gets `failure` once the finished rows are taken. `begun`: what was
        generated for the others.
        """
        with self._changed:
            self.begun = tuple(_renamed(row, self._own_name(row.request.request_id)) for row in begun)
            self._failure = failure
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[ServedRow]:
        """Rows finished since the last call, under their own names, after at most `timeout_s` seconds, sooner when
        all are done.

        Raises what `fail` was given, when no finished row is left to take.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished or self._failure is not None, timeout_s)
            fresh, self._fresh = self._fresh, []
            if self._failure is not None and self._unfinished and not fresh:
                raise self._failure
        return [self._under_own_name(row) for row in fresh]

    def _under_own_name(self, row: ServedRow) -> ServedRow:
        return replace(row, result=replace(row.result, request_id=self._own_name(row.result.request_id)))

    def _own_name(self, request_id: str) -> str:
        return request_id.removeprefix(f"{self.run}/")


def _renamed(row: ExportedRow, request_id: str) -> ExportedRow:
    return replace(row, request=replace(row.request, request_id=request_id))
