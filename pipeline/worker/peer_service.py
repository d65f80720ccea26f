"""What one worker answers the others of a run: rows it lends, rows it works on for them, and the adapters they need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Worker

from ...engine.server.wire import unpack_exported_row
from ..migration.incoming import Guests
from ..migration.outgoing import Loans
from ..migration.peers import Answer, Peers, answer_peers, ignore_peers
from ..supervisor.supervisor import EngineShare
from .adapters import AdapterShelf, AdapterSupply

# Longer than another worker is waited for; what comes from storage instead may take its time.
_TAKE_OVER_LIMIT_S = 30.0


class RowExchange:
    """Answers what the coordinator and other hosts ask. `find_shelf` may read from storage on its first call."""

    def __init__(
        self, worker: Worker, run_id: str, engine: EngineShare, find_shelf: Callable[[], AdapterShelf]
    ) -> None:
        self._worker = worker
        self._run_id = run_id
        peers = Peers(worker, run_id)
        self._supply = AdapterSupply(peers, find_shelf)
        self._loans = Loans(engine, peers, worker.address)
        self._guests = Guests(engine)
        answer_peers(worker, run_id, self._answer)

    def take_over(self, sources: Mapping[str, str]) -> None:
        """`AdapterSupply.take_over` for a thread that is not the event loop's: it waits, but not for ever, as the loop
        may have ended.
        """
        asked = asyncio.run_coroutine_threadsafe(self._supply.take_over(sources), self._worker.loop.asyncio_loop)  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            asked.result(_TAKE_OVER_LIMIT_S)

    async def call_back(self, timeout_s: float) -> None:
        """Get rows back that are on loan, as they are, but wait no longer than this. Nothing is lent any more."""
        await self._loans.call_back(timeout_s)

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
            case "recall":
                self._guests.recall(**content)
            case "drop":
                self._guests.drop(**content)
            case "adapter":
                return {"files": await self._supply.files(**content)}
            case _:
                raise AssertionError(f"unknown question {question!r}")
        return {}

    async def _receive(self, loan_id: str, owner: str, rows: list[dict[str, Any]]) -> None:
        guests = [unpack_exported_row(raw) for raw in rows]
        named = (row.request.adapter_id for row in guests)
        # The owner has them at hand.
        adapters = await self._supply.take_over({adapter_id: owner for adapter_id in named if adapter_id is not None})
        self._guests.receive(loan_id, guests, adapters)
