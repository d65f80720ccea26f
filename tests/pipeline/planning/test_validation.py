"""Ids that appear in more than one row are found however many files their hashes are in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.record import index_key
from lorabatch.pipeline.planning.external_sort import read_chunks
from lorabatch.pipeline.planning.validation import DuplicateIds


@pytest.mark.parametrize("file_rows", [1, 5, 1000])
def test_doubles_far_apart_are_named_with_their_places(prepare_job: Callable[..., Any], file_rows: int) -> None:
    job = prepare_job(pa.table({"id": [*range(40), 7, 39], "prompt": ["a"] * 42}), row_group_rows=10)
    job.index()
    with DuplicateIds(42, file_rows) as ids:
        for chunk in read_chunks(job.store, index_key(job.record), 5, {}):
            ids.add(chunk)
        with pytest.raises(JobRequestError, match="2 ids appear in more than one row") as caught:
            ids.refuse(job.store, "id")
    assert {"7 at rows.parquet:7, rows.parquet:40", "39 at rows.parquet:39, rows.parquet:41"} == set(
        re.findall(r"\d+ at rows.parquet:\d+, rows.parquet:\d+", str(caught.value))
    )


def test_ids_whose_hashes_agree_by_chance_and_rows_without_one_are_let_through(
    prepare_job: Callable[..., Any],
) -> None:
    job = prepare_job(pa.table({"id": range(6), "prompt": ["a"] * 6}))
    job.index()
    (rows,) = read_chunks(job.store, index_key(job.record), 1, {})
    rows["id_hash"] = np.array([5, 5, 5, 0, 0, 9], np.uint64)
    with DuplicateIds(6, 2) as ids:
        ids.add(rows)
        ids.refuse(job.store, "id")


def test_no_rows_have_no_doubles(prepare_job: Callable[..., Any]) -> None:
    with DuplicateIds(0, 10) as ids:
        ids.refuse(prepare_job(pa.table({"id": [1], "prompt": ["a"]})).store, "id")
