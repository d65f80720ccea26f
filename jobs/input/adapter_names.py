"""Names of adapters in rows: why rows with a name cannot be answered, and which columns hold names.

`columns_with_names` is for the message about a job without an adapter column. It reads rows, from at most
`_ROW_GROUPS_READ` row groups, to keep the wait short.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.compute as pc

from ..record import AdapterRecord, InputFile, InputRecord
from ..storage.location import options_for
from ..storage.redaction import is_redacted
from ..storage.stores import open_store
from .columns import text_columns
from .files import unpack_schema
from .row_group import open_row_group

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
