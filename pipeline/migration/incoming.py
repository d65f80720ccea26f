"""Incoming rows: rows of other workers' shards that this worker's engine works on. Their owners fetch the results.

An owner that has not asked for `PATIENCE_S` counts as lost. Its rows are then dropped, since the next worker that opens
its shard computes them too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...engine.request import ExportedRow
from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import JobFailedError
from ...scheduler.liveness import LivenessDetector
from ..supervisor.open_shard import OpenShard, ServedRow
from ..supervisor.queue import EngineQueue
from ..supervisor.supervisor import EngineHandle
from .peers import LoanResults

logger = logging.getLogger(__name__)
# Seconds without a request after which an owner counts as lost: longer than an owner tries to reach a helper before it
# takes its rows back.
PATIENCE_S = 20.0
_DEPART_POLL_S = 0.05


@dataclass(slots=True)
class _Loan:
    """Rows that one owner has lent together. `unacknowledged`: results that the owner may not have, by request id."""

    shard: OpenShard
    unacknowledged: dict[str, ServedRow] = field(default_factory=dict)


class IncomingRows:
    """Incoming rows of one engine, by loan. Used from the worker's event loop only.

    `patience_s`: seconds without a request after which an owner counts as lost.
    """

    def __init__(self, engine: EngineHandle, patience_s: float = PATIENCE_S) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._liveness = self._new_detector()
        self._loans: dict[str, _Loan] = {}
        self._watcher: asyncio.Task[None] | None = None

    def receive(self, loan_id: str, rows: Sequence[ExportedRow], adapters: Sequence[RegisterAdapter]) -> None:
        """Work on these rows. A repeated call for the same loan does nothing."""
        if loan_id in self._loans:
            return
        self._loans[loan_id] = _Loan(self._engine.open(None, rows, adapters))
        if self._watcher is None or self._watcher.done():
            # A detector needs regular looks; the previous detector had its last when the last loan ended.
            self._liveness = self._new_detector()
            self._watcher = asyncio.create_task(self._watch())
        self._liveness.heard(loan_id, time.monotonic())

    def results(self, loan_id: str, acknowledged: Sequence[str]) -> LoanResults:
        """Results of the loan's rows that the owner has not acknowledged yet.

        A loan ends when the owner has acknowledged all results. It also ends when this engine cannot go on, or has been
        asked to give the rows back: then `is_over` is true and unfinished rows are `returned` as they are. Raises
        KeyError for a loan that has ended.
        """
        loan = self._loans[loan_id]
        self._liveness.heard(loan_id, time.monotonic())
        for request_id in acknowledged:
            loan.unacknowledged.pop(request_id, None)
        is_over = False
        try:
            loan.unacknowledged |= {served.result.request_id: served for served in loan.shard.take(0)}
        except JobFailedError:
            is_over = True
        if is_over or (not loan.unacknowledged and not loan.shard.num_unfinished):
            del self._loans[loan_id]
            self._liveness.forget(loan_id)
        return LoanResults(tuple(loan.unacknowledged.values()), is_over, loan.shard.begun if is_over else ())

    @property
    def has_rows(self) -> bool:
        """Whether any loan has not ended."""
        return bool(self._loans)

    def recall(self, loan_id: str) -> None:
        """Have the engine give a loan's rows back to their owner as they are, unless the loan has ended."""
        loan = self._loans.get(loan_id)
        if loan is not None:
            self._engine.submit(EngineQueue.surrender, loan.shard)

    async def depart(self, timeout_s: float) -> None:
        """Wait until every owner has fetched the rows that were given up, at most `timeout_s`."""
        give_up_s = time.monotonic() + timeout_s
        while self._loans and time.monotonic() < give_up_s:
            await asyncio.sleep(_DEPART_POLL_S)

    def drop(self, loan_id: str) -> None:
        """Forget rows that their owner does not need any more."""
        loan = self._loans.pop(loan_id, None)
        self._liveness.forget(loan_id)
        if loan is not None:
            self._engine.submit(EngineQueue.abandon, loan.shard)

    async def _watch(self) -> None:
        while self._loans:
            await asyncio.sleep(self._patience_s / 4)
            for loan_id in self._liveness.silent(list(self._loans), time.monotonic()):
                logger.warning("the owner of loan %s is silent; its rows leave", loan_id)
                self.drop(loan_id)

    def _new_detector(self) -> LivenessDetector:
        return LivenessDetector(self._patience_s, self._patience_s / 2, time.monotonic())
