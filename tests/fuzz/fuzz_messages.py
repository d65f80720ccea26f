"""Frames of engines and messages of workers: cases, and the readers that they are given to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgpack
from fuzz_case import Case
from fuzz_values import Raw, changed, damaged, scalars
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.server.frames import FROM_ENGINE, TO_ENGINE, FromEngine, ToEngine, read_frame, unpacked
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.pipeline.messages import CoordinatorStarted, PublishedState, StopRun, WorkerReport
from lorabatch.pipeline.migration import peers
from lorabatch.pipeline.monitoring.topics import CONTROL, REPORTS, STATES
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.system.codec import MessageError, to_plain


def _messages(*kinds: Any) -> SearchStrategy[Any]:
    """Messages with fields of the types that they should have."""
    counts, costs = st.none() | st.integers(1, 2**40), st.none() | st.just(CPU_SMOLLM2_135M)
    st.register_type_strategy(EngineConfig, st.builds(EngineConfig, max_batch_rows=counts, cost=costs))
    st.register_type_strategy(
        EngineTelemetry, st.builds(EngineTelemetry, num_running=st.integers(), busy_s=st.floats())
    )
    return st.sampled_from([kind for given in kinds for kind in (get_args(given) or (given,))]).flatmap(st.builds)


def packed(value: Any) -> bytes:
    try:
        return msgpack.packb(value, use_bin_type=True, default=str)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return b"\xc1"


def frame_cases() -> SearchStrategy[Case]:
    def frames(message: Any) -> SearchStrategy[bytes]:
        codec = TO_ENGINE if isinstance(message, get_args(ToEngine)) else FROM_ENGINE
        body = packed(codec.encode(message))
        whole = len(body).to_bytes(4, "little") + body
        other = changed(codec.encode(message), scalars.map(small)).map(unpaired).map(packed)
        return st.one_of(
            st.just(whole),
            damaged(whole),
            other.map(lambda body: len(body).to_bytes(4, "little") + body),
        )

    return _messages(ToEngine, FromEngine).flatmap(frames).map(lambda data: {"frame": data})


def small(value: Any) -> Any:
    return 7 if isinstance(value, Raw) else value


def unpaired(value: Any) -> Any:
    """Pairs as a dict; msgpack has no word for them."""
    if isinstance(value, list) and type(value) is not list:
        return {key: unpaired(item) for key, item in value}
    return [unpaired(item) for item in value] if isinstance(value, list) else value


def read_frames(folder: Path) -> Iterator[str]:
    data = (folder / "frame").read_bytes()
    refused = 0
    for codec in (TO_ENGINE, FROM_ENGINE):
        stream = BytesIO(data)
        try:
            while read_frame(stream, codec) is not None:
                pass
        except MessageError as error:
            refused += 1
            yield str(error)


_PEER_MESSAGES = (
    peers.LendRows, peers.ReceiveRows, peers.FetchResults, peers.RecallRows, peers.DropRows, peers.FetchAdapter,
    peers.LoanResults, peers.AdapterFiles, peers.Refused, WorkerReport, PublishedState, StopRun,
    CoordinatorStarted,
)  # fmt: skip


def peer_cases() -> SearchStrategy[Case]:
    def bodies(message: Any) -> SearchStrategy[bytes]:
        plain = {"type": type(message).__name__, **to_plain(message)}
        other = changed(plain, scalars.map(small)).map(unpaired).map(packed)
        return st.one_of(st.just(packed(plain)), damaged(packed(plain)), other)

    return _messages(*_PEER_MESSAGES).flatmap(bodies).map(lambda data: {"body": data})


def read_peers(folder: Path) -> Iterator[str]:
    body = (folder / "body").read_bytes()
    yield from asyncio.run(_ask_and_reply(body))
    try:
        plain = unpacked(body)
    except MessageError as error:
        yield str(error)
        return
    for topic in (REPORTS, STATES, CONTROL):
        try:
            topic.codec.decode(plain)
        except MessageError as error:
            yield str(error)


async def _ask_and_reply(body: bytes) -> list[str]:
    """What a worker says to a request, and what it makes of a reply."""
    said: list[str] = []

    async def reply_to(request: Any) -> None:
        pass

    async def answer(**_: Any) -> dict[str, bytes]:
        return {"body": body}

    worker: Any = SimpleNamespace(
        handlers={}, address="tcp://a", rpc=lambda _: SimpleNamespace(**{"lorabatch-run": answer})
    )
    peers.serve_peers(worker, "run", reply_to)
    said.append(repr(await worker.handlers["lorabatch-run"](body=body)))
    try:
        await peers.Peers(worker, "run").ask("tcp://b", peers.RecallRows("loan"))
    except peers.PeerLostError as error:
        said.append(str(error))
    return said
