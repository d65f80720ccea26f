"""What the footers of a job's files say beside their columns: settings of batch files, and what the output keeps.

pandas writes its index and its types there, GeoParquet which columns are geometries. Both are kept where all files
agree; whatever else is there is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...engine.untrusted import parse_json, shown_name
from .files import Footer
from .spark_metadata import SPARK_SCHEMA_KEY, says_more

#: Key under which `lorabatch import` writes a JSON list of the columns that are settings.
SETTINGS_KEY = "lorabatch.row_settings"
_OWN_PREFIX = "lorabatch."


def settings_of_files(
    footers: Sequence[Footer], asked: Collection[str], settings: Collection[str]
) -> tuple[list[str], list[str]]:
    """Columns that files name as settings, and what is wrong. `asked`: settings that the job asks for itself, so that
    files need not agree on them. `settings`: all names that settings have.
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
    """What all parts of the output say too, and the keys of what they leave out. `copied`: columns of the output."""
    keys = sorted({key for footer in footers for key in footer.metadata if not key.startswith(_OWN_PREFIX)})
    # types that only it shows are refused
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
    """What holds for the copied columns of any file; None for what cannot be kept, "" for what says nothing."""
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
    """Types of columns and the columns of the index. Numbers of rows as an index say nothing in a part."""
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


# What pandas makes of a column without being told.
_PLAIN = {
    **{kind: kind for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")},
    "float32": "float32", "float64": "float64", "float16": "float16", "unicode": "object", "bytes": "object",
    "datetime": "datetime64[ns]", "empty": "object",
}  # fmt: skip


def _geo(value: dict[str, Any], copied: Collection[str]) -> dict[str, Any] | None:
    """Which columns are geometries. A box around the rows of a file is none around those of a part."""
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
