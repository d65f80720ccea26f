"""What an attempt at a shard finds of those before it: nothing is computed twice, nothing out of date is believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.pipeline.dataset.answers import BegunRow, RowAnswer, encode_answers, encode_begun
from lorabatch.pipeline.dataset.reader import ShardRows, read_shard
from lorabatch.pipeline.dataset.writer import part_bytes
from lorabatch.pipeline.worker.run_shard import read_done, read_kept, work_of
from lorabatch.scheduler.planning.bound import AdapterWork


@pytest.fixture
def shard(prepare_job: Callable[..., Any]) -> tuple[Any, ShardRows]:
    """A job and its first shard: rows of two adapters, planned and not begun."""
    table = pa.table({"id": range(24), "prompt": [f"p{i}" for i in range(24)], "adapter": ["alpha", "beta"] * 12})
    job = prepare_job(table, rows_per_shard=50)
    rows = job.shards()[0]
    assert {request.adapter_id for request in rows.requests} == {"a" * 64, "b" * 64}
    return job, rows


def begun(rows: ShardRows, number: int, num_tokens: int) -> BegunRow:
    request = rows.requests[number]
    assert isinstance(request, Request)
    return BegunRow(rows.fingerprints[number], request.adapter_id, tuple(range(num_tokens)), ())


def test_rows_are_found_begun_as_far_as_anybody_came_with_them(shard: tuple[Any, ShardRows]) -> None:
    job, rows = shard
    job.store.append_wip(0, "a", encode_begun([begun(rows, 0, 2), begun(rows, 1, 5)]))
    job.store.append_wip(0, "b", encode_begun([begun(rows, 0, 4), begun(rows, 1, 3)]))
    kept = read_kept(job.store, job.record, rows)
    names = [request.request_id for request in rows.requests]
    assert {name: len(row.token_ids) for name, row in kept.begun.items()} == {names[0]: 4, names[1]: 5}
    assert kept.answers == {}


def test_what_was_generated_under_another_adapter_is_not_gone_on_with(shard: tuple[Any, ShardRows]) -> None:
    job, rows = shard
    others = [replace(begun(rows, i, 3), adapter_sha256="d" * 64) for i in range(rows.num_rows)]
    strangers = [replace(begun(rows, i, 3), fingerprint=b"?" * 16) for i in range(rows.num_rows)]
    job.store.append_wip(0, "a", encode_begun(others + strangers))
    assert read_kept(job.store, job.record, rows).begun == {}


def test_a_begun_row_with_all_its_tokens_or_too_many_is_not_believed(shard: tuple[Any, ShardRows]) -> None:
    job, rows = shard
    job.store.append_wip(0, "a", encode_begun([begun(rows, 0, 8), begun(rows, 1, 900)]))
    assert read_kept(job.store, job.record, rows).begun == {}


def test_finished_and_begun_rows_of_one_journal_are_both_kept(
    shard: tuple[Any, ShardRows], answer_by_echo: Callable[..., Any]
) -> None:
    job, rows = shard
    answers = answer_by_echo(rows)
    first = rows.requests[0].request_id
    job.store.append_wip(0, "a", encode_answers([answers[first]]))
    job.store.append_wip(0, "a", encode_begun([begun(rows, 1, 3)]))
    kept = read_kept(job.store, job.record, rows)
    assert (list(kept.answers), list(kept.begun)) == ([first], [rows.requests[1].request_id])


def test_a_part_with_error_rows_is_done_and_is_not_taken_apart(
    shard: tuple[Any, ShardRows], answer_by_echo: Callable[..., Any]
) -> None:
    job, rows = shard
    assert read_done(job.store, job.record, rows) is None
    answers = answer_by_echo(rows)
    name = rows.requests[2].request_id
    answers[name] = replace(answers[name], error="an engine died", completion=None, finish_reason="error")
    job.store.commit_part(0, part_bytes(rows, answers, job.record))
    found = read_done(job.store, job.record, rows)
    assert found is not None
    assert found[name].error == "an engine died"
    assert len(found) == rows.num_rows


def test_a_part_of_a_former_run_is_replaced_and_what_holds_of_it_is_kept(
    shard: tuple[Any, ShardRows], answer_by_echo: Callable[..., Any]
) -> None:
    job, rows = shard
    job.store.commit_part(0, part_bytes(rows, answer_by_echo(rows), job.record))
    alpha = job.record.adapters[0].model_copy(update={"sha256": "d" * 64})
    record = job.record.model_copy(update={"adapters": (alpha, *job.record.adapters[1:])})
    today = read_shard(job.store, record, 0)
    assert read_done(job.store, record, today) is None
    kept = read_kept(job.store, record, today)
    assert set(kept.answers) == {r.request_id for r in rows.requests if r.adapter_id == "b" * 64}
    assert not job.store.is_committed(0)
    assert read_kept(job.store, record, today) == kept


def test_the_work_of_answers_is_what_engines_computed_of_them_in_this_attempt() -> None:
    def answer(adapter_id: str | None, completion_tokens: int, **facts: Any) -> RowAnswer:
        return RowAnswer(b"", adapter_id, "", "stop", 10, completion_tokens, "base", 1, **facts)

    answers = {
        "whole": answer("a", 5, reused_prompt_tokens=0),
        "shared": answer("a", 4, reused_prompt_tokens=8),
        "begun": answer(None, 7),
        "wrong": answer(None, 9, error="it is"),
    }
    work = work_of(answers, {"begun": ExportedRow(Request("begun", (1,), None, SamplingParams()), (5, 5))})
    assert work.adapters == (AdapterWork("a", 2, 12, 7, 4), AdapterWork(None, 1, 10, 4, 4))
    assert work_of({}, {}).adapters == ()
