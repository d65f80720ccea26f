"""Classifies the types of columns: the type in which each is carried from input to output, and which are refused.

A column is copied unchanged where readers of Parquet find the type and the values in the output that they find in the
input. `ARROW_TYPES` has every type of Arrow, `parquet_schema.py` every type of Parquet.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as t

from .parquet_schema import INT96, NULL, PLAIN_TIMESTAMP, column_kinds, is_zoned_time, plain_time

KEPT = "kept"
_AS_VALUES = "read as the type of its values"
#: Name of an Arrow type -> how columns of it are carried. A type that is read as another has equal values in Parquet.
ARROW_TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "NA", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "HALF_FLOAT",
            "FLOAT", "DOUBLE", "DECIMAL32", "DECIMAL64", "DECIMAL128", "DECIMAL256", "DATE32", "DATE64", "TIME32",
            "TIME64", "TIMESTAMP", "DURATION", "STRING", "LARGE_STRING", "BINARY", "LARGE_BINARY",
            "FIXED_SIZE_BINARY", "LIST", "LARGE_LIST", "FIXED_SIZE_LIST", "MAP", "STRUCT",
        ),
        KEPT,
    ),
    "STRING_VIEW": "read as string",
    "BINARY_VIEW": "read as binary",
    "LIST_VIEW": "read as list",
    "LARGE_LIST_VIEW": "read as large_list",
    "DICTIONARY": "kept, with 32-bit indices: files may have other categories",
    "RUN_END_ENCODED": _AS_VALUES,
    **dict.fromkeys(
        ("SPARSE_UNION", "DENSE_UNION", "INTERVAL_MONTHS", "INTERVAL_DAY_TIME", "INTERVAL_MONTH_DAY_NANO"),
        "no Parquet file has it",
    ),
}  # fmt: skip
#: Unit in which INT96 timestamps are read: as nanoseconds they would wrap outside of 1677 to 2262.
INT96_UNIT = "us"
_NS_PER_UNIT = 1000


def carried_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column of this type has between input and output; inside of lists and structs too.

    Arrow computes little on views, and dictionaries of several files together may have more values than 8-bit indices
    can tell apart.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return pa.json_() if kind.extension_name == "arrow.json" and t.is_string_view(kind.storage_type) else kind
    if t.is_dictionary(kind):
        return pa.dictionary(pa.int32(), carried_type(kind.value_type), kind.ordered)
    if t.is_run_end_encoded(kind):
        return carried_type(kind.value_type)
    if t.is_string_view(kind) or t.is_binary_view(kind):
        return pa.string() if t.is_string_view(kind) else pa.binary()
    if t.is_struct(kind):
        return pa.struct([carried_field(kind.field(i)) for i in range(kind.num_fields)])
    if t.is_map(kind):
        return pa.map_(carried_field(kind.key_field), carried_field(kind.item_field), kind.keys_sorted)
    if t.is_fixed_size_list(kind):
        return pa.list_(carried_field(kind.value_field), kind.list_size)
    if t.is_list(kind) or t.is_list_view(kind):
        return pa.list_(carried_field(kind.value_field))
    if t.is_large_list(kind) or t.is_large_list_view(kind):
        return pa.large_list(carried_field(kind.value_field))
    return kind


def carried_field(field: pa.Field) -> pa.Field:
    """The field with its `carried_type`."""
    kind = carried_type(field.type)
    return field if kind == field.type else field.with_type(kind)


def as_carried(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in the job's type: its own `carried_type`, or another file's when the column has no value."""
    if column.type == kind:
        return column
    if isinstance(column.type, pa.BaseExtensionType) and isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, column.storage.cast(kind.storage_type))
    return _without_list_views(column, kind) if _has_list_view(column.type) else column.cast(kind)


def _has_list_view(kind: pa.DataType) -> bool:
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        return True
    return any(_has_list_view(kind.field(i).type) for i in range(kind.num_fields))


