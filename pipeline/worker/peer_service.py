"""`PeerService`: replies to requests of a run's coordinator and other workers, about lent rows and adapters."""

from __future__ import annotations

import asyncio

from distributed import Worker

from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import StorageError
from ..migration.incoming import IncomingRows
from ..migration.outgoing import OutgoingRows
from ..migration.peers import (
    AdapterFiles,
    DropRows,
    FetchAdapter,
    FetchResults,
    ForeseeAdapters,
    LendRows,
    LoanResults,
    Peers,
    RecallRows,
    ReceiveRows,
    serve_peers,
)
from ..supervisor.supervisor import EngineHandle
from .adapters import AdapterCache


class PeerService:
    """Serves the coordinator and other workers, until `stop_serving_peers` is called."""

    def __init__(self, worker: Worker, run_id: str, engine: EngineHandle, peers: Peers, adapters: AdapterCache) -> None:
        self._adapters = adapters
        # Adapters of incoming rows.
        self._lent: list[RegisterAdapter | str] = []
        self.outgoing = OutgoingRows(engine, peers, worker.address)
        self.incoming = IncomingRows(engine)
        serve_peers(worker, run_id, self._reply_to)

    async def _reply_to(self, request: object) -> LoanResults | AdapterFiles | None:
        match request:
            case LendRows():
                self.outgoing.begin(request)
            case ReceiveRows():
                await self._receive(request)
            case FetchResults():
                results = self.incoming.results(request.loan_id, request.acknowledged)
                await self._release()
                return results
            case RecallRows():
                self.incoming.recall(request.loan_id)
            case DropRows():
                self.incoming.drop(request.loan_id)
                await self._release()
            case ForeseeAdapters():
                self._adapters.foresee(request.fetches)
            case FetchAdapter():
                return await self._adapters.reply(request)
            case _:
                raise AssertionError(f"no way to reply to {request!r}")
        return None

    async def _release(self) -> None:
        """Let the adapters of incoming rows go when there are no such rows."""
        if self._lent and not self.incoming.has_rows:
            lent, self._lent = self._lent, []
            await asyncio.to_thread(self._adapters.release, lent)

    async def _receive(self, request: ReceiveRows) -> None:
        named = (row.request.adapter_id for row in request.rows)
        # The owner of the rows has their adapters.
        owner = request.owner
        peers = {adapter_id: owner for adapter_id in named if adapter_id is not None}
        found = await self._adapters.get(peers, peers)
        self._lent += found.values()
        for why in found.values():
            if isinstance(why, str):
                raise StorageError(f"rows are not taken: {why}")
        adapters = [adapter for adapter in found.values() if not isinstance(adapter, str)]
        self.incoming.receive(request.loan_id, request.rows, adapters)
