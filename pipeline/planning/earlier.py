"""`EarlierRows`: finds the rows of an update whose answers an earlier job on the output has, and counts all of them.

Rows are found by the hashes of their ids and by their fingerprints, which the plans of the earlier jobs have kept. Of
the parts only the columns of errors and adapters are read. A row of an earlier job takes some 50 bytes of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...jobs.input.files import unpack_schema
from ...jobs.progress import UpdateCounts
from ...jobs.record import JobRecord, changed_adapters
from ...jobs.store import JobStore
from ...jobs.updates import arithmetic_differences
from ..dataset import schema as prepared
from ..dataset.earlier import answered_by
from .external_sort import IndexedRows, are_further

_READS_AT_ONCE = 16
# `key`: see `_keys`. `id`: hash of the id in the output's own job, 0 for a row of an update that was left. `source`:
# index into `EarlierRows.places`, -1 without an answer that may be kept. `adapter`: code of the adapter that has
# answered, -1 for the base model, `_NO_ANSWER`. `is_other`: the answer, if any, is one of another base model or
# arithmetic.
_EARLIER_ROW = np.dtype(
    [
        ("key", np.uint64),
        ("high", np.uint64),
        ("low", np.uint64),
        ("id", np.uint64),
        ("source", np.int32),
        ("adapter", np.int32),
        ("is_other", np.bool_),
    ]
)
_NO_ANSWER = -2
_ODD = np.uint64(0x9E3779B97F4A7C15)


class EarlierRows:
    """The rows of earlier jobs, and which rows of `record`'s job keep their answers.

    `sources`: stores of the earlier jobs, oldest first, as in `record.sources`; the first is the output's own job.
    `names`: names of the job's adapters by code.
    """

    def __init__(self, sources: Sequence[JobStore], record: JobRecord, names: Sequence[str]) -> None:
        self._record = record
        self._codes: dict[str, int] = {}
        contents = {adapter.name: adapter.sha256 for adapter in record.adapters if not adapter.is_refused}
        # the last entry is the base model's
        self._adapter_of = np.array([*(self._code(contents.get(name, "")) for name in names), -1], np.int32)
        #: Job and shard of each source of answers, as in the column `SOURCE` of the plan.
        self.places: list[int] = []
        self._reasons: list[str] = []
        tables = [self._read(job, store) for job, store in enumerate(sources)]
        self._rows = _without_repeats(np.concatenate([np.zeros(0, _EARLIER_ROW), *(rows for rows, _ in tables)]))
        self._keys = np.ascontiguousarray(self._rows["key"])
        self._ids = np.unique(np.concatenate([np.zeros(0, np.uint64), *(ids[ids != 0] for _, ids in tables[:1])]))
        self._is_there = np.zeros(len(self._ids), bool)
        #: Rows that keep answers, by source.
        self.rows_per_source = np.zeros(len(self.places), np.int64)
        #: Rows that keep answers, by code of their adapter; the base model's last.
        self.rows_per_code = np.zeros(len(names) + 1, np.int64)
        self._counts = dict.fromkeys(("kept", "new", "changed", "unanswered"), 0)

    @property
    def counts(self) -> UpdateCounts:
        """Counts of the rows that were given to `find`."""
        removed = int((~self._is_there).sum())
        return UpdateCounts(**self._counts, removed=removed, reasons=tuple(dict.fromkeys(self._reasons)))

    def find(self, rows: IndexedRows, is_error: NDArray[np.bool_]) -> NDArray[np.int32]:
        """For each row of a chunk the number of the source whose answer it keeps, -1 for none, int32 `[num_rows]`.
        `is_error`: rows that no engine can answer.
        """
        if not len(rows):
            return np.zeros(0, np.int32)
        adapter = self._adapter_of[rows["adapter"]]
        if self._record.spec.stages is not None:
            # Rows with stages have answers of several adapters, of which `_read` has found that none has changed.
            adapter = np.full(len(rows), -1, np.int32)
        earlier = self._answered(rows, adapter)
        keeps = (earlier["source"] >= 0) & ~is_error
        source = np.where(keeps, earlier["source"], np.int32(-1))
        unanswered = self._answered(rows, np.full(len(rows), _NO_ANSWER, np.int32))
        waits = (unanswered["key"] != 0) & ~unanswered["is_other"]
        is_first = ~are_further(rows)
        is_first[0] = True
        starts = np.flatnonzero(is_first)
        if self._record.has_lists:
            # completions of a row are in one part: all of them are kept, from one part, or none
            least, most = np.minimum.reduceat(source, starts), np.maximum.reduceat(source, starts)
            source = np.where(least == most, least, -1)[np.cumsum(is_first) - 1]
        self._note_there(earlier["id"][source >= 0])
        self._count(rows["id_hash"][starts], starts, source >= 0, waits)
        kept = source[source >= 0]
        self.rows_per_source += np.bincount(kept, minlength=len(self.places))
        num_codes = len(self.rows_per_code)
        self.rows_per_code += np.bincount(rows["adapter"][source >= 0] % num_codes, minlength=num_codes)
        return source.astype(np.int32)

    def _answered(self, rows: IndexedRows, adapter: NDArray[np.int32]) -> NDArray[np.void]:
        """The earlier row of each row that `adapter` (code, `_NO_ANSWER`) has answered; zeros, with source -1, for a
        row without one.
        """
        place, is_known = _places(self._keys, _keys(rows["fingerprint_low"], adapter))
        found = self._rows[place] if len(self._rows) else np.zeros(len(rows), _EARLIER_ROW)
        is_known &= (found["high"] == rows["fingerprint_high"]) & (found["low"] == rows["fingerprint_low"])
        is_known &= found["adapter"] == adapter
        found[~is_known] = np.zeros(1, _EARLIER_ROW)
        found["source"][~is_known] = -1
        return found

    def _note_there(self, ids: NDArray[np.uint64]) -> None:
        """Note that rows with these hashes of ids, in the output's own job, are still in the input."""
        place, is_old = _places(self._ids, ids)
        self._is_there[place[is_old]] = True

    def _count(
        self, ids: NDArray[np.uint64], starts: NDArray[np.int64], keeps: NDArray[np.bool_], waits: NDArray[np.bool_]
    ) -> None:
        """Count the rows of the input in a chunk. `ids`, `starts`: hashes and places of their first completions.
        `waits`: completions that are as they were and had no answer.
        """
        is_kept = np.logical_and.reduceat(keeps, starts)
        _, is_old = _places(self._ids, ids)
        self._note_there(ids)
        is_new = ~is_old & ~is_kept
        is_unanswered = np.logical_and.reduceat(keeps | waits, starts) & ~is_kept & ~is_new
        is_changed = ~(is_kept | is_new | is_unanswered)
        found = {"kept": is_kept, "new": is_new, "changed": is_changed, "unanswered": is_unanswered}
        for name, rows in found.items():
            self._counts[name] += int(rows.sum())

    def _code(self, adapter_id: str) -> int:
        return self._codes.setdefault(adapter_id, len(self._codes))

    def _read(self, job: int, store: JobStore) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
        """The rows of one earlier job, and the hashes of their ids."""
        if not store.has_plan():
            return np.zeros(0, _EARLIER_ROW), np.zeros(0, np.uint64)
        before = store.read_record()
        differences = arithmetic_differences(before, self._record)
        if self._record.spec.stages is not None and (changed := changed_adapters(before, self._record)):
            differences = (*differences, f"adapters have another content: {', '.join(sorted(changed)[:5])}")
        with prepared.arrow_file(store.plan_source()) as plan:
            shards = [plan.get_batch(number) for number in range(plan.num_record_batches)]
            has_ids = set(prepared.IDENTITY_COLUMNS) <= set(plan.schema.names)
            table = pa.Table.from_batches(shards, plan.schema)
            if not has_ids:
                differences = (*differences, "its rows had no ids of their own, or an earlier version planned them")
            if not job:
                self._reasons += [*differences, *_other_ids(before, self._record)]
            if not has_ids:
                return np.zeros(0, _EARLIER_ROW), np.zeros(0, np.uint64)
            rows = np.zeros(table.num_rows, _EARLIER_ROW)
            rows["high"], rows["low"] = (table.column(name).to_numpy() for name in prepared.IDENTITY_COLUMNS[1:])
            rows["source"], rows["adapter"], rows["is_other"] = -1, _NO_ANSWER, bool(differences)
            ids = np.array(table.column("id_hash").to_numpy())
        if not job:
            rows["id"] = ids
        if not differences:
            self._fill(job, store, before, np.split(rows, np.cumsum([shard.num_rows for shard in shards])[:-1]))
        rows["key"] = _keys(rows["low"], rows["adapter"])
        return rows, ids

    def _fill(self, job: int, store: JobStore, before: JobRecord, shards: Sequence[NDArray[np.void]]) -> None:
        """Note which rows of an earlier job have answers. `shards`: views of the rows of each shard."""
        committed = store.committed_parts()

        def states(shard_id: int) -> list[str | bool | None]:
            rows = shards[shard_id]
            fingerprints = prepared.fingerprints_of(rows["high"], rows["low"])
            return answered_by(store, before, shard_id, fingerprints, is_committed=shard_id in committed)

        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            for shard_id, found in enumerate(pool.map(states, range(len(shards)))):
                rows = shards[shard_id]
                rows["source"] = [-1 if adapter is False else len(self.places) for adapter in found]
                rows["adapter"] = [
                    _NO_ANSWER if adapter is False else self._code(adapter) if isinstance(adapter, str) else -1
                    for adapter in found
                ]
                self.places.append(job << 32 | shard_id)


