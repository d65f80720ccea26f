"""Indexes a chunk: every row is checked, rendered, tokenised and fingerprinted. `IndexTotals` adds chunks up.

A chunk becomes two Arrow files (`schema.py`): its rows, ready to run, and a few numbers per row for the planner. Rows
never leave the machine that indexes them; only counts are returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...engine.errors import AdapterRefusedError, ModelFilesError, TokenizerError, curable
from ...engine.text.tokenizers.confined_tokenizer import MissingTokenizer, adapter_tokenizer
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...jobs.errors import DamagedRecordError, StorageError
from ...jobs.input.files import pack_schema, unpack_schema
from ...jobs.outcome import EXAMPLE_CHARACTERS
from ...jobs.record import JobRecord
from ...jobs.spec import JobSpec
from ...jobs.storage.adapter_copy import adapter_folder
from ...jobs.storage.local_copy import local_folder
from ...jobs.storage.model_proof import ModelProof
from ...jobs.storage.redaction import is_redacted, redacted_url
from ...jobs.store import JobStore
from .chunk import ChunkRef, DamagedChunkError, IndexJob, RowGroupRef, read_chunk
from .chunk_rows import ChunkRows
from .prompt_reader import PromptReader
from .schema import arrow_file, counts_of, with_counts, with_key, without_tokenizer
from .writer import Spell

# Most files, rows and bytes of files in a chunk of small files. They share the cost of a chunk; a file that ends its
# worker takes the others of its chunk with it.
_MOST_FILES_TOGETHER = 16
_MOST_ROWS_TOGETHER = 1024
_MOST_BYTES_TOGETHER = 1 << 20
# Most pairs of an adapter and a task that are counted, and those of one chunk.
_MOST_TASKS_COUNTED, _MOST_TASKS_OF_CHUNK = 20_000, 200
# Most rows without a prompt before the one that is shown as an example.
_MOST_PASSED = 16


@dataclass(slots=True)
class IndexTotals:
    """Counts of indexed chunks: those of one chunk, or of several added up."""

    #: Chunks that were indexed, or could not be read.
    num_chunks: int = 0
    #: Prepared rows of all chunks; each completion of a row with several counts.
    num_rows: int = 0
    #: Prepared rows by name of their adapter; None for the base model.
    rows_per_adapter: Counter[str | None] = field(default_factory=Counter)
    #: Prepared rows by name of their adapter and by task, about: of many tasks the rare ones are left out.
    rows_per_task: Counter[tuple[str | None, int]] = field(default_factory=Counter)
    #: Rows of the input with a peculiarity that users should know of, by peculiarity.
    peculiar_rows: Counter[str] = field(default_factory=Counter)
    #: Number of a chunk -> why row groups of it cannot be read, a sentence each. Nothing is written or counted of such
    #: a chunk.
    damages: dict[int, tuple[str, ...]] = field(default_factory=dict)
    #: Adapters whose own tokenizers could not be read when a chunk was indexed before, and can be read now.
    cured: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, parts: Iterable[IndexTotals]) -> IndexTotals:
        """Totals of several counts, given in any order."""
        totals = cls()
        for part in parts:
            totals.add(part)
        return totals

    def add(self, other: IndexTotals) -> None:
        """Add the counts of other chunks."""
        self.num_chunks += other.num_chunks
        self.num_rows += other.num_rows
        self.rows_per_adapter.update(other.rows_per_adapter)
        self.rows_per_task.update(other.rows_per_task)
        if len(self.rows_per_task) > _MOST_TASKS_COUNTED:
            self.rows_per_task = Counter(dict(self.rows_per_task.most_common(_MOST_TASKS_COUNTED // 2)))
        self.peculiar_rows.update(other.peculiar_rows)
        self.damages |= other.damages
        self.cured |= other.cured


def list_chunks(record: JobRecord, places: Sequence[str] = ()) -> tuple[ChunkRef, ...]:
    """The chunks of a job: one per row group that has rows, in input order; consecutive small files are one chunk.
    `places`: URLs of the job's input and output with the passwords and signatures that the record leaves out.
    """
    chunks: list[list[RowGroupRef]] = []
    num_rows, num_bytes = 0, _MOST_BYTES_TOGETHER
    for file in record.input.files:
        url = _opening(file.url, places) if places and is_redacted(file.url) else file.url
        starts = accumulate(file.row_group_rows, initial=0)
        groups = [
            RowGroupRef(url, file.name, number, start, rows, file.footer_sha256, file.partition, file.version)
            for number, (start, rows) in enumerate(zip(starts, file.row_group_rows, strict=False))
            if rows
        ]
        if not record.input.has_small_files_together or len(groups) != 1:
            chunks += [[group] for group in groups]
            num_bytes = _MOST_BYTES_TOGETHER
            continue
        num_rows, num_bytes = num_rows + groups[0].num_rows, num_bytes + file.size_bytes
        is_full = num_rows > _MOST_ROWS_TOGETHER or num_bytes > _MOST_BYTES_TOGETHER
        if is_full or len(chunks[-1]) == _MOST_FILES_TOGETHER:
            chunks.append([])
            num_rows, num_bytes = groups[0].num_rows, file.size_bytes
        chunks[-1] += groups
    return tuple(ChunkRef(number, tuple(groups)) for number, groups in enumerate(chunks))


def _opening(url: str, places: Sequence[str]) -> str:
    """A file's URL with what opens it, from the place that it is, or below which it is."""
    for place in places:
        shown = redacted_url(place).rstrip("/")
        if url == redacted_url(place) or url.startswith(f"{shown}/"):
            return place.rstrip("/") + url.removeprefix(shown) if url != redacted_url(place) else place
    return places[0]


