"""Adapters that change between runs cost their own rows and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from lorabatch.jobs.record import AdapterRecord, JobRecord
from lorabatch.pipeline.planning import read_plan
from lorabatch.pipeline.reader import read_shard
from lorabatch.pipeline.reopening import reopen_shards
from lorabatch.pipeline.row_answer import decode_journal
from lorabatch.pipeline.writer import part_bytes

NAMES = ["alpha", "beta", None, "broken", "gamma"]


@pytest.fixture
def finished(prepare_job: Callable[..., Any], answer_by_echo: Callable[..., Any]) -> Any:
    """A finished job of 25 rows in shards that mix adapters."""
    table = pa.table({"id": range(25), "prompt": [f"p{i}" for i in range(25)], "adapter": NAMES * 5})
    job = prepare_job(table, rows_per_shard=50)
    for rows in job.shards():
        part = part_bytes(rows, answer_by_echo(rows), job.record)
        job.store.commit_part(rows.shard_id, part)
    job.store.mark_success()
    return job


def with_adapters(record: JobRecord, *adapters: AdapterRecord) -> JobRecord:
    changed = {adapter.name: adapter for adapter in (*record.adapters, *adapters)}
    return record.model_copy(update={"adapters": tuple(changed.values())})


def kept(job: Any) -> dict[bytes, str | None]:
    journals = [j for shard in read_plan(job.store).shards for j in job.store.read_wip(shard.shard_id)]
    return {answer.fingerprint: answer.adapter_sha256 for journal in journals for answer in decode_journal(journal)}


def shards_with(job: Any, name: str) -> set[int]:
    return {i for i, names in enumerate(read_plan(job.store).adapter_names) if name in names}


def test_only_shards_with_rows_of_the_changed_adapter_are_opened_again(finished: Any) -> None:
    plan, committed = read_plan(finished.store), finished.store.committed_parts()
    record = with_adapters(finished.record, finished.record.adapters[0].model_copy(update={"sha256": "d" * 64}))
    refreshed, reopened = reopen_shards(finished.store, record, plan, {"alpha"})
    assert set(reopened) == shards_with(finished, "alpha")
    assert set(finished.store.committed_parts()) == set(committed) - set(reopened)
    assert not finished.store.is_finished()
    assert refreshed == plan
    assert set(kept(finished).values()) <= {None, "b" * 64}


def test_answers_of_other_rows_in_these_shards_are_kept(finished: Any) -> None:
    plan = read_plan(finished.store)
    before = {shard.shard_id: read_shard(finished.store, finished.record, shard.shard_id) for shard in plan.shards}
    beta = finished.record.adapters[1].model_copy(update={"sha256": "d" * 64})
    _, reopened = reopen_shards(finished.store, with_adapters(finished.record, beta), plan, {"beta"})
    expected = {
        fingerprint
        for shard_id in reopened
        for request, fingerprint in zip(before[shard_id].requests, before[shard_id].fingerprints, strict=True)
        if request.adapter_id == "a" * 64
    }
    assert expected
    assert set(kept(finished)) == expected


def test_repeating_it_after_a_crash_loses_and_doubles_nothing(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(finished.store)
    beta = finished.record.adapters[1].model_copy(update={"sha256": "d" * 64})
    record = with_adapters(finished.record, beta)

    def killed(shard_id: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finished.store, "remove_part", killed)
        with pytest.raises(KeyboardInterrupt):
            reopen_shards(finished.store, record, plan, {"beta"})
    assert len(finished.store.committed_parts()) == len(plan.shards)
    _, reopened = reopen_shards(finished.store, record, plan, {"beta"})
    journals = [journal for shard_id in reopened for journal in finished.store.read_wip(shard_id)]
    answers = [answer.fingerprint for journal in journals for answer in decode_journal(journal)]
    assert len(answers) == len(set(answers)) == 5


def test_rows_of_a_repaired_or_new_adapter_get_their_engine(finished: Any) -> None:
    plan = read_plan(finished.store)
    gamma = AdapterRecord(name="gamma", url="/gamma", verdict="exact", sha256="e" * 64, rank=4)
    broken = finished.record.adapters[2].model_copy(update={"verdict": "exact", "sha256": "f" * 64})
    refreshed, reopened = reopen_shards(
        finished.store, with_adapters(finished.record, gamma, broken), plan, {"gamma", "broken"}
    )
    assert reopened
    assert all(not plan.shards[i].has_engine_work for i in reopened)
    assert all(refreshed.shards[i].has_engine_work for i in reopened)
    assert read_plan(finished.store) == refreshed


def test_nothing_changed_means_nothing_is_touched(finished: Any) -> None:
    plan = read_plan(finished.store)
    assert reopen_shards(finished.store, finished.record, plan, set()) == (plan, ())
    assert finished.store.is_finished()
