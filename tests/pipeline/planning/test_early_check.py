"""What is wrong with a small job's rows is known before its engines start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lorabatch.jobs.errors import ErrorBudgetError, InputRowsError
from lorabatch.jobs.opening.opened_job import OpenedJob
from lorabatch.pipeline.dataset.index import list_chunks
from lorabatch.pipeline.planning.early_check import MAX_INDEXED_ROWS, EarlyCheck

PATIENCE_S = 60.0


@pytest.fixture
def opened(prepare_job: Callable[..., Any]) -> Callable[..., OpenedJob]:
    def prepare(table: pa.Table, **options: Any) -> OpenedJob:
        job = prepare_job(table, **options)
        return OpenedJob(job.spec, job.store, job.record, Path(job.spec.model), False, frozenset())

    return prepare


def raise_problems(job: OpenedJob) -> None:
    with EarlyCheck(job, PATIENCE_S) as rows:
        rows.raise_problems()


def test_ids_in_two_rows_and_too_many_wrong_rows_are_found(opened: Callable[..., OpenedJob]) -> None:
    with pytest.raises(InputRowsError, match="1 id appears in more than one row"):
        raise_problems(opened(pa.table({"id": [1, 1], "prompt": ["a", "b"]})))
    with pytest.raises(ErrorBudgetError, match="1 of 2 rows cannot be answered"):
        raise_problems(opened(pa.table({"id": [1, 2], "prompt": ["a", ""]}), max_errors="0"))


def test_the_index_of_a_right_job_is_there_for_its_coordinator(opened: Callable[..., OpenedJob]) -> None:
    job = opened(pa.table({"id": range(5), "prompt": ["a"] * 5}), row_group_rows=2)
    raise_problems(job)
    assert all(job.store.has_index(chunk.chunk_id) for chunk in list_chunks(job.record))


def test_of_large_jobs_only_the_ids_are_read(opened: Callable[..., OpenedJob]) -> None:
    num_rows = MAX_INDEXED_ROWS + 1
    right = opened(pa.table({"id": range(num_rows), "prompt": [""] * num_rows}), row_group_rows=1000, max_errors="0")
    raise_problems(right)
    assert not right.store.has_index(0)
    ids = [*range(num_rows - 2), 7, 2000]
    for column in (pa.array(ids), pa.array(map(str, ids)).dictionary_encode()):
        with pytest.raises(InputRowsError, match="2 ids appear in more than one row") as caught:
            raise_problems(opened(pa.table({"id": column, "prompt": [""] * num_rows}), row_group_rows=1000))
        assert "at rows.parquet:7, rows.parquet:4095;" in str(caught.value)
        assert "at rows.parquet:2000, rows.parquet:4096." in str(caught.value)


def test_rows_without_ids_and_jobs_with_a_plan_are_left_to_the_coordinator(opened: Callable[..., OpenedJob]) -> None:
    without = opened(pa.table({"id": pa.nulls(20, pa.int64()), "prompt": ["a"] * 20}), row_group_rows=1)
    unnamed = opened(pa.table({"prompt": ["a"] * 20}), row_group_rows=1)
    planned = opened(pa.table({"id": [1, 1], "prompt": ["a", "b"]}))
    planned.store.write_plan(b"")
    for job in (without, unnamed, planned):
        raise_problems(job)
        assert not job.store.has_index(0)


def test_what_cannot_be_checked_does_not_stop_the_job(opened: Callable[..., OpenedJob]) -> None:
    job = opened(pa.table({"id": [1], "prompt": ["a"]}))
    with EarlyCheck(job, patience_s=0.0) as rows:
        rows.raise_problems()
    broken = opened(pa.table({"id": [1], "prompt": ["a"]}))
    (Path(broken.store.url) / "_lorabatch" / "rows").write_text("no folder")
    raise_problems(broken)
