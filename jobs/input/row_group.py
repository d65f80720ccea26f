"""Opens row groups of Parquet files within a limit of memory.

The headers of a row group's pages give an upper bound. If it exceeds the limit, a child process with limits of its own
(`system/confinement.py`) decodes the row group once and counts its bytes; a row group that is too large is refused
before this process reads it.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...system.confinement import ConfinedError, confined
from ...system.local_cache import temporary_folder
from .column_types import INT96_UNIT, check_int96, int96_columns
from .pages import decoded_bytes
from .spark_metadata import check_calendar, old_calendar

MAX_ROW_GROUP_BYTES = 2 << 30
#: Most rows of a row group, since a job keeps some memory for each row.
MAX_ROW_GROUP_ROWS = 1 << 22
_BATCH_BYTES = 64 << 20
_MAX_BATCH_ROWS = 1024
_COUNTED_ROWS = 256
_COUNT_CPU_S = 60
_COUNT_TASK = "jobs.input.row_group"
# Ranges of a file with at most this gap between them are read as one.
_GAP_BYTES = 1 << 20
_FIXED_BYTES = _LIST_BYTES = 8
_VARIABLE = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
# Bytes that readers read beyond a column chunk: old writers left the header of a dictionary out of its size.
_PADDING_BYTES = 100


class OversizedRowGroupError(ValueError):
    """The row group takes more memory than is allowed; the message names the column that takes most of it."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """An open row group."""

    #: The open file.
    file: pq.ParquetFile
    #: Number of the row group in its file.
    number: int
    #: Columns to read; None for all.
    columns: Sequence[str] | None
    #: Rows of the row group.
    num_rows: int
    #: Most bytes that its rows take in memory.
    num_bytes: int
    #: Columns to read that hold INT96 timestamps.
    int96: Sequence[str] = ()
    #: The file opened again with INT96 timestamps read as nanoseconds; None without `int96` columns.
    as_nanoseconds: pq.ParquetFile | None = None
    #: Whether old dates and timestamps, and whether old INT96 timestamps, are of the Julian calendar.
    has_old_calendar: tuple[bool, bool] = (False, False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows in batches of at most a thousand rows and, single rows apart, at most 64 MiB."""
        row_bytes = max(self.num_bytes // max(self.num_rows, 1), 1)
        num_rows = min(max(_BATCH_BYTES // row_bytes, 1), _MAX_BATCH_ROWS)
        for batch in self._checked(self.file.iter_batches(num_rows, [self.number], columns=self.columns), num_rows):
            yield from _pieces(batch)

    def _checked(self, batches: Iterator[pa.RecordBatch], num_rows: int) -> Iterator[pa.RecordBatch]:
        """The batches. Raises ValueError when reading has changed an INT96 timestamp, or a date is another day in
        Spark's Julian calendar.
        """
        if self.as_nanoseconds is None and not any(self.has_old_calendar):
            yield from batches
            return
        again: Iterator[pa.RecordBatch | None] = repeat(None)
        if self.as_nanoseconds is not None:
            again = self.as_nanoseconds.iter_batches(num_rows, [self.number], columns=self.int96)
        for batch, nanoseconds in zip(batches, again, strict=False):
            if nanoseconds is not None:
                for name in nanoseconds.schema.names:
                    check_int96(name, batch.column(name), nanoseconds.column(name))
            for name in batch.schema.names:
                if self._may_be_old(name, batch.column(name).type):
                    check_calendar(name, batch.column(name))
            yield batch

    def _may_be_old(self, name: str, kind: pa.DataType) -> bool:
        """Whether a column may have values of the Julian calendar. A nested column may have dates beside INT96."""
        days, timestamps = self.has_old_calendar
        if name not in self.int96:
            return days
        return timestamps or (days and not pa.types.is_timestamp(kind))

    def table(self) -> pa.Table:
        """The rows of the row group as one table."""
        return self.file.read_row_group(self.number, columns=self.columns)


@contextmanager
def open_row_group(
    handle: BinaryIO,
    number: int,
    columns: Sequence[str] | None = None,
    *,
    verify: bool = False,
    max_bytes: int = MAX_ROW_GROUP_BYTES,
) -> Iterator[RowGroup]:
    """Opens a row group of an open file, or some of its columns. `verify`: check the checksums of pages. `max_bytes`:
    the most bytes that its rows may take in memory.

    Raises `OversizedRowGroupError`, `ValueError` for damage, and what pyarrow and storage raise.
    """
    metadata = pq.read_metadata(handle)
    handle.seek(0, io.SEEK_END)
    size = handle.tell()
    group, paths = metadata.row_group(number), [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    named = None if columns is None else frozenset(columns)
    wanted = [i for i, path in enumerate(paths) if named is None or _is_of(path, named)]
    _check_columns(metadata, number, wanted, _UnreadFile(handle, size, []))
    chunks = [(i, *_extent(group.column(i), size)) for i in wanted]
    source = _RowGroupFile(handle, size, _ranges([(start, end) for _, start, end in chunks], max_bytes))
    num_bytes = _cleared_bytes(metadata, number, chunks, source, max_bytes)
    with ExitStack() as stack:
        options = {"metadata": metadata, "page_checksum_verification": verify}
        file = stack.enter_context(pq.ParquetFile(source, coerce_int96_timestamp_unit=INT96_UNIT, **options))
        int96 = [name for name in int96_columns(file) if columns is None or name in columns]
        again = stack.enter_context(pq.ParquetFile(source, **options)) if int96 else None
        calendar = old_calendar(metadata.metadata)
        yield RowGroup(file, number, columns, group.num_rows, num_bytes, int96, again, calendar)


def _check_columns(metadata: pq.FileMetaData, number: int, columns: Sequence[int], file: _UnreadFile) -> None:
    """Raise OSError for a column with unusable metadata, for which `RowGroupMetaData.column` would end the process."""
    with pq.ParquetFile(file, metadata=metadata) as unread:
        for column in columns:
            file.was_read = False
            try:
                unread.reader.read_row_group(number, column_indices=[column])
            except (pa.ArrowException, OSError):
                if not file.was_read:
                    raise


def _is_of(path: str, columns: Collection[str]) -> bool:
    end = len(path)
    while end > 0:
        if path[:end] in columns:
            return True
        end = path.rfind(".", 0, end)
    return False


def _extent(column: pq.ColumnChunkMetaData, size: int) -> tuple[int, int]:
    """Start and end of a column chunk in its file of `size` bytes; the end includes bytes that readers read beyond."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < (column.dictionary_page_offset or 0) < start:
        start = column.dictionary_page_offset
    end = start + column.total_compressed_size
    if not 0 <= start <= end <= size:
        raise ValueError(f"column {column.path_in_schema!r}: bytes {start} to {end} of a file of {size}")
    return start, min(end + _PADDING_BYTES, size)


def _ranges(extents: list[tuple[int, int]], max_bytes: int) -> list[tuple[int, int]]:
    """The parts of the file to read: without overlaps, and without small gaps."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if found and start <= found[-1][1] + _GAP_BYTES:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    num_bytes = sum(end - start for start, end in found)
    if num_bytes > max_bytes:
        raise OversizedRowGroupError(f"has {_size(num_bytes)} in its file, expected at most {_size(max_bytes)}")
    return found


class _RowGroupFile(io.RawIOBase):
    """A file with some ranges held in memory; the rest is read from the file itself."""

    def __init__(self, handle: BinaryIO, size: int, ranges: list[tuple[int, int]]) -> None:
        self._handle = handle
        self._size = size
        self._position = 0
        self.held: list[tuple[int, memoryview]] = []
        for start, end in ranges:
            handle.seek(start)
            data = handle.read(end - start)
            if len(data) < end - start:
                raise ValueError(f"ends at byte {start + len(data)} of {size}")
            self.held.append((start, memoryview(data)))

    def part(self, start: int, end: int) -> memoryview | None:
        """These bytes, if they are held."""
        for first, data in self.held:
            if first <= start and end <= first + len(data):
                return data[start - first : end - first]
        return None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> Any:
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        held = self.part(start, end)
        if held is not None:
            self._position = end
            return held
        self._handle.seek(start)
        read = self._handle.read(max(end - start, 0))
        self._position = start + len(read)
        return read


class _UnreadFile(_RowGroupFile):
    """A file that seems to end wherever it is read. `was_read`: whether a read was tried."""

    was_read = False

    def read(self, size: int = -1) -> Any:
        self.was_read = True
        return b""


def _cleared_bytes(
    metadata: pq.FileMetaData,
    number: int,
    chunks: Sequence[tuple[int, int, int]],
    source: _RowGroupFile,
    max_bytes: int,
) -> int:
    """The most bytes that the rows take in memory. Raises `OversizedRowGroupError` for more than `max_bytes`."""
    group = metadata.row_group(number)
    if group.num_rows > MAX_ROW_GROUP_ROWS:
        raise OversizedRowGroupError(f"holds {group.num_rows} rows, expected at most {MAX_ROW_GROUP_ROWS}")
    for exact in (False, True):
        bounds: dict[str, int] = {}
        for i, start, end in chunks:
            stored = source.part(start, end)
            assert stored is not None, f"bytes {start} to {end} were not read"
            column = metadata.schema.column(i)
            name = column.path.partition(".")[0]
            bounds[name] = bounds.get(name, 0) + decoded_bytes(group.column(i), column, stored, exact=exact)
        if sum(bounds.values()) <= max_bytes:
            return sum(bounds.values())
    return _counted_bytes(number, bounds, source, max_bytes)


def _counted_bytes(number: int, bounds: dict[str, int], source: _RowGroupFile, max_bytes: int) -> int:
    """The bytes that the rows take in memory, counted by a child process that decodes the columns, largest first.

    Raises `OversizedRowGroupError` for more than `max_bytes`, and when the child cannot decode the row group.
    """
    largest = sorted(bounds, key=bounds.__getitem__, reverse=True)
    with temporary_folder() as folder:
        copy = folder / "rows.parquet"
        with copy.open("xb") as file:
            _write_copy(file, source)
        try:
            found = confined().run(_COUNT_TASK, [str(copy), number, largest, max_bytes], _COUNT_CPU_S)
        except ConfinedError as error:
            raise OversizedRowGroupError(f"column {largest[0]!r} cannot be decoded within limits: {error}") from None
    total = sum(found.values())
    if total > max_bytes:
        column = max(found, key=found.__getitem__)
        raise OversizedRowGroupError(
            f"column {column!r} takes {_size(found[column])} or more in memory, expected at most {_size(max_bytes)} "
            "for all columns"
        )
    return int(total)


def _write_copy(copy: Any, source: _RowGroupFile) -> None:
    """Write the held ranges and the footer at their places in the file, with holes between them."""
    size = source.seek(-8, io.SEEK_END) + 8
    footer_bytes = int.from_bytes(source.read(4), "little") + 8
    source.seek(size - footer_bytes)
    for start, data in [*source.held, (size - footer_bytes, source.read(footer_bytes))]:
        copy.seek(start)
        copy.write(data)
    copy.flush()


def run(payload: list[Any]) -> dict[str, int]:
    """Counts the bytes that columns take in memory, until they are too many: column -> bytes. The task of a child
    process.
    """
    path, number, columns, max_bytes = payload
    pa.set_memory_pool(pa.system_memory_pool())  # others reserve more address space than is allowed here
    found: dict[str, int] = {}
    # Values of dictionaries are counted, not repeated.
    leaves = pq.read_metadata(path).schema
    texts = [leaf.path for leaf in map(leaves.column, range(len(leaves))) if leaf.physical_type == "BYTE_ARRAY"]
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for column in columns:
            found[column] = 0
            for batch in file.iter_batches(_COUNTED_ROWS, [number], columns=[column], use_threads=False):
                found[column] += sum(map(memory_bytes, batch.columns))
                if sum(found.values()) > max_bytes:
                    return found
    return found


def memory_bytes(array: pa.Array) -> int:
    """Bytes of an array's values; a dictionary's value counts once for each row that uses it."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return memory_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        if not any(is_kind(kind.value_type) for is_kind in _VARIABLE):
            return len(array) * _FIXED_BYTES
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return int(array.indices.nbytes) + (pc.sum(lengths).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(map(memory_bytes, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return len(array) * _LIST_BYTES + memory_bytes(array.flatten())
    return int(array.nbytes)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of bounded size, as far as its rows allow."""
    if batch.num_rows < 2 or sum(map(memory_bytes, batch.columns)) <= _BATCH_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
