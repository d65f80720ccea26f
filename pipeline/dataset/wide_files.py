"""Writes the Parquet files of a wide output from the parts of a sweep, once all of these are there.

A part has answers of few adapters, a wide file all answers to a range of the input's rows, in their order. Each file is
written whole from the parts alone, so that it can be made anew at any time and by any worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...jobs.input.columns import records_samples, sample_field
from ...jobs.input.wide import wide_table
from ...jobs.record import JobRecord
from ...jobs.store import JobStore
from .reader import ShardReader
from .writer import output_schema, wide_file

# Most bytes of parts, as stored, and most answers from which one file is made: a worker has them in memory.
_FILE_BYTES, _FILE_ANSWERS = 64 << 20, 500_000

#: Number of a wide file, its first row of the input, and the row behind its last one.
WideRange = tuple[int, int, int]


def wide_ranges(record: JobRecord, num_answers: int, num_bytes: int) -> list[WideRange]:
    """The files of a job's wide output, whose ranges hold every row of the input once. `num_answers`, `num_bytes`: rows
    and stored bytes of all parts together.
    """
    num_rows = record.input.num_rows
    sizes = [num_bytes / _FILE_BYTES, num_answers / _FILE_ANSWERS]
    sizes += [num_rows / record.spec.rows_per_shard] if record.spec.rows_per_shard else []
    count = max(1, min(num_rows, math.ceil(max(sizes))))
    cuts = [num_rows * number // count for number in range(count + 1)]
    return [(number, cuts[number], cuts[number + 1]) for number in range(count)]


def write_wide_files(
    ranges: Sequence[WideRange], store: JobStore, record: JobRecord, shard_ids: Sequence[int]
) -> dict[int, int]:
    """Write some files of a wide output; returns number -> bytes. `shard_ids`: all shards of the job.

    Raises `StorageError`, and its kinds for prepared rows and parts that are gone or damaged.
    """
    with closing(ShardReader(store, record)) as shards:
        rows_of = {shard_id: shards.input_rows(shard_id) for shard_id in shard_ids}
    sizes = {}
    for number, start, end in ranges:
        data = wide_file(_table(start, end, store, record, rows_of), record)
        store.write_wide(number, data)
        sizes[number] = len(data)
    return sizes


def _table(
    start: int, end: int, store: JobStore, record: JobRecord, rows_of: Mapping[int, NDArray[np.int64]]
) -> pa.Table:
    """The wide table of the input's rows from `start` to before `end`, in their order. `rows_of`: number of the
    input's row of each row of each part.
    """
    answers, rows = [], []
    for shard_id, of_part in rows_of.items():
        mine = np.flatnonzero((of_part >= start) & (of_part < end))
        if len(mine):
            with store.open_part(shard_id) as part:
                table = pq.read_table(part, page_checksum_verification=True)
            answers.append(table.replace_schema_metadata().take(pa.array(mine)))
            rows.append(of_part[mine])
    if not answers:
        return wide_table(pa.Table.from_batches([], output_schema(record)), record)
    table, numbers = pa.concat_tables(answers).unify_dictionaries().combine_chunks(), np.concatenate(rows)
    samples = table[sample_field(record).name].fill_null(0).to_numpy() if records_samples(record) else np.zeros(1)
    order = np.lexsort((np.broadcast_to(samples, numbers.shape), numbers))
    return wide_table(table.take(pa.array(order)).combine_chunks(), record, numbers[order].tolist())
