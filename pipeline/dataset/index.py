"""Indexes a chunk: every row is checked, rendered, tokenised and fingerprinted. `IndexTotals` adds the chunks up.

A chunk becomes two Arrow files (`schema.py`): its rows, ready to run, and a few numbers per row for the planner. Rows
never leave the machine that indexes them; only counts are returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from ...engine.text.tokenizer import Tokenizer
from ...jobs.errors import DamagedRecordError
from ...jobs.record import JobRecord
from ...jobs.storage.local_copy import local_folder
from ...jobs.storage.redaction import is_redacted, redacted_url
from ...jobs.store import JobStore
from .chunk import ChunkRef, DamagedChunkError, IndexJob, read_chunk
from .chunk_rows import ChunkRows
from .schema import arrow_file, with_key


@dataclass(frozen=True, slots=True)
class ChunkSummary:
    """Counts of one chunk. `rows_per_adapter`: "" counts the base model's rows.

    `damage`: why the row group cannot be read; then nothing was written and all counts are 0.
    """

    chunk_id: int
    num_rows: int = 0
    rows_per_adapter: Mapping[str, int] = field(default_factory=dict)
    damage: str | None = None


def list_chunks(record: JobRecord, inputs: Sequence[str] = ()) -> tuple[ChunkRef, ...]:
    """One chunk per row group that has rows, in input order. `inputs`: the job's, with what opens them; the record has
    them without.
    """
    opening = {redacted_url(url): url for url in inputs}
    chunks: list[ChunkRef] = []
    for file in record.input.files:
        url = opening.get(file.url, inputs[0]) if inputs and is_redacted(file.url) else file.url
        first_row = 0
        for row_group, num_rows in enumerate(file.row_group_rows):
            if num_rows:
                place = (url, file.name, row_group, first_row, num_rows)
                chunks.append(ChunkRef(len(chunks), *place, file.footer_sha256, file.partition, file.version))
            first_row += num_rows
    return tuple(chunks)


def index_chunk(chunk: ChunkRef, job: IndexJob, store: JobStore) -> ChunkSummary:
    """Index one chunk, unless that is done already. Safe to repeat, and to run twice at once.

    Bad rows become error rows. A row group that cannot be read is reported in the summary. Raises
    `StorageError` when the model cannot be had or the output cannot be written.
    """
    if store.has_index(chunk.chunk_id):
        with (
            suppress(DamagedRecordError),
            arrow_file(store.rows_source(chunk.chunk_id), job.key),
            arrow_file(store.index_source(chunk.chunk_id), job.key) as index,
        ):
            return _summary(chunk.chunk_id, index.read_all())
    rows = ChunkRows(chunk, job, lambda adapter: _tokenizer_of(job, adapter))
    try:
        for batch in read_chunk(chunk, job.schema_ipc, job.storage_options):
            rows.add(batch)
    except DamagedChunkError as damage:
        return ChunkSummary(chunk.chunk_id, damage=str(damage))
    order, batches = rows.order()
    store.write_rows(chunk.chunk_id, _ipc_bytes(rows.prepared_batches(order, batches), job.key))
    found = rows.index(order, batches)
    store.write_index(chunk.chunk_id, _ipc_bytes(found.combine_chunks().to_batches(), job.key))
    return _summary(chunk.chunk_id, found)


def deadly_chunk(chunk: ChunkRef) -> ChunkSummary:
    """The summary of a chunk whose workers are lost while they index it."""
    return ChunkSummary(
        chunk.chunk_id,
        damage=f"{chunk.place}: two workers or more were lost while they read it. It may end the process that reads it "
        "or take more memory than a worker has; the workers' logs may say more. Write it in smaller row groups, repair "
        "it or leave it out; if the workers were ended by something else, run the same command again.",
    )


def _tokenizer_of(job: IndexJob, adapter: str | None) -> Tokenizer:
    """The base's tokenizer, or the adapter's where it ships one."""
    base = local_folder(job.model_url, job.storage_options)
    apart = job.prepared_apart.get(adapter or "")
    if apart is None or not apart.tokenizer_sha256:
        return _tokenizer(base, None, job.now, job.chat_template)
    return _tokenizer(local_folder(apart.url, job.storage_options), base, job.now, job.chat_template)


@lru_cache(maxsize=16)
def _tokenizer(folder: Path, base: Path | None, now: str, chat_template: str | None) -> Tokenizer:
    return Tokenizer.from_folder(folder, base=base, now=datetime.fromisoformat(now), chat_template=chat_template)


def _ipc_bytes(batches: Iterable[pa.RecordBatch], key: str) -> memoryview:
    waiting = iter(batches)
    first = next(waiting)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, with_key(first.schema, key), options=options) as writer:
        writer.write_batch(first)
        for batch in waiting:
            writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _summary(chunk_id: int, index: pa.Table) -> ChunkSummary:
    adapters = Counter(index.column("adapter").to_pylist())
    return ChunkSummary(chunk_id, index.num_rows, {name or "": count for name, count in adapters.items()})


@dataclass(slots=True)
class IndexTotals:
    """`rows_per_adapter`: "" counts the base model's rows. `damages`: chunk -> why it cannot be read."""

    num_chunks: int = 0
    num_rows: int = 0
    rows_per_adapter: Counter[str] = field(default_factory=Counter)
    damages: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, summaries: Iterable[ChunkSummary]) -> IndexTotals:
        """Of these chunks, in any order."""
        totals = cls()
        for summary in summaries:
            totals.add(summary)
        return totals

    def add(self, summary: ChunkSummary) -> None:
        """One chunk more, each once."""
        self.num_chunks += 1
        self.num_rows += summary.num_rows
        self.rows_per_adapter.update(summary.rows_per_adapter)
        if summary.damage is not None:
            self.damages[summary.chunk_id] = summary.damage
