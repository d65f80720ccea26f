"""`shown`: objects as text for a document, short and nearly the same in every run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

_WIDTH = 92
# Most items of a list that are printed, and those that are printed of a longer one.
_MOST_ITEMS, _FIRST_ITEMS = 8, 5
# Fields that are long and say little in a document.
_LEFT_OUT = ("steps", "version", "meta", "created_at", "engine_pid")
# Parts of text that differ in every run, or are long and say little, and what stands for them.
_SHORTENED = (
    (re.compile(r"\b((?:0x)?[0-9a-f]{8})[0-9a-f]{8,}\b"), r"\1…"),
    (re.compile(r"\bdemo-\d{8}-\d{6}(-[0-9a-f]{6})+"), "demo-…"),
    (re.compile(r"(tls://127\.0\.0\.1):\d+"), r"\1:…"),
    (re.compile(r"(?<=['\s])/\S*/(?=(adapters|output)/|prompts\.parquet)"), "…/"),
)


def shown(value: Any) -> str:
    """The value as Python prints it, without fields that have their defaults; times are an ellipsis."""
    return _shown(value, 0)


def shortened(text: str) -> str:
    """The text with hashes cut, and without ids of jobs, ports and folders of this machine."""
    for pattern, instead in _SHORTENED:
        text = pattern.sub(instead, text)
    return text


def _shown(value: Any, indent: int) -> str:
    """`indent`: column of the line's beginning."""
    match value:
        case _ if is_dataclass(value):
            items = [f"{name}={_field(name, item, indent + 4)}" for name, item in _given(value).items()]
            return _together(f"{type(value).__name__}(", items, ")", indent)
        case Mapping():
            kept = {name: item for name, item in value.items() if name not in _LEFT_OUT}
            items = [f"{name!r}: {_field(str(name), item, indent + 4)}" for name, item in kept.items()]
            return _together("{", items, "}", indent)
        case tuple() | list():
            opening, closing = "()" if isinstance(value, tuple) else "[]"
            items = [_shown(item, indent + 4) for item in value]
            if len(items) > _MOST_ITEMS:
                items[_FIRST_ITEMS:] = [f"… {len(items)} in all"]
            return _together(opening, items, closing, indent)
        case bytes():
            return shortened(f"0x{value.hex()}")
        case float():
            return f"{value:.4g}"
    return shortened(repr(value))


def _given(value: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults."""
    given = {}
    for field in fields(value):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        item = getattr(value, field.name)
        if item != default and field.name not in _LEFT_OUT:
            given[field.name] = item
    return given


def _field(name: str, value: Any, indent: int) -> str:
    return "…" if name.endswith("_s") and isinstance(value, float) else _shown(value, indent)


def _together(opening: str, items: list[str], closing: str, indent: int) -> str:
    comma = "," if opening == "(" and len(items) == 1 else ""
    line = f"{opening}{', '.join(items)}{comma}{closing}"
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    margin = " " * (indent + 4)
    return "\n".join([opening, *(f"{margin}{item}," for item in items), " " * indent + closing])
