"""Columns that the index adds to the input's, and the layout of its Arrow IPC files.

A chunk's prepared rows are sorted by adapter; every record batch holds rows of one adapter, at most `BATCH_ROWS` of
them, so that a shard reads little more than its own rows.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...jobs.errors import DamagedRecordError
from ...jobs.options.values import OUR_PREFIX
from ...jobs.record import JobRecord

BATCH_ROWS = 256
# Most mapped files that stay open.
_MOST_OPEN = 8
# Most bytes of a remote file that is read whole, and of all that stay in memory. A store sends 4 MiB in the time of two
# or three requests.
_WHOLE_FILE_BYTES = 4 << 20
_KEPT_BYTES = 32 << 20
REQUEST_ID = "__lb_request_id"
ADAPTER = "__lb_adapter"
TOKENS = "__lb_tokens"
SAMPLING = "__lb_sampling"
ERROR = "__lb_error"
FINGERPRINT = "__lb_fingerprint"
SAMPLE = "__lb_sample"
LOCATION = "__lb_location"
# Columns that the index adds to each row. Tokens are null in error rows. Sampling is a JSON object of the options that
# the row overrides, or null. Location is `file:row`, for messages.
PREPARED_FIELDS = (
    pa.field(REQUEST_ID, pa.string()),
    pa.field(ADAPTER, pa.string()),
    pa.field(TOKENS, pa.list_(pa.int32())),
    pa.field(SAMPLING, pa.string()),
    pa.field(ERROR, pa.string()),
    pa.field(FINGERPRINT, pa.binary(16)),
    pa.field(LOCATION, pa.string()),
)
#: Column for the number of a row's completion, in jobs whose output has a row's completions as lists.
SAMPLE_FIELD = pa.field(SAMPLE, pa.int32())
# Columns of a chunk's index: one row per prepared row, in the order of the prepared rows.
# `max_tokens`: 0 for an error row.
# `id_hash`: 0 for a row without an id, and for further completions of a row.
# `shared_tokens`: tokens at the prompt's beginning that another row computes (`fingerprints.shared_tokens`).
# `is_drawn`: whether tokens are drawn at a temperature.
# `is_scored`: whether the row asks for log-probabilities of its prompt.
# `fixed_tokens`: tokens computed for the answer, when the row's options or choice fix them; 0 otherwise.
# `task`: equal for rows of which answers of like lengths are expected (`fingerprints.task_hash`).
# `batch`, `row`: record batch of the prepared row, and row in it.
# `place`: number of the row in the chunk as it was read.
# `fingerprint_high`, `fingerprint_low`: the row's fingerprint, as two numbers; 0 in files of earlier versions.
INDEX_SCHEMA = pa.schema(
    [
        pa.field("adapter", pa.dictionary(pa.int32(), pa.string())),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("max_tokens", pa.int32()),
        pa.field("prefix_hash", pa.uint64()),
        pa.field("shared_tokens", pa.int32()),
        pa.field("id_hash", pa.uint64()),
        pa.field("error_kind", pa.int8()),
        pa.field("is_drawn", pa.bool_()),
        pa.field("is_scored", pa.bool_()),
        pa.field("fixed_tokens", pa.int32()),
        pa.field("task", pa.uint64()),
        pa.field("batch", pa.int32()),
        pa.field("row", pa.int32()),
        pa.field("place", pa.int32()),
        pa.field("fingerprint_high", pa.uint64()),
        pa.field("fingerprint_low", pa.uint64()),
    ]
)
#: Columns of `plan.arrow` by which an update finds the rows of a job again.
IDENTITY_COLUMNS = ("id_hash", "fingerprint_high", "fingerprint_low")
SOURCE, SWEPT = "source", "adapter"
#: Column of prepared rows, in jobs with stages: a struct of the input's columns that stages read.
GIVEN = "__lb_given"


def reference_schema(record: JobRecord) -> pa.Schema:
    """The columns of a job's `plan.arrow`. Record batch `i` has the rows of shard `i`, in the plan's order: their
    places, for a job with ids `IDENTITY_COLUMNS`, for an update `SOURCE`, the place of the answer that a row keeps (-1:
    none): number of the job in `record.sources` in the upper 32 bits, of its shard in the lower ones. For a sweep
    `SWEPT`, the place of the adapter in `record.swept`.
    """
    names = ["batch", "row", *(IDENTITY_COLUMNS if record.has_own_ids else ())]
    sources = [pa.field(SOURCE, pa.int64())] if record.sources else []
    swept = [pa.field(SWEPT, pa.int32())] if record.swept else []
    return pa.schema([pa.field("chunk", pa.int32()), *map(INDEX_SCHEMA.field, names), *sources, *swept])


def fingerprint_numbers(fingerprints: Iterable[bytes]) -> NDArray[np.uint64]:
    """Upper and lower halves of fingerprints of 16 bytes, uint64 `[num_rows, 2]`."""
    return np.frombuffer(b"".join(fingerprints), ">u8").astype(np.uint64).reshape(-1, 2)


def fingerprints_of(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> list[bytes]:
    """The fingerprints that `fingerprint_numbers` has taken apart."""
    data = np.stack([high, low], axis=1).astype(">u8").tobytes()
    return [data[start : start + 16] for start in range(0, len(data), 16)]


def passthrough_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a prepared table that go to the output: all but those that the index has added."""
    return pa.schema([field for field in schema if not field.name.startswith(OUR_PREFIX)])


_KEY, _COUNTS = b"lorabatch.index_key", b"lorabatch.counts"
_WITHOUT_TOKENIZER = b"lorabatch.without_tokenizer"


def with_key(schema: pa.Schema, key: str) -> pa.Schema:
    """The schema of a chunk's file, with the `index_key` that it was written under in its metadata."""
    return schema.with_metadata({**(schema.metadata or {}), _KEY: key})


def with_counts(table: pa.Table, counts: Mapping[str, int], without_tokenizer: Sequence[str] = ()) -> pa.Table:
    """A chunk's index with two more facts in its metadata: `counts`, the rows of the input by peculiarity, and
    `without_tokenizer`, the adapters whose own tokenizers could not be read.
    """
    return table.replace_schema_metadata(
        {_COUNTS: json.dumps(counts), _WITHOUT_TOKENIZER: json.dumps(without_tokenizer)}
    )


def without_tokenizer(schema: pa.Schema) -> frozenset[str]:
    """Adapters whose own tokenizers could not be read when the index with this schema was made."""
    return frozenset(json.loads((schema.metadata or {}).get(_WITHOUT_TOKENIZER, b"[]")))


def counts_of(schema: pa.Schema) -> dict[str, int]:
    """The `counts` that `with_counts` has written; empty for files of earlier versions."""
    found: dict[str, int] = json.loads((schema.metadata or {}).get(_COUNTS, b"{}"))
    return found


@contextmanager
def arrow_file(
    source: Path | BinaryIO | pa.Buffer, key: str = "", columns: Sequence[str] = ()
) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """Open an Arrow IPC file; one at a path is mapped into memory. `columns`: names of those to read; empty for all.

    Raises `DamagedRecordError` for a damaged file, and for one that was written under another key than `key`. A file
    without a key, and a `key` of "", fit all.
    """
    with _naming_damage(source), _handle(source) as handle:
        yield _reader(handle, source, key, columns)


class KeptFiles:
    """Arrow IPC files of a job that are read again and again, by any thread. On local disk the `_MOST_OPEN` used last
    stay mapped. Of a remote store, files of at most `_WHOLE_FILE_BYTES` are read whole, and those read last stay in
    memory: one request instead of five for each record batch.

    `key`: the key under which files must have been written, as in `arrow_file`.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._turn = threading.Lock()
        self._open: OrderedDict[tuple[Path, tuple[str, ...]], tuple[Any, pa.ipc.RecordBatchFileReader]] = OrderedDict()
        self._contents: OrderedDict[int, pa.Buffer] = OrderedDict()

    @contextmanager
    def use(
        self, number: int, source_of: Callable[[int], Path | BinaryIO], columns: Sequence[str] = ()
    ) -> Iterator[pa.ipc.RecordBatchFileReader]:
        """Open a file for this thread alone until the block ends. `number`: of the file. `source_of`: finds the file by
        its number. Raises what `arrow_file` raises.
        """
        source: Path | BinaryIO | pa.Buffer | None = self._contents.get(number)
        if source is None:
            source = source_of(number)
        if isinstance(source, Path):
            with self._turn, _naming_damage(source):
                yield self._mapped(source, columns)
            return
        if not isinstance(source, pa.Buffer) and source.seek(0, os.SEEK_END) <= _WHOLE_FILE_BYTES:
            with source:
                source.seek(0)
                source = self._keep(number, pa.py_buffer(source.read()))
        with arrow_file(source, self._key, columns) as reader:
            yield reader

    def close(self) -> None:
        """Close all files."""
        with self._turn:
            for handle, _ in self._open.values():
                handle.close()
            self._open.clear()
            self._contents.clear()

    def _mapped(self, path: Path, columns: Sequence[str]) -> pa.ipc.RecordBatchFileReader:
        place = path, tuple(columns)
        if place not in self._open:
            handle = _handle(path)
            self._open[place] = handle, _reader(handle, path, self._key, columns)
        self._open.move_to_end(place)
        if len(self._open) > _MOST_OPEN:
            handle, _ = self._open.popitem(last=False)[1]
            handle.close()
        return self._open[place][1]

    def _keep(self, number: int, contents: pa.Buffer) -> pa.Buffer:
        with self._turn:
            self._contents[number] = contents
            while sum(one.size for one in self._contents.values()) > _KEPT_BYTES:
                self._contents.popitem(last=False)
        return contents


def _handle(source: Path | BinaryIO | pa.Buffer) -> Any:
    if isinstance(source, Path):
        return pa.memory_map(str(source))
    return pa.BufferReader(source) if isinstance(source, pa.Buffer) else pa.PythonFile(source, mode="r")


def _name(source: Path | BinaryIO | pa.Buffer) -> Any:
    return source if isinstance(source, Path) else getattr(source, "path", "an Arrow file of this job")


def _reader(
    handle: Any, source: Path | BinaryIO | pa.Buffer, key: str, columns: Sequence[str]
) -> pa.ipc.RecordBatchFileReader:
    reader = pa.ipc.open_file(handle)
    found = (reader.schema.metadata or {}).get(_KEY, b"").decode()
    if key and found not in ("", key):
        # The file was written by a process that was stopped, or slow, after the job had been started over.
        raise DamagedRecordError(
            f"{_name(source)}: written for other rows than this job's. Run the same command again."
        )
    if not columns:
        return reader
    places = [reader.schema.get_field_index(name) for name in columns]
    return pa.ipc.open_file(handle, options=pa.ipc.IpcReadOptions(included_fields=places))


@contextmanager
def _naming_damage(source: Path | BinaryIO | pa.Buffer) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        raise DamagedRecordError(
            f"{_name(source)}: cannot be read back ({error}). Start the job again with --overwrite."
        ) from None
