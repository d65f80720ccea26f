"""Messages between an engine process and its supervisor, and the frames that carry them on pipes.

A frame is four bytes of length (little-endian), then the message as msgpack. Request ids are opaque to the process: the
supervisor gives each row a name of its own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import msgpack

from ...scheduler.costs.cost import CostModel
from ...system.codec import Codec, MessageError
from ...system.untrusted import shown_name
from ..config import EngineConfig
from ..request import ExportedRow, Result, TopLogprobs
from ..telemetry import EngineTelemetry

_LENGTH = struct.Struct("<I")
MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class Start:
    """To the process, first of all: make the engine. `factory`: `module:callable`."""

    model: str
    factory: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class RegisterAdapter:
    """To the process: where an adapter is stored, and what to call it in messages. `content_sha256`: hash that its
    content must have; "" where that is its id.
    """

    adapter_id: str
    folder: str
    name: str
    content_sha256: str = ""


@dataclass(frozen=True, slots=True)
class ExpectRows:
    """To the process: `num_rows` more rows of an adapter will be added; they are planned to run merged."""

    adapter_id: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class AddRows:
    """To the process: generate these rows, which may have been begun by another engine."""

    rows: tuple[ExportedRow, ...]


@dataclass(frozen=True, slots=True)
class ExportRows:
    """To the process: give these rows up. `Exported` replies, with those among them that are unfinished."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbortRows:
    """To the process: forget these rows."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """To the process: end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the process: the engine is made. `batch_rows`, `step_tokens`: the limits of a step that it keeps."""

    pid: int
    load_s: float
    batch_rows: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Results:
    """From the process: rows that have finished."""

    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens generated for an unfinished row, and what belongs to them; see `ExportedRow`."""

    #: Id of the request.
    request_id: str
    #: Tokens generated.
    token_ids: tuple[int, ...]
    #: Log-probability of each token.
    token_logprobs: tuple[float, ...]
    #: Likeliest tokens in place of each token.
    top_logprobs: tuple[TopLogprobs, ...] = ()
    #: Likeliest tokens in place of each token, packed.
    teacher: bytes = b""


@dataclass(frozen=True, slots=True)
class Exported:
    """From the process: the reply to one `ExportRows`, in the order of these. Rows that finished before were in
    `Results` before it.
    """

    rows: tuple[RowTokens, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From the process about once a second, also during a step, which has run for `step_s` seconds."""

    step_s: float


@dataclass(frozen=True, slots=True)
class Fatal:
    """From a process, last of all: why it ends. `is_permanent`: another process would fail, too."""

    error: str
    is_permanent: bool = False
    is_out_of_memory: bool = False


ToEngine = Start | RegisterAdapter | ExpectRows | AddRows | ExportRows | AbortRows | Stop
#: An `EngineTelemetry` comes four times a second, between two steps.
FromEngine = Ready | Results | Exported | Heartbeat | EngineTelemetry | Fatal
TO_ENGINE: Codec[ToEngine] = Codec(
    Start, RegisterAdapter, ExpectRows, AddRows, ExportRows, AbortRows, Stop, named=(CostModel,)
)
FROM_ENGINE: Codec[FromEngine] = Codec(Ready, Results, Exported, Heartbeat, EngineTelemetry, Fatal)


def encode_frame(codec: Codec[MessageT], message: MessageT) -> bytes:
    """The bytes of one message's frame. Raises `MessageError` for a message of another codec."""
    body: bytes = msgpack.packb(codec.encode(message), use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> Any:
    """The plain value of msgpack. Raises `MessageError`."""
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        why = shown_name(str(error) or type(error).__name__)
        raise MessageError(f"a frame of {len(body)} bytes is no msgpack: {why}") from None


def write_frame(stream: IO[bytes], codec: Codec[MessageT], message: MessageT) -> None:
    """Write one message and flush. Raises `OSError` when the other side is gone, `MessageError`."""
    stream.write(encode_frame(codec, message))
    stream.flush()


def read_frame(stream: IO[bytes], codec: Codec[MessageT]) -> MessageT | None:
    """The next message, or None at the end of the stream (also when it ends inside a frame). Raises `MessageError`."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = stream.read(size)
    if len(body) < size:
        return None
    return codec.decode(unpacked(body))
