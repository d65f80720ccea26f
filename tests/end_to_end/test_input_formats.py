"""Whole jobs over input that is not Parquet: every row is answered once, and the same input again is the same job."""

from __future__ import annotations

import json
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import polars as pl
import pytest
from distributed import Client
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.jobs.errors import OutputConflictError
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run
from lorabatch.tests.end_to_end.bucket import Bucket

ROWS = make_rows(100)


def given(kind: str, job: EchoJob) -> Any:
    match kind:
        case "JSON Lines":
            (job.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
            return str(job.folder / "rows.jsonl")
        case "polars":
            return pl.DataFrame(ROWS)
        case "dask":
            with dask.config.set({"dataframe.convert-string": False}):  # else Dask makes text of lists
                return dd.from_pandas(pd.DataFrame(ROWS), npartitions=3)
    return ROWS


@pytest.mark.parametrize(
    "kind",
    [
        "JSON Lines",
        pytest.param("polars", marks=pytest.mark.long),
        pytest.param("dask", marks=pytest.mark.long),
        pytest.param("rows", marks=pytest.mark.long),
    ],
)
def test_rows_of_other_formats_are_answered_once(echo_job: EchoJob, shared_client: Client, kind: str) -> None:
    watcher = Watcher(lambda state: False, lambda: None)
    result = echo_job.run(shared_client, watcher, input=given(kind, echo_job))
    assert (result.num_rows, result.num_errors) == (100, 0)
    echo_job.assert_answered(ROWS)
    assert any("read as 4 columns: id int64, adapter" in note for note in watcher.notes)
    before = echo_job.parts()
    assert echo_job.run(shared_client, input=given(kind, echo_job)) == result
    resumed = echo_job.record.job_spec()
    assert echo_job.run(shared_client, input=resumed.input) == result
    assert echo_job.parts() == before
    with pytest.raises(OutputConflictError):
        echo_job.run(shared_client, input=[*ROWS[1:], {**ROWS[0], "note": "another"}])


@pytest.mark.long
def test_input_and_output_in_a_bucket(echo_job: EchoJob, shared_client: Client, bucket: Bucket) -> None:
    text = "id,adapter,prompt\n" + "".join(f"{i:03d},{'rank1' if i % 2 else ''},number {i}\n" for i in range(40))
    for name, rows in (("a", text), ("b", text.replace("\n0", "\n1"))):
        bucket.fs.pipe_file(f"bucket/rows/{name}.csv", rows.encode())
    options = echo_job.options(input="s3://bucket/rows", output="s3://bucket/out", storage_options=bucket.options)
    job = JobSpec(**options)
    first = run(job, client=shared_client, engine_factory="echo_engine:EchoEngine")
    assert (first.num_rows, first.num_errors) == (80, 0)
    assert run(job, client=shared_client, engine_factory="echo_engine:EchoEngine") == first
    with bucket.fs.open("bucket/out/part-00000.parquet", "rb") as file:
        assert set(pd.read_parquet(file)["id"].str.len()) == {3}
