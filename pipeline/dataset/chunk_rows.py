"""Collects the read rows of one chunk, and orders and indexes them: `ChunkRows`.

Shapes: rows `[num_rows]` in input order; after `order()`, in the order of the chunk file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...jobs.input.columns import DEFAULT_ID_COLUMN
from . import schema as prepared
from .chunk import IndexJob
from .column_values import row_values
from .fingerprints import STREAM_BYTES, id_hash, prefix_hash, row_fingerprint, shared_tokens, staged_fingerprint
from .row_checks import RowDraft, sampling_overrides


class ChunkRows:
    """The rows of one chunk in memory, as Arrow columns."""

    def __init__(self, chunk_id: int, job: IndexJob) -> None:
        self._chunk_id = chunk_id
        self._job = job
        self._batches: list[pa.RecordBatch] = []
        self._numbers: list[pa.RecordBatch] = []
        self._num_prepared = 0

    def add(self, batch: pa.RecordBatch, places: Sequence[str], drafts: list[RowDraft]) -> None:
        """Add the next rows of the chunk. `places`: `file:row` of each. `drafts`: what `PromptReader.read` has made of
        them, one for each completion.
        """
        if len(drafts) != batch.num_rows or self._job.groups:
            batch = batch.take(pa.array([draft.row for draft in drafts]))
        first, job = self._num_prepared, replace(self._job.sampling, n=1)
        self._num_prepared += len(drafts)
        fingerprints = [_fingerprint(draft) for draft in drafts]
        read = {name: _decoded(batch.column(name)) for name in self._job.given}
        if self._job.stages:
            values = [*zip(*map(row_values, read.values()), strict=True)] or [()] * len(drafts)
            fingerprints = [
                staged_fingerprint(first, self._job.stages, given)
                for first, given in zip(fingerprints, values, strict=True)
            ]
        ours = (
            [f"{self._chunk_id}:{number}" for number in range(first, self._num_prepared)],
            [draft.adapter for draft in drafts],
            [draft.tokens for draft in drafts],
            [None if d.problems else sampling_overrides(job, d.sampling) for d in drafts],
            [" ".join(draft.problems) or None for draft in drafts],
            fingerprints,
            [places[draft.row] for draft in drafts],
        )
        fields = [field for field in batch.schema if field.name not in self._job.dropped]
        columns = [batch.column(field.name) for field in fields]
        if "id" not in self._job.roles:
            fields.append(pa.field(DEFAULT_ID_COLUMN, pa.string()))
            columns.append(pa.array([draft.row_id for draft in drafts], pa.string()))
        if (expected := self._job.expected_field) is not None:
            fields.append(expected)
            columns.append(pa.array([draft.expected for draft in drafts], expected.type))
        if (numbers := self._job.sample_field) is not None:
            fields.append(numbers)
            columns.append(pa.array([draft.sample for draft in drafts], numbers.type))
        for column, made in zip(prepared.PREPARED_FIELDS, ours, strict=True):
            fields.append(column)
            columns.append(pa.array(made, column.type))
        if self._job.stages:
            given = pa.StructArray.from_arrays([*read.values()], names=[*read]) if read else _no_columns(len(drafts))
            fields.append(pa.field(prepared.GIVEN, given.type))
            columns.append(given)
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))
        numbers = _numbers(drafts, fingerprints)
        self._numbers.append(self._of_all_stages(numbers) if self._job.stages else numbers)

    def _of_all_stages(self, numbers: pa.RecordBatch) -> pa.RecordBatch:
        """The numbers of rows with the work of all their stages, of which the first alone is known: the others are
        expected to have prompts as long as the first one's.
        """
        prompts, tokens = self._job.expected_prompts, self._job.expected_tokens
        prompt = np.round(numbers.column("prompt_tokens").to_numpy() * prompts)
        output = np.where(numbers.column("max_tokens").to_numpy() > 0, max(1, round(tokens)), 0)
        changed = {"prompt_tokens": prompt, "max_tokens": output, "fixed_tokens": np.zeros(len(prompt))}
        columns = {name: numbers.column(name) for name in numbers.schema.names}
        columns |= {name: pa.array(values.astype(np.int32)) for name, values in changed.items()}
        return pa.RecordBatch.from_pydict(columns)

    def order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows sorted by adapter, the base model first, otherwise as in the input; and the beginnings of record
        batches: `[num_batches + 1]` offsets into the order.
        """
        names = pa.chunked_array([batch.column("adapter") for batch in self._numbers])
        codes = names.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
        places = np.argsort(np.argsort(codes.dictionary.to_numpy(zero_copy_only=False)))
        adapter = places[codes.indices.to_numpy(zero_copy_only=False)]
        order = np.argsort(adapter, kind="stable")
        starts = np.flatnonzero(np.diff(adapter[order], prepend=-1))
        ends = np.append(starts[1:], len(order))
        cuts = [np.arange(start, end, prepared.BATCH_ROWS) for start, end in zip(starts, ends, strict=True)]
        return order, np.append(np.concatenate(cuts), len(order))

    def prepared_batches(self, order: NDArray[np.int64], offsets: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """The rows in `order`, as the record batches of the chunk file."""
        table = pa.Table.from_batches(self._batches).unify_dictionaries().combine_chunks()
        for start, end in pairwise(offsets.tolist()):
            yield table.take(pa.array(order[start:end])).combine_chunks().to_batches()[0]

    def index(self, order: NDArray[np.int64], offsets: NDArray[np.int64]) -> pa.Table:
        """The rows' numbers for the planner, in `order`, each with record batch and row in it (`INDEX_SCHEMA`)."""
        sizes = np.diff(offsets)
        batch = np.repeat(np.arange(len(sizes)), sizes)
        row = np.arange(len(order)) - offsets[:-1][batch]
        numbers = pa.Table.from_batches(self._numbers).take(pa.array(order))
        columns = {
            **{name: numbers.column(name) for name in numbers.column_names},
            "adapter": numbers.column("adapter").combine_chunks().dictionary_encode(),
            "shared_tokens": pa.array(self._shared_tokens()[order]),
            "batch": pa.array(batch, pa.int32()),
            "row": pa.array(row, pa.int32()),
            "place": pa.array(order, pa.int32()),
        }
        return pa.table(columns, schema=prepared.INDEX_SCHEMA)

    def _shared_tokens(self) -> NDArray[np.int32]:
        """`fingerprints.shared_tokens` of the chunk's rows, in input order."""
        adapters = [name for batch in self._numbers for name in batch.column("adapter").to_pylist()]
        tokens = [batch.column(prepared.TOKENS) for batch in self._batches]
        prompts = [_tokens(column, row) for column in tokens for row in range(len(column))]
        return shared_tokens(adapters, prompts)


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _no_columns(num_rows: int) -> pa.Array:
    return pa.array([{}] * num_rows, pa.struct([]))


def _fingerprint(draft: RowDraft) -> bytes:
    """The fingerprint of a row. Its first half is the key of the row's random numbers, which is that of the twin."""
    own = row_fingerprint(draft.row_id, draft.tokens or (), draft.sampling, draft.sample)
    return own if draft.twin is None else _fingerprint(draft.twin)[:STREAM_BYTES] + own[STREAM_BYTES:]


def _numbers(drafts: list[RowDraft], fingerprints: list[bytes]) -> pa.RecordBatch:
    """The rows' numbers for the index. Error rows have `max_tokens` 0: they need no engine. All tokens of a given
    completion that is computed as prompts are, but the last, count as tokens of the prompt.
    """
    halves = prepared.fingerprint_numbers(fingerprints)
    given = [max(len(d.sampling.continuation_token_ids) - 1, 0) if d.sampling.is_given else 0 for d in drafts]
    values = {
        "prompt_tokens": [len(draft.tokens or ()) + more for draft, more in zip(drafts, given, strict=True)],
        "max_tokens": [
            0 if draft.problems else draft.sampling.max_tokens - more for draft, more in zip(drafts, given, strict=True)
        ],
        "prefix_hash": [prefix_hash(draft.tokens or ()) for draft in drafts],
        "id_hash": [0 if draft.sample else id_hash(draft.row_id) for draft in drafts],
        "error_kind": [int(draft.kind) for draft in drafts],
        "is_drawn": [draft.sampling.is_drawn for draft in drafts],
        # of a given completion's row all tokens or none count as scored
        "is_scored": [
            draft.sampling.wants_prompt_logprobs or more >= len(draft.tokens or ()) > 0
            for draft, more in zip(drafts, given, strict=True)
        ],
        "fixed_tokens": [draft.fixed_tokens for draft in drafts],
        "task": [draft.task for draft in drafts],
        "fingerprint_high": halves[:, 0],
        "fingerprint_low": halves[:, 1],
    }
    columns = {name: pa.array(items, prepared.INDEX_SCHEMA.field(name).type) for name, items in values.items()}
    adapters = pa.array([draft.adapter for draft in drafts], pa.string())
    return pa.RecordBatch.from_pydict({"adapter": adapters, **columns})


def _tokens(column: pa.Array, row: int) -> NDArray[np.int32]:
    """One row's tokens; none for an error row."""
    prompt = column[row].values
    return np.zeros(0, np.int32) if prompt is None else prompt.to_numpy()
