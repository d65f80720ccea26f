"""Strategies for what strangers write: valid files with a few things changed, as values and as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

#: Text that terminals, markup, paths, templates or Unicode take for something else.
TEXTS = (
    "", " ", "a", "\x1b[2J\x1b]0;title\x07", "\x9b", "\u202etxt.exe", "\u2028", "\ud800", "\x00", "\r\n", "[/foo]",
    "[bold red]", "%s%n", "{0}", "../../etc/passwd", "/dev/zero", "s3://user:secret@bucket/x", "a" * 5_000, "é\u0301",
    "{{ 9**(9**9) }}", "<|im_start|>", "</script>", "NaN", "null", "tcp://127.0.0.1:1",
)  # fmt: skip


class Raw(str):
    """JSON text that `json` would not write: giant numbers, infinities, a nest without end."""

    __slots__ = ()


NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**64), 10**30, 10**70, True, False, 0.5,
    -0.0, 1e-320, 1e308, 1e-5, Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("1" + "0" * 400),
    Raw("1" + "0" * 5_000),
)  # fmt: skip
_NESTS = (Raw("[" * 400 + "]" * 400), Raw("[" * 20_000 + "]" * 20_000), Raw('{"a":' * 3_000 + "1" + "}" * 3_000))
#: Numbers that lengths and offsets of binary files are replaced by.
_SIZES = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

texts = st.sampled_from(TEXTS) | st.text(max_size=12)
scalars: SearchStrategy[Any] = st.none() | st.sampled_from(NUMBERS) | st.integers() | st.floats() | texts
values: SearchStrategy[Any] = st.recursive(
    scalars | st.sampled_from(_NESTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


class Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs, which may repeat a key."""


def dump(value: Any) -> str:
    """JSON of a value, `Raw` as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, Mapping):
        return dump(Pairs(value.items()))
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


@st.composite
def changed(draw: st.DrawFn, seed: Any, replacements: SearchStrategy[Any] = values, most: int = 3) -> Any:
    """A JSON value of which up to `most` parts are replaced, left out, added or repeated."""
    value = seed
    for _ in range(draw(st.integers(1, most))):
        value = draw(_changed_once(value, replacements))
    return value


@st.composite
def _changed_once(draw: st.DrawFn, value: Any, replacements: SearchStrategy[Any]) -> Any:
    is_object, is_list = isinstance(value, Mapping | Pairs), type(value) is list
    if not (is_object or is_list) or not value or draw(st.integers(0, 7)) == 0:
        return draw(replacements)
    pairs = list(value.items()) if isinstance(value, Mapping) else list(value) if is_object else list(enumerate(value))
    place = draw(st.integers(0, len(pairs) - 1))
    key, item = pairs[place]
    match draw(st.sampled_from(("inside", "inside", "inside", "drop", "add", "repeat", "rename"))):
        case "inside":
            pairs[place] = (key, draw(_changed_once(item, replacements)))
        case "drop":
            del pairs[place]
        case "add":
            pairs.insert(place, (draw(texts), draw(replacements)))
        case "repeat":
            pairs.insert(place, (key, draw(replacements)))
        case "rename":
            pairs[place] = (draw(texts), item)
    return Pairs((str(key), item) for key, item in pairs) if is_object else [item for _, item in pairs]


@st.composite
def damaged(draw: st.DrawFn, seed: bytes, most: int = 4, head: int = 4096) -> bytes:
    """A file of which up to `most` places are changed, most of them in its first `head` bytes."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, most))):
        limit = len(data) if draw(st.integers(0, 3)) == 0 else min(head, len(data))
        place = draw(st.integers(0, max(0, limit - 1)))
        match draw(st.sampled_from(("flip", "byte", "size", "size", "cut", "drop", "insert", "repeat"))):
            case "flip" if data:
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "byte" if data:
                data[place] = draw(st.integers(0, 255))
            case "size":
                width, order = draw(st.sampled_from((4, 8))), draw(st.sampled_from(("little", "big")))
                number = draw(st.sampled_from(_SIZES)) % (1 << 8 * width)
                data[place : place + width] = number.to_bytes(width, order)
            case "cut":
                del data[place:]
            case "drop":
                del data[place : place + draw(st.integers(1, 64))]
            case "insert":
                data[place:place] = draw(st.binary(max_size=16))
            case "repeat":
                data[place:place] = data[place : place + draw(st.integers(1, 256))]
    return bytes(data)


def json_files(seed: Any, replacements: SearchStrategy[Any] = values) -> SearchStrategy[bytes]:
    """JSON files near a valid one; some are no JSON any more."""
    whole = changed(seed, replacements).map(lambda value: dump(value).encode("utf-8", "surrogatepass"))
    return st.one_of(whole, whole, whole, damaged(dump(seed).encode()), st.binary(max_size=64))


def one_of_files(files: Mapping[str, bytes], strategies: Mapping[str, SearchStrategy[bytes]]) -> Any:
    """All files as they are, but one or two of them drawn from the strategy of their name."""

    def draw_some(names: Sequence[str]) -> SearchStrategy[dict[str, bytes]]:
        drawn = st.fixed_dictionaries({name: strategies[name] for name in names})
        return drawn.map(lambda some: {**files, **some})

    return st.lists(st.sampled_from(sorted(strategies)), min_size=1, max_size=2, unique=True).flatmap(draw_some)
