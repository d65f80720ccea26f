"""Live migration as one worker sees it: rows it lends, rows it works on for others, and the adapters they need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from distributed import Worker

from ..engine.exported_row import ExportedRow
from ..engine.wire import unpack_exported_row
from .adapter_shelf import AdapterShelf
from .engine_share import EngineShare
from .guests import Guests
from .loans import Loans
from .messages import LocalAdapter
from .peers import Answer, PeerLostError, Peers, answer_peers, ignore_peers

logger = logging.getLogger(__name__)

_ADAPTER_TIMEOUT_S = 30.0


class RowExchange:
    """Answers what the coordinator and other hosts ask. `find_shelf` may read from storage on its first call."""

    def __init__(
        self, worker: Worker, run_id: str, engine: EngineShare, find_shelf: Callable[[], AdapterShelf]
    ) -> None:
        self._worker = worker
        self._run_id = run_id
        self._find_shelf = find_shelf
        self._peers = Peers(worker, run_id)
        self._loans = Loans(engine, self._peers, worker.address)
        self._guests = Guests(engine)
        answer_peers(worker, run_id, self._answer)

    async def depart(self, timeout_s: float) -> None:
        """Wait until owners have fetched guests that this worker had to give up, but no longer than this."""
        await self._guests.depart(timeout_s)

    def close(self) -> None:
        """Answer nobody any more."""
        ignore_peers(self._worker, self._run_id)

    async def _answer(self, question: str, content: Answer) -> Answer:
        match question:
            case "lend":
                self._loans.begin(**content)
            case "receive":
                await self._receive(**content)
            case "results":
                return self._guests.results(**content)
            case "drop":
                self._guests.drop(**content)
            case "adapter":
                return {"files": await asyncio.to_thread(self._find_shelf().files, content["adapter_id"])}
            case _:
                raise AssertionError(f"unknown question {question!r}")
        return {}

    async def _receive(self, loan_id: str, owner: str, rows: list[dict[str, Any]]) -> None:
        guests = [unpack_exported_row(raw) for raw in rows]
        self._guests.receive(loan_id, guests, await self._adapters_of(guests, owner))

    async def _adapters_of(self, rows: Iterable[ExportedRow], owner: str) -> list[LocalAdapter]:
        """From the owner, who has them at hand, before storage."""
        adapter_ids = list(dict.fromkeys(r.request.adapter_id for r in rows if r.request.adapter_id is not None))
        shelf = await asyncio.to_thread(self._find_shelf)
        for adapter_id in shelf.far(adapter_ids):
            try:
                answer = await self._peers.ask(owner, "adapter", timeout_s=_ADAPTER_TIMEOUT_S, adapter_id=adapter_id)
                await asyncio.to_thread(shelf.put, adapter_id, answer["files"])
            except (PeerLostError, ValueError) as error:
                logger.warning("adapter %s comes from storage: %s", adapter_id[:12], error)
        return await asyncio.to_thread(shelf.local, adapter_ids)
