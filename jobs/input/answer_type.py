"""The Arrow type of a JSON Schema's instances, for the output column `answer`.

The type follows every keyword of the schema: keywords beside one another add up, as in JSON Schema. A part without one
Arrow type (any kind, several types, keys by pattern, a schema inside of itself) is a string with its JSON. Keys that
the schema does not name are left out; the completion has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import pyarrow as pa

from ...engine.text.answers.json_schema import pointed_at, resources
from ...system.untrusted import MALFORMED

_MOST_NESTED = 32
# Most parts of a schema, references followed. Real schemas have fewer; a schema of a hundred characters can stand for
# more parts than memory holds.
_MOST_PARTS = 5_000
_MOST_CHARACTERS = 256 * 1024
_Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerType:
    """The Arrow type of a schema's instances, with their conversion."""

    #: The type.
    arrow: pa.DataType
    #: Makes a parsed instance a value of `arrow`. Raises TypeError, ValueError, KeyError or AttributeError for a value
    #: that is no instance.
    convert: Callable[[Any], Any]

    def column(self, texts: Iterable[str | None]) -> pa.Array:
        """An array of instances from their texts; null for None, and for a text that is no instance of the type."""
        return pa.array([None if text is None else self._value(text) for text in texts], self.arrow)

    def _value(self, text: str) -> Any:
        try:
            value = self.convert(json.loads(text, parse_float=_finite))
            pa.scalar(value, self.arrow)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError, pa.ArrowException):
            return None
        return value


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise OverflowError(text)
    return number


@lru_cache(maxsize=64)
def answer_type(schema: str) -> AnswerType:
    """The type of a JSON Schema's instances, found in bounded time: a schema of too many parts has text as its type."""
    if len(schema) > _MOST_CHARACTERS:
        return _ANY
    try:
        root = json.loads(schema)
        return _arrow_type(_Reader(root).shape_of(root, 0, frozenset()))
    except (*MALFORMED, _TooManyPartsError):
        return _ANY


class _TooManyPartsError(Exception):
    """A schema stands for more parts than `_MOST_PARTS`."""


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
# Every type name. "number" stands for numbers that are no integers.
_ALL = frozenset({*_SCALARS, "object", "array"})


@dataclass(frozen=True, slots=True)
class _Shape:
    """The values that a schema allows, as far as they decide the Arrow type."""

    #: JSON's names of the allowed types.
    types: frozenset[str] = _ALL
    #: Named keys of objects -> shape of their values.
    fields: Mapping[str, _Shape] = field(default_factory=dict)
    #: Shape of the items of arrays; None when the schema does not restrict them.
    items: _Shape | None = None
    #: Whether its objects and arrays have no single Arrow type.
    is_text: bool = False

    def __and__(self, other: _Shape) -> _Shape:
        """The shape of values that both allow."""
        common = {name: self.fields[name] & other.fields[name] for name in self.fields if name in other.fields}
        return _Shape(
            self.types & other.types,
            {**self.fields, **other.fields, **common},
            self.items & other.items if self.items and other.items else self.items or other.items,
            self.is_text or other.is_text,
        )

    def __or__(self, other: _Shape) -> _Shape:
        """The shape of values that at least one allows."""
        types = self.types | other.types
        objects, arrays = self._holding("object", other), self._holding("array", other)
        named = [value for shape in objects for value in shape.fields.values()]
        # Shapes that only require keys do not restrict their values.
        is_open = all(value == _OPEN for value in named)
        fields = {name: value for shape in objects for name, value in shape.fields.items()}
        is_text = (
            self.is_text
            or other.is_text
            or (len(objects) > 1 and not is_open)
            or (len(arrays) > 1 and any(shape.items is not None for shape in arrays))
        )
        return _Shape(types, fields, next((shape.items for shape in arrays), None), is_text)

    def _holding(self, name: str, other: _Shape) -> list[_Shape]:
        return [shape for shape in (self, other) if name in shape.types]


_OPEN = _Shape()
_TEXT = _Shape(is_text=True)
_NEVER = _Shape(frozenset())


