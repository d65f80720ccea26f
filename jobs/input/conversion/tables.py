"""Holds rows on disk until their types are known (`Spool`), and writes rows as Parquet (`ParquetFile`)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ....system.untrusted import shown_name
from ..column_types import as_carried, carried_field
from ..row_group import memory_bytes

#: Key of a Parquet footer with the hash of what the file was made from.
SOURCE_KEY = "lorabatch.source"
_GROUP_ROWS, _GROUP_BYTES = 8192, 32 << 20
_TABLE_ROWS = 1024
_LENGTH_BYTES = 8


class Spool:
    """Record batches in a temporary file, each with a schema of its own. Batches are added first, and read then."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("x+b")
        #: Rows of all batches.
        self.num_rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch. Raises `OSError`."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_batch(batch)
        data = sink.getvalue()
        self._file.write(data.size.to_bytes(_LENGTH_BYTES, "little"))
        self._file.write(data)
        self.num_rows += batch.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All batches, in the order in which they were added."""
        self._file.seek(0)
        while length := self._file.read(_LENGTH_BYTES):
            yield from pa.ipc.open_stream(self._file.read(int.from_bytes(length, "little")))


class ParquetFile:
    """A new Parquet file, which gets its rows in tables. The file depends on the rows and not on their batches.

    Its row groups have at most 8,192 rows and, single rows apart, 32 MiB. Methods raise `OSError`.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file: BinaryIO = path.open("xb")
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd", write_page_checksum=True)
        self._schema = schema
        self._waiting: list[pa.Table] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError, pa.ArrowException):  # a file that is not finished is not used
            self._writer.close()
        self._file.close()

    def add(self, table: pa.Table) -> None:
        """Add rows."""
        self._waiting.append(table)
        if sum(map(len, self._waiting)) >= _GROUP_ROWS or sum(map(_table_bytes, self._waiting)) >= _GROUP_BYTES:
            self._write()

    def finish(self, source: str) -> None:
        """Write what is left. `source`: hash of what the rows come from, which the footer has."""
        self._write()
        self._writer.add_key_value_metadata({SOURCE_KEY: source})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            table = pa.concat_tables(waiting).unify_dictionaries().combine_chunks()
            for group in _cut(table.replace_schema_metadata(self._schema.metadata)):
                self._writer.write_table(group, row_group_size=len(group))


def write_parquet(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], source: str) -> None:
    """Write rows as one `ParquetFile`. `source`: hash of what they come from. Raises what `batches` raises too."""
    with ParquetFile(path, schema) as file:
        for table in equal_tables(batches):
            file.add(table)
        file.finish(source)


def equal_tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in tables of 1,024 rows without chunks, the last of fewer, however the batches are cut."""
    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            piece = batch.slice(start, _TABLE_ROWS - num_waiting)
            start += piece.num_rows
            waiting.append(piece)
            num_waiting += piece.num_rows
            if num_waiting == _TABLE_ROWS:
                yield _joined(waiting)
                waiting, num_waiting = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    if table.num_rows < 2 or _table_bytes(table) <= _GROUP_BYTES:
        yield table
        return
    half = table.num_rows // 2
    yield from _cut(table.slice(0, half).combine_chunks())
    yield from _cut(table.slice(half).combine_chunks())


def _table_bytes(table: pa.Table) -> int:
    return sum(memory_bytes(chunk) for column in table.columns for chunk in column.chunks)


def carried_schema(schema: pa.Schema) -> pa.Schema:
    """The schema in the types in which columns are carried (`column_types.carried_type`).

    Raises ValueError naming a column whose type no Parquet file has.
    """
    carried = pa.schema([carried_field(column) for column in schema], schema.metadata)
    for column in carried:
        try:
            pq.write_table(pa.Table.from_batches([], pa.schema([column])), io.BytesIO())
        except pa.ArrowException:
            raise ValueError(
                f"column {shown_name(column.name)!r} is {column.type}, which no Parquet file has. Cast it, or leave it "
                "out."
            ) from None
    return carried


def carried_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch in the types of its `carried_schema`. Raises ValueError and `pyarrow.ArrowException`."""
    columns = [as_carried(_decoded(batch.column(place)), column.type) for place, column in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _decoded(column: pa.Array) -> pa.Array:
    return pc.run_end_decode(column) if pa.types.is_run_end_encoded(column.type) else column
