"""Rows that leave an engine before they are finished: who asked for them, and what they got. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..engine.exported_row import ExportedRow
from .open_shard import OpenShard
from .row_ledger import RowLedger

Asker = Callable[[list[ExportedRow]], None]


@dataclass(frozen=True, slots=True)
class Loan:
    """Rows that left the engine, under the names that it knows, and the shard that waits for them (None: it is not
    open here).
    """

    shard: OpenShard | None
    rows: tuple[ExportedRow, ...] = ()


class LoanDesk:
    """Whoever asked for rows, in the order in which the engine process will answer."""

    def __init__(self, ledger: RowLedger) -> None:
        self._ledger = ledger
        self._askers: deque[tuple[int, Asker]] = deque()

    @property
    def num_asked(self) -> int:
        """Rows that the process was asked for and has not given up yet."""
        return sum(num_rows for num_rows, _ in self._askers)

    def ask(self, request_ids: Iterable[str], num_rows: int, asker: Asker) -> list[str]:
        """Rows the process must export, the last `num_rows` of these that may leave; `asker` gets them, lent. When
        there are none it is told so at once.
        """
        chosen = self._ledger.lendable(request_ids, num_rows)
        if chosen:
            self._askers.append((len(chosen), asker))
        else:
            asker([])
        return chosen

    def exported(self, rows: Iterable[ExportedRow]) -> None:
        """The process has answered the first who asked."""
        _, asker = self._askers.popleft()
        asker(self._ledger.lend(rows))

    def close(self) -> None:
        """The process will not answer any more."""
        while self._askers:
            self.exported(())
