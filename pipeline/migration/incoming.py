"""Rows of other workers' shards that this worker's engine works on. They belong to their owner, who asks for results.

An owner that has not asked for a while is taken for lost: its guests leave, since whoever works on its shard now has
them too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engine.request import ExportedRow
from ...jobs.errors import JobFailedError
from ..messages import LocalAdapter
from ..supervisor.open_shard import OpenShard, ServedRow
from ..supervisor.supervisor import EngineShare
from .peers import LoanResults

logger = logging.getLogger(__name__)
# Longer than an owner tries to reach a helper before it takes its rows back.
PATIENCE_S = 20.0
_DEPART_POLL_S = 0.05


@dataclass(slots=True)
class _Party:
    """The guests of one loan. `untold`: finished rows that the owner has not acknowledged, by its request ids."""

    shard: OpenShard
    asked_s: float
    untold: dict[str, ServedRow] = field(default_factory=dict)


class Guests:
    """Guests of one engine, by loan. Used from the worker's event loop only."""

    def __init__(self, engine: EngineShare, patience_s: float = PATIENCE_S) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._parties: dict[str, _Party] = {}
        self._watcher: asyncio.Task[None] | None = None

    def receive(self, loan_id: str, rows: Sequence[ExportedRow], adapters: Sequence[LocalAdapter]) -> None:
        """Work on these rows. Asked again for the same loan, nothing happens."""
        if loan_id in self._parties:
            return
        # Their owner's shard may be opened here too, should the owner be lost: the names must differ.
        renamed = [_renamed(row, f"{loan_id}/{row.request.request_id}") for row in rows]
        self._parties[loan_id] = _Party(self._engine.open(None, renamed, adapters), time.monotonic())
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    def results(self, loan_id: str, acknowledged: Sequence[str]) -> LoanResults:
        """What has finished and was not acknowledged yet (`rows`). When the owner has acknowledged all, the loan is
        over; it is over too when this engine cannot go on, or was asked for the rows (`is_over`), and the rest is
        `returned` as it is.

        Raises KeyError for a loan that is not here (any more).
        """
        party = self._parties[loan_id]
        party.asked_s = time.monotonic()
        for request_id in acknowledged:
            party.untold.pop(request_id, None)
        is_over = False
        try:
            for served in party.shard.take(0):
                party.untold[served.result.request_id.removeprefix(f"{loan_id}/")] = served
        except JobFailedError:
            is_over = True
        if is_over or (not party.untold and not party.shard.num_unfinished):
            del self._parties[loan_id]
        rows = (
            replace(served, result=replace(served.result, request_id=name)) for name, served in party.untold.items()
        )
        begun = party.shard.begun if is_over else ()
        returned = (_renamed(row, row.request.request_id.removeprefix(f"{loan_id}/")) for row in begun)
        return LoanResults(tuple(rows), is_over, tuple(returned))

    def recall(self, loan_id: str) -> None:
        """Their owner wants the rows back as they are: soon the loan is over. It may be over already."""
        party = self._parties.get(loan_id)
        if party is not None:
            self._engine.surrender(party.shard)

    async def depart(self, timeout_s: float) -> None:
        """Wait until every owner has heard that its guests are given up, but no longer than this."""
        give_up_s = time.monotonic() + timeout_s
        while self._parties and time.monotonic() < give_up_s:
            await asyncio.sleep(_DEPART_POLL_S)

    def drop(self, loan_id: str) -> None:
        """Nobody wants these rows any more."""
        party = self._parties.pop(loan_id, None)
        if party is not None:
            self._engine.abandon(party.shard)

    async def _watch(self) -> None:
        while self._parties:
            await asyncio.sleep(self._patience_s / 4)
            for loan_id, party in list(self._parties.items()):
                if time.monotonic() - party.asked_s > self._patience_s:
                    logger.warning("nobody asks for the guests of loan %s; they leave", loan_id)
                    self.drop(loan_id)


def _renamed(row: ExportedRow, request_id: str) -> ExportedRow:
    return replace(row, request=replace(row.request, request_id=request_id))
