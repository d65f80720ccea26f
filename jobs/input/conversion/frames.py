"""Reads tables of Python programs: Arrow, pandas, Polars, DuckDB, Dask, `datasets`, and lists of dictionaries.

A table is known by a hash of its columns' types and values, whatever its batches are, so that the same table is the
same input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ....system.untrusted import shown_name
from .source import UnreadableSourceError
from .tables import ParquetFile, carried_batch, carried_schema, equal_tables

_BATCH_ROWS = 1024
_WRONG_VALUES = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


def write_frame(data: Any, target: Path) -> str:
    """Write a table as Parquet. Returns its hash. Raises `UnreadableSourceError`, and `OSError`."""
    try:
        schema, batches = _rows(data)
        carried = carried_schema(schema)
        batches = (carried_batch(batch, carried) for batch in batches)
        digest = hashlib.sha256(carried.remove_metadata().to_string(truncate_metadata=False).encode())
        with ParquetFile(target, carried) as file:
            for table in equal_tables(batches):
                digest.update(_plain(table))
                file.add(table)
            file.finish(digest.hexdigest())
    except UnreadableSourceError:
        raise
    except _WRONG_VALUES as error:
        raise UnreadableSourceError(f"{'. '.join(map(str, error.args)).strip()}. Cast the column.") from None
    return digest.hexdigest()


def _plain(table: pa.Table) -> memoryview:
    """The values of a table as Parquet writes them without compression, dictionaries and statistics: bytes that depend
    on the values only, and not on what a buffer has in the place of a null.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False, store_schema=False)
    data = memoryview(sink.getvalue())
    return data[: len(data) - 8 - int.from_bytes(data[-8:-4], "little")]


def _rows(data: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and rows of a table of any kind."""
    if type(data).__module__.partition(".")[0] == "pandas":
        # pandas leaves the index out of its stream
        keeps_index = True if any(name is not None for name in data.index.names) else None
        table = pa.Table.from_pandas(data, preserve_index=keeps_index)
        return table.schema, iter(table.to_batches())
    if hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
        return reader.schema, iter(reader)
    if hasattr(data, "__arrow_c_array__"):
        batch = pa.record_batch(data)
        return batch.schema, iter([batch])
    if hasattr(data, "npartitions"):
        return _dask_rows(data)
    if isinstance(data, Mapping):
        return _columns_of(data)
    if hasattr(data, "with_format"):
        return _dataset_rows(data)
    return _columns_of(_of_dictionaries(data))


def _of_dictionaries(rows: list[Mapping[str, Any]] | tuple[Mapping[str, Any], ...]) -> dict[str, list[Any]]:
    """Columns of rows. A row without a field of other rows has null there."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UnreadableSourceError(f"row {number} is {type(row).__name__}, expected a dictionary.")
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _columns_of(columns: Mapping[str, Any]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    splits = [name for name, values in columns.items() if hasattr(values, "with_format")]
    if splits:
        raise UnreadableSourceError(f"several data sets ({', '.join(map(shown_name, splits))}). Give one of them.")
    made = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise UnreadableSourceError(f"column {name!r} is named by {type(name).__name__}, expected text.")
        try:
            made[name] = pa.array(values)
        except _WRONG_VALUES as error:
            raise UnreadableSourceError(
                f"column {shown_name(name)!r}: its values have no common type ({error}). Give all of them one type."
            ) from None
    table = pa.table(made)
    return table.schema, iter(table.to_batches())


def _dask_rows(frame: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Rows of a Dask frame. A partition is computed when its rows are needed, where Dask computes by default.

    The frame does not know what its columns of objects hold: the first partition says it, and a column that is null
    there is text.
    """
    keeps_index = frame.index.name is not None
    first = frame.partitions[0].compute()
    schema = pa.Schema.from_pandas(first, preserve_index=keeps_index)
    for place, column in enumerate(schema):
        if pa.types.is_null(column.type):
            schema = schema.set(place, column.with_type(pa.string()))

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(frame.npartitions):
            rows = frame.partitions[number].compute() if number else first
            try:
                table = pa.Table.from_pandas(rows, schema=schema, preserve_index=keeps_index)
            except _WRONG_VALUES as error:
                raise UnreadableSourceError(f"partition {number}: {error}. Give all partitions one schema.") from None
            yield from table.to_batches()

    return schema, batches()


def _dataset_rows(data: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Rows of a data set of the package `datasets`, also one that is streamed."""
    tables = iter(data.with_format("arrow").iter(batch_size=_BATCH_ROWS))
    first = next(tables, None)
    if first is None:
        schema = data.features.arrow_schema if data.features else pa.schema([])
        return schema, iter([])

    def batches() -> Iterator[pa.RecordBatch]:
        yield from first.to_batches()
        for table in tables:
            yield from table.cast(first.schema).to_batches()

    return first.schema, batches()
