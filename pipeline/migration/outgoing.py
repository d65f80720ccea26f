"""Rows of this worker's shards that other workers' engines work on. The shard stays here, and so does its commit."""

from __future__ import annotations

import asyncio
import logging
import uuid

from ..supervisor.requests import Loan
from ..supervisor.supervisor import EngineShare
from .peers import DropRows, FetchResults, LoanResults, PeerLostError, Peers, RecallRows, ReceiveRows

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2
# Questions in a row without an answer after which a helper is lost.
MAX_SILENCES = 3
_EXPORT_TIMEOUT_S = 30.0
# The helper may have to fetch adapters first.
_RECEIVE_TIMEOUT_S = 60.0


class Loans:
    """Lends rows and gets their results back, or the rows. Used from the worker's event loop only.

    `address`: of this worker, where helpers may get adapters.
    """

    def __init__(self, engine: EngineShare, peers: Peers, address: str) -> None:
        self._engine = engine
        self._peers = peers
        self._address = address
        self._running: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    def begin(self, shard_id: int, num_rows: int, helper: str) -> None:
        """Lend rows of an open shard to another worker, in the background; not when this one leaves."""
        if self._is_leaving:
            return
        task = asyncio.create_task(self.lend(shard_id, num_rows, helper))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def call_back(self, timeout_s: float) -> None:
        """This worker leaves: what helpers have generated comes back before its shards are handed over. Waits until it
        has, but no longer than this.
        """
        self._is_leaving = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def lend(self, shard_id: int, num_rows: int, helper: str) -> None:
        """Lend rows of an open shard and wait until each has its result or is back in the engine here."""
        asked = asyncio.wrap_future(self._engine.lend(shard_id, num_rows))
        try:
            # Shielded: rows that leave the engine late must be seen to come back.
            loan = await asyncio.wait_for(asyncio.shield(asked), _EXPORT_TIMEOUT_S)
        except TimeoutError:
            asked.add_done_callback(lambda late: self._take_back(late.result()))
            return
        if not loan.rows:
            return
        try:
            await self._see_through(loan, helper)
        except PeerLostError as error:
            logger.warning("rows of shard %d come back: %s", shard_id, error)
        finally:
            self._take_back(loan)

    def _take_back(self, loan: Loan) -> None:
        """What was answered is not in the ledger any more; the rest goes on here."""
        self._engine.reclaim(row.request.request_id for row in loan.rows)

    async def _see_through(self, loan: Loan, helper: str) -> None:
        loan_id = uuid.uuid4().hex[:12]
        lent = ReceiveRows(loan_id, self._address, tuple(loan.rows))
        await self._peers.ask(helper, lent, timeout_s=_RECEIVE_TIMEOUT_S)
        logger.info("%d rows lent to %s", len(loan.rows), helper)
        waiting = {row.request.request_id for row in loan.rows}
        acknowledged: tuple[str, ...] = ()
        is_recalled = False
        while waiting:
            if loan.shard is not None and loan.shard.is_abandoned:
                await self._peers.ask(helper, DropRows(loan_id))
                return
            if self._is_leaving and not is_recalled:
                is_recalled = True
                await self._peers.ask(helper, RecallRows(loan_id))
            await asyncio.sleep(POLL_INTERVAL_S)
            results = await self._patiently(helper, FetchResults(loan_id, acknowledged))
            self._engine.answered(results.rows)
            acknowledged = tuple(row.result.request_id for row in results.rows)
            waiting.difference_update(acknowledged)
            if results.is_over:
                self._engine.returned(results.returned)
                logger.info("%s gives rows back, %d of them begun", helper, len(results.returned))
                return
        await self._peers.ask(helper, FetchResults(loan_id, acknowledged))

    async def _patiently(self, helper: str, request: FetchResults) -> LoanResults:
        """Ask several times: one lost connection is no lost helper."""
        for silences in range(MAX_SILENCES):
            try:
                return await self._peers.ask(helper, request)
            except PeerLostError:
                if silences == MAX_SILENCES - 1:
                    raise
        raise AssertionError("unreachable")
