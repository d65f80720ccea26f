"""Requests between the workers of one run, past the Dask scheduler: one typed request, one typed reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgpack
from distributed import Worker

from ...engine.request import ExportedRow
from ...engine.server.frames import unpacked
from ...scheduler.messages import AdapterFetch
from ...system.codec import Codec, MessageError
from ...system.untrusted import printable
from ..supervisor.open_shard import ServedRow

logger = logging.getLogger(__name__)
# Limit in seconds for a reply: a worker that is stopped accepts connections and never replies.
_TIMEOUT_S = 4.0
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class LoanResults:
    """The reply to `FetchResults`: results of lent rows that the owner has not acknowledged. `is_over`: whether no more
    results will come; `returned`: the rows without a result, with the tokens that were generated for them.
    """

    rows: tuple[ServedRow, ...]
    is_over: bool
    returned: tuple[ExportedRow, ...]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The reply to `FetchAdapter`: sizes of an adapter's files by name (None: the worker does not have them yet), or a
    piece of one and its SHA-256. `is_shared`: both workers would share the copy.
    """

    sizes: Mapping[str, int] | None = None
    piece: bytes = b""
    sha256: str = ""
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The reply to a request that raised an error on the worker that was asked."""

    reason: str


class PeerRequest(Generic[ReplyT]):
    """Base of all requests; the parameter is the type of the reply, None for a request that asks for no data."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LendRows(PeerRequest[None]):
    """Asks an owner to lend rows of an open shard to another worker."""

    #: Shard of the rows.
    shard_id: int
    #: Unfinished rows to lend.
    num_rows: int
    #: Address of the worker that works on the rows.
    helper: str
    #: Whether only rows of one adapter are lent, that of `adapter_id`; else rows of any.
    is_selective: bool = False
    #: Content hash of this adapter; None for the base model, and when rows of any adapter are lent.
    adapter_id: str | None = None


@dataclass(frozen=True, slots=True)
class ReceiveRows(PeerRequest[None]):
    """Asks a helper to work on these rows of the worker `owner`."""

    loan_id: str
    owner: str
    rows: tuple[ExportedRow, ...]


@dataclass(frozen=True, slots=True)
class FetchResults(PeerRequest[LoanResults]):
    """Asks a helper for results of lent rows. `acknowledged`: request ids whose results have arrived."""

    loan_id: str
    acknowledged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecallRows(PeerRequest[None]):
    """Asks a helper to give lent rows back as they are, with the next results."""

    loan_id: str


@dataclass(frozen=True, slots=True)
class DropRows(PeerRequest[None]):
    """Asks a helper to drop lent rows, which are no longer needed."""

    loan_id: str


@dataclass(frozen=True, slots=True)
class FetchAdapter(PeerRequest[AdapterFiles]):
    """Asks a worker for a piece of a file of an adapter, which the worker fetches if it has to; without a name, for the
    names and sizes of the files.
    """

    #: Identity of the adapter.
    adapter_id: str
    #: File of which a piece is asked; "" for the names and sizes of all.
    name: str = ""
    #: First byte of the piece.
    offset: int = 0
    #: Name of the copies of the worker that asks (`AdapterCopies.identity`), where the adapter would be one of them.
    copies: str = ""
    #: Addresses of the workers that wait for the reply, directly or not.
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeseeAdapters(PeerRequest[None]):
    """Tells a worker which adapters its shards will need, in the order of the plan, so that it fetches them ahead."""

    fetches: tuple[AdapterFetch, ...]


_REQUESTS: Codec[Any] = Codec(LendRows, ReceiveRows, FetchResults, RecallRows, DropRows, FetchAdapter, ForeseeAdapters)
_REPLIES: Codec[Any] = Codec(LoanResults, AdapterFiles, Refused)


class PeerLostError(Exception):
    """A worker does not reply, or not as a worker of this run."""


class PeerUnreachableError(PeerLostError):
    """Nothing comes back from a worker: it hangs, or the network between the two is cut."""


class Peers:
    """The other workers of a run, as one worker reaches them."""

    def __init__(self, worker: Worker, run_id: str) -> None:
        self._worker = worker
        self._run_id = run_id

    @property
    def address(self) -> str:
        """Address of the worker itself."""
        return str(self._worker.address)

    async def ask(self, address: str, request: PeerRequest[ReplyT], timeout_s: float = _TIMEOUT_S) -> ReplyT:
        """Send a request to another worker and return its reply. Raises `PeerUnreachableError` when there is none, and
        `PeerLostError` for a reply that is no answer to the request.
        """
        call = getattr(self._worker.rpc(address), _op(self._run_id))
        body = _packed(_REQUESTS, request)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call(body=body)
        except Exception as error:
            raise PeerUnreachableError(f"{address} does not answer ({str(error) or type(error).__name__})") from None
        # Dask replies with a string when a worker serves no such operation.
        try:
            reply = _unpacked_reply(answer["body"]) if isinstance(answer, dict) else Refused("no engine of this run")
        except MessageError as error:
            raise PeerLostError(f"{address}: {error}") from None
        if isinstance(reply, Refused):
            raise PeerLostError(f"{address}: {printable(str(reply.reason))}")
        return cast(ReplyT, reply)

    def send(self, address: str, request: PeerRequest[None]) -> None:
        """Send a request from any thread without waiting for the reply; a lost worker is only logged."""
        self._worker.loop.add_callback(self._send, address, request)

    async def _send(self, address: str, request: PeerRequest[None]) -> None:
        try:
            await self.ask(address, request)
        except PeerLostError as error:
            logger.warning("%s: %s", type(request).__name__, error)


def serve_peers(worker: Worker, run_id: str, reply_to: Callable[[Any], Awaitable[object]]) -> None:
    """Have `reply_to(request)` reply to requests of this run's workers to this worker."""

    async def receive(body: bytes) -> dict[str, Any]:
        request = None
        try:
            request = _unpacked(_REQUESTS, body)
            found = await reply_to(request)
            reply = None if found is None else _packed(_REPLIES, found)
        except Exception as error:
            logger.exception("no reply to %s", type(request).__name__)
            reply = _packed(_REPLIES, Refused(f"{type(error).__name__}: {error}"))
        return {"body": reply}

    worker.handlers[_op(run_id)] = receive


def stop_serving_peers(worker: Worker, run_id: str) -> None:
    """Stop replying to requests of this run's workers."""
    worker.handlers.pop(_op(run_id), None)


def _packed(codec: Codec[Any], message: object) -> bytes:
    return cast(bytes, msgpack.packb(codec.encode(message), use_bin_type=True))


def _unpacked(codec: Codec[Any], body: bytes) -> Any:
    return codec.decode(unpacked(body))


def _unpacked_reply(body: bytes | None) -> Any:
    return None if body is None else _unpacked(_REPLIES, body)


def _op(run_id: str) -> str:
    return f"lorabatch-{run_id}"
