"""`ShardReader`: the requests of a shard, read from the record batches that hold its rows and from no others.

Prepared rows are stored in chunks (`schema.py`); the plan says chunk, batch and row of each. Local files are mapped
into memory; remote ones are read whole when they are small, else by range, several chunks at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...engine.request import Request
from ...engine.teacher import token_bytes
from ...jobs.contents import part_name
from ...jobs.errors import StorageError
from ...jobs.input.adapter_names import adapter_problem
from ...jobs.options.stages import Stage, stages_of
from ...jobs.parts import contents_of
from ...jobs.record import AdapterRecord, JobRecord, index_key
from ...jobs.stages import first_stage, origin_of, stage_spec
from ...jobs.store import JobStore
from . import schema as prepared
from .answers import RowAnswer
from .column_values import row_values, take_undecodable
from .fingerprints import STREAM_BYTES
from .row_checks import row_sampling
from .sweep import with_adapters

_REMOTE_READS = 8
# Columns that `contents_of` needs.
_CONTENTS = (prepared.FINGERPRINT, prepared.ADAPTER, prepared.ERROR)
# Most bytes of a shard's rows. Each row group has less, but a shard takes rows of many. Arrow counts the bytes of text
# in one array by 31 bits.
_MAX_SHARD_BYTES = 2 << 30
# Most chunks whose numbers are kept; a chunk of 5,000 rows has 150 KB of them.
_MOST_INDEXES = 256


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of one shard, in the plan's order."""

    #: Number of the shard.
    shard_id: int
    #: Columns of the input and prepared ones (`PREPARED_FIELDS`).
    table: pa.Table
    #: Request of each row of `table`; for a row that no engine can answer, the error in place of its answer.
    requests: tuple[Request | RowAnswer, ...]
    #: Fingerprint of each row of `table`.
    fingerprints: tuple[bytes, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the shard, error rows included."""
        return len(self.requests)

    @property
    def adapters(self) -> list[str | None]:
        """Name of each row's adapter, as the row has it; None for the base model."""
        return self.table.column(prepared.ADAPTER).to_pylist()  # type: ignore[no-any-return]

    def contents(self, record: JobRecord) -> str:
        """Hash of all that the shard's answers depend on (`jobs.parts.contents_of`)."""
        return _contents(self.table, record, {adapter.name: adapter for adapter in record.adapters})

    def fingerprint_of(self) -> dict[str, bytes]:
        """Request id -> fingerprint, of rows that engines answer."""
        rows = zip(self.requests, self.fingerprints, strict=True)
        return {r.request_id: fingerprint for r, fingerprint in rows if isinstance(r, Request)}


class ShardReader:
    """Reads shards of a job, in any thread. The plan and the chunks that were used last stay open (`KeptFiles`):
    opening a plan reads the places of all its shards.

    `max_bytes`: most bytes that the rows of a shard may take in memory.
    """

    def __init__(self, store: JobStore, record: JobRecord, max_bytes: int = _MAX_SHARD_BYTES) -> None:
        self._store = store
        self._record = record
        self._max_bytes = max_bytes
        self._key = index_key(record)
        #: The job's adapters by name.
        self.adapters: Mapping[str, AdapterRecord] = {adapter.name: adapter for adapter in record.adapters}
        asked = record.spec if record.spec.stages is None else stage_spec(record.spec, first_stage(record.spec))
        self._sampling = replace(asked.sampling, n=1)  # each completion is a request
        self._plan, self._chunks = prepared.KeptFiles(""), prepared.KeptFiles(self._key)
        self._indexes: OrderedDict[tuple[int, tuple[str, ...]], dict[str, NDArray[Any]]] = OrderedDict()

    def close(self) -> None:
        """Close the files that are open."""
        self._plan.close()
        self._chunks.close()

    def rows(self, shard_id: int) -> ShardRows:
        """The rows of one shard.

        Raises `StorageError` when they take too much memory, and its kinds `MissingFileError` and `DamagedRecordError`
        when the prepared rows or the plan are gone or damaged.
        """
        table = self._gather(shard_id)
        requests = tuple(self._requests(table))
        self._check_bytes(shard_id, len(requests), table.nbytes + sum(map(_answer_bytes, requests)))
        return ShardRows(
            shard_id=shard_id,
            table=table,
            requests=requests,
            fingerprints=tuple(table.column(prepared.FINGERPRINT).to_pylist()),
        )

    def sources(self, shard_id: int) -> list[int]:
        """Places of the answers that rows of a shard keep (`reference_schema`), each once; empty unless the job is an
        update.
        """
        with self._plan.use(0, self._plan_source) as plan:
            batch = plan.get_batch(shard_id)
        if prepared.SOURCE not in batch.schema.names:
            return []
        found: list[int] = np.unique(batch.column(prepared.SOURCE)).tolist()
        return [place for place in found if place >= 0]

    def contents(self, shard_id: int) -> str:
        """`ShardRows.contents` of one shard, reading only the columns that it needs. Raises what `rows` raises."""
        columns = _CONTENTS if self._record.spec.stages is None else (*_CONTENTS, prepared.GIVEN)
        return _contents(self._gather(shard_id, columns), self._record, self.adapters)

    def tokens(self, shard_id: int, rows: Sequence[int]) -> list[list[int]]:
        """Tokens of the prompts of some rows of a shard, by their place in it. Raises what `rows` raises."""
        column = self._gather(shard_id, (prepared.TOKENS,)).column(prepared.TOKENS)
        return [column[row].as_py() or [] for row in rows]

    def input_rows(self, shard_id: int) -> NDArray[np.int64]:
        """Number of the input's row, counted through all files, of each row of a shard's part. Raises what `rows`
        raises.
        """
        has_lists = self._record.has_lists
        columns = [prepared.LOCATION, *([prepared.SAMPLE] if has_lists else [])]
        table = self._gather(shard_id, columns)
        table = table.filter(pc.equal(table.column(prepared.SAMPLE), 0)) if has_lists else table
        sizes = {file.name: sum(file.row_group_rows) for file in self._record.input.files}
        starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        places = (place.rpartition(":") for place in table.column(prepared.LOCATION).to_pylist())
        return np.array([starts[name] + int(row) for name, _, row in places], np.int64)

    def numbers(self, shard_id: int, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Columns of the index (`INDEX_SCHEMA`) for a shard's rows, `[num_rows]` each; 0 where an index of an earlier
        version lacks one. `names`: columns of numbers. Raises what `rows` raises.
        """
        chunk, batch, row = self._places(shard_id)
        found = {name: np.zeros(len(row), prepared.INDEX_SCHEMA.field(name).type.to_pandas_dtype()) for name in names}
        for chunk_id in np.unique(chunk).tolist():
            is_here = chunk == chunk_id
            index = self._index(chunk_id, names)
            # The index has its rows in the order of the record batches.
            place = np.searchsorted(index["batch"], batch[is_here]) + row[is_here]
            for name in names:
                if name in index:
                    found[name][is_here] = index[name][place]
        return found

    def _index(self, chunk_id: int, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Columns of a chunk's index; those of the chunks that were used last are kept."""
        key = chunk_id, tuple(names)
        if key not in self._indexes:
            with prepared.arrow_file(self._store.index_source(chunk_id), self._key) as reader:
                there = [name for name in ("batch", *names) if name in reader.schema.names]
                table = reader.read_all().select(there).combine_chunks()
            self._indexes[key] = {name: table.column(name).to_numpy() for name in there}
            if len(self._indexes) > _MOST_INDEXES:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(key)
        return self._indexes[key]

    def _places(self, shard_id: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Chunk, record batch and row in it of each row of a shard, in the plan's order."""
        with self._plan.use(0, self._plan_source) as plan:
            references = plan.get_batch(shard_id)
        chunk, batch, row = (references.column(name).to_numpy() for name in ("chunk", "batch", "row"))
        return chunk, batch, row

    def _gather(self, shard_id: int, columns: Sequence[str] = ()) -> pa.Table:
        """The rows of a shard, in the plan's order. `columns`: names of those to read; empty for all."""
        chunk, batch, row = self._places(shard_id)
        by_place = np.lexsort((row, batch, chunk))
        chunks, starts = np.unique(chunk[by_place], return_index=True)
        pieces = np.split(by_place, starts[1:])

        num_bytes = 0
        counting = threading.Lock()

        def read(piece: NDArray[np.int64]) -> list[pa.RecordBatch]:
            nonlocal num_bytes
            found = self._read_chunk(int(chunk[piece[0]]), batch[piece], row[piece], columns)
            with counting:
                num_bytes += sum(part.nbytes for part in found)
            self._check_bytes(shard_id, len(row), num_bytes)
            return found

        if self._store.location.is_local or len(chunks) == 1:
            found = [read(piece) for piece in pieces]
        else:
            with ThreadPoolExecutor(_REMOTE_READS) as pool:
                found = list(pool.map(read, pieces))
        table = pa.Table.from_batches([piece for pieces_of_chunk in found for piece in pieces_of_chunk])
        order = np.empty(len(by_place), dtype=np.int64)
        order[by_place] = np.arange(len(by_place))
        rows = table.unify_dictionaries().combine_chunks().take(pa.array(order)).combine_chunks()
        rows = rows.replace_schema_metadata(None)
        return with_adapters(rows, self._swept(shard_id), self._record) if self._record.swept else rows

    def _swept(self, shard_id: int) -> NDArray[np.int32]:
        """Place in `record.swept` of the adapter of each row of a shard."""
        with self._plan.use(0, self._plan_source) as plan:
            return np.array(plan.get_batch(shard_id).column(prepared.SWEPT))

    def _check_bytes(self, shard_id: int, num_rows: int, num_bytes: int) -> None:
        """Raise `StorageError` unless a worker has room for the rows of a shard."""
        if num_bytes > self._max_bytes:
            raise StorageError(
                f"{part_name(shard_id)}: its {num_rows} rows take more than {self._max_bytes / 1e9:.1f} GB in "
                "memory. Start over with fewer --rows-per-shard."
            )

    def _read_chunk(
        self, chunk_id: int, batch: NDArray[np.int32], row: NDArray[np.int32], columns: Sequence[str]
    ) -> list[pa.RecordBatch]:
        """Read rows `row` of batches `batch` (ascending) of one chunk."""
        batches, starts = np.unique(batch, return_index=True)
        with self._chunks.use(chunk_id, self._store.rows_source, columns) as reader:
            return [
                reader.get_batch(int(number)).take(pa.array(rows))
                for number, rows in zip(batches, np.split(row, starts[1:]), strict=True)
            ]

    def _plan_source(self, _: int) -> Path | BinaryIO:
        return self._store.plan_source()

    def _requests(self, table: pa.Table) -> list[Request | RowAnswer]:
        adapters = self.adapters
        columns = (
            table.column(name).to_pylist()
            for name in (
                prepared.REQUEST_ID,
                prepared.ADAPTER,
                prepared.TOKENS,
                prepared.SAMPLING,
                prepared.ERROR,
                prepared.FINGERPRINT,
            )
        )
        requests: list[Request | RowAnswer] = []
        for request_id, name, tokens, overrides, error, fingerprint in zip(*columns, strict=True):
            sentences = [error] if error else []
            sentences += [problem] if (problem := adapter_problem(name, adapters)) else []
            adapter_id = adapters[name].sha256 if name in adapters else None
            if sentences:
                error = " ".join(sentences)
                requests.append(RowAnswer.refused(fingerprint, adapter_id or None, error, len(tokens or ())))
                continue
            requests.append(
                Request(
                    request_id=request_id,
                    prompt_token_ids=tuple(tokens),
                    adapter_id=adapter_id,
                    sampling=row_sampling(self._sampling, overrides),
                    stream_id=int.from_bytes(fingerprint[:STREAM_BYTES], "little"),
                )
            )
        return requests


def _answer_bytes(request: Request | RowAnswer) -> int:
    """Bytes of the likeliest tokens in the longest answer that a row may have."""
    if isinstance(request, RowAnswer):
        return 0
    return request.sampling.max_tokens * token_bytes(request.sampling.teacher_top_k)


def read_shard(store: JobStore, record: JobRecord, shard_id: int, *, max_bytes: int = _MAX_SHARD_BYTES) -> ShardRows:
    """The rows of one shard, read by a `ShardReader` of its own."""
    with closing(ShardReader(store, record, max_bytes)) as reader:
        return reader.rows(shard_id)


def _contents(table: pa.Table, record: JobRecord, adapters: Mapping[str, AdapterRecord]) -> str:
    if record.spec.stages is not None:
        return contents_of(record, _staged_contents(table, record, adapters))
    names = pc.unique(table.column(prepared.ADAPTER)).to_pylist()
    is_refused = {name: adapter_problem(name, adapters) is not None for name in names}
    hashes = {name: adapters[name].sha256 for name in names if name in adapters}
    rows = zip(*(table.column(name).to_pylist() for name in _CONTENTS), strict=True)
    return contents_of(
        record, ((fingerprint, hashes.get(name), bool(error) or is_refused[name]) for fingerprint, name, error in rows)
    )


def _staged_contents(
    table: pa.Table, record: JobRecord, adapters: Mapping[str, AdapterRecord]
) -> Iterator[tuple[bytes, str | None, bool]]:
    """`contents_of` of rows with several stages: each row has the content hashes of the adapters of all its stages."""
    stages = [stage for stage in stages_of(record.spec.stages) if stage.asks]
    rows = (table.column(name).to_pylist() for name in (prepared.FINGERPRINT, prepared.ERROR))
    for fingerprint, error, given in zip(*rows, given_values(table), strict=True):
        asked = [stage_adapter(stage, given, record) for stage in stages]
        hashes = [adapters[name].sha256 if name in adapters else "" for name in asked if name is not None]
        yield fingerprint, "+".join(hashes), bool(error)


def given_values(table: pa.Table) -> list[dict[str, Any]]:
    """The values that stages read, by row and by column; None for one that cannot be read."""
    given = table.column(prepared.GIVEN).combine_chunks()
    columns = {field.name: row_values(pc.struct_field(given, field.name)) for field in given.type}
    take_undecodable(columns)
    return [{name: values[row] for name, values in columns.items()} for row in range(len(given))]


def stage_adapter(stage: Stage, given: Mapping[str, Any], record: JobRecord) -> str | None:
    """Name of the adapter that answers a stage for one row; None for the base model. `given`: the columns that stages
    read. A stage that continues another has the adapter of that one.
    """
    stage = origin_of(stage, stages_of(record.spec.stages))
    column = stage.adapter_column or (None if stage.has_adapter else record.input.roles.get("adapter"))
    return (given.get(column) or None) if column else stage.adapter
