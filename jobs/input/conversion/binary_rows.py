"""Reads Arrow and ORC files, in a child process with limits: damaged ones may end the process that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ....system.confinement import ConfinedError, confined
from .source import Kind, UnreadableSourceError
from .tables import carried_batch, carried_schema, write_parquet

_TASK = "jobs.input.conversion.binary_rows"
_MAGIC, _STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\x00\x00\x00\x00"
# Memory and time of the child: for a small file, and more for each byte of a large one. Address space counts, and a
# record batch may be as large as its file.
_MEMORY_BYTES, _MEMORY_RATIO = 1 << 30, 2
_CPU_S, _BYTES_PER_CPU_S = 60, 4 << 20
# Rows of nulls take no bytes in a file.
_MAX_ROWS_PER_BYTE = 1000


def convert_binary(path: Path, kind: Kind, target: Path, source: str) -> None:
    """Write an Arrow or ORC file of this machine as Parquet. `source`: hash of the file.

    Raises `UnreadableSourceError`, and `NoProcessError` where no child can be started.
    """
    num_bytes = path.stat().st_size
    cpu_s, memory_bytes = _CPU_S + num_bytes // _BYTES_PER_CPU_S, _MEMORY_BYTES + _MEMORY_RATIO * num_bytes
    try:
        problem = confined().run(_TASK, [str(path), kind, str(target), source], cpu_s, memory_bytes)
    except ConfinedError as error:
        raise UnreadableSourceError(f"not a readable {kind} file ({error}). Write it again or leave it out.") from None
    if problem:
        raise UnreadableSourceError(problem)


def run(payload: list[Any]) -> str:
    """Writes a file as Parquet. Returns why its columns cannot be written; "" where they are. The task of a child
    process.
    """
    path, kind, target, source = payload
    pa.set_memory_pool(pa.system_memory_pool())  # others reserve more address space than is allowed here
    schema, batches = _orc(path) if kind == "ORC" else _arrow(path)
    try:
        carried = carried_schema(schema)
    except ValueError as error:
        return str(error)
    rows = _counted(batches, _MAX_ROWS_PER_BYTE * Path(path).stat().st_size)
    write_parquet(Path(target), carried, (carried_batch(batch, carried) for batch in rows), source)
    return ""


def _counted(batches: Iterator[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """The batches. Raises ValueError when they have more than `most` rows together."""
    num_rows = 0
    for batch in batches:
        num_rows += batch.num_rows
        if num_rows > most:
            raise ValueError(f"it has more than {_MAX_ROWS_PER_BYTE} rows for each of its bytes")
        yield batch


def _arrow(path: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and batches of an Arrow file, or of a stream in a file."""
    with open(path, "rb") as file:
        is_file = file.read(len(_MAGIC)) == _MAGIC
    mapped = pa.memory_map(path)
    if not is_file:
        stream = pa.ipc.open_stream(mapped)
        return stream.schema, _stream(mapped, stream)
    reader = pa.ipc.open_file(mapped)
    return reader.schema, (_valid(reader.get_batch(number)) for number in range(reader.num_record_batches))


def _stream(mapped: pa.MemoryMappedFile, stream: pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    """The batches of a stream that is the whole file. Raises ValueError for a file that ends before or after it."""
    for batch in stream:
        yield _valid(batch)
    end = mapped.tell()
    mapped.seek(max(end - len(_STREAM_END), 0))
    if mapped.read(len(_STREAM_END)) != _STREAM_END:
        raise ValueError("it ends without the mark of a stream's end, so it may be cut off")
    if end != mapped.size():
        raise ValueError(f"its stream ends at byte {end} of {mapped.size()}, so it may be several files in one")


def _orc(path: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    from pyarrow import orc

    file = orc.ORCFile(path)
    return file.schema, (_valid(file.read_stripe(number)) for number in range(file.nstripes))


def _valid(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch
