"""Reads the Python values of columns. Nested columns for chat templates are read as the JSON that they stand for.

A column of structs has every field in every row, null where a row has no value: nulls in structs are filling and are
left out at every level. A map has its own keys in each row, so that a null in a map is the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as t


def column_values(column: pa.Array) -> list[Any]:
    """The values of a column. Text that is not UTF-8 is a `UnicodeDecodeError` in its own row."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(item) for item in column]


def _value(item: pa.Scalar) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError as error:
        return error


def template_values(column: pa.Array) -> list[Any]:
    """`column_values` for chat templates: nested ones are without filling."""
    values = column_values(column)
    if not t.is_nested(column.type):
        return values
    return [v if isinstance(v, UnicodeDecodeError) else without_filling(v, column.type) for v in values]


def take_undecodable(columns: Mapping[str, list[Any]]) -> dict[int, list[str]]:
    """Set values that are not UTF-8 to None, and return their problems by row."""
    found: dict[int, list[str]] = {}
    for role, values in columns.items():
        for row, value in enumerate(values):
            if isinstance(value, UnicodeDecodeError):
                found.setdefault(row, []).append(f"{role}: not valid UTF-8 text ({value.reason}).")
                values[row] = None
    return found


def without_filling(value: Any, kind: pa.DataType) -> Any:
    """Convert a value (`Scalar.as_py`) of a column of type `kind` to plain JSON values, without filling."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return without_filling(value, kind.storage_type)
    if t.is_dictionary(kind):
        return without_filling(value, kind.value_type)
    if t.is_struct(kind):
        found = ((field.name, without_filling(value.get(field.name), field.type)) for field in kind)
        return {name: item for name, item in found if item is not None}
    if t.is_map(kind):
        return {str(key): without_filling(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [without_filling(item, kind.value_type) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    """Convert a value that is no list or object to a number, a truth value or a text."""
    if isinstance(value, Decimal):
        # DuckDB writes 1.5 as a decimal, and sums of integers as decimals without a fraction.
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float) else str(value)
