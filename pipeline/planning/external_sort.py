"""Sorts the index of all rows by adapter, in a file of this machine.

Each row takes some 70 bytes, and a job may have more rows than memory has room for. Rows are therefore written to a
file and read back a block at a time (`SortedRows` over `ScratchFile`). Prompts and ids stay in the prepared rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...jobs.errors import StorageError
from ...jobs.input.columns import readable
from ...jobs.store import JobStore
from ..dataset import schema as prepared

_CHUNK_READS = 8
_FEW_ROWS = 256
_NUMBERS = [(field.name, field.type.to_pandas_dtype()) for field in prepared.INDEX_SCHEMA if field.name != "adapter"]
# One row of the index: the columns of `INDEX_SCHEMA`, and its chunk.
# `adapter`: code of the adapter, -1 for the base model.
# `error_kind`: 0 for a row in which the index has seen no error.
# `chunk`, `batch`, `row`: place of the prepared row; `place`: number of the row in its chunk as it was read.
# `source`: number of the shard of an earlier job whose answer the row keeps (`EarlierRows.places`); -1 for none.
INDEXED_ROW = np.dtype([("adapter", np.int32), ("chunk", np.int32), ("source", np.int32), *_NUMBERS])
IndexedRows = NDArray[np.void]


def read_chunks(store: JobStore, key: str, num_chunks: int, codes: Mapping[str, int]) -> Iterator[IndexedRows]:
    """The rows of each chunk, in input order. `key`: the job's `index_key`. `codes`: name of an adapter -> its code.

    Raises `MissingFileError` for a chunk that is lost, `DamagedRecordError` for one that is damaged or another job's.
    """
    with ThreadPoolExecutor(_CHUNK_READS) as pool:
        for start in range(0, num_chunks, _CHUNK_READS):
            chunks = range(start, min(start + _CHUNK_READS, num_chunks))
            yield from pool.map(lambda chunk_id: _read_chunk(store, key, chunk_id, codes), chunks)


def _read_chunk(store: JobStore, key: str, chunk_id: int, codes: Mapping[str, int]) -> IndexedRows:
    with prepared.arrow_file(store.index_source(chunk_id), key) as reader:
        table: pa.Table = reader.read_all().unify_dictionaries().combine_chunks()
        rows = np.empty(table.num_rows, INDEXED_ROW)
        for name, _ in _NUMBERS:
            if name in table.column_names:
                rows[name] = table.column(name).to_numpy()
            else:
                # an index of an earlier version: rows count as greedy, and as read in the order of the index
                rows[name] = np.arange(table.num_rows) if name == "place" else 0
        rows["chunk"], rows["source"] = chunk_id, -1
        rows["adapter"] = -1
        for part in table.column("adapter").chunks:  # one chunk; none in an empty table
            of_name = np.array([codes[name] for name in part.dictionary.to_pylist()] + [-1], np.int32)
            rows["adapter"] = of_name[part.indices.fill_null(-1).to_numpy(zero_copy_only=False)]
    return rows


class SortedRows:
    """Rows in a file of this machine, adapter after adapter, those of one adapter in the order of their `add`. Rows
    that keep answers come last, source after source, so that few shards read the same part of an earlier job.

    `rows_per_code`: number of rows to compute that each adapter will have, by code; the base model's last.
    `rows_per_source`: number of rows that keep answers, by source.
    """

    def __init__(self, rows_per_code: Sequence[int], rows_per_source: Sequence[int] = ()) -> None:
        #: Number of rows to compute of each adapter, by code; the base model's last.
        self.rows_per_code = tuple(rows_per_code)
        self._num_codes = len(rows_per_code)
        counts = np.array([*rows_per_code, *rows_per_source], np.int64)
        self._next = np.cumsum(counts) - counts
        #: Rows of the job.
        self.num_rows = int(counts.sum())
        self._file = ScratchFile()

    def __enter__(self) -> SortedRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, rows: IndexedRows) -> None:
        """Write rows of any adapters to the file."""
        codes = np.where(rows["source"] >= 0, self._num_codes + rows["source"], rows["adapter"] % self._num_codes)
        order = np.argsort(codes, kind="stable")
        by_place = rows[order]
        places, firsts = np.unique(codes[order], return_index=True)
        for code, first, end in zip(places, firsts, np.append(firsts, len(rows))[1:], strict=True):
            self._file.write(by_place[first:end].tobytes(), int(self._next[code]) * INDEXED_ROW.itemsize)
            self._next[code] += end - first

    def blocks(self, block_rows: int, *, together: bool = False) -> Iterator[IndexedRows]:
        """All rows in order, in blocks of about equal size, at most `block_rows`; one empty block if there are no rows.
        `together`: completions of one row of the input are in one block, which may be longer by as many rows.
        """
        num_blocks = max(1, -(-self.num_rows // block_rows))
        ends = [self.num_rows * i // num_blocks for i in range(num_blocks + 1)]
        if together:
            ends = [0, *sorted({self._next_row(end) for end in ends[1:]})]
        for start, end in pairwise(ends):
            data = self._file.read(start * INDEXED_ROW.itemsize, (end - start) * INDEXED_ROW.itemsize)
            yield np.frombuffer(data, INDEXED_ROW)

    def _next_row(self, place: int) -> int:
        """Number of the first row from `place` on that is not a further completion of the row before it."""
        while place < self.num_rows:
            few = min(_FEW_ROWS, self.num_rows - place)
            data = self._file.read(place * INDEXED_ROW.itemsize, few * INDEXED_ROW.itemsize)
            is_further = are_further(np.frombuffer(data, INDEXED_ROW))
            if not is_further.all():
                return place + int(np.argmin(is_further))
            place += len(is_further)
        return self.num_rows


def are_further(rows: IndexedRows) -> NDArray[np.bool_]:
    """Whether each row is a further completion of the row before it, bool `[len(rows)]`."""
    is_further: NDArray[np.bool_] = (rows["id_hash"] == 0) & (rows["error_kind"] == 0)
    return is_further


def read_row(store: JobStore, row: Any, columns: tuple[str, ...]) -> dict[str, Any]:
    """Some columns of one prepared row. `row`: an entry of `IndexedRows`, or a record with `chunk`, `batch`, `row`."""
    with prepared.arrow_file(store.rows_source(int(row["chunk"]))) as reader:
        batch = reader.get_batch(int(row["batch"]))
    return {name: readable(batch.column(name)[int(row["row"])]) for name in columns}


class ScratchFile:
    """A temporary file without a name, which is gone when the process ends. All methods raise `StorageError` when its
    folder has no room.
    """

    def __init__(self) -> None:
        with _as_storage_error():
            self._file = tempfile.TemporaryFile("w+b", buffering=0, prefix="lorabatch-")  # noqa: SIM115, see `close`

    def close(self) -> None:
        """Close the file, which frees its room."""
        self._file.close()

    def write(self, data: bytes | memoryview, place: int | None = None) -> int:
        """Write `data` at byte `place`, or at the end of the file. Returns the byte at which it begins."""
        with _as_storage_error():
            start = self._file.seek(0, 2) if place is None else self._file.seek(place)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            return start

    def read(self, place: int = 0, size: int = -1) -> bytearray:
        """Read `size` bytes from byte `place` on; all to the end of the file when `size` is negative."""
        with _as_storage_error():
            size = self._file.seek(0, 2) - place if size < 0 else size
            self._file.seek(place)
            data = bytearray(size)
            rest = memoryview(data)
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise EOFError(f"{len(rest)} bytes are missing at {place}")
                rest = rest[count:]
            return data


@contextmanager
def _as_storage_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"temporary folder {tempfile.gettempdir()}: {error.strerror or error}. A job is planned in files there, "
            "some 100 bytes a row; give it room, or set TMPDIR for the workers to a folder that has some."
        ) from None
