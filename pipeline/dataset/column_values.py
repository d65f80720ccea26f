"""Reads the Python values of columns. Columns for templates are read as the JSON that they stand for.

A column of structs has every field in every row, null where a row has no value: nulls in structs are filling and are
left out at every level. A map has its own keys in each row, so that a null in a map is the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np
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


def row_values(column: pa.Array) -> list[Any]:
    """The values of a column for a prompt template: numbers, truth values, texts, lists, structs and null. A value that
    cannot be read is the `ValueError` in its own row.

    Dates and times are ISO text, and decimals numbers unless a float would round them. A time is read in microseconds;
    one that has nanoseconds cannot be read.
    """
    kind = _in_microseconds(column.type)
    try:
        return [_row_value(item) for item in (column if kind == column.type else column.cast(kind))]
    except pa.ArrowInvalid:
        if len(column) == 1:
            return [ValueError("a time with nanoseconds; write it in microseconds, or as text")]
    return [value for row in range(len(column)) for value in row_values(column.slice(row, 1))]


def _row_value(item: pa.Scalar) -> Any:
    try:
        return _json(item.as_py(), item.type)
    except OverflowError:
        return ValueError("a time beyond the years 1 to 9999")
    except pa.ArrowInvalid:
        raise
    except ValueError as error:
        return error


def _json(value: Any, kind: pa.DataType) -> Any:
    """A value (`Scalar.as_py`) of a column of type `kind` as JSON has it, with all nulls. Raises `ValueError`."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _json(value, kind.storage_type)
    if t.is_dictionary(kind):
        return _json(value, kind.value_type)
    if t.is_struct(kind):
        return {field.name: _json(value[field.name], field.type) for field in kind}
    if t.is_map(kind):
        return {str(key): _json(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [_json(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if t.is_float32(kind) or t.is_float16(kind):
        # the shortest text that is this number in the column's type
        return float(str(np.dtype(kind.to_pandas_dtype()).type(value)))
    plain = _plain(value)
    return str(value) if isinstance(value, Decimal) and Decimal(repr(plain)) != value else plain


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """The type with microseconds in place of nanoseconds, at any depth: Python's times have no more."""
    if t.is_timestamp(kind):
        return pa.timestamp("us", kind.tz) if kind.unit == "ns" else kind
    if t.is_time64(kind):
        return pa.time64("us")
    if t.is_duration(kind):
        return pa.duration("us") if kind.unit == "ns" else kind
    if t.is_list(kind) or t.is_large_list(kind):
        made = pa.list_ if t.is_list(kind) else pa.large_list
        return made(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if t.is_map(kind):
        return pa.map_(kind.key_type, _in_microseconds(kind.item_type))
    if t.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    return kind


def take_undecodable(columns: Mapping[str, list[Any]]) -> dict[int, list[str]]:
    """Set values that cannot be read, such as text that is not UTF-8, to None. Returns their problems by row."""
    found: dict[int, list[str]] = {}
    for role, values in columns.items():
        for row, value in enumerate(values):
            if not isinstance(value, ValueError):
                continue
            of_text = f"not valid UTF-8 text ({value.reason})" if isinstance(value, UnicodeDecodeError) else ""
            found.setdefault(row, []).append(f"{role}: {of_text or f'cannot be read ({value})'}.")
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
