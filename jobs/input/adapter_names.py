"""Names of adapters in rows: why rows with a name cannot be answered, and which columns hold names.

`columns_with_names` is for the message about a job without an adapter column. It reads rows, from at most
`_ROW_GROUPS_READ` row groups, to keep the wait short.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.compute as pc

from ..options.problems import with_suggestion
from ..record import AdapterRecord, InputFile, InputRecord
from ..storage.location import options_for
from ..storage.redaction import is_redacted
from ..storage.stores import open_store
from .columns import text_columns
from .files import unpack_schema
from .row_group import open_row_group

#: Role of the column that says which adapters a row may name.
ALLOWED_ROLE = "allowed_adapters"
_ROW_GROUPS_READ = 64
_NAMES_SHOWN = 8


def adapter_problem(name: str | None, adapters: Mapping[str, AdapterRecord]) -> str | None:
    """Why rows of this adapter cannot be answered, or None when they can. The name None is the base model."""
    if name is None:
        return None
    if name in adapters:
        adapter = adapters[name]
        reasons = (reason.removeprefix(f"adapter {name!r}: ") for reason in adapter.reasons)
        why = " ".join(reasons) or "its folder could not be read."
        return f"adapter={name!r}: refused. {why}" if adapter.is_refused else None
    if not adapters:
        return (
            f"adapter={name!r}: the job has no adapters. Give them with --adapters, or have the base model answer all "
            "rows: --column adapter= (no column names adapters then)"
        )
    close = difflib.get_close_matches(name, adapters, n=1)
    known = ", ".join(sorted(adapters)[:_NAMES_SHOWN]) + (", …" if len(adapters) > _NAMES_SHOWN else ".")
    if twin := next((other for other in adapters if normalize("NFC", other) == normalize("NFC", name)), None):
        return (
            f"adapter={name!a}: not among this job's adapters; {twin!a} looks the same, written with other characters. "
            "Write both alike."
        )
    hint = f"did you mean {close[0]!r}?" if close else f"known: {known}"
    return f"adapter={name!r}: not among this job's adapters; {hint}"


@lru_cache(maxsize=16)
def allowed_adapters(option: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The column and the names or globs by its value, of the option `allowed_adapters`."""
    ((column, rules),) = json.loads(option).items()
    return column, {key: (names,) if isinstance(names, str) else tuple(names) for key, names in rules.items()}


def not_allowed(option: str, value: Any, adapter: str | None) -> str | None:
    """Why a row with this value in the column of `allowed_adapters` may not name an adapter, or None when it may. The
    base model is free to all.
    """
    column, rules = allowed_adapters(option)
    patterns = rules.get("" if value is None else str(value), rules.get("*", ()))
    if adapter is None or any(pattern == adapter or fnmatchcase(adapter, pattern) for pattern in patterns):
        return None
    may = f"it may name {', '.join(patterns)}" if patterns else "allowed_adapters names none for it"
    shown = "null" if value is None else repr(value)
    return f"adapter={adapter!r}, {column}={shown}: not allowed; {may}. Correct the row, or allowed_adapters."


def rule_problems(option: str | None, columns: Collection[str], adapters: Collection[str]) -> list[str]:
    """Problems of the option `allowed_adapters` with the input's columns and the job's adapters, as sentences."""
    if option is None:
        return []
    column, rules = allowed_adapters(option)
    problems = []
    if column not in columns:
        problem = with_suggestion(f"allowed_adapters: the input has no column {column!r}", column, tuple(columns))
        problems.append(f"{problem.removesuffix('?')}{'?' * problem.endswith('?') or '.'}")
    for pattern in dict.fromkeys(name for names in rules.values() for name in names):
        if not any(pattern == name or fnmatchcase(name, pattern) for name in adapters):
            problem = with_suggestion(f"allowed_adapters: no adapter is called {pattern!r}", pattern, tuple(adapters))
            problems.append(f"{problem.removesuffix('?')}{'?' * problem.endswith('?') or '.'}")
    return problems


def columns_with_names(
    given: InputRecord, names: Collection[str], storage_options: Mapping[str, Any]
) -> dict[str, int]:
    """Column -> how many of `names` it holds, most first; columns of text without any are left out."""
    found: dict[str, set[str]] = {name: set() for name in text_columns(unpack_schema(given.schema_ipc))}
    for file in given.files:
        for column, value in file.partition.items():
            found.setdefault(column, set()).add(str(value))
    wanted = pa.array(sorted(names), pa.string())
    for file, row_group in _sample(given):
        try:
            for column, values in _names_in(file, row_group, list(found), wanted, storage_options).items():
                found[column] |= values
        except (OSError, ValueError, pa.ArrowException):
            continue  # the message does without this row group
    counts = {column: len(values & set(names)) for column, values in found.items()}
    return dict(sorted(((c, n) for c, n in counts.items() if n), key=lambda item: -item[1]))


def _sample(given: InputRecord) -> list[tuple[InputFile, int]]:
    """Row groups spread evenly over the input."""
    groups = [
        (file, i)
        for file in given.files
        if not is_redacted(file.url)
        for i, num_rows in enumerate(file.row_group_rows)
        if num_rows
    ]
    return groups[:: -(-len(groups) // _ROW_GROUPS_READ) or 1]


def _names_in(
    file: InputFile, row_group: int, columns: list[str], wanted: pa.Array, storage_options: Mapping[str, Any]
) -> dict[str, set[str]]:
    """Column of the file -> the wanted names among its values."""
    fs, path = open_store(file.url, options_for(file.url, storage_options))
    with fs.open(path, "rb") as handle, open_row_group(handle, row_group, columns) as rows:
        own = [column for column in columns if column in rows.file.schema_arrow.names]
        table = rows.table().select(own)
    return {
        column: set(pc.unique(values.filter(pc.is_in(values, wanted))).to_pylist())
        for column in own
        for values in [table.column(column).cast(pa.string())]
    }
