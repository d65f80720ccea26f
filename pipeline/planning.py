"""From the index of all rows to the plan: bad input refused, errors counted, rows cut into shards.

Nothing has run yet, so whatever is wrong here costs no work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..jobs.error_budget import ErrorBudget
from ..jobs.errors import DamagedRecordError, ErrorBudgetError, JobRequestError
from ..jobs.input_columns import DEFAULT_ID_COLUMN
from ..jobs.record import JobRecord, adapter_problem
from ..jobs.store import JobStore
from ..scheduler.forecast import Forecast
from ..scheduler.waves import Shard, ShardPlan
from ..scheduler.workload import BASE_MODEL, AdapterInfo, Workload
from . import prepared_rows as prepared
from .index import ChunkSummary
from .job_index import JobIndex, read_index, read_row, refuse_duplicate_ids
from .row_checks import ErrorKind

ADAPTER_ERROR = "adapter"
_FACTS_KEY = b"lorabatch.plan"


@dataclass(frozen=True, slots=True)
class KindOfError:
    """Rows with one kind of error, and the first of them: its place and its sentence."""

    kind: str
    num_rows: int
    location: str
    sentence: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What planning found. `errors`: rows that no engine will see, by kind; a row counts once.

    `rows_per_adapter`: "" counts the base model's rows. `adapter_names`: per shard, every name its rows ask
    for, refused and unknown ones included. `predicted_s`: from the first shard opened to the last part written.
    """

    shards: tuple[Shard, ...]
    num_rows: int
    prompt_tokens: int
    errors: tuple[KindOfError, ...]
    rows_per_adapter: Mapping[str, int]
    adapter_names: tuple[tuple[str, ...], ...]
    predicted_s: float | None = None

    @property
    def num_errors(self) -> int:
        """Rows that no engine will see."""
        return sum(kind.num_rows for kind in self.errors)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRows:
    """All rows of a job, what is wrong with some of them, and the planner's view: error rows ask for nothing."""

    index: JobIndex
    errors: tuple[KindOfError, ...]
    workload: Workload


def plan_job(
    store: JobStore,
    record: JobRecord,
    summaries: Sequence[ChunkSummary],
    *,
    num_replicas: int,
    forecast: Callable[[Workload, int], Forecast],
) -> JobPlan:
    """Check the whole index, plan and predict it, and write the plan. Raises what `check_rows` raises.

    The plan that comes back is another run's when that was faster.
    """
    checked = check_rows(store, record, summaries)
    index, errors, workload = checked.index, checked.errors, checked.workload
    found = forecast(workload, num_replicas)
    cut = found.plan
    cut.check_integrity()
    plan = JobPlan(
        shards=cut.shards,
        num_rows=index.num_rows,
        prompt_tokens=int(workload.prompt_tokens.sum()),
        errors=errors,
        rows_per_adapter=_rows_per_adapter(index),
        adapter_names=tuple(_names(index, cut.rows_of(shard.shard_id)) for shard in cut.shards),
        predicted_s=found.predicted_s,
    )
    if not store.write_plan(_references(index, cut, plan)):
        return read_plan(store)
    store.write_plan_facts(plan_facts(plan))
    return plan


def check_rows(store: JobStore, record: JobRecord, summaries: Sequence[ChunkSummary]) -> CheckedRows:
    """Look at the whole index.

    Raises `JobRequestError` for row groups that cannot be read and for duplicate ids, all at once, and
    `ErrorBudgetError` when more rows are wrong than the job's `max_errors` allows.
    """
    damages = [summary.damage for summary in summaries if summary.damage is not None]
    if damages:
        raise JobRequestError(*dict.fromkeys(damages))
    index = read_index(store, len(summaries))
    refuse_duplicate_ids(store, index, record.input.roles.get("id", DEFAULT_ID_COLUMN))
    errors, workload = _errors_and_workload(store, record, index)
    _check_budget(ErrorBudget.parse(record.spec["max_errors"]), errors, index.num_rows)
    return CheckedRows(index, errors, workload)


