"""Frozen records that travel as JSON: the base of events and commands.

A record becomes a flat object with its class under `kind`; tuples become lists and come back as tuples, so
`Event.from_json(event.to_json()) == event` and one line of `events.jsonl` is one record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class Record:
    """Mixin for frozen dataclasses; each family (events, commands) has its own registry of kinds."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls) -> None:
        if Record in cls.__bases__:
            cls.kinds = {}
        else:
            cls.kinds[cls.__name__] = cls

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object: `kind` and every field."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {"kind": type(self).__name__} | {f.name: getattr(self, f.name) for f in fields}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The record that `to_json` wrote. Raises ValueError for a kind this family does not have."""
        kind = value.get("kind")
        if kind not in cls.kinds:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(sorted(cls.kinds))}")
        fields = {name: _as_tuples(item) for name, item in value.items() if name != "kind"}
        record: Self = cls.kinds[kind](**fields)
        return record


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
