"""Makes the plan of a job from the index of its rows: refuses bad input, counts errors, cuts rows into shards.

Planning comes before any engine's work, so that an error found here costs none. Rows are read in blocks, one adapter
after the other, so that memory does not grow with the number of rows; `_ShardDraft` keeps the places of rows in a file
of this machine. When adapters have changed between two runs, `reopen_shards` opens the shards with their rows again and
keeps the other rows.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...engine.request import Request
from ...jobs.errors import DamagedRecordError, InputRowsError, naming_damage
from ...jobs.input.adapter_names import adapter_problem
from ...jobs.input.columns import DEFAULT_ID_COLUMN
from ...jobs.outcome import KindOfError
from ...jobs.progress import UpdateCounts
from ...jobs.record import JobRecord, index_key
from ...jobs.store import JobStore
from ...scheduler.estimates.canary import canary_rows
from ...scheduler.estimates.lengths import PRIOR_SHARE, expected_tokens
from ...scheduler.forecast import CutRows
from ...scheduler.planning.waves import Shard, ShardPlan, dispatch_order
from ...scheduler.workload import BASE_MODEL, AdapterInfo, Workload
from ...system.local_cache import temporary_folder
from ..dataset import schema as prepared
from ..dataset.answers import encode_answers
from ..dataset.index import IndexTotals
from ..dataset.reader import ShardRows, read_shard
from ..dataset.sweep import salt_of, swept_rows
from ..dataset.writer import answers_in_part
from . import prediction
from .earlier import EarlierRows
from .external_sort import INDEXED_ROW, IndexedRows, ScratchFile, SortedRows, are_further, read_chunks
from .settings import RunSettings
from .validation import DuplicateIds, RowErrors, check_budget

logger = logging.getLogger(__name__)
# Rows that are planned together; they take some 10 MB. An adapter at the end of a block has a wave more than it needs.
_BLOCK_ROWS = 65_536
# Rows of the largest job that is played whole by a run. Playing a plan takes half a second per thousand rows: a run
# does not wait longer than its engines take to start.
_SIMULATED_ROWS = 5_000
_FACTS_KEY = b"lorabatch.plan"
# Columns of the index that planning uses.
_PLANNED = (
    "prompt_tokens", "max_tokens", "prefix_hash", "shared_tokens", "is_drawn", "is_scored", "fixed_tokens", "task",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The plan of a job: its shards and their predicted seconds."""

    #: Shards of the job; the id of a shard is its index.
    shards: tuple[Shard, ...]
    #: Rows of all shards.
    num_rows: int
    #: Rows that no engine will see, by kind of error; a row counts once.
    errors: tuple[KindOfError, ...]
    #: Names of all adapters that the rows of each shard ask for, including refused and unknown ones.
    adapter_names: tuple[tuple[str, ...], ...]
    #: Seconds predicted from the first shard opened to the last part written.
    predicted_s: float
    #: Counts of an update's rows; None for a job that is no update.
    update: UpdateCounts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRows:
    """All rows of a job, sorted by adapter, and their errors."""

    #: The rows.
    rows: SortedRows
    #: Counts of error rows, which also distinguish error rows from others.
    errors: RowErrors
    #: Error rows by kind.
    kinds: tuple[KindOfError, ...]
    #: Names of adapters by code.
    names: tuple[str, ...]
    #: Adapters that answer rows.
    serving: tuple[AdapterInfo, ...]
    #: Index into `serving` for each code from -1 on, `[num_adapters + 1]`; `BASE_MODEL` for the base model and for
    #: adapters that answer no rows.
    number: NDArray[np.int32]
    #: Whether completions of one row of the input must be in one shard.
    together: bool = False
    #: The earlier jobs of an update; None for a job that is no update.
    earlier: EarlierRows | None = None

    def whole(self) -> tuple[IndexedRows, Workload]:
        """All rows at once, and the planner's view of them."""
        return next(self.blocks(max(self.rows.num_rows, 1)))

    def blocks(self, block_rows: int) -> Iterator[tuple[IndexedRows, Workload]]:
        """Blocks of rows in order of their adapters, and the planner's view of each: error rows, and rows that keep
        their answers, have no work in it.
        """
        for rows in self.rows.blocks(block_rows, together=self.together):
            yield rows, self.workload(rows)

    def workload(self, rows: IndexedRows) -> Workload:
        """The planner's view of some of the rows."""
        is_idle = self.errors.is_error(rows) | (rows["source"] >= 0)
        prompt, output, prefix, shared, is_drawn, is_scored, fixed, task = (
            np.where(is_idle, INDEXED_ROW[name].type(0), rows[name]) for name in _PLANNED
        )
        return Workload(
            adapters=self.serving,
            adapter_index=np.where(is_idle, np.int32(BASE_MODEL), self.number[rows["adapter"] + 1]),
            prompt_tokens=prompt,
            # engines compute more tokens for a choice of many texts than its answer has
            max_tokens=np.maximum(output, fixed),
            prefix_hash=prefix,
            # a prompt that is scored is computed whole
            shared_tokens=np.where(is_scored, np.int32(0), shared),
            is_drawn=is_drawn,
            is_scored=is_scored,
            fixed_tokens=fixed,
            task=task,
            input_place=(rows["chunk"].astype(np.int64) << 32) + rows["place"],
            groups=np.cumsum(~are_further(rows)) if self.together else None,
        )

    @property
    def rows_per_adapter(self) -> Counter[int]:
        """Rows to compute, error rows among them, by the number of their adapter."""
        counts: Counter[int] = Counter()
        for code, num_rows in enumerate(self.rows.rows_per_code):
            counts[int(self.number[code + 1 if code < len(self.names) else 0])] += num_rows
        return counts


