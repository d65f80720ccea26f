"""One row group of one input file, streamed as record batches of the job's schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ..jobs.input_files import footer_sha256, unpack_schema
from ..jobs.location import options_for
from ..jobs.storage_reason import storage_reason

_READ_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A row group. `file_name` is for messages and made-up ids; `first_row` counts from the file's start.

    `footer_sha256`: of the file as it was when the job was frozen.
    """

    chunk_id: int
    file_url: str
    file_name: str
    row_group: int
    first_row: int
    num_rows: int
    footer_sha256: str


class DamagedChunkError(Exception):
    """The row group cannot be read; the message names file and row group."""


def read_chunk(chunk: ChunkRef, schema_ipc: str, storage_options: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """The rows of a chunk, a thousand at a time, cast to the job's schema. Page checksums are verified.

    Raises `DamagedChunkError`.
    """
    schema = unpack_schema(schema_ipc)
    options = options_for(chunk.file_url, storage_options)
    num_rows = 0
    try:
        fs, path = fsspec.core.url_to_fs(chunk.file_url, **options)
        with fs.open(path, "rb") as handle:
            if footer_sha256(handle) != chunk.footer_sha256:
                raise DamagedChunkError(
                    f"input file {chunk.file_name!r}: has changed since the job was started. Put back what it was, or "
                    "start over with --overwrite."
                )
            with pq.ParquetFile(handle, pre_buffer=True, page_checksum_verification=True) as file:
                for batch in file.iter_batches(batch_size=_READ_ROWS, row_groups=[chunk.row_group]):
                    num_rows += batch.num_rows
                    yield _fitted(batch, schema)
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        reason = storage_reason(error, options, chunk.file_url)
        raise DamagedChunkError(_refusal(chunk, f"cannot be read ({reason})")) from None
    if num_rows != chunk.num_rows:
        raise DamagedChunkError(_refusal(chunk, f"holds {num_rows} rows, its footer says {chunk.num_rows}"))


def _refusal(chunk: ChunkRef, what: str) -> str:
    return (
        f"input file {chunk.file_name!r}, row group {chunk.row_group} (rows {chunk.first_row} to "
        f"{chunk.first_row + chunk.num_rows - 1}): {what}. Repair the file or leave it out."
    )


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Columns that this file lacks become null; columns without any value take the type of the other files."""
    columns = []
    for column in schema:
        place = batch.schema.get_field_index(column.name)
        if place < 0:
            columns.append(pa.nulls(batch.num_rows, column.type))
        elif batch.column(place).type == column.type:
            columns.append(batch.column(place))
        else:
            columns.append(batch.column(place).cast(column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
