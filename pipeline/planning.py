"""From the index of all rows to the plan: bad input refused, errors counted, rows cut into shards.

Nothing has run yet, so whatever is wrong here costs no work. Rows are looked at in blocks, one adapter after the other:
memory does not grow with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jobs.error_budget import ErrorBudget
from ..jobs.errors import DamagedRecordError, JobRequestError
from ..jobs.input_columns import DEFAULT_ID_COLUMN
from ..jobs.record import JobRecord, adapter_problem
from ..jobs.store import JobStore
from ..scheduler.waves import Shard
from ..scheduler.workload import BASE_MODEL, AdapterInfo, Workload
from . import prepared_rows as prepared
from .duplicate_ids import DuplicateIds
from .index_totals import IndexTotals
from .job_forecast import Forecaster
from .job_index import INDEXED_ROW, IndexedRows, SortedRows, read_chunks
from .row_errors import KindOfError, RowErrors, check_budget
from .shard_draft import ShardDraft

# Some 10 MB while they are planned; an adapter at the end of one block has a wave more than it needs.
_BLOCK_ROWS = 65_536
_FACTS_KEY = b"lorabatch.plan"


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
    """All rows of a job, and what is wrong with some of them. `names`: of adapters, by code. `serving`: those that
    answer; `number`: of code -1, 0, 1, … among them, `BASE_MODEL` for the base model and adapters that do not.
    """

    rows: SortedRows
    errors: RowErrors
    kinds: tuple[KindOfError, ...]
    names: tuple[str, ...]
    serving: tuple[AdapterInfo, ...]
    number: NDArray[np.int32]
    rows_per_adapter: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return self.rows.num_rows

    def whole(self) -> Workload:
        """The planner's view of all rows at once."""
        blocks = self.blocks(max(self.num_rows, 1))
        return next(blocks)[1]

    def blocks(self, block_rows: int) -> Iterator[tuple[IndexedRows, Workload]]:
        """Rows in order of their adapters, and the planner's view of them: error rows ask for nothing."""
        for rows in self.rows.blocks(block_rows):
            is_error = self.errors.is_error(rows)
            prompt, output, prefix, shared = (
                np.where(is_error, INDEXED_ROW[name].type(0), rows[name])
                for name in ("prompt_tokens", "max_tokens", "prefix_hash", "shared_tokens")
            )
            yield (
                rows,
                Workload(
                    adapters=self.serving,
                    adapter_index=np.where(is_error, np.int32(BASE_MODEL), self.number[rows["adapter"] + 1]),
                    prompt_tokens=prompt,
                    max_tokens=output,
                    prefix_hash=prefix,
                    shared_tokens=shared,
                ),
            )


def plan_job(
    store: JobStore,
    record: JobRecord,
    indexed: IndexTotals,
    *,
    num_replicas: int,
    forecast: Forecaster,
    block_rows: int = _BLOCK_ROWS,
) -> JobPlan:
    """Check the whole index, plan and predict it, and write the plan. Raises what `check_rows` raises.

    The plan that comes back is another run's when that was faster.
    """
    prompt_tokens, predicted_s = 0, None
    with check_rows(store, record, indexed) as checked, ShardDraft() as draft:
        for rows, workload in checked.blocks(block_rows):
            prompt_tokens += int(workload.prompt_tokens.sum())
            if workload.num_rows == checked.num_rows:
                found = forecast(workload, num_replicas)
                draft.add(rows, checked.names, found.plan, found.shard_s)
                predicted_s = found.predicted_s
            else:
                cut = forecast.cut(workload, num_replicas, checked.num_rows)
                draft.add(rows, checked.names, cut.plan, cut.shard_s)
        if predicted_s is None:
            draft.sort()
            predicted_s = forecast.seconds(checked.serving, draft.shards, draft.shard_s, num_replicas)
        plan = JobPlan(
            shards=draft.shards,
            num_rows=checked.num_rows,
            prompt_tokens=prompt_tokens,
            errors=checked.kinds,
            rows_per_adapter=checked.rows_per_adapter,
            adapter_names=draft.adapter_names,
            predicted_s=predicted_s,
        )
        with draft.references({_FACTS_KEY: json.dumps(plan_facts(plan))}) as references:
            is_ours = store.write_plan(references)
    if not is_ours:
        return read_plan(store)
    store.write_plan_facts(plan_facts(plan))
    return plan


@contextmanager
def check_rows(store: JobStore, record: JobRecord, indexed: IndexTotals) -> Iterator[CheckedRows]:
    """Look at the whole index; what comes of it lies in a file until it is closed.

    Raises `JobRequestError` for row groups that cannot be read and for duplicate ids, all at once, and
    `ErrorBudgetError` when more rows are wrong than the job's `max_errors` allows.
    """
    if indexed.damages:
        raise JobRequestError(*dict.fromkeys(indexed.damages[chunk_id] for chunk_id in sorted(indexed.damages)))
    known = {adapter.name: adapter for adapter in record.adapters}
    counts = dict(indexed.rows_per_adapter)
    num_base = counts.pop("", 0)
    # Adapters of one rank side by side: the small ones of them share waves.
    names = tuple(sorted(counts, key=lambda name: (known[name].rank if name in known else 0, name)))
    codes = {name: code for code, name in enumerate(names)}
    errors = RowErrors([adapter_problem(name, known) for name in names])
    num_rows = indexed.num_rows
    with SortedRows([*(counts[name] for name in names), num_base]) as rows:
        with DuplicateIds(num_rows, _BLOCK_ROWS) as ids:
            for chunk in read_chunks(store, indexed.num_chunks, codes):
                rows.add(chunk)
                ids.add(chunk)
                errors.add(chunk)
            ids.refuse(store, record.input.roles.get("id", DEFAULT_ID_COLUMN))
        kinds = errors.kinds(store)
        check_budget(ErrorBudget.parse(record.spec["max_errors"]), kinds, num_rows)
        serving = [adapter for adapter in record.adapters if not adapter.is_refused]
        place = {adapter.name: i for i, adapter in enumerate(serving)}
        yield CheckedRows(
            rows,
            errors,
            kinds,
            names,
            tuple(AdapterInfo(a.name, max(a.rank, 1), a.weight_bytes) for a in serving),
            np.array([BASE_MODEL, *(place.get(name, BASE_MODEL) for name in names)], np.int32),
            counts | ({"": num_base} if num_base else {}),
        )


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


def _first_facts(store: JobStore) -> dict[str, Any]:
    """What `plan.json` will hold, or would if its writer had not been killed."""
    with prepared.arrow_file(store.plan_source()) as file:
        facts: dict[str, Any] = json.loads((file.schema.metadata or {}).get(_FACTS_KEY, b"{}"))
        return facts