def plan_job(
    store: JobStore,
    record: JobRecord,
    indexed: IndexTotals,
    *,
    num_replicas: int,
    settings: RunSettings,
    block_rows: int = _BLOCK_ROWS,
) -> JobPlan:
    """Check the whole index, plan and predict its rows, and write the plan. Raises what `check_rows` raises.

    Returns the plan of another run if that has written one meanwhile.
    """
    sources = [store.source(name) for name in record.sources]
    with check_rows(store, record, indexed, sources) as checked, _ShardDraft(record, checked.earlier) as draft:
        num_rows = checked.rows.num_rows
        sample = prediction.sample(settings, num_rows, num_replicas, max_rows=_SIMULATED_ROWS)
        if settings.is_dealt:
            block_rows = max(num_rows, 1)
        for rows, workload, cut in _cut_blocks(checked, settings, num_replicas, block_rows):
            draft.add(rows, checked.names, cut.plan)
            sample.add(workload, cut)
        if num_rows > block_rows:
            draft.sort()
        plan = JobPlan(
            shards=draft.shards,
            num_rows=num_rows,
            errors=checked.kinds,
            adapter_names=draft.adapter_names,
            predicted_s=sample.predict(partial(prediction.play_expected, settings)),
            update=None if checked.earlier is None else checked.earlier.counts,
        )
        with draft.references({_FACTS_KEY: json.dumps(plan_facts(plan))}) as references:
            is_ours = store.write_plan(references)
    if not is_ours:
        return read_plan(store)
    store.write_plan_facts(plan_facts(plan))
    return plan


def _cut_blocks(
    checked: CheckedRows, settings: RunSettings, num_replicas: int, block_rows: int
) -> Iterator[tuple[IndexedRows, Workload, CutRows]]:
    """Cut the rows of each block into shards. The canary of a job of several blocks comes last, as a block of its own:
    each block has chosen its part of it.
    """
    job_rows = checked.rows.num_rows
    if not settings.canary or job_rows <= block_rows:
        for rows, workload in checked.blocks(block_rows):
            yield rows, workload, prediction.cut_rows(settings, workload, num_replicas, job_rows)
        return
    rest, total, before = replace(settings, canary=0), checked.rows_per_adapter, Counter[int]()
    chosen: list[IndexedRows] = []
    for rows, workload in checked.blocks(block_rows):
        is_canary = canary_rows(workload, settings.canary, before, total)
        before.update(checked.number[rows["adapter"] + 1][rows["source"] < 0].tolist())
        chosen.append(rows[is_canary])
        others = np.flatnonzero(~is_canary)
        workload = workload.part(others)
        yield rows[others], workload, prediction.cut_rows(rest, workload, num_replicas, job_rows)
    rows = np.concatenate(chosen)
    workload = checked.workload(rows)
    yield rows, workload, prediction.cut_canary(settings, workload, num_replicas, job_rows)


