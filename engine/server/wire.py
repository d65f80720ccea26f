"""Frames between an engine process and its host: four bytes of length (little-endian), then msgpack.

Every message is a map with an `op`; `docs/architecture.md` lists them. Only plain values travel, so neither
side can make the other run code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import IO, Any

import msgpack

from ...scheduler.cost import CostModel
from ..config import EngineConfig
from ..request import EngineTelemetry, ExportedRow, Request, Result, SamplingParams

_LENGTH = struct.Struct("<I")


def pack_frame(message: Mapping[str, Any]) -> bytes:
    """One message as it is written."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


def write_frame(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write one message and flush. Raises `OSError` when the other side is gone."""
    stream.write(pack_frame(message))
    stream.flush()


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream (also when it ends inside a frame)."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = stream.read(size)
    if len(body) < size:
        return None
    message: dict[str, Any] = msgpack.unpackb(body, raw=False, strict_map_key=True)
    return message


def pack_config(config: EngineConfig) -> dict[str, Any]:
    """An engine's configuration as plain values."""
    return asdict(config)


def unpack_config(raw: Mapping[str, Any]) -> EngineConfig:
    """The configuration that `pack_config` packed."""
    cost = raw["cost"]
    return EngineConfig(**{**raw, "cost": None if cost is None else CostModel.from_json(cost)})


def pack_request(request: Request) -> dict[str, Any]:
    """A request as plain values."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "adapter_id": request.adapter_id,
        "sampling": asdict(request.sampling),
        "stream_id": request.stream_id,
    }


def unpack_request(raw: Mapping[str, Any]) -> Request:
    """The request that `pack_request` packed."""
    sampling = dict(raw["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    return Request(
        request_id=raw["request_id"],
        prompt_token_ids=tuple(raw["prompt_token_ids"]),
        adapter_id=raw["adapter_id"],
        sampling=SamplingParams(**sampling),
        stream_id=raw["stream_id"],
    )


def pack_exported_row(row: ExportedRow) -> dict[str, Any]:
    """An unfinished row as plain values."""
    return {
        "request": pack_request(row.request),
        "token_ids": row.token_ids,
        "token_logprobs": row.token_logprobs,
    }


def unpack_exported_row(raw: Mapping[str, Any]) -> ExportedRow:
    """The row that `pack_exported_row` packed."""
    return ExportedRow(unpack_request(raw["request"]), tuple(raw["token_ids"]), tuple(raw["token_logprobs"]))


def pack_result(result: Result) -> dict[str, Any]:
    """A result as plain values."""
    return {field.name: getattr(result, field.name) for field in fields(result)}


def unpack_result(raw: Mapping[str, Any]) -> Result:
    """The result that `pack_result` packed."""
    logprobs = raw["token_logprobs"]
    return Result(
        **{
            **raw,
            "token_ids": tuple(raw["token_ids"]),
            "token_logprobs": None if logprobs is None else tuple(logprobs),
        }
    )


def pack_telemetry(telemetry: EngineTelemetry) -> dict[str, Any]:
    """A snapshot as plain values."""
    return asdict(telemetry)


def unpack_telemetry(raw: Mapping[str, Any]) -> EngineTelemetry:
    """The snapshot that `pack_telemetry` packed."""
    return EngineTelemetry(**{**raw, "resident_adapter_ids": tuple(raw["resident_adapter_ids"])})
