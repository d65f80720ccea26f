"""Reads Spark's metadata in a file's footer: types that Parquet's own do not show, and the calendar of old values.

Spark stores an interval as a number and a vector as a struct, and records the type in a JSON schema beside Parquet's.
It also records when days before 1582-10-15 are of the Julian calendar, as in Spark 2 and in its mode LEGACY (Spark,
`DataSourceUtils.datetimeRebaseSpec`). Other readers see neither, and an output without this metadata would be read as
other values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from ...system.untrusted import parse_json, shown_name
from .column_types import nested_values

#: Key of the JSON schema.
SPARK_SCHEMA_KEY = "org.apache.spark.sql.parquet.row.metadata"
_VERSION, _OLD_DAYS, _OLD_INT96 = (
    "org.apache.spark.version",
    "org.apache.spark.legacyDateTime",
    "org.apache.spark.legacyINT96",
)
#: Keys that decide how values are read. They need not be kept: values for which they matter are refused.
SPARK_CALENDAR_KEYS = (_VERSION, _OLD_DAYS, _OLD_INT96, "org.apache.spark.timeZone")
# Types that readers of Parquet find without the JSON schema; `_WITH_PARAMETERS` also with parameters.
_WITH_PARAMETERS = ("decimal", "char", "varchar", "time")
_SHOWN = {
    *_WITH_PARAMETERS, "boolean", "byte", "short", "integer", "long", "float", "double", "string", "binary", "date",
    "timestamp", "timestamp_ntz",
}  # fmt: skip
_COLLATIONS = "__COLLATIONS"
# The first values that are the same in both calendars: days since 1970, and microseconds, for zones changed too.
_FIRST_DAY, _FIRST_MICROSECOND = -141_427, -2_208_988_800_000_000
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def spark_type_problems(files: Iterable[tuple[str, Mapping[str, str]]], copied: Collection[str]) -> dict[str, str]:
    """Why columns would lose a type of Spark's: column -> a sentence. `files`: name and metadata of each file."""
    problems: dict[str, str] = {}
    seen: set[str] = set()
    for file, metadata in files:
        text = metadata.get(SPARK_SCHEMA_KEY, "")
        if text in seen:
            continue
        seen.add(text)
        for name, kind in _hidden_types(text).items():
            if name in copied:
                problems.setdefault(
                    name,
                    f"input column {name!r}: {shown_name(kind)} in {file!r}, a type of Spark that would be lost in the "
                    f"output; expected one that is copied unchanged. Cast the column before, or leave it out of the "
                    f"output with --drop {quote(name)}.",
                )
    return problems


def _hidden_types(text: str) -> dict[str, str]:
    """Column -> its first type that only Spark's schema shows. Text that is no schema is ignored, as in Spark."""
    try:
        fields = parse_json(text)["fields"] if text else []
        found = {field["name"]: next(_hidden(field["type"], field.get("metadata")), "") for field in fields}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return {name: kind for name, kind in found.items() if kind and isinstance(name, str)}


def _hidden(kind: Any, metadata: Any = None) -> Iterator[str]:
    if metadata and _COLLATIONS in metadata:
        yield "text with a collation"
    if isinstance(kind, str):
        name, parameters, _ = kind.partition("(")
        if name not in _SHOWN or (parameters and name not in _WITH_PARAMETERS):
            yield kind
        return
    if kind["type"] == "struct":
        for field in kind["fields"]:
            yield from _hidden(field["type"], field.get("metadata"))
    elif kind["type"] == "array":
        yield from _hidden(kind["elementType"])
    elif kind["type"] == "map":
        yield from _hidden(kind["keyType"])
        yield from _hidden(kind["valueType"])
    else:
        yield f"{kind['type']} {kind.get('class') or kind.get('pyClass') or ''}".strip()


def says_more(text: str) -> bool:
    """Whether Spark's schema has more about its columns than types, such as comments."""
    try:
        return any(field.get("metadata") for field in parse_json(text)["fields"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def old_calendar(metadata: Mapping[bytes, bytes] | None) -> tuple[bool, bool]:
    """Whether old dates and timestamps of a file are of the Julian calendar, and whether old INT96 timestamps are."""
    found = metadata or {}
    version = found.get(_VERSION.encode())
    if version is None:
        return False, False
    return (
        version < b"3.0.0" or _OLD_DAYS.encode() in found,
        version < b"3.1.0" or _OLD_INT96.encode() in found,
    )


def check_calendar(name: str, array: pa.Array) -> None:
    """Raise ValueError where a column of a file with the Julian calendar has values that differ in ours."""
    for is_kind in (t.is_date, t.is_timestamp):
        for values in nested_values(array, is_kind):
            if len(values) and pc.min(_numbers(values)).as_py() < _first(values.type):
                raise ValueError(
                    f"column {name!r} has dates before 1582-10-15 or timestamps before 1900, in the Julian calendar of "
                    "Spark's mode LEGACY; other readers take them for other days. Leave it out with --drop "
                    f"{quote(name)}, or write it with datetimeRebaseModeInWrite and int96RebaseModeInWrite CORRECTED"
                )


def _numbers(values: pa.Array) -> pa.Array:
    return values.cast(pa.int32() if t.is_date32(values.type) else pa.int64())


def _first(kind: pa.DataType) -> int:
    if t.is_date32(kind):
        return _FIRST_DAY
    if t.is_date64(kind):
        return _FIRST_DAY * 86_400_000
    return _FIRST_MICROSECOND // 1_000_000 * _PER_SECOND[kind.unit]