@contextmanager
def check_rows(
    store: JobStore, record: JobRecord, indexed: IndexTotals, sources: Sequence[JobStore] = ()
) -> Iterator[CheckedRows]:
    """Check the whole index; the rows stay in a file until the context is closed. `sources`: stores of the jobs whose
    answers an update keeps.

    Raises `InputRowsError` for row groups that cannot be read and for duplicate ids, all at once, and
    `ErrorBudgetError` when more rows are wrong than the job's `max_errors` allows.
    """
    if indexed.damages:
        damages = chain.from_iterable(indexed.damages[chunk_id] for chunk_id in sorted(indexed.damages))
        raise InputRowsError(*dict.fromkeys(damages))
    known = {adapter.name: adapter for adapter in record.adapters}
    counts = {name: num_rows for name, num_rows in indexed.rows_per_adapter.items() if name is not None}
    names = tuple(sorted(counts))
    codes = {name: code for code, name in enumerate(names)}
    errors = RowErrors([adapter_problem(name, known) for name in names])
    num_rows = indexed.num_rows
    read = partial(_read_asked, store, record, indexed.num_chunks, codes)
    earlier = EarlierRows(sources, record, names) if sources else None
    kept = [] if earlier is None else [earlier.find(chunk, errors.is_error(chunk)) for chunk in read()]
    rows_per_code = np.array([*(counts[name] for name in names), indexed.rows_per_adapter[None]], np.int64)
    if earlier is not None:
        rows_per_code -= earlier.rows_per_code
    rows_per_source = [] if earlier is None else earlier.rows_per_source.tolist()
    with SortedRows(rows_per_code.tolist(), rows_per_source) as rows:
        with DuplicateIds(num_rows, _BLOCK_ROWS) as ids:
            for chunk_id, chunk in enumerate(read()):
                if kept:
                    chunk["source"] = kept[chunk_id]
                rows.add(chunk)
                # every adapter of a sweep has the same rows
                ids.add(chunk[chunk["adapter"] == chunk["adapter"][0]] if record.swept and len(chunk) else chunk)
                errors.add(chunk)
            id_column = record.input.roles.get("id", DEFAULT_ID_COLUMN)
            ids.refuse(store, id_column, is_from_content=record.spec.id_from_content)
        kinds = errors.kinds(store)
        check_budget(record.spec.error_budget, kinds, num_rows)
        serving = serving_adapters(record)
        number = {adapter.adapter_id: i for i, adapter in enumerate(serving)}
        served = {adapter.name: number[adapter.sha256] for adapter in record.adapters if not adapter.is_refused}
        yield CheckedRows(
            rows,
            errors,
            kinds,
            names,
            serving,
            np.array([BASE_MODEL, *(served.get(name, BASE_MODEL) for name in names)], np.int32),
            record.has_lists,
            earlier,
        )


def _read_asked(store: JobStore, record: JobRecord, num_chunks: int, codes: Mapping[str, int]) -> Iterator[IndexedRows]:
    """The rows of each chunk, in input order; in a sweep once for each adapter. `codes`: name of an adapter -> code."""
    of_name = dict(zip([None, *codes], [-1, *codes.values()], strict=True))
    # an input without rows has no codes
    groups = record.adapter_groups.items() if num_chunks else ()
    members = {of_name[name]: [of_name[member] for member in group] for name, group in groups if group}
    salts = {code: salt_of(name) for name, code in of_name.items()}
    for chunk in read_chunks(store, index_key(record), num_chunks, codes):
        yield swept_rows(chunk, members, salts) if record.swept else chunk


def serving_adapters(record: JobRecord) -> tuple[AdapterInfo, ...]:
    """The adapters that answer rows, as planners see them: names of the same content are one adapter."""
    served = {adapter.sha256: adapter for adapter in record.adapters if not adapter.is_refused}
    return tuple(
        AdapterInfo(each.sha256, max(each.rank, 1), each.weight_bytes, is_fetched=bool(each.files))
        for each in served.values()
    )


