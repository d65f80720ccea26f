"""From the index of all rows to the plan: duplicate ids refused, errors counted, rows cut into shards.

Reads only numbers (`INDEX_SCHEMA`), some 60 bytes a row; prompts stay where they are. Nothing has run yet, so
whatever is wrong here costs no work.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..jobs.errors import ErrorBudgetError, JobRequestError
from ..jobs.record import JobRecord, adapter_problem
from ..jobs.spec import JobSpec
from ..jobs.store import JobStore
from ..scheduler.waves import Shard, ShardLimits, ShardPlan, plan_shards
from ..scheduler.workload import BASE_MODEL, AdapterInfo, Workload
from . import prepared_rows as prepared

_CHUNK_READS = 8
_IDS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class JobIndex:
    """All rows of a job as numbers, `[num_rows]` each, chunk after chunk.

    `adapter`: dictionary-encoded names, null for the base model. `error_kind` 0: no error. `chunk`, `batch`, `row`:
    where the prepared row lies.
    """

    table: pa.Table
    chunk: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return len(self.chunk)

    def column(self, name: str) -> NDArray[np.generic]:
        """One column as an array."""
        values: NDArray[np.generic] = self.table.column(name).to_numpy()
        return values


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What planning found. `error_rows`: rows that no engine will see, because of the index or their adapter."""

    shards: tuple[Shard, ...]
    num_rows: int
    error_rows: int
    prompt_tokens: int


def plan_job(store: JobStore, record: JobRecord, spec: JobSpec, num_chunks: int, num_replicas: int) -> PlannedJob:
    """Read the index, check it and write the plan.

    Raises `JobRequestError` for duplicate ids and `ErrorBudgetError` when more rows are wrong than
    `max_errors` allows.
    """
    index = read_index(store, num_chunks)
    _refuse_duplicates(store, index)
    workload = _workload(index, record)
    error_rows = int((workload.max_tokens == 0).sum())
    _check_budget(spec, error_rows, index.num_rows)
    limits = None if spec.rows_per_shard is None else _fixed_size(spec.rows_per_shard)
    plan = plan_shards(workload, batch_rows=spec.batch_rows, num_replicas=num_replicas, limits=limits)
    plan.check_integrity()
    planned = PlannedJob(plan.shards, index.num_rows, error_rows, int(workload.prompt_tokens.sum()))
    _write_plan(store, index, plan, planned)
    return planned


def read_plan(store: JobStore) -> PlannedJob:
    """The plan that `plan_job` wrote."""
    facts = store.read_plan_facts()
    return PlannedJob(
        shards=tuple(Shard.from_json(shard) for shard in facts["shards"]),
        num_rows=facts["num_rows"],
        error_rows=facts["error_rows"],
        prompt_tokens=facts["prompt_tokens"],
    )


def read_index(store: JobStore, num_chunks: int) -> JobIndex:
    """The numbers of all chunks, in order."""

    def read(chunk_id: int) -> pa.Table:
        with prepared.arrow_file(store.index_source(chunk_id)) as reader:
            return reader.read_all()

    with ThreadPoolExecutor(_CHUNK_READS) as pool:
        tables = list(pool.map(read, range(num_chunks)))
    chunk = np.repeat(np.arange(num_chunks, dtype=np.int32), [table.num_rows for table in tables])
    if not tables:
        return JobIndex(prepared.INDEX_SCHEMA.empty_table(), chunk)
    return JobIndex(pa.concat_tables(tables).unify_dictionaries().combine_chunks(), chunk)


def _refuse_duplicates(store: JobStore, index: JobIndex) -> None:
    """Ids are compared by 64-bit hash first; equal hashes are looked up, so that no collision is taken for a
    duplicate."""
    hashes = index.column("id_hash")
    has_id = np.flatnonzero(hashes != 0)
    order = has_id[np.argsort(hashes[has_id], kind="stable")]
    is_repeated = hashes[order[1:]] == hashes[order[:-1]]
    suspects = np.unique(np.concatenate([order[1:][is_repeated], order[:-1][is_repeated]]))
    if not len(suspects):
        return
    places: dict[str, list[str]] = {}
    for position in suspects.tolist():
        request_id, location = _identity(store, index, position)
        places.setdefault(request_id, []).append(location)
    repeated = {request_id: found for request_id, found in places.items() if len(found) > 1}
    if not repeated:
        return
    shown = "; ".join(
        f"{request_id!r} at {', '.join(found[:3])}" for request_id, found in list(repeated.items())[:_IDS_SHOWN]
    )
    raise JobRequestError(
        f"id: {len(repeated)} ids occur more than once ({shown}). Every row needs an id of its own: make them unique, "
        "or name another column with --column id=OTHER."
    )