class _Reader:
    """Reads the parts of a schema. `root`: the whole schema, in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_parts = 0
        # a path may begin at another schema than the root
        self._has_resources = isinstance(root, dict) and any(part is not root for part in resources(root)[1].values())

    def shape_of(self, schema: Any, depth: int, inside: frozenset[str]) -> _Shape:
        """The shape of one part. `inside`: references that lead to it."""
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise _TooManyPartsError
        if not isinstance(schema, Mapping) or depth > _MOST_NESTED:
            return _NEVER if schema is False else _OPEN if schema is True else _TEXT
        self._num_parts += sum(len(schema.get(word, ())) for word in ("enum", "required"))
        found = _own_shape(schema)
        if "$ref" in schema:
            found &= self._referred(schema["$ref"], depth, inside)
        for part in schema.get("allOf", ()):
            found &= self.shape_of(part, depth + 1, inside)
        for word in ("anyOf", "oneOf"):
            if parts := schema.get(word):
                found &= reduce(_Shape.__or__, [self.shape_of(part, depth + 1, inside) for part in parts])
        named = {key: self.shape_of(part, depth + 1, inside) for key, part in schema.get("properties", {}).items()}
        found &= _Shape(fields=named | {key: _OPEN for key in schema.get("required", ()) if key not in named})
        if "items" in schema and not _has_places(schema):
            found &= _Shape(items=self.shape_of(schema["items"], depth + 1, inside))
        return found

    def _referred(self, reference: Any, depth: int, inside: frozenset[str]) -> _Shape:
        """The shape of a referenced part; text for a part outside of this schema, and for one that contains itself."""
        is_path = isinstance(reference, str) and not self._has_resources
        target = pointed_at(self._root, reference) if is_path else None
        if target is None or reference in inside:
            return _TEXT
        return self.shape_of(target, depth + 1, inside | {reference})


def _own_shape(schema: _Schema) -> _Shape:
    """The shape from a schema's own keywords, without its subschemas."""
    found = _OPEN
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= _Shape(frozenset(given) | ({"integer"} if "number" in given else frozenset()))
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            found &= reduce(_Shape.__or__, map(_shape_of_value, values), _NEVER)
    has_other_keys = isinstance(schema.get("additionalProperties"), dict) and bool(schema["additionalProperties"])
    if has_other_keys or schema.get("patternProperties") or _has_places(schema):
        found &= _TEXT
    return found


def _has_places(schema: _Schema) -> bool:
    """Whether items of arrays have a schema for each place."""
    return "prefixItems" in schema or isinstance(schema.get("items"), list)


_TYPE_NAMES: Mapping[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer",), float: ("integer", "number"), type(None): ("null",),
    dict: ("object",), list: ("array",),
}  # fmt: skip


def _shape_of_value(value: Any) -> _Shape:
    return _Shape(frozenset(_TYPE_NAMES[type(value)]), is_text=isinstance(value, dict | list))


def _arrow_type(shape: _Shape) -> AnswerType:
    types = shape.types - {"null"}
    if not types:
        return _SCALARS["null"] if shape.types else _ANY
    name = "number" if "number" in types and types <= {"integer", "number"} else next(iter(types))
    if len(types - {"integer"} if name == "number" else types) != 1:
        return _ANY
    found = _ANY
    if name in _SCALARS:
        found = _SCALARS[name]
    elif name == "array" and shape.items is not None and not shape.is_text:
        found = _list(_arrow_type(shape.items))
    elif name == "object" and shape.fields and not shape.is_text:
        found = _struct({key: _arrow_type(part) for key, part in shape.fields.items()})
    return _optional(found) if "null" in shape.types else found


def _list(item: AnswerType) -> AnswerType:
    return AnswerType(pa.list_(item.arrow), lambda values: [item.convert(value) for value in values])


def _struct(fields: Mapping[str, AnswerType]) -> AnswerType:
    kinds = {key: _optional(found) for key, found in fields.items()}
    return AnswerType(
        pa.struct([(key, found.arrow) for key, found in fields.items()]),
        lambda value: {key: found.convert(value.get(key)) for key, found in kinds.items()},
    )


def _optional(found: AnswerType) -> AnswerType:
    return AnswerType(found.arrow, lambda value: None if value is None else found.convert(value))
