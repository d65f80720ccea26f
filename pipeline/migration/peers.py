"""Direct questions between the engine hosts of one run: worker to worker, past the Dask scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
from distributed import Worker

logger = logging.getLogger(__name__)
Answer = dict[str, Any]
Answerer = Callable[[str, Answer], Coroutine[Any, Any, Answer]]
# A worker that is stopped accepts connections and never answers.
_TIMEOUT_S = 4.0


class PeerLostError(Exception):
    """A worker does not answer, or not as a host of this run."""


class Peers:
    """The other hosts of a run, as one worker reaches them."""

    def __init__(self, worker: Worker, run_id: str) -> None:
        self._worker = worker
        self._run_id = run_id

    @property
    def address(self) -> str:
        """Of the worker itself."""
        return str(self._worker.address)

    async def ask(self, address: str, question: str, timeout_s: float = _TIMEOUT_S, **content: Any) -> Answer:
        """The answer of another host. `content`: what msgpack can carry. Raises `PeerLostError`."""
        call = getattr(self._worker.rpc(address), _op(self._run_id))
        body = msgpack.packb(content, use_bin_type=True)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await call(question=question, body=body)
        except Exception as error:
            raise PeerLostError(f"{address} does not answer ({error or type(error).__name__})") from None
        if not isinstance(reply, dict) or reply["error"] is not None:
            reason = reply["error"] if isinstance(reply, dict) else "it has no engine of this run"
            raise PeerLostError(f"{address}: {reason}")
        answer: Answer = msgpack.unpackb(reply["body"], raw=False)
        return answer

    def tell(self, address: str, question: str, **content: Any) -> None:
        """Ask from any thread without waiting for an answer; a lost host is only logged."""
        self._worker.loop.add_callback(self._tell, address, question, content)

    async def _tell(self, address: str, question: str, content: Answer) -> None:
        try:
            await self.ask(address, question, **content)
        except PeerLostError as error:
            logger.warning("%s: %s", question, error)


def answer_peers(worker: Worker, run_id: str, answer: Answerer) -> None:
    """Have `answer(question, content)` answer what hosts of this run ask this worker."""

    async def receive(question: str, body: bytes) -> dict[str, Any]:
        try:
            found = await answer(question, msgpack.unpackb(body, raw=False))
        except Exception as error:
            logger.exception("cannot answer %s", question)
            return {"error": f"{type(error).__name__}: {error}", "body": b""}
        return {"error": None, "body": msgpack.packb(found, use_bin_type=True)}

    worker.handlers[_op(run_id)] = receive


def ignore_peers(worker: Worker, run_id: str) -> None:
    """This run's host is gone."""
    worker.handlers.pop(_op(run_id), None)


def _op(run_id: str) -> str:
    return f"lorabatch-{run_id}"
