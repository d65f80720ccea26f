"""Adapters changed between two runs of a job: shards with their rows are opened again, other rows are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..jobs.record import JobRecord
from ..jobs.store import JobStore
from ..scheduler.waves import Shard
from .planning import JobPlan, plan_facts
from .reader import read_shard
from .row_answer import encode_answers
from .writer import answers_in_part

_ATTEMPT = "kept"


def reopen_shards(
    store: JobStore, record: JobRecord, plan: JobPlan, changed: Collection[str]
) -> tuple[JobPlan, tuple[int, ...]]:
    """Uncommit every part with a row of a changed adapter; answers of its other rows go to the shard's journal.

    `record`: with the adapters as they are now. Needs the prepared rows. Safe to repeat after a crash: a part is
    removed only after what is kept of it is written. Returns the plan with what these shards need now, and the ids
    of the shards opened again.
    """
    affected = [i for i, names in enumerate(plan.adapter_names) if not set(changed).isdisjoint(names)]
    committed = store.committed_parts()
    reopened = tuple(shard_id for shard_id in affected if shard_id in committed)
    for shard_id in reopened:
        _reopen(store, record, shard_id)
    serving = {adapter.name for adapter in record.adapters if not adapter.is_refused}
    shards = list(plan.shards)
    for shard_id in affected:
        shards[shard_id] = _refreshed(shards[shard_id], plan.adapter_names[shard_id], serving)
    refreshed = replace(plan, shards=tuple(shards))
    if refreshed != plan:
        store.write_plan_facts(plan_facts(refreshed))
    return refreshed, reopened


def _reopen(store: JobStore, record: JobRecord, shard_id: int) -> None:
    rows = read_shard(store, record, shard_id)
    with store.open_part(shard_id) as part:
        kept = answers_in_part(part, rows, record)
    store.clear_wip(shard_id)
    if kept:
        store.append_wip(shard_id, _ATTEMPT, encode_answers(kept.values()))
    store.remove_part(shard_id)


def _refreshed(shard: Shard, names: Collection[str], serving: Collection[str]) -> Shard:
    """The same rows; adapters that can serve them now. A shard of errors only may need an engine after all."""
    adapters = tuple(name for name in names if name in serving)
    mode = "unmerged" if adapters and shard.mode == "none" else shard.mode
    return replace(shard, adapters=adapters, mode=mode)
