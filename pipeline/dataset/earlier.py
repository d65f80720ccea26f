"""Answers of earlier jobs on an output, which an update keeps: found again by the fingerprints of their rows.

An earlier job has them in its parts and, where it has not finished, in the journals of its shards. Its plan says which
rows a shard has, in the order of the part.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...jobs.contents import part_name
from ...jobs.errors import DamagedRecordError, MissingFileError
from ...jobs.input.columns import output_name
from ...jobs.parts import PartMark, damage_of
from ...jobs.record import JobRecord
from ...jobs.store import JobStore
from ...jobs.updates import arithmetic_differences
from . import schema as prepared
from .answers import AnswerKey, RowAnswer, decode_journal
from .writer import answer_values, has_answers_as_written, row_answer, with_contents

logger = logging.getLogger(__name__)
# Shards of earlier jobs whose answers a worker keeps in memory.
_SHARDS_IN_MEMORY = 16
_STATE_COLUMNS = ("error", "adapter_sha256", "finish_reason")


class EarlierAnswers:
    """Reads the answers of the jobs that an update keeps rows of, in any thread. `sources`: their stores."""

    def __init__(self, sources: Sequence[JobStore]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._record = lru_cache(lambda job: sources[job].read_record())
        self._shard = lru_cache(_SHARDS_IN_MEMORY)(self._read)
        self._places = lru_cache(lambda job: _ids_of(sources[job]))
        self._kept = lru_cache(_SHARDS_IN_MEMORY)(lambda job, shard_id: kept_answers(sources[job], shard_id))

    def of(self, places: Iterable[int]) -> dict[AnswerKey, RowAnswer]:
        """Answers by fingerprint and adapter, of all rows of some shards that have one. `places`: job and shard, as in
        the column `SOURCE` of a plan. A shard whose part is not what its job has written has none.
        """
        found: dict[AnswerKey, RowAnswer] = {}
        for place in places:
            with self._lock:
                found |= self._shard(place)
        return found

    def of_stages(self, ids: Iterable[int], record: JobRecord) -> dict[bytes, RowAnswer]:
        """Fingerprint -> answer, of all requests of the rows with these hashes of ids, in jobs with stages. `record`:
        of the job that keeps them.
        """
        wanted = np.array(list(ids), np.uint64)
        found: dict[bytes, RowAnswer] = {}
        for job in range(len(self._sources)):
            with self._lock:
                if arithmetic_differences(self._record(job), record):
                    continue
                hashes, shards = self._places(job)
                for shard_id in np.unique(shards[np.isin(hashes, wanted)]).tolist():
                    found |= self._kept(job, shard_id)
        return found

    def _read(self, place: int) -> dict[AnswerKey, RowAnswer]:
        job, shard_id = place >> 32, place & 0xFFFFFFFF
        try:
            return _answers(self._sources[job], self._record(job), shard_id)
        except (MissingFileError, DamagedRecordError) as error:
            logger.warning("answers that were to be kept are computed again: %s", error)
            return {}


def kept_answers(store: JobStore, shard_id: int) -> dict[bytes, RowAnswer]:
    """Fingerprint -> answer, of all requests of a shard with stages that are kept beside its part or in its journals,
    errors left out.
    """
    kept = (row for row in decode_journal(decompressed(store.read_answers(shard_id))) if isinstance(row, RowAnswer))
    found = {row.fingerprint: row for row in with_contents(kept, store.content_of) if row.error is None}
    return found | {row.fingerprint: row for row in _journalled(store, shard_id).values()}


def decompressed(data: bytes) -> bytes:
    """The journal that was kept beside a part; empty when it is gone or damaged: its answers are computed again."""
    try:
        return bytes(pa.input_stream(pa.BufferReader(data), compression="zstd").read()) if data else b""
    except (pa.ArrowInvalid, OSError):
        return b""


def _ids_of(store: JobStore) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hash of the id of each planned row of a job, and its shard; none when its plan has no ids."""
    if not store.has_plan():
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    with prepared.arrow_file(store.plan_source()) as plan:
        if "id_hash" not in plan.schema.names:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        batches = [np.array(plan.get_batch(number).column("id_hash")) for number in range(plan.num_record_batches)]
    shards = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    return np.concatenate([np.zeros(0, np.uint64), *batches]), shards


