"""Reads values of nested columns as the JSON that they stand for: messages, tools, variables of templates.

A column of structs has every field in every row, null where a row has no value: nulls in structs are filling and are
left out at every level. A map has its own keys in each row, so that a null in a map is the user's.
"""

from __future__ import annotations

from datetime import date, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as t


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