def read_plan(store: JobStore) -> JobPlan:
    """The plan that `plan_job` wrote. When `plan.json` is missing or damaged, the plan as it was first made is read
    from `plan.arrow`. Raises `MissingFileError` or `DamagedRecordError`.
    """
    if store.has_plan_facts():
        try:
            return _plan_of(store.read_plan_facts())
        except DamagedRecordError as error:
            logger.warning("%s; the plan is taken as it was made", str(error).rstrip("."))
    return _plan_of(_first_facts(store))


def _plan_of(facts: Mapping[str, Any]) -> JobPlan:
    with naming_damage("plan.json"):
        update = facts.get("update")
        return JobPlan(
            shards=tuple(Shard.from_json(shard) for shard in facts["shards"]),
            num_rows=facts["num_rows"],
            errors=tuple(KindOfError(**kind) for kind in facts["errors"]),
            adapter_names=tuple(tuple(names) for names in facts["adapter_names"]),
            predicted_s=facts["predicted_s"],
            update=update and UpdateCounts(**update | {"reasons": tuple(update["reasons"])}),
        )


def plan_facts(plan: JobPlan) -> dict[str, object]:
    """The content of `plan.json` for a plan."""
    return asdict(plan) | {"shards": [shard.to_json() for shard in plan.shards]}


def _first_facts(store: JobStore) -> dict[str, Any]:
    """The content of `plan.json` as the plan was first made, from the metadata of `plan.arrow`."""
    with prepared.arrow_file(store.plan_source()) as file:
        facts: dict[str, Any] = json.loads((file.schema.metadata or {}).get(_FACTS_KEY, b"{}"))
        return facts


class _ShardDraft:
    """Collects the shards of a job block by block; the places of their rows are kept in a file of this machine.
    `earlier`: the earlier jobs of an update.
    """

    def __init__(self, record: JobRecord, earlier: EarlierRows | None = None) -> None:
        self._schema = prepared.reference_schema(record)
        self._swept = {name: place for place, name in enumerate(record.swept)}
        self._columns = np.dtype([(column.name, column.type.to_pandas_dtype()) for column in self._schema])
        # the last entry is for rows that keep no answer
        self._sources = np.array([*(earlier.places if earlier else ()), -1], np.int64)
        #: Shards so far.
        self.shards: tuple[Shard, ...] = ()
        #: Names of all adapters that the rows of each shard ask for, including refused and unknown ones.
        self.adapter_names: tuple[tuple[str, ...], ...] = ()
        self._file = ScratchFile()
        self._starts: tuple[int, ...] = ()
        self._num_waves = 0

    def __enter__(self) -> _ShardDraft:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, rows: IndexedRows, names: Sequence[str], plan: ShardPlan) -> None:
        """Add the shards of one more block. `names`: names of adapters by code."""
        plan.check_integrity()
        places = np.empty(len(rows), self._columns)
        # the last entry is the base model's
        swept = np.array([self._swept.get(name, -1) for name in (*names, None)], np.int32)
        coded: dict[str, NDArray[Any]] = {prepared.SOURCE: self._sources, prepared.SWEPT: swept}
        for name in self._schema.names:
            values = coded[name][rows[name]] if name in coded else rows[name]
            places[name] = values[plan.row_order]
        start = self._file.write(places.tobytes())
        self._starts += tuple((start + plan.shard_offsets[:-1] * self._columns.itemsize).tolist())
        codes = (np.unique(rows["adapter"][plan.rows_of(shard.shard_id)]) for shard in plan.shards)
        self.adapter_names += tuple(tuple(names[code] for code in found if code >= 0) for found in codes)
        self.shards += tuple(replace(s, wave_id=s.wave_id + self._num_waves) for s in plan.shards)
        self._num_waves = max((shard.wave_id + 1 for shard in self.shards), default=0)

    def sort(self) -> None:
        """Number the shards of all blocks in the order in which they should run; their ids are their places."""
        order = dispatch_order(self.shards)
        self.shards = tuple(replace(self.shards[old], shard_id=new) for new, old in enumerate(order))
        self.adapter_names = tuple(self.adapter_names[old] for old in order)
        self._starts = tuple(self._starts[old] for old in order)

    @contextmanager
    def references(self, metadata: Mapping[bytes, str]) -> Iterator[memoryview]:
        """The bytes of `plan.arrow`: record batch i has the places of shard i's rows, the schema has `metadata`."""
        schema = self._schema.with_metadata(metadata)
        with temporary_folder() as folder:
            path = folder / "plan.arrow"
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for shard, start in zip(self.shards, self._starts, strict=True):
                    data = self._file.read(start, shard.num_rows * self._columns.itemsize)
                    places = np.frombuffer(data, self._columns)
                    columns = [pa.array(np.ascontiguousarray(places[name])) for name in schema.names]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
            with pa.memory_map(str(path)) as mapped:
                yield memoryview(mapped.read_buffer())


