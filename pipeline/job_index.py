"""All rows of a job as numbers: the index chunks put together, and what they say about ids.

Some 60 bytes a row. Prompts and ids stay in the prepared rows and are looked up only to name examples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..jobs.errors import JobRequestError
from ..jobs.store import JobStore
from . import prepared_rows as prepared

_CHUNK_READS = 8
# A table has some 20 KB around its rows: those of small row groups are not kept until all are read.
_CHUNKS_JOINED = 64
_NUMBERS = ("prompt_tokens", "max_tokens", "prefix_hash", "shared_tokens", "id_hash", "error_kind", "batch", "row")
_IDS_SHOWN = 5
_PLACES_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class JobIndex:
    """One array per fact, `[num_rows]` each, chunk after chunk.

    `adapter`: int32 index into `adapter_names`, -1 for the base model. `error_kind` 0: no error seen by the index.
    `chunk`, `batch`, `row`: where the prepared row lies.
    """

    adapter_names: tuple[str, ...]
    adapter: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    prefix_hash: NDArray[np.uint64]
    shared_tokens: NDArray[np.int32]
    id_hash: NDArray[np.uint64]
    error_kind: NDArray[np.int8]
    chunk: NDArray[np.int32]
    batch: NDArray[np.int32]
    row: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return len(self.chunk)


def read_index(store: JobStore, num_chunks: int) -> JobIndex:
    """Put the chunks together. Raises `MissingFileError` when one is not there."""

    def read(chunk_id: int) -> pa.Table:
        with prepared.arrow_file(store.index_source(chunk_id)) as reader:
            return reader.read_all().drop_columns(["fingerprint"]).replace_schema_metadata()

    joined, num_rows = [prepared.INDEX_SCHEMA.empty_table().drop_columns(["fingerprint"])], []
    with ThreadPoolExecutor(_CHUNK_READS) as pool:
        for start in range(0, num_chunks, _CHUNKS_JOINED):
            tables = list(pool.map(read, range(start, min(start + _CHUNKS_JOINED, num_chunks))))
            num_rows += [table.num_rows for table in tables]
            joined.append(_joined(tables))
    chunk = np.repeat(np.arange(num_chunks, dtype=np.int32), num_rows)
    table = _joined(joined)
    adapter = table.column("adapter").combine_chunks()
    numbers = {name: table.column(name).to_numpy() for name in _NUMBERS}
    return JobIndex(
        adapter_names=tuple(adapter.dictionary.to_pylist()),
        adapter=adapter.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32),
        chunk=chunk,
        **numbers,
    )


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def refuse_duplicate_ids(store: JobStore, index: JobIndex, id_column: str) -> None:
    """Raise `JobRequestError`, naming examples and where they stand, when two rows have one id.

    Ids are compared by 64-bit hashes; where those agree the ids themselves decide, so that no collision is taken
    for a duplicate.
    """
    groups = _equal_hashes(index)
    examples: list[str] = []
    num_collisions = 0
    for group in groups:
        places: defaultdict[Any, list[str]] = defaultdict(list)
        for position in group.tolist():
            row = read_row(store, index, position, (id_column, prepared.LOCATION))
            places[row[id_column]].append(row[prepared.LOCATION])
        repeated = [(row_id, found) for row_id, found in places.items() if len(found) > 1]
        num_collisions += not repeated
        examples += [f"{row_id!r} at {', '.join(found[:_PLACES_SHOWN])}" for row_id, found in repeated]
        if len(examples) >= _IDS_SHOWN:
            break
    if examples:
        raise JobRequestError(
            f"column {id_column!r} (id): {len(groups) - num_collisions} ids stand in more than one row: "
            f"{'; '.join(examples[:_IDS_SHOWN])}. Every row needs an id of its own: make them unique, or name "
            "another column with --column id=NAME."
        )


def read_row(store: JobStore, index: JobIndex, position: int, columns: tuple[str, ...]) -> dict[str, Any]:
    """Some columns of one prepared row."""
    with prepared.arrow_file(store.rows_source(int(index.chunk[position]))) as reader:
        batch = reader.get_batch(int(index.batch[position]))
    return {name: batch.column(name)[int(index.row[position])].as_py() for name in columns}


def _equal_hashes(index: JobIndex) -> list[NDArray[np.int64]]:
    """Groups of rows whose ids hash alike; rows without an id (0) are in none."""
    has_id = np.flatnonzero(index.id_hash)
    if not len(has_id):
        return []
    order = has_id[np.argsort(index.id_hash[has_id], kind="stable")]
    hashes = index.id_hash[order]
    return list(_runs(order, np.concatenate([[False], hashes[1:] == hashes[:-1]])))


def _runs(order: NDArray[np.int64], is_same: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """Runs of at least two positions, where `is_same` says that a position goes with the one before."""
    starts = np.flatnonzero(~is_same)
    ends = np.append(starts[1:], len(order))
    is_long = ends - starts > 1
    for start, end in zip(starts[is_long], ends[is_long], strict=True):
        yield order[start:end]
