"""Rows that leave an engine for another one: who asked for them, and what they got. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from ..engine.exported_row import ExportedRow
from .open_shard import OpenShard
from .row_ledger import RowLedger


@dataclass(frozen=True, slots=True)
class Loan:
    """Rows that left the engine, and the shard that waits for them (None: it is not open here)."""

    shard: OpenShard | None
    rows: tuple[ExportedRow, ...] = ()


class LoanDesk:
    """Whoever asked for rows, in the order in which the engine process will answer."""

    def __init__(self, ledger: RowLedger) -> None:
        self._ledger = ledger
        self._askers: deque[tuple[OpenShard, Future[Loan]]] = deque()

    def ask(self, shard: OpenShard | None, num_rows: int, asked: Future[Loan]) -> list[str]:
        """Rows the process must export; none when there is nothing to lend, which `asked` is told."""
        chosen = self._ledger.lendable(shard.request_ids, num_rows) if shard else []
        if shard is None or not chosen:
            asked.set_result(Loan(shard))
        else:
            self._askers.append((shard, asked))
        return chosen

    def exported(self, rows: Iterable[ExportedRow]) -> None:
        """The process has answered the first who asked."""
        shard, asked = self._askers.popleft()
        asked.set_result(Loan(shard, tuple(self._ledger.lend(rows))))

    def close(self) -> None:
        """The process will not answer any more."""
        while self._askers:
            self.exported(())
