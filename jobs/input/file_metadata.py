"""Reads the metadata in the footers of a job's files: settings of batch files, and metadata that the output keeps.

pandas stores its index and types in a footer, GeoParquet which columns are geometries. Both are kept when all files
agree; keys of other metadata are reported as left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...system.untrusted import parse_json, shown_name
from .files import Footer
from .spark_metadata import SPARK_SCHEMA_KEY, says_more

#: Key under which `lorabatch import` writes a JSON list of the columns that are settings.
SETTINGS_KEY = "lorabatch.row_settings"
_OWN_PREFIX = "lorabatch."


def settings_of_files(
    footers: Sequence[Footer], asked: Collection[str], settings: Collection[str]
) -> tuple[list[str], list[str]]:
    """Columns that files name as settings, and problems, as sentences. `asked`: settings that the job asks for itself,
    so that files need not agree on them. `settings`: names of all settings.
    """
    named: dict[str, str] = {}
    for footer in footers:
        for name in _names(footer.metadata.get(SETTINGS_KEY, "")):
            if name in footer.schema.names and name in settings:
                named.setdefault(name, footer.file.name)
    problems = []
    for footer in footers:
        own = _names(footer.metadata.get(SETTINGS_KEY, ""))
        odd = [name for name in named if name in footer.schema.names and name not in own and name not in asked]
        problems += [
            f"input file {footer.file.name!r}: column {name!r} is data there and a setting in {named[name]!r}, as "
            f"`lorabatch import` wrote it. Say that it is one in all files with --row-settings {name}, or give the "
            "files to two jobs."
            for name in odd
        ]
    return list(named), problems[:1]


def kept_metadata(footers: Sequence[Footer], copied: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Metadata that all parts of the output get (key -> text), and keys that they leave out. `copied`: columns of the
    input that the output has.
    """
    keys = sorted({key for footer in footers for key in footer.metadata if not key.startswith(_OWN_PREFIX)})
    # Spark's schema is passed over unless it has more than types: `spark_type_problems` refuses types only it shows
    if not any(says_more(text) for text in {footer.metadata.get(SPARK_SCHEMA_KEY, "") for footer in footers}):
        keys = [key for key in keys if key != SPARK_SCHEMA_KEY]
    kept, left_out = {}, []
    for key in keys:
        texts = {footer.metadata.get(key) for footer in footers}
        reduce = _KEPT.get(key)
        found = {_reduced(reduce, text, copied) for text in texts} if reduce else {None}
        text = found.pop()
        if text is None or found:
            left_out.append(shown_name(key))
        elif text:
            kept[key] = text
    return kept, left_out


def _names(text: str) -> list[str]:
    try:
        found = parse_json(text.encode()) if text else []
    except ValueError:
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _reduced(
    reduce: Callable[[dict[str, Any], Collection[str]], dict[str, Any] | None],
    text: str | None,
    copied: Collection[str],
) -> str | None:
    """The text reduced to the copied columns of any file; None when it cannot be kept, "" when nothing is left."""
    if text is None:
        return None
    try:
        found = reduce(parse_json(text.encode()), copied)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if found is None:
        return None
    return json.dumps(found) if found else ""


def _pandas(value: dict[str, Any], copied: Collection[str]) -> dict[str, Any] | None:
    """pandas' types of columns and columns of the index. An index of row numbers is dropped: parts have other rows."""
    index = [name for name in value["index_columns"] if isinstance(name, str)]
    if any(name not in copied for name in index):
        return None
    columns = [column for column in value["columns"] if column["field_name"] in copied]
    is_plain = all(column["numpy_type"] == _PLAIN.get(column["pandas_type"]) for column in columns)
    names = value.get("column_indexes") or []
    has_names = any(name.get("name") is not None or name.get("pandas_type") != "unicode" for name in names)
    if not index and is_plain and not has_names:
        return {}
    return {"index_columns": index, "column_indexes": names, "columns": columns, "pandas_version": None}


# pandas type -> numpy type that pandas gives such a column without metadata.
_PLAIN = {
    **{kind: kind for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")},
    "float32": "float32", "float64": "float64", "float16": "float16", "unicode": "object", "bytes": "object",
    "datetime": "datetime64[ns]", "empty": "object",
}  # fmt: skip


def _geo(value: dict[str, Any], copied: Collection[str]) -> dict[str, Any] | None:
    """GeoParquet's geometry columns, without bounding boxes: a box around a file's rows does not hold for a part."""
    columns: Mapping[str, Any] = {name: column for name, column in value["columns"].items() if name in copied}
    if not columns:
        return {}
    if value["primary_column"] not in columns:
        return None
    without = {name: {key: item for key, item in column.items() if key != "bbox"} for name, column in columns.items()}
    return value | {"columns": without}


_KEPT: Mapping[str, Callable[[dict[str, Any], Collection[str]], dict[str, Any] | None]] = {
    "pandas": _pandas,
    "geo": _geo,
}