def _keys(low: NDArray[np.uint64], adapter: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Number by which an answer is found, never 0, from half of its row's fingerprint and the code of its adapter: the
    adapters of a sweep answer rows with one fingerprint.
    """
    keys = low ^ ((adapter.astype(np.int64) - _NO_ANSWER).astype(np.uint64) * _ODD)
    return np.where(keys == 0, np.uint64(1), keys)


def _without_repeats(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Earlier rows by key, each once, of equal ones the latest job's."""
    latest_first = np.arange(len(rows))[::-1]
    rows = rows[np.lexsort((latest_first, rows["key"]))]
    is_first = np.append(np.ones(len(rows[:1]), bool), rows["key"][1:] != rows["key"][:-1])
    return rows.compress(is_first)


def _places(values: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Index of each wanted number among sorted `values`, and whether the number is there at all; 0 is not."""
    if not len(values):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    place = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return place, (values[place] == wanted) & (wanted != 0)


def _other_ids(old: JobRecord, new: JobRecord) -> list[str]:
    """Why no id of the new job's rows can be one of the old job's, as clauses."""
    kinds = [_id_kind(old), _id_kind(new)]
    return [] if kinds[0] == kinds[1] else [f"ids were {kinds[0]}, now {kinds[1]}"]


def _id_kind(record: JobRecord) -> str:
    column = record.input.roles.get("id")
    if column is None:
        return "made of content" if record.spec.id_from_content else "made of file and row"
    kind = unpack_schema(record.input.schema_ipc).field(column).type
    return "integers" if pa.types.is_integer(kind) else "text"
