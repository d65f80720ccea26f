"""Reads columns from folder names, as Hive, Spark and DuckDB write them: `tenant=a/day=3/rows.parquet`.

pyarrow takes the names apart. A column of integers only, each written as integers are (7, not 007), is int32; any other
one is a string, so that no value loses a part of its text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from ..errors import JobRequestError
from ..record import InputFile, InputRecord, PartitionValues
from .files import Footer, pack_schema, unpack_schema

#: Role of the column that names adapters, and the column's name where nothing gives it another.
ADAPTER_ROLE = "adapter"
_SHOWN = 3


def with_partitions(
    footers: Sequence[Footer], schema: pa.Schema, text_columns: Collection[str]
) -> tuple[tuple[InputFile, ...], pa.Schema]:
    """The files with the values that their folders give them, and `schema` with the columns of the folders, last.

    `text_columns`: columns that are strings whatever their values look like. A file outside of the folders of a column
    has null there, or its own column of that name. Raises `JobRequestError` for folder names that cannot be read, and
    where a file has a column of its folder too.
    """
    folders = {footer.folder for footer in footers if _segments(footer.folder)}
    problems = [*_repeated(folders), *_clashes(footers)]
    if problems:
        raise JobRequestError(*problems)
    texts = {folder: _values(folder) for folder in folders}
    names = dict.fromkeys(name for footer in footers for name, _ in _segments(footer.folder))
    added = pa.schema(
        [
            pa.field(name, pa.string() if name in text_columns else _kind([v.get(name) for v in texts.values()]))
            for name in names
            if name not in schema.names
        ]
    )
    whole = pa.schema([*schema, *added])
    typed = {folder: _typed(folder, values, whole) for folder, values in texts.items()}
    files = tuple(
        footer.file.model_copy(update={"partition": typed[footer.folder]}) if footer.folder in typed else footer.file
        for footer in footers
    )
    return files, whole


def with_sole_adapter(given: InputRecord, name: str, prefix: str) -> InputRecord:
    """The input with a column that has the name of an adapter in all rows, as if it were a folder's; see
    `with_adapter_column`.
    """
    found = with_adapter_column(given, prefix)
    column = found.roles[ADAPTER_ROLE]
    files = [file.model_copy(update={"partition": {**file.partition, column: name}}) for file in found.files]
    return found.model_copy(update={"files": tuple(files), "sole_adapter": name})


def with_adapter_column(given: InputRecord, prefix: str) -> InputRecord:
    """The input with a column for names of adapters, null in all rows. The column is `adapter`, or where the input has
    data of that name, it begins with `prefix`.

    Raises `JobRequestError` where both names are taken.
    """
    schema = unpack_schema(given.schema_ipc)
    taken = {*schema.names, *given.dropped}
    column = ADAPTER_ROLE if ADAPTER_ROLE not in taken else f"{prefix}{ADAPTER_ROLE}"
    if column in taken:
        raise JobRequestError(
            f"adapters: column {column!r} of the input is data, so the output's own needs another name. Add "
            "--output-prefix answer_, or a text of your own."
        )
    return given.model_copy(
        update={
            "roles": given.roles | {ADAPTER_ROLE: column},
            "schema_ipc": pack_schema(schema.append(pa.field(column, pa.string()))),
        }
    )


def _segments(folder: str) -> list[tuple[str, str]]:
    """(column, value) of each folder name that holds one."""
    parts = (segment.partition("=") for segment in folder.split("/"))
    return [(name, value) for name, equals, value in parts if name and equals]


def _values(folder: str) -> dict[str, str | None]:
    """Column -> its value in this folder, as text."""
    # This imports pandas, which takes 0.3 s: only jobs with columns in folder names pay for it.
    import pyarrow.dataset as ds

    segments = _segments(folder)
    fields = pa.schema([pa.field(name, pa.string()) for name, _ in segments])
    path = "/".join(f"{name}={value}" for name, value in segments)
    try:
        return dict(ds.get_partition_keys(ds.HivePartitioning(fields).parse(f"{path}/")))
    except pa.ArrowInvalid as error:
        raise JobRequestError(f"input folder {folder!r}: cannot be read as columns ({error}). Rename it.") from None


def _typed(folder: str, values: Mapping[str, str | None], schema: pa.Schema) -> PartitionValues:
    """The values in the schema's types, which may come from other files that have the column themselves."""
    found: PartitionValues = {}
    for name, text in values.items():
        kind = schema.field(name).type
        try:
            value = pa.array([text], pa.string()).cast(kind)[0].as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            value = object()
        if value is not None and not isinstance(value, int | str):
            raise JobRequestError(
                f"input folder {folder!r}: column {name!r} is {kind} in other files. Give it a type that folder names "
                "can have there: a string or an integer."
            )
        found[name] = value
    return found


def _kind(values: Sequence[str | None]) -> pa.DataType:
    texts = [value for value in values if value is not None]
    try:
        numbers = pa.array(texts, pa.string()).cast(pa.int32()).to_pylist()
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32() if texts and list(map(str, numbers)) == texts else pa.string()


def _repeated(folders: Collection[str]) -> list[str]:
    problems: dict[str, str] = {}
    for folder in sorted(folders):
        names = [name for name, _ in _segments(folder)]
        problems |= {name: folder for name in names if names.count(name) > 1}
    return [
        f"input folder {folder!r}: names column {name!r} twice. Rename one of them."
        for name, folder in problems.items()
    ]


def _clashes(footers: Sequence[Footer]) -> list[str]:
    found: dict[str, list[str]] = {}
    for footer in footers:
        for name, _ in _segments(footer.folder):
            if name in footer.schema.names:
                found.setdefault(name, []).append(footer.file.name)
    return [
        f"input column {name!r}: stands in folder names ({name}=…) and in their files too "
        f"({', '.join(map(repr, files[:_SHOWN]))}{', …' if len(files) > _SHOWN else ''}). Leave it out of the files, "
        "or rename it in one of the two places."
        for name, files in found.items()
    ]