def read_plan(store: JobStore) -> JobPlan:
    """The plan that `plan_job` wrote. Raises `MissingFileError` or `DamagedRecordError`."""
    facts = store.read_plan_facts() if store.has_plan_facts() else _first_facts(store)
    try:
        return JobPlan(
            **facts
            | {
                "shards": tuple(Shard.from_json(shard) for shard in facts["shards"]),
                "errors": tuple(KindOfError(**kind) for kind in facts["errors"]),
                "adapter_names": tuple(tuple(names) for names in facts["adapter_names"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise DamagedRecordError(f"plan.json: cannot be read back ({error}). Start again with --overwrite.") from None


def plan_facts(plan: JobPlan) -> dict[str, object]:
    """The plan as `plan.json` holds it."""
    return asdict(plan) | {"shards": [shard.to_json() for shard in plan.shards]}


def _errors_and_workload(
    store: JobStore, record: JobRecord, index: JobIndex
) -> tuple[tuple[KindOfError, ...], Workload]:
    """Kinds of errors, and the planner's view: error rows ask for no tokens and no adapter."""
    known = {adapter.name: adapter for adapter in record.adapters}
    problems = [adapter_problem(name, known) for name in index.adapter_names]
    serving = [adapter for adapter in record.adapters if not adapter.is_refused]
    place = {adapter.name: number for number, adapter in enumerate(serving)}
    # One entry more than there are names: index -1, the base model, reads the last.
    number = np.array([place.get(name, BASE_MODEL) for name in index.adapter_names] + [BASE_MODEL], np.int32)
    has_bad_adapter = np.array([problem is not None for problem in problems] + [False])[index.adapter]
    is_error = (index.error_kind != 0) | has_bad_adapter
    workload = Workload(
        adapters=tuple(AdapterInfo(a.name, max(a.rank, 1), a.weight_bytes) for a in serving),
        adapter_index=np.where(is_error, BASE_MODEL, number[index.adapter]).astype(np.int32),
        prompt_tokens=np.where(is_error, 0, index.prompt_tokens).astype(np.int32),
        max_tokens=np.where(is_error, 0, index.max_tokens).astype(np.int32),
        prefix_hash=np.where(is_error, np.uint64(0), index.prefix_hash),
        shared_tokens=np.where(is_error, 0, index.shared_tokens).astype(np.int32),
    )
    return tuple(_kinds(store, index, has_bad_adapter, problems)), workload


def _kinds(
    store: JobStore, index: JobIndex, has_bad_adapter: NDArray[np.bool_], problems: Sequence[str | None]
) -> list[KindOfError]:
    kinds = []
    for kind in ErrorKind:
        positions = np.flatnonzero(index.error_kind == kind)
        if kind and len(positions):
            first = read_row(store, index, int(positions[0]), (prepared.LOCATION, prepared.ERROR))
            name = kind.name.lower()
            kinds.append(KindOfError(name, len(positions), first[prepared.LOCATION], first[prepared.ERROR]))
    # A row that the index has rejected already is not counted again.
    positions = np.flatnonzero(has_bad_adapter & (index.error_kind == 0))
    if len(positions):
        first = read_row(store, index, int(positions[0]), (prepared.LOCATION,))
        sentence = problems[int(index.adapter[positions[0]])] or ""
        kinds.append(KindOfError(ADAPTER_ERROR, len(positions), first[prepared.LOCATION], sentence))
    return kinds


def _check_budget(budget: ErrorBudget, errors: Sequence[KindOfError], num_rows: int) -> None:
    num_errors = sum(kind.num_rows for kind in errors)
    if budget.allows(num_errors, num_rows):
        return
    kinds = "; ".join(f"{k.num_rows} x {k.kind}, first at {k.location}: {k.sentence}" for k in errors)
    raise ErrorBudgetError(
        f"max_errors={budget}: {num_errors} of {num_rows} rows cannot be answered, {budget.limit(num_rows)} are "
        f"allowed ({kinds}) Nothing was run. Correct these rows, or raise --max-errors to run the others."
    )


def _rows_per_adapter(index: JobIndex) -> dict[str, int]:
    codes, counts = np.unique(index.adapter, return_counts=True)
    names = [index.adapter_names[code] if code >= 0 else "" for code in codes]
    return dict(zip(names, counts.tolist(), strict=True))


def _names(index: JobIndex, rows: NDArray[np.int64]) -> tuple[str, ...]:
    return tuple(index.adapter_names[code] for code in np.unique(index.adapter[rows]) if code >= 0)


def _first_facts(store: JobStore) -> dict[str, Any]:
    """What `plan.json` will hold, or would if its writer had not been killed."""
    with prepared.arrow_file(store.plan_source()) as file:
        facts: dict[str, Any] = json.loads((file.schema.metadata or {}).get(_FACTS_KEY, b"{}"))
        return facts


def _references(index: JobIndex, cut: ShardPlan, plan: JobPlan) -> memoryview:
    """`plan.arrow`: record batch i tells where the rows of shard i lie; the facts stand in the schema's metadata."""
    sink = pa.BufferOutputStream()
    schema = prepared.REFERENCE_SCHEMA.with_metadata({_FACTS_KEY: json.dumps(plan_facts(plan))})
    with pa.ipc.new_file(sink, schema) as writer:
        for shard in cut.shards:
            rows = cut.rows_of(shard.shard_id)
            columns = [pa.array(values[rows]) for values in (index.chunk, index.batch, index.row)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return memoryview(sink.getvalue())
