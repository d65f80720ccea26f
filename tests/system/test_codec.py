"""Messages as plain values and back: every field as it was, and errors that name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import pytest

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.system.codec import Codec, MessageError


@dataclass(frozen=True)
class Point:
    x: int
    label: str | None = None


@dataclass(frozen=True)
class Draw:
    points: tuple[Point, ...]
    spans: tuple[tuple[int, float], ...] = ()
    style: Literal["thin", "thick"] = "thin"
    origin: Point | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    by_name: Mapping[str, Point] = field(default_factory=dict)
    extra: Any = None


@dataclass(frozen=True)
class Stop:
    reason: str


@dataclass(frozen=True)
class Either:
    shape: Draw | Stop


@dataclass(frozen=True)
class Grab:
    names: set[str]


CODEC: Codec[Draw | Stop] = Codec(Draw, Stop)
FULL = Draw((Point(1), Point(2, "b")), ((1, 0.5),), "thick", Point(0), {"a": b"\x00"}, {"p": Point(3)}, [1, "two"])


@pytest.mark.parametrize("message", [Draw(()), FULL, Stop("enough")])
def test_a_message_comes_back_from_msgpack_as_it_was(message: Draw | Stop) -> None:
    assert CODEC.decode(msgpack.unpackb(msgpack.packb(CODEC.encode(message)))) == message


def test_a_message_without_bytes_comes_back_from_json_as_it_was() -> None:
    message = Draw((Point(1),), ((1, 0.5),), origin=Point(0))
    assert CODEC.decode(json.loads(json.dumps(CODEC.encode(message)))) == message


def test_what_engines_exchange_comes_back_as_it_was() -> None:
    request = Request(
        "a", (1, 2), "sha", SamplingParams(stop=("\n",), logprobs=True), stream_id=2**64 - 1, will_continue=True
    )
    values = [
        EngineConfig(max_batch_rows=4, cost=CPU_SMOLLM2_135M),
        EngineConfig(),
        ExportedRow(request, (3,), (-0.5,)),
        Result("a", (3,), "c", "stop", 2, "merged", token_logprobs=(-0.5,), reused_prompt_tokens=1),
        Result.refused(request, "no"),
        EngineTelemetry(1, ("sha",), "mixture", 3, 4, 5, 6, 7),
    ]
    codec: Codec[object] = Codec(EngineConfig, ExportedRow, Result, EngineTelemetry, named=(CostModel,))
    for value in values:
        assert codec.decode(msgpack.unpackb(msgpack.packb(codec.encode(value)))) == value


def test_an_unknown_type_is_named_with_those_expected() -> None:
    with pytest.raises(MessageError, match="type='Dance': expected one of Draw, Stop"):
        CODEC.decode({"type": "Dance"})
    with pytest.raises(MessageError, match="type='Point': expected one of Draw, Stop"):
        CODEC.encode(Point(1))  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="expected a message with its type"):
        CODEC.decode({"op": "stop"})


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(MessageError, match=r"Stop: missing fields \['reason'\], unknown fields \['why'\]"):
        CODEC.decode({"type": "Stop", "why": "enough"})
    plain = CODEC.encode(FULL)
    del plain["points"][0]["label"]
    with pytest.raises(MessageError, match=r"Point: missing fields \['label'\]"):
        CODEC.decode(plain)


@pytest.mark.parametrize("kind", [Either, Grab])
def test_a_type_whose_fields_cannot_travel_is_refused_when_the_codec_is_made(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}.*cannot travel"):
        Codec(kind)


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (None, "None: expected a message"),
        ({"type": ["Draw"]}, r"type=\['Draw'\]: expected one of"),
        ({"type": "Draw\x1b[2J"}, r"type='Draw\\x1b\[2J': expected one of"),
        ({"type": "Stop", 7: 1}, r"missing fields \['reason'\], unknown fields \[7\]"),
        ({"type": "Stop", **dict.fromkeys(map(str, range(10_000)))}, "unknown fields"),
    ],
)
def test_what_is_no_message_is_named_on_one_short_line(plain: Any, reason: str) -> None:
    with pytest.raises(MessageError, match=reason) as raised:
        CODEC.decode(plain)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("field_name", "value"),
    [("points", 7), ("points", [None]), ("points", ["x"]), ("spans", [[1, 2, 3]]), ("origin", 1), ("by_name", [1])],
)
def test_values_of_another_type_are_named_with_their_field(field_name: str, value: Any) -> None:
    with pytest.raises(MessageError, match=f"Draw.{field_name}=|Point: .*expected its fields"):
        CODEC.decode(CODEC.encode(FULL) | {field_name: value})
