"""Outgoing rows: rows of this worker's shards that other workers' engines work on. The shard is committed here."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid

from ..supervisor.queue import EngineQueue, LentRows
from ..supervisor.supervisor import EngineHandle
from .peers import (
    DropRows,
    FetchResults,
    LendRows,
    LoanResults,
    PeerLostError,
    Peers,
    PeerUnreachableError,
    RecallRows,
    ReceiveRows,
)

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2
# Requests in a row without a reply after which a helper is lost.
MAX_SILENCES = 3
_EXPORT_TIMEOUT_S = 30.0
# Limit in seconds for a helper's reply to lent rows; it may have to fetch adapters first.
_RECEIVE_TIMEOUT_S = 60.0
# Seconds for which no rows are lent to a helper that could not be reached. The coordinator, which may reach both
# workers, would have rows lent again at once and never computed.
_AVOIDED_S = 60.0


class OutgoingRows:
    """Lends rows and gets their results, or the rows, back. Used from the worker's event loop only.

    `address`: address of this worker, from which helpers may fetch adapters.
    """

    def __init__(self, engine: EngineHandle, peers: Peers, address: str) -> None:
        self._engine = engine
        self._peers = peers
        self._address = address
        self._running: set[asyncio.Task[None]] = set()
        self._is_leaving = False
        # Helper that could not be reached -> time of the last attempt in seconds.
        self._unreachable: dict[str, float] = {}

    def begin(self, request: LendRows) -> None:
        """Lend rows of an open shard to another worker, in the background. Does nothing when this worker leaves, or has
        not reached the other one within the last `_AVOIDED_S`.
        """
        is_avoided = time.monotonic() - self._unreachable.get(request.helper, -math.inf) < _AVOIDED_S
        if self._is_leaving or is_avoided:
            return
        task = asyncio.create_task(self.lend(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def call_back(self, timeout_s: float) -> None:
        """Fetch all lent rows back, before this worker leaves and hands over its shards. Waits at most `timeout_s`."""
        self._is_leaving = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def lend(self, request: LendRows) -> None:
        """Lend rows of an open shard and wait until each has its result or is back in this worker's engine."""
        shard_id, helper = request.shard_id, request.helper
        asked = (shard_id, request.num_rows, request.is_selective, request.adapter_id)
        exported = asyncio.wrap_future(self._engine.lend(*asked))
        try:
            # Shielded: rows that leave the engine late must be taken back.
            lent = await asyncio.wait_for(asyncio.shield(exported), _EXPORT_TIMEOUT_S)
        except TimeoutError:
            exported.add_done_callback(lambda late: self._take_back(late.result()))
            return
        if lent is None:
            return
        try:
            await self._see_through(lent, helper)
        except PeerLostError as error:
            if isinstance(error, PeerUnreachableError):
                self._unreachable[helper] = time.monotonic()
            logger.warning("rows of shard %d are taken back: %s", shard_id, error)
        finally:
            self._take_back(lent)

    def _take_back(self, lent: LentRows | None) -> None:
        """Have this worker's engine go on with the lent rows that have no result."""
        if lent is None:
            return
        shard, rows = lent
        self._engine.submit(EngineQueue.reclaim, shard, [row.request.request_id for row in rows])

    async def _see_through(self, lent: LentRows, helper: str) -> None:
        shard, rows = lent
        loan_id = uuid.uuid4().hex[:12]
        sent = ReceiveRows(loan_id, self._address, rows)
        await self._peers.ask(helper, sent, timeout_s=_RECEIVE_TIMEOUT_S)
        logger.info("%d rows lent to %s", len(rows), helper)
        waiting = {row.request.request_id for row in rows}
        acknowledged: tuple[str, ...] = ()
        is_recalled = False
        while waiting:
            if shard.is_abandoned:
                await self._peers.ask(helper, DropRows(loan_id))
                return
            if self._is_leaving and not is_recalled:
                is_recalled = True
                await self._peers.ask(helper, RecallRows(loan_id))
            await asyncio.sleep(POLL_INTERVAL_S)
            results = await self._patiently(helper, FetchResults(loan_id, acknowledged))
            self._engine.submit(EngineQueue.answered, shard, results.rows)
            acknowledged = tuple(row.result.request_id for row in results.rows)
            waiting.difference_update(acknowledged)
            if results.is_over:
                self._engine.submit(EngineQueue.returned, shard, results.returned)
                logger.info("%s gives rows back, %d of them begun", helper, len(results.returned))
                return
        await self._peers.ask(helper, FetchResults(loan_id, acknowledged))

    async def _patiently(self, helper: str, request: FetchResults) -> LoanResults:
        """Ask up to `MAX_SILENCES` times: one lost connection is no lost helper."""
        for silences in range(MAX_SILENCES):
            try:
                return await self._peers.ask(helper, request)
            except PeerLostError:
                if silences == MAX_SILENCES - 1:
                    raise
        raise AssertionError("unreachable")
