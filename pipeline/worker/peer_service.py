"""`PeerService`: replies to the other workers of a run about rows that this one lends or works on, and adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from distributed import Worker

from ..messages import LocalAdapter
from ..migration.incoming import IncomingRows
from ..migration.outgoing import OutgoingRows
from ..migration.peers import (
    Accepted,
    AdapterFiles,
    DropRows,
    FetchAdapter,
    FetchResults,
    LendRows,
    LoanResults,
    Peers,
    RecallRows,
    ReceiveRows,
    serve_peers,
    stop_serving_peers,
)
from ..supervisor.supervisor import EngineHandle
from .adapters import AdapterCache

# Longer than another worker is waited for; what comes from storage instead may take its time.
_TAKE_OVER_LIMIT_S = 30.0


class PeerService:
    """Serves the coordinator and other workers. `find_cache` may read from storage on its first call."""

    def __init__(
        self, worker: Worker, run_id: str, engine: EngineHandle, peers: Peers, find_cache: Callable[[], AdapterCache]
    ) -> None:
        self._worker = worker
        self._run_id = run_id
        self._find_cache = find_cache
        self._outgoing = OutgoingRows(engine, peers, worker.address)
        self._incoming = IncomingRows(engine)
        serve_peers(worker, run_id, self._reply_to)

    def take_over(self, sources: Mapping[str, str]) -> None:
        """`AdapterCache.take_over` for a thread that is not the event loop's: it waits, but not for ever, as the loop
        may have ended.
        """
        asked = asyncio.run_coroutine_threadsafe(self._take_over(sources), self._worker.loop.asyncio_loop)  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            asked.result(_TAKE_OVER_LIMIT_S)

    async def call_back(self, timeout_s: float) -> None:
        """Fetch lent rows as they are, but wait no longer than this. Nothing is lent any more."""
        await self._outgoing.call_back(timeout_s)

    async def depart(self, timeout_s: float) -> None:
        """Wait until owners have fetched rows that this worker had to give up, but no longer than this."""
        await self._incoming.depart(timeout_s)

    def close(self) -> None:
        """Reply to no worker any more."""
        stop_serving_peers(self._worker, self._run_id)

    async def _reply_to(self, request: object) -> Accepted | LoanResults | AdapterFiles:
        match request:
            case LendRows():
                self._outgoing.begin(request.shard_id, request.num_rows, request.helper)
            case ReceiveRows():
                await self._receive(request)
            case FetchResults():
                return self._incoming.results(request.loan_id, request.acknowledged)
            case RecallRows():
                self._incoming.recall(request.loan_id)
            case DropRows():
                self._incoming.drop(request.loan_id)
            case FetchAdapter():
                return AdapterFiles(await (await self._cache()).files(request.adapter_id))
            case _:
                raise AssertionError(f"no way to reply to {request!r}")
        return Accepted()

    async def _receive(self, request: ReceiveRows) -> None:
        named = (row.request.adapter_id for row in request.rows)
        # The owner has them at hand.
        owner = request.owner
        adapters = await self._take_over({adapter_id: owner for adapter_id in named if adapter_id is not None})
        self._incoming.receive(request.loan_id, request.rows, adapters)

    async def _take_over(self, workers: Mapping[str, str]) -> list[LocalAdapter]:
        return await (await self._cache()).take_over(workers)

    async def _cache(self) -> AdapterCache:
        return await asyncio.to_thread(self._find_cache)