def _identity(store: JobStore, index: JobIndex, position: int) -> tuple[str, str]:
    """Id and location of one row."""
    batch, row = int(index.column("batch")[position]), int(index.column("row")[position])
    with prepared.arrow_file(store.rows_source(int(index.chunk[position]))) as reader:
        record_batch = reader.get_batch(batch)
        request_id = record_batch.column(prepared.REQUEST_ID)[row].as_py()
        return request_id, record_batch.column(prepared.LOCATION)[row].as_py()


def _workload(index: JobIndex, record: JobRecord) -> Workload:
    """The planner's view: rows that no engine can serve have `max_tokens` 0 and no adapter."""
    adapters = {adapter.name: adapter for adapter in record.adapters if not adapter.is_refused}
    names = list(adapters)
    infos = tuple(AdapterInfo(name, max(adapters[name].rank, 1), adapters[name].weight_bytes) for name in names)
    column = index.table.column("adapter").combine_chunks()
    values = column.dictionary.to_pylist()
    number = {name: i for i, name in enumerate(names)}
    problems = {record_.name: record_ for record_ in record.adapters}
    code_of_value = np.array([number.get(value, BASE_MODEL) for value in values] or [BASE_MODEL], np.int32)
    is_unknown = np.array([adapter_problem(value, problems) is not None for value in values] or [False])
    codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    is_base = codes < 0
    adapter_index = np.where(is_base, BASE_MODEL, code_of_value[codes]).astype(np.int32)
    is_error = (index.column("error_kind") != 0) | (~is_base & is_unknown[codes])
    max_tokens = np.where(is_error, 0, index.column("max_tokens")).astype(np.int32)
    return Workload(
        adapters=infos,
        adapter_index=np.where(is_error, BASE_MODEL, adapter_index).astype(np.int32),
        prompt_tokens=np.where(is_error, 0, index.column("prompt_tokens")).astype(np.int32),
        max_tokens=max_tokens,
        prefix_hash=index.column("prefix_hash").astype(np.uint64),
    )


def _check_budget(spec: JobSpec, error_rows: int, num_rows: int) -> None:
    if spec.error_budget.allows(error_rows, num_rows):
        return
    raise ErrorBudgetError(
        f"max_errors={spec.max_errors}: {error_rows} of {num_rows} rows are wrong before any work has started "
        f"({error_rows / num_rows:.1%}). Nothing was run. Correct the rows, or raise --max-errors to run "
        "the others; the summary lists the kinds of errors."
    )


def _fixed_size(rows_per_shard: int) -> ShardLimits:
    """Shards of about the asked number of rows, however the job is shaped."""
    return ShardLimits(shards_per_replica=1, min_rows=rows_per_shard, max_batches=1, max_shards=1 << 30)


def _write_plan(store: JobStore, index: JobIndex, plan: ShardPlan, planned: PlannedJob) -> None:
    batch, row = index.column("batch"), index.column("row")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, prepared.REFERENCE_SCHEMA) as writer:
        for shard in plan.shards:
            rows = plan.rows_of(shard.shard_id)
            columns = [pa.array(values[rows], pa.int32()) for values in (index.chunk, batch, row)]
            writer.write_batch(pa.record_batch(columns, schema=prepared.REFERENCE_SCHEMA))
    facts = {
        "shards": [shard.to_json() for shard in plan.shards],
        "num_rows": planned.num_rows,
        "error_rows": planned.error_rows,
        "prompt_tokens": planned.prompt_tokens,
    }
    store.write_plan(memoryview(sink.getvalue()), facts)
