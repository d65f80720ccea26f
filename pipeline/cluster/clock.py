"""Keeps the processes of a Dask cluster going when the clock of their host is set back.

Dask finds by the wall clock when a stream's next batch of messages is due (`distributed.batched.BatchedSend`), and
tornado when a callback is to be called again (`PeriodicCallback`). Where the clock is set back by an hour, what waits
at that moment waits for an hour: messages of a scheduler and its workers, heartbeats, and the looks at leases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from distributed import Client
from distributed.batched import BatchedSend
from tornado.ioloop import PeriodicCallback

_LOOK_INTERVAL_S = 1.0
# Clocks that are kept right by another one go back by less.
_LEAST_STEP_S = 0.1
Part = BatchedSend | PeriodicCallback | None


async def follow_clock(parts: Callable[[], Sequence[Part] | None]) -> None:
    """Have parts of this process go on within a second or so whenever its clock is set back. `parts`: its streams and
    periodic callbacks; None ends it.
    """
    ahead_s = time.time() - time.monotonic()
    while (found := parts()) is not None:
        before_s, ahead_s = ahead_s, time.time() - time.monotonic()
        if ahead_s < before_s - _LEAST_STEP_S:
            for part in found:
                _go_on(part)
        del found
        await asyncio.sleep(_LOOK_INTERVAL_S)


def parts_of_server(server: Any) -> Sequence[Part]:
    """Streams and periodic callbacks of a Dask scheduler or worker."""
    streams: list[Part] = [getattr(server, "batched_stream", None)]
    for name in ("client_comms", "stream_comms"):
        streams += getattr(server, name, {}).values()
    return [*streams, *server.periodic_callbacks.values()]


def follow_clock_of_client(client: Client) -> None:
    """`follow_clock` for a client until it is closed or nobody has it any more."""
    reference = ref(client)

    def parts() -> Sequence[Part] | None:
        followed = reference()
        if followed is None or followed.status == "closed":
            return None
        return [followed.scheduler_comm, *followed._periodic_callbacks.values()]

    asyncio.run_coroutine_threadsafe(follow_clock(parts), client.loop.asyncio_loop)  # type: ignore[union-attr]


def _go_on(part: Part) -> None:
    if isinstance(part, BatchedSend):
        part.next_deadline = None
        part.waker.set()
    elif part is not None and part.is_running():
        part.stop()
        part.start()