def _without_list_views(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column rebuilt with lists, since casts of list views read beyond their offsets (PyArrow 26). Raises
    ValueError for list views inside of maps and lists of a fixed size.
    """
    if t.is_struct(kind):
        fields = [as_carried(column.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=column.is_null())
    if t.is_map(kind) or t.is_fixed_size_list(kind):
        raise ValueError(f"values of type {column.type} are not read; write them with lists instead of list views")
    values = as_carried(column.flatten(), kind.value_type)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    is_large = t.is_large_list(kind)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int64() if is_large else pa.int32())
    make = pa.LargeListArray if is_large else pa.ListArray
    return make.from_arrays(offsets, values, type=kind, mask=column.is_null())


def type_problems(
    schema: pa.Schema, copied: Collection[str], of_files: Sequence[tuple[str, Mapping[str, tuple[str, ...]]]]
) -> dict[str, str]:
    """Why columns cannot be copied unchanged: column -> a sentence. `of_files`: name and `column_kinds` of one file for
    each distinct `column_kinds`.
    """
    names = [name for name in schema.names if name in copied]
    written = _written_kinds(pa.schema([schema.field(name) for name in names]))
    problems: dict[str, str] = {}
    are_zoned = times_are_zoned(copied, of_files)
    for file, kinds in of_files:
        for name in names:
            if name in kinds and (kind := _lost(kinds[name], written[name], are_zoned)):
                problems.setdefault(
                    name,
                    f"input column {name!r}: {kind} in {file!r}, a Parquet type that would be lost in the "
                    f"output; expected one that is copied unchanged. Cast the column before, or leave it out of the "
                    f"output with --drop {quote(name)}.",
                )
    return problems


def columns_of_int96(
    copied: Collection[str], of_files: Sequence[tuple[str, Mapping[str, tuple[str, ...]]]]
) -> list[str]:
    """Copied columns that hold INT96 timestamps in some file, by themselves or nested."""
    return sorted({name for _, kinds in of_files for name in kinds if name in copied and INT96 in kinds[name]})


def times_are_zoned(copied: Collection[str], of_files: Sequence[tuple[str, Mapping[str, tuple[str, ...]]]]) -> bool:
    """Whether all times of day in copied columns are in UTC: the writer has one option for all of them."""
    times = [
        is_zoned_time(kind)
        for _, kinds in of_files
        for name, found in kinds.items()
        if name in copied
        for kind in found
        if plain_time(kind).startswith("time (")
    ]
    return bool(times) and all(times) and "write_time_adjusted_to_utc" in pq.write_table.__code__.co_varnames


def _lost(kinds: Sequence[str], written: Sequence[str], are_zoned: bool) -> str:
    """The first of a column's kinds that would be written as another one; "" when all are kept."""
    if "VARIANT" in kinds:
        return "VARIANT"
    if list(kinds) == [NULL]:
        return ""
    for kind, ours in zip(kinds, written, strict=False):
        same = {INT96: PLAIN_TIMESTAMP}.get(kind, kind)
        same = plain_time(same) if are_zoned else same
        if same not in (ours, NULL):
            return kind
    return ""


def _written_kinds(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """The `column_kinds` of a file that is written with this schema."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_batches([], schema), sink)
    data = sink.getvalue()
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    return column_kinds(data[len(data) - 8 - footer_bytes :])


def int96_columns(file: pq.ParquetFile) -> list[str]:
    """Columns that hold INT96 timestamps, by themselves or inside of lists and structs."""
    leaves = map(file.schema.column, range(len(file.schema)))
    paths = [leaf.path for leaf in leaves if leaf.physical_type == "INT96"]
    names = file.schema_arrow.names if paths else []
    return [name for name in names if any(path == name or path.startswith(f"{name}.") for path in paths)]


def check_int96(name: str, read: pa.Array, as_nanoseconds: pa.Array) -> None:
    """Raise ValueError where INT96 timestamps have more digits than microseconds hold. `as_nanoseconds`: the column
    read as nanoseconds, which wrap outside of 1677 to 2262, as products of microseconds do.
    """
    pairs = zip(nested_values(read, t.is_timestamp), nested_values(as_nanoseconds, t.is_timestamp), strict=True)
    for micros, nanos in ((one.cast(pa.int64()), other.cast(pa.int64())) for one, other in pairs):
        if not pc.all(pc.equal(pc.multiply(micros, _NS_PER_UNIT), nanos)).as_py():
            raise ValueError(
                f"column {name!r} has INT96 timestamps with nanoseconds, expected microseconds; leave it out with "
                f"--drop {quote(name)}, or write it as INT64"
            )


def nested_values(array: Any, is_kind: Callable[[pa.DataType], bool]) -> Iterator[pa.Array]:
    """The values of a kind in an array, nested ones too, without nulls."""
    kind = array.type
    if is_kind(kind):
        yield array.drop_null()
    elif t.is_struct(kind):
        for field in array.flatten():
            yield from nested_values(field, is_kind)
    elif t.is_map(kind):
        # entries behind a null map are no values
        yield from nested_values(pa.ListArray.from_arrays(array.offsets, array.keys).flatten(), is_kind)
        yield from nested_values(pa.ListArray.from_arrays(array.offsets, array.items).flatten(), is_kind)
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        yield from nested_values(array.flatten(), is_kind)