def index_chunk(chunk: ChunkRef, job: IndexJob, store: JobStore) -> IndexTotals:
    """Index one chunk, unless it was indexed already with every tokenizer readable. Safe to repeat, and to run twice at
    once.

    Bad rows become error rows. A row group that cannot be read is reported in `damages`. Raises `StorageError` when
    the model cannot be read or the output cannot be written.
    """
    without: frozenset[str] = frozenset()
    if store.has_index(chunk.chunk_id):
        with (
            suppress(DamagedRecordError),
            arrow_file(store.rows_source(chunk.chunk_id), job.key),
            arrow_file(store.index_source(chunk.chunk_id), job.key) as index,
        ):
            without = without_tokenizer(index.schema)
            if not without:
                return _totals(index.read_all(), counts_of(index.schema), job.groups)
    try:
        rows, reader = _read_rows(chunk, job)
    except DamagedChunkError as damage:
        return IndexTotals(1, damages={chunk.chunk_id: damage.args})
    order, batches = rows.order()
    store.write_rows(chunk.chunk_id, _ipc_bytes(rows.prepared_batches(order, batches), job.key))
    found = rows.index(order, batches)
    batches_of_index = with_counts(found.combine_chunks(), reader.counts, reader.without_tokenizer).to_batches()
    store.write_index(chunk.chunk_id, _ipc_bytes(batches_of_index, job.key))
    return _totals(found, reader.counts, job.groups, cured=without.difference(reader.without_tokenizer))


def _read_rows(chunk: ChunkRef, job: IndexJob) -> tuple[ChunkRows, PromptReader]:
    reader = PromptReader(job, lambda adapter: tokenizer_of(job, adapter))
    rows = ChunkRows(chunk.chunk_id, job)
    for batch, places in read_chunk(chunk, job.schema_ipc, job.storage_options, is_narrow=bool(job.dropped)):
        rows.add(batch, places, reader.read(batch, places))
    return rows, reader


def example_prompt(record: JobRecord, spec: JobSpec) -> tuple[str, str] | None:
    """Place (`file:row`) and prompt of a job's first row as the model gets it, special tokens written out. Rows that
    have no prompt are passed over, up to `_MOST_PASSED` of them; None if there is no other.

    Reads one row group, and of it the columns that prompts are made of. Raises `StorageError`.
    """
    job = IndexJob.from_record(record, spec)
    needed = {*job.template_columns, *(name.partition(".")[0] for name in job.roles.values())}
    schema = pack_schema(pa.schema([column for column in unpack_schema(job.schema_ipc) if column.name in needed]))
    reader = PromptReader(job, lambda adapter: tokenizer_of(job, adapter))
    chunks = list_chunks(record, spec.inputs)[:1]
    with suppress(DamagedChunkError, TokenizerError):
        for chunk in chunks:
            first = ChunkRef(chunk.chunk_id, chunk.row_groups[:1])
            for batch, places in read_chunk(first, schema, job.storage_options, is_narrow=True):
                for row in range(min(batch.num_rows, _MOST_PASSED)):
                    draft = reader.read(batch.slice(row, 1), places[row : row + 1])[0]
                    if not draft.problems:
                        return places[row], tokenizer_of(job, draft.adapter).text_of(draft.tokens or ())
                return None
    return None


def check_chunk(chunk: ChunkRef, job: IndexJob) -> IndexTotals:
    """Read a chunk as `index_chunk` does and write nothing, to find which of several small files ends the workers that
    index them together. Nothing is counted but damages.
    """
    try:
        _read_rows(chunk, job)
    except DamagedChunkError as damage:
        return IndexTotals(damages={chunk.chunk_id: damage.args})
    return IndexTotals()


def deadly_chunk(chunk: ChunkRef) -> IndexTotals:
    """Counts of a chunk whose workers are lost while they index it."""
    damage = (
        f"{chunk.place}: two workers or more were lost while they read it. It may end the process that reads it "
        "or take more memory than a worker has; the workers' logs may say more. Write it in smaller row groups, repair "
        "it or leave it out; if the workers were ended by something else, run the same command again."
    )
    return IndexTotals(1, damages={chunk.chunk_id: (damage,)})


