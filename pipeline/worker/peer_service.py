"""`PeerService`: replies to the other workers of a run about rows that this one lends or works on, and adapters."""

from __future__ import annotations

from distributed import Worker

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


class PeerService:
    """Serves the coordinator and other workers."""

    def __init__(self, worker: Worker, run_id: str, engine: EngineHandle, peers: Peers, adapters: AdapterCache) -> None:
        self._worker = worker
        self._run_id = run_id
        self._adapters = adapters
        self._outgoing = OutgoingRows(engine, peers, worker.address)
        self._incoming = IncomingRows(engine)
        serve_peers(worker, run_id, self._reply_to)

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
                return AdapterFiles(await self._adapters.files(request.adapter_id))
            case _:
                raise AssertionError(f"no way to reply to {request!r}")
        return Accepted()

    async def _receive(self, request: ReceiveRows) -> None:
        named = (row.request.adapter_id for row in request.rows)
        # The owner has them at hand.
        owner = request.owner
        peers = {adapter_id: owner for adapter_id in named if adapter_id is not None}
        adapters = await self._adapters.get(peers, peers)
        self._incoming.receive(request.loan_id, request.rows, adapters)
