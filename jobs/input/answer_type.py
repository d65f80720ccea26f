"""The Arrow type of a JSON Schema's instances, for the output column `answer`.

What Arrow has no one type for (parts of any kind, of several types, recursive ones) is a string with its JSON. Keys
that the schema does not name are left out; the completion has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

_MOST_NESTED = 32
_Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerType:
    """`arrow`: the type. `convert`: makes a parsed instance a value of it; raises TypeError, ValueError, KeyError or
    AttributeError for what is no instance.
    """

    arrow: pa.DataType
    convert: Callable[[Any], Any]

    def column(self, texts: Iterable[str | None]) -> pa.Array:
        """Instances as an array; null where there is no text or it is no instance that the type can hold."""
        return pa.array([None if text is None else self._value(text) for text in texts], self.arrow)

    def _value(self, text: str) -> Any:
        try:
            value = self.convert(json.loads(text))
            pa.scalar(value, self.arrow)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError, pa.ArrowException):
            return None
        return value


@lru_cache(maxsize=64)
def answer_type(schema: str) -> AnswerType:
    """The type of the instances of a JSON Schema."""
    root = json.loads(schema)
    return _Reader(root).type_of(root, 0)


def _same(value: Any) -> Any:
    return value


_ANY = AnswerType(pa.string(), lambda value: json.dumps(value, ensure_ascii=False))
_SCALARS: Mapping[str, AnswerType] = {
    "string": AnswerType(pa.string(), _same),
    "integer": AnswerType(pa.int64(), int),
    "number": AnswerType(pa.float64(), float),
    "boolean": AnswerType(pa.bool_(), _same),
    "null": AnswerType(pa.null(), _same),
}
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class _Reader:
    """Reads parts of a schema. `root`: where its references begin."""

    def __init__(self, root: _Schema) -> None:
        self._root = root

    def type_of(self, schema: Any, depth: int) -> AnswerType:
        if not isinstance(schema, Mapping) or depth > _MOST_NESTED:
            return _ANY
        if "$ref" in schema:
            return self.type_of(self._resolved(schema["$ref"]), depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self._one_of(schema[key], depth)
        names = self._names(schema)
        optional = "null" in names and len(names) > 1
        names -= {"null"} if optional else set()
        if names == {"integer", "number"}:
            names = {"number"}
        if len(names) != 1:
            return _ANY
        [name] = names
        found = self._of_name(name, schema, depth)
        return _optional(found) if optional else found

    def _names(self, schema: _Schema) -> set[str]:
        """The JSON types that instances may have; none where that is open."""
        if "type" in schema:
            given = schema["type"]
            return set(given) if isinstance(given, list) else {given}
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        names = {_NAMES.get(type(value), "object") for value in values}
        if not names and "properties" in schema:
            return {"object"}
        return names if "object" not in names else set()

    def _of_name(self, name: str, schema: _Schema, depth: int) -> AnswerType:
        if name in _SCALARS:
            return _SCALARS[name]
        if name == "array" and "items" in schema and "prefixItems" not in schema:
            item = self.type_of(schema["items"], depth + 1)
            return AnswerType(pa.list_(item.arrow), lambda values: [item.convert(value) for value in values])
        if name == "object" and schema.get("properties"):
            return _struct({key: self.type_of(part, depth + 1) for key, part in schema["properties"].items()})
        return _ANY

    def _one_of(self, parts: Any, depth: int) -> AnswerType:
        """The type that all parts have, but for null."""
        types = [self.type_of(part, depth + 1) for part in parts]
        others = [found for found in types if found.arrow != pa.null()]
        if not others or any(found.arrow != others[0].arrow for found in others) or _ANY in others:
            return _ANY if others else _SCALARS["null"]
        if len(others) > 1 and not (pa.types.is_primitive(others[0].arrow) or pa.types.is_string(others[0].arrow)):
            return _ANY
        return _optional(others[0]) if len(others) < len(types) else others[0]

    def _resolved(self, reference: Any) -> Any:
        """The part that a reference within the schema names; anything for another one."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        found: Any = self._root
        for step in filter(None, reference[1:].split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key, True) if isinstance(found, Mapping) else True
        return found


def _struct(fields: Mapping[str, AnswerType]) -> AnswerType:
    kinds = {key: _optional(found) for key, found in fields.items()}
    return AnswerType(
        pa.struct([(key, found.arrow) for key, found in fields.items()]),
        lambda value: {key: found.convert(value.get(key)) for key, found in kinds.items()},
    )


def _optional(found: AnswerType) -> AnswerType:
    return AnswerType(found.arrow, lambda value: None if value is None else found.convert(value))