def spelling(record: JobRecord, model_url: str, storage_options: Mapping[str, Any]) -> Spell:
    """A function that gives the bytes of tokens by the tokenizer of an adapter's rows; None if that cannot be read."""
    spec = record.spec.model_copy(update={"model": model_url, "storage_options": dict(storage_options)})
    job = IndexJob.from_record(record, spec)

    def spell(adapter: str | None, token_ids: Sequence[int]) -> list[bytes] | None:
        try:
            return tokenizer_of(job, adapter).bytes_of(token_ids)
        except TokenizerError:
            return None

    return spell


def prompt_ends(record: JobRecord, spec: JobSpec) -> Callable[[str | None, Sequence[int]], str | None]:
    """A function that gives the text of the last tokens of a prompt as the model gets it, special tokens written out,
    at most `EXAMPLE_CHARACTERS` of it, by the tokenizer of an adapter's rows; None if that cannot be read.
    """
    job = IndexJob.from_record(record, spec)

    def prompt_end(adapter: str | None, token_ids: Sequence[int]) -> str | None:
        try:
            tokenizer = tokenizer_of(job, adapter)
            if isinstance(tokenizer, MissingTokenizer):
                return None
            # A token has seldom fewer characters than one.
            return tokenizer.text_of(token_ids[-EXAMPLE_CHARACTERS:])[-EXAMPLE_CHARACTERS:]
        except (TokenizerError, StorageError):
            return None

    return prompt_end


def tokenizer_of(job: IndexJob, adapter: str | None) -> Tokenizer:
    """The adapter's tokenizer if it has one of its own, else the base model's.

    Raises `StorageError` when the base model's tokenizer is not the job's any more. An adapter's tokenizer that cannot
    be read is a `MissingTokenizer`, which makes its rows error rows.
    """
    base = local_folder(job.model_url, job.storage_options)
    apart = None if adapter is None else job.prepared_apart.get(adapter)
    if apart is None or not apart.tokenizer_sha256:
        return _tokenizer(base, job.tokenizer_sha256, job.now, job.chat_template)
    try:
        folder = adapter_folder(apart.url, job.storage_options)
        return _own_tokenizer(folder, apart.tokenizer_sha256, base, job.tokenizer_sha256, job.now, job.chat_template)
    except (ModelFilesError, AdapterRefusedError) as error:
        return MissingTokenizer(curable(error).rstrip("."))


@lru_cache(maxsize=4)
def _tokenizer(base: Path, sha256: str, now: str, chat_template: str | None) -> Tokenizer:
    with _proven(base, sha256):
        return Tokenizer.from_folder(base, now=datetime.fromisoformat(now), chat_template=chat_template)


@lru_cache(maxsize=16)
def _own_tokenizer(
    folder: Path, sha256: str, base: Path, base_sha256: str, now: str, chat_template: str | None
) -> Tokenizer:
    at = datetime.fromisoformat(now)
    with _proven(base, base_sha256):
        return adapter_tokenizer(folder, base, sha256, now=at, chat_template=chat_template)


@contextmanager
def _proven(base: Path, sha256: str) -> Iterator[None]:
    """Raise `StorageError` when the base model's tokenizer, which the block reads, does not have this hash."""
    try:
        proof = ModelProof(base, sha256, with_weights=False)
    except OSError as error:
        raise StorageError(f"model={str(base)!r}: cannot be read ({error.strerror}). Check the path.") from None
    with closing(proof):
        yield
        problem = proof.problem(proof.digest())
    if problem is not None:
        raise StorageError(f"{problem[0]}.")


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


def _totals(
    index: pa.Table,
    peculiar_rows: Mapping[str, int],
    groups: Mapping[str | None, tuple[str | None, ...]],
    cured: Iterable[str] = (),
) -> IndexTotals:
    """Counts of one chunk by its index. `groups`: adapters of a sweep by the adapter that its rows name."""
    names = index.column("adapter").to_pylist()
    # an index of an earlier version has no tasks
    tasks = index.column("task").to_pylist() if "task" in index.column_names else []
    of_tasks = Counter(zip(names, tasks, strict=False)).most_common(_MOST_TASKS_OF_CHUNK)
    adapters = Counter({name: n for named, n in Counter(names).items() for name in groups.get(named, (named,))})
    by_task = {(name, task): n for (named, task), n in of_tasks for name in groups.get(named, (named,))}
    all_cured = {name for named in cured for name in groups.get(named, (named,)) if name is not None}
    return IndexTotals(1, adapters.total(), adapters, Counter(by_task), Counter(peculiar_rows), cured=all_cured)
