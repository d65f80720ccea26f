"""Reads the column types that a Parquet footer states, including types that Arrow does not have: `column_kinds`.

Arrow shows only the physical type of a column whose type it does not have. The footer's first two fields are read here:
Thrift structs in the compact protocol (https://github.com/apache/parquet-format, `SchemaElement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .pages import integer, unsigned

_MAX_DEPTH = 32
_PHYSICAL = ("boolean", "int32", "int64", "INT96", "float", "double", "binary", "binary")
_UNITS = {1: "milliseconds", 2: "microseconds", 3: "nanoseconds"}
INT96 = "INT96 timestamp"
#: Kind of a column without a value; it agrees with every type.
NULL = "null"
#: Kind of a timestamp without a time zone, as which INT96 timestamps are written.
PLAIN_TIMESTAMP = "timestamp (microseconds)"
_ZONED_TIME = "time with time zone"

#: Field of Parquet's `LogicalType` -> kind of its columns. `_logical` adds the parameters of decimals, times and
#: integers.
LOGICAL_TYPES: Mapping[int, str] = {
    1: "string", 2: "map", 3: "list", 4: "string", 5: "decimal", 6: "date", 7: "time", 8: "timestamp", 10: "integer",
    11: NULL, 12: "JSON", 13: "binary", 14: "UUID", 15: "float16", 16: "VARIANT", 17: "GEOMETRY", 18: "GEOGRAPHY",
}  # fmt: skip
#: Value of Parquet's older `ConvertedType` -> kind of its columns. A timestamp that has only this type is read as one
#: without time zone by DuckDB and as an instant by Spark: no logical type stands for both.
CONVERTED_TYPES: Mapping[int, str] = {
    0: "string", 1: "map", 2: "map", 3: "list", 4: "string", 5: "decimal", 6: "date", 7: "time (milliseconds)",
    8: "time (microseconds)", 9: "timestamp by converted type (milliseconds)",
    10: "timestamp by converted type (microseconds)", 11: "uint8", 12: "uint16", 13: "uint32", 14: "uint64",
    15: "int8", 16: "int16", 17: "int32", 18: "int64", 19: "JSON", 20: "binary", 21: "INTERVAL",
}  # fmt: skip
#: Logical types of groups that mean more than their fields.
_GROUPS = (16,)


@dataclass(frozen=True, slots=True)
class _Element:
    """One node of the schema, as the footer has it."""

    #: Name of the node.
    name: str
    #: Nodes directly below it; 0 for a column with values.
    num_children: int
    #: Kind of its values; "" for a group that is only its fields.
    kind: str


def column_kinds(footer: bytes) -> dict[str, tuple[str, ...]]:
    """Column -> the kinds of its values, depth first. A `VARIANT` comes before the kinds of its fields.

    `footer`: a footer's Thrift struct, which may be followed by other bytes. Raises ValueError for a damaged footer.
    """
    try:
        elements = iter(_elements(memoryview(footer)))
        root = next(elements)
        found: dict[str, tuple[str, ...]] = {}
        for _ in range(root.num_children):
            column = next(elements)
            found[column.name] = tuple(_kinds(column, elements))
    except (IndexError, StopIteration, RuntimeError, UnicodeDecodeError):
        raise ValueError("the schema in its footer is damaged") from None
    return found


def is_zoned_time(kind: str) -> bool:
    """Whether the kind is a time of day in UTC."""
    return kind.startswith(_ZONED_TIME)


def plain_time(kind: str) -> str:
    """The kind without the time zone of a time of day."""
    return kind.replace(_ZONED_TIME, "time")


def _kinds(column: _Element, elements: Iterator[_Element]) -> Iterator[str]:
    """The kinds of a column and of all elements below it, which come next in `elements`."""
    num_left = 1
    element = column
    while True:
        if element.kind:
            yield element.kind
        num_left += element.num_children - 1
        if num_left < 1:
            return
        element = next(elements)


def _elements(data: memoryview) -> Iterator[_Element]:
    """The nodes of the schema, the root first: the list that is field 2 of the footer."""
    position, field = 0, 0
    while data[position]:
        head, position = data[position], position + 1
        field += head >> 4
        if field == 2:
            yield from map(_element, _list(data, position, 0)[0])
            return
        _, position = _value(data, position, head & 15, 0)


def _element(fields: Mapping[int, Any]) -> _Element:
    num_children = fields.get(5) or 0
    return _Element(bytes(fields[4]).decode(), num_children, _group(fields) if num_children else _leaf(fields))


def _group(fields: Mapping[int, Any]) -> str:
    logical = fields.get(10) or {}
    return next((LOGICAL_TYPES[field] for field in _GROUPS if field in logical), "")


def _leaf(fields: Mapping[int, Any]) -> str:
    """The kind of a column with values. The logical type counts before the converted type, as in readers."""
    logical = fields.get(10) or {}
    converted = fields.get(6)
    if logical:
        ((field, value),) = list(logical.items())[:1]
        return _logical(field, value or {})
    if fields.get(1) == 3:
        return INT96
    if converted is None:
        # a group without fields has no physical type
        return _PHYSICAL[fields[1]] if 1 in fields else "struct"
    kind = CONVERTED_TYPES.get(converted, f"converted type {converted}")
    return f"decimal({fields.get(8, 0)}, {fields.get(7, 0)})" if kind == "decimal" else kind


def _logical(field: int, value: Mapping[int, Any]) -> str:
    kind = LOGICAL_TYPES.get(field, f"logical type {field}")
    if kind == "decimal":
        return f"decimal({value.get(2, 0)}, {value.get(1, 0)})"
    if kind == "integer":
        return f"{'' if value.get(2) else 'u'}int{value.get(1, 0)}"
    if kind in ("time", "timestamp"):
        unit = next(iter(value.get(2) or {}), 0)
        return f"{kind}{' with time zone' if value.get(1) else ''} ({_UNITS.get(unit, 'other units')})"
    return kind


def _struct(data: memoryview, position: int, depth: int) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    field = 0
    while head := data[position]:
        position += 1
        if head >> 4:
            field += head >> 4
        else:
            field, position = integer(data, position)
        fields[field], position = _value(data, position, head & 15, depth + 1)
    return fields, position + 1


def _list(data: memoryview, position: int, depth: int) -> tuple[list[Any], int]:
    head, position = data[position], position + 1
    size, kind = head >> 4, head & 15
    if size == 15:
        size, position = unsigned(data, position)
    if size > len(data):
        raise IndexError
    found = []
    for _ in range(size):
        # booleans in lists take a byte each
        item, position = (data[position] == 1, position + 1) if kind in (1, 2) else _value(data, position, kind, depth)
        found.append(item)
    return found, position


def _value(data: memoryview, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("its schema nests too deeply")
    if kind in (1, 2):
        return kind == 1, position
    if kind == 3:
        byte = data[position]
        return byte - 256 if byte > 127 else byte, position + 1
    if kind in (4, 5, 6):
        return integer(data, position)
    if kind == 7:
        return None, position + 8
    if kind == 8:
        size, position = unsigned(data, position)
        return data[position : position + size], position + size
    if kind in (9, 10):
        return _list(data, position, depth + 1)
    if kind == 12:
        return _struct(data, position, depth)
    raise ValueError("the schema in its footer is damaged")  # maps: no struct of a schema has one
