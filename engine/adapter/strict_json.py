"""JSON as it must be when every word counts: a repeated key, or NaN for a number, is an error and not a guess."""

from __future__ import annotations

import json
from typing import Any


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` for anything else, and for repeated keys, NaN and infinities."""
    try:
        value = json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, expected an object")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {key!r} is given twice")
        value[key] = item
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