def _answers(store: JobStore, record: JobRecord, shard_id: int) -> dict[AnswerKey, RowAnswer]:
    """Answers of one shard's rows by fingerprint and adapter, errors left out."""
    if not store.is_committed(shard_id):
        return _journalled(store, shard_id)
    with store.open_part(shard_id) as part:
        table = _table_of(part, record, shard_id)
    rows = planned_rows(store, shard_id)
    if table is None or rows is None:
        return {}
    if not has_answers_as_written(table, record):
        logger.warning("%s has other answers than were written: its rows are computed again", part_name(shard_id))
        return {}
    values = answer_values(table, record)
    fingerprints = prepared.fingerprints_of(rows["fingerprint_high"], rows["fingerprint_low"])
    if len(values) != len(fingerprints):
        return {}
    pairs = zip(fingerprints, values, strict=True)
    found = [row_answer(each, fingerprint) for fingerprint, each in pairs if each["error"] is None]
    return {answer.key: answer for answer in found}


def _journalled(store: JobStore, shard_id: int) -> dict[AnswerKey, RowAnswer]:
    rows = (row for journal in store.read_wip(shard_id).values() for row in decode_journal(journal))
    answers = (row for row in rows if isinstance(row, RowAnswer) and row.error is None)
    return {row.key: row for row in with_contents(answers, store.content_of)}


def _table_of(part: BinaryIO, record: JobRecord, shard_id: int, names: Sequence[str] = ()) -> pa.Table | None:
    """The part as a table, or some columns of it; None when it is not this job's part of this shard."""
    try:
        file = pq.ParquetFile(part, page_checksum_verification=True)
        mark = PartMark.of(file.schema_arrow)
        made_by = mark.job_id, mark.shard_id, mark.model_sha256
        if made_by != (record.job_id, str(shard_id), record.model.sha256):
            return None
        return file.read(columns=list(names) or None)
    except Exception as error:
        logger.warning("%s %s: its rows are computed again", part_name(shard_id), damage_of(error))
        return None


def planned_rows(store: JobStore, shard_id: int) -> dict[str, Any] | None:
    """Columns `IDENTITY_COLUMNS` of a shard's rows; None when the job's plan has none."""
    with prepared.arrow_file(store.plan_source(), columns=()) as plan:
        if not set(prepared.IDENTITY_COLUMNS) <= set(plan.schema.names):
            return None
        batch = plan.get_batch(shard_id)
        return {name: np.array(batch.column(name)) for name in prepared.IDENTITY_COLUMNS}


def answered_by(
    store: JobStore, record: JobRecord, shard_id: int, fingerprints: Sequence[bytes], *, is_committed: bool
) -> list[str | bool | None]:
    """For each row of a shard the content hash of the adapter that has answered it, None for the base model; False for
    a row without an answer.
    """
    if not is_committed:
        adapters = defaultdict(list)
        for fingerprint, adapter in _journalled(store, shard_id):
            adapters[fingerprint].append(adapter)
        # rows of one fingerprint are those of several adapters, which have as many answers
        return [adapters[each].pop() if adapters.get(each) else False for each in fingerprints]
    if record.spec.stages is not None:
        with store.open_part(shard_id) as part:
            table = _table_of(part, record, shard_id, [output_name(record, "error")])
        errors = [] if table is None else table.column(0).to_pylist()
        is_whole = len(errors) == len(fingerprints) and bool(store.read_answers(shard_id))
        return [None if is_whole and error is None else False for error in errors] or [False] * len(fingerprints)
    with store.open_part(shard_id) as part:
        table = _table_of(part, record, shard_id, [output_name(record, name) for name in _STATE_COLUMNS])
    values = [] if table is None else answer_values(table, record)
    if len(values) != len(fingerprints):
        return [False] * len(fingerprints)
    return [each["adapter_sha256"] if each["error"] is None else False for each in values]
