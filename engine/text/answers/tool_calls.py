"""Reads tool calls from completions, in the forms that models are trained on. What is not a whole call stays text.

| parser | form |
|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere (Hermes, Qwen) |
| `llama3` | `{"name": …, "parameters": {…}}`, several with `;` between, and no other text but `<|python_tag|>` before |
| `mistral` | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....system.untrusted import MALFORMED

_BLANK = re.compile(r"\s*")
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*[^\s\[\]{}]+\s*)?\[ARGS\]\s*")


@dataclass(frozen=True, slots=True)
class _Parser:
    """`markers`: texts that may be special tokens, which the parser must see."""

    markers: tuple[str, ...]
    parse: Callable[[str], list[tuple[str, str]]]


def call_markers(parser: str) -> tuple[str, ...]:
    """Texts that a parser looks for. Special tokens among them must be in the text that it is given."""
    return _PARSERS[parser].markers


def parse_tool_calls(parser: str, text: str) -> tuple[tuple[str, str], ...]:
    """The calls in a completion, in order: name and arguments (JSON). Whatever the text is, nothing is raised."""
    return tuple(_PARSERS[parser].parse(text))


def _hermes(text: str) -> list[tuple[str, str]]:
    calls, place = [], text.find(_CALL)
    while place >= 0:
        place += len(_CALL)
        found = _json_at(text, place)
        if found is not None and text.startswith(_CALL_END, _behind_blanks(text, found[1])):
            call = _call(found[0], "arguments")
            if call is not None:
                calls.append(call)
                place = found[1]
        place = text.find(_CALL, place)
    return calls


def _llama3(text: str) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    place = _behind_blanks(text, 0)
    while True:
        if text.startswith(_PYTHON_TAG, place):
            place = _behind_blanks(text, place + len(_PYTHON_TAG))
        found = _json_at(text, place)
        call = None if found is None else _call(found[0], "parameters")
        if found is None or call is None:
            return []
        calls.append(call)
        place = _behind_blanks(text, found[1])
        if place == len(text):
            return calls
        if text[place] != ";":
            return []
        place = _behind_blanks(text, place + 1)


def _mistral(text: str) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    place = text.find(_CALLS)
    while place >= 0:
        place = _behind_blanks(text, place + len(_CALLS))
        if text.startswith("[", place):
            found = _json_at(text, place)
            if found is not None:
                in_list = [_call(item, "arguments") for item in found[0]]
                calls += [call for call in in_list if call is not None]
                place = found[1]
        elif (named := _NAMED.match(text, place)) is not None:
            found = _json_at(text, named.end())
            call = None if found is None else _call({"name": named[1], "arguments": found[0]}, "arguments")
            if found is not None and call is not None:
                calls.append(call)
                place = found[1]
        place = text.find(_CALLS, place)
    return calls


_PARSERS: Mapping[str, _Parser] = {
    "hermes": _Parser((_CALL, _CALL_END), _hermes),
    "llama3": _Parser((_PYTHON_TAG,), _llama3),
    "mistral": _Parser((_CALLS, "[ARGS]", "[CALL_ID]"), _mistral),
}


def _call(value: Any, arguments_key: str) -> tuple[str, str] | None:
    """The call that an object describes, if it has a name and an object of arguments that JSON can hold."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get(arguments_key)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
    except MALFORMED:
        # Infinite numbers, half of a surrogate pair.
        return None
    return name, written


def _json_at(text: str, place: int) -> tuple[Any, int] | None:
    """The JSON value that begins here, and where it ends. None for what is no JSON, or has a key twice."""
    try:
        return _DECODER.raw_decode(text, _behind_blanks(text, place))
    except MALFORMED:
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that is given twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _behind_blanks(text: str, place: int) -> int:
    blank = _BLANK.match(text, place)
    assert blank is not None, "no blanks match, too"
    return blank.end()