_ATTEMPT = "kept"


def reopen_shards(
    store: JobStore,
    record: JobRecord,
    plan: JobPlan,
    changed: Collection[str],
    length_share: float = PRIOR_SHARE,
    check: Callable[[], None] = lambda: None,
) -> JobPlan:
    """Uncommit every part with a row of a changed adapter; answers of its other rows go to the shard's journal.

    `record`: the job's record with the adapters as they are now. `length_share`: share of their `max_tokens` that rows
    are expected to generate. `check`: called before each shard; raises an error to stop. Needs the prepared rows, and
    the store's record with the adapters as they were. Safe to repeat after a crash: a part is removed only after the
    answers kept of it are written. Returns the plan with the adapters and the work that these shards have now.
    """
    if record.spec.stages is not None:
        return plan  # the count compares each part with what its shard would be, and answers are kept beside the parts
    affected = [i for i, names in enumerate(plan.adapter_names) if not set(changed).isdisjoint(names)]
    committed = store.committed_parts()
    before = {adapter.name: adapter.sha256 for adapter in store.read_record().adapters} if affected else {}
    served = {adapter.name: adapter.sha256 for adapter in record.adapters if not adapter.is_refused}
    serving = serving_adapters(record)
    shards = list(plan.shards)
    for shard_id in affected:
        planned, names = shards[shard_id], [name for name in plan.adapter_names[shard_id] if name in served]
        adapter_ids = {served[name] for name in names}
        shard = _served_by(planned, [adapter for adapter in serving if adapter.adapter_id in adapter_ids])
        # Other content under the same names is no other work.
        is_other_work = planned.adapters != shard.adapters and set(planned.adapters) != set(map(before.get, names))
        shards[shard_id] = shard
        if shard_id not in committed and not is_other_work:
            continue
        check()
        rows = read_shard(store, record, shard_id)
        if shard_id in committed:
            reopen_shard(store, record, rows)
        if is_other_work:
            shards[shard_id] = _refreshed(shard, rows, length_share)
    refreshed = replace(plan, shards=tuple(shards))
    if refreshed != plan:
        store.write_plan_facts(plan_facts(refreshed))
    return refreshed


def reopen_shard(store: JobStore, record: JobRecord, rows: ShardRows) -> None:
    """Uncommit a shard's part; its answers that still hold go to the shard's journal first."""
    kept = {}
    if record.spec.stages is None:
        with store.open_part(rows.shard_id) as part:
            kept = answers_in_part(part, rows, record, store.content_of) or {}
    store.clear_wip(rows.shard_id)
    if kept:
        store.append_wip(rows.shard_id, _ATTEMPT, encode_answers(kept.values()))
    store.remove_part(rows.shard_id)


def _served_by(shard: Shard, adapters: Sequence[AdapterInfo]) -> Shard:
    return replace(
        shard,
        adapters=tuple(adapter.adapter_id for adapter in adapters),
        adapter_bytes=sum(adapter.weight_bytes for adapter in adapters),
    )


def _refreshed(shard: Shard, rows: ShardRows, length_share: float) -> Shard:
    """The shard with the work of the rows that its adapters, and the base model, can serve now. A shard that had error
    rows only may need an engine now.
    """
    requests = [request for request in rows.requests if isinstance(request, Request)]
    of_each = Counter(request.adapter_id for request in requests)
    expected = expected_tokens(np.array([r.sampling.max_tokens for r in requests], np.int32), length_share)
    return replace(
        shard,
        mode="unmerged" if shard.adapters and shard.mode == "none" else shard.mode,
        prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        predicted_output_tokens=round(float(expected.sum())),
        longest_output_tokens=round(float(expected.max(initial=0.0))),
        # kept only by plans that deal rows out
        adapter_rows=shard.adapter_rows and tuple(of_each[adapter_id] for adapter_id in (*shard.adapters, None)),
    )
