"""Sweeps of wide shape: the files of the output have a row for each row of the input and a struct for each adapter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import echo_engine
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from echo_job import ECHO_FOLDER, EchoJob, wait_until

import lorabatch
from lorabatch.jobs.errors import JobRequestError, OutputConflictError
from lorabatch.jobs.report.page import write_report
from lorabatch.tests.end_to_end.bucket import Bucket

WIDE: dict[str, Any] = {"for_each_adapter": "all", "include_base": True, "shape": "wide"}
# Folders of adapters -> names that are no words, have the separators of paths and SQL, or another alphabet.
ODD = {"rank1": "run 7.ckpt=5", "rank8": 'a-b\'s "c"', "rank20": "übung", "rank64": "completion"}


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i:03d}", "prompt_token_ids": [3 + i % 300, 4 + i // 300], "note": i} for i in range(count)]


def expected(job: EchoJob, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row of the input, in its order, with what each adapter must have answered."""
    sha = {adapter.name: adapter.sha256 for adapter in job.record.adapters}
    return [
        {"id": row["id"], "note": row["note"]}
        | {name or "base_model": echo_engine.answer(row["prompt_token_ids"], sha.get(name), 4) for name in (None, *sha)}
        for row in rows
    ]


def found(job: EchoJob) -> list[dict[str, Any]]:
    """The rows of the output, as any reader of a Parquet folder finds them, in their order."""
    files = sorted(job.output.glob("*.parquet"))
    table = pa.concat_tables(pq.read_table(file) for file in files)
    assert ds.dataset(job.output, format="parquet").count_rows() == table.num_rows
    return [
        {name: value["completion"] if isinstance(value, dict) else value for name, value in row.items()}
        for row in table.drop_columns(["prompt_token_ids"]).to_pylist()
    ]


def num_traced(path: Path) -> int:
    return sum(map(int, path.read_text().split())) if path.exists() else 0


def test_the_output_has_each_row_once_with_all_answers(shared_client: Any, echo_job: EchoJob, tmp_path: Path) -> None:
    for folder, name in ODD.items():
        (echo_job.adapters / folder).rename(echo_job.adapters / name)
    rows, trace = prompts(40), tmp_path / "trace"
    echo_job.write_input(rows, rows_per_group=11)
    echo_job.set_engine(trace=str(trace))
    result = echo_job.run(shared_client, **WIDE)
    assert (result.num_rows, result.num_errors) == (200, 0)
    assert found(echo_job) == expected(echo_job, rows)
    assert [pq.read_metadata(file).num_rows for file in sorted(echo_job.output.glob("*.parquet"))] == [13, 13, 14]
    query = f"""SELECT "a-b's ""c""\".completion FROM '{echo_job.output}/*.parquet' WHERE id = 'r007'"""
    [(answer,)] = duckdb.sql(query).fetchall()
    assert answer == expected(echo_job, rows)[7]['a-b\'s "c"']

    job = lorabatch.Job(str(echo_job.output))
    long = job.to_arrow(wide=False)
    assert (long.num_rows, set(long["adapter"].to_pylist())) == (200, {None, *ODD.values()})
    assert job.to_arrow().equals(job.to_arrow(wide=True))
    assert job.to_arrow().num_rows == len(job.to_pandas()) == len(list(job.iter_rows(["id", "completion"]))) == 40
    assert "<h1" in write_report(echo_job.store)
    assert json.loads((echo_job.output / "_lorabatch" / "summary.json").read_text())["num_rows"] == 200
    computed = num_traced(trace)

    for damage in (lambda file: file.unlink(), lambda file: file.write_bytes(b"PAR1"), _copied_beside):
        before = {file.name: file.read_bytes() for file in echo_job.output.glob("*.parquet")}
        damage(echo_job.output / "part-00001.parquet")
        assert job.status().headline == "done, parts changed since"
        assert echo_job.run(shared_client, **WIDE).num_reused == 200
        assert job.status().headline == "done"
        assert {file.name: file.read_bytes() for file in echo_job.output.glob("*.parquet")} == before
    # what a file holds is not looked at for a status; --verify writes all files again
    (echo_job.output / "part-00001.parquet").write_bytes(bytes(len(before["part-00001.parquet"])))
    assert job.status().headline == "done"
    assert echo_job.run(shared_client, verify=True, **WIDE).num_reused == 200
    assert {file.name: file.read_bytes() for file in echo_job.output.glob("*.parquet")} == before
    assert num_traced(trace) == computed, "wide files are made of the parts, and no engine computes anything"


def _copied_beside(file: Path) -> None:
    shutil.copy(file, file.with_name("part-00007.parquet"))


def test_a_further_checkpoint_computes_its_own_column_only(
    shared_client: Any, echo_job: EchoJob, tmp_path: Path
) -> None:
    (echo_job.adapters / "rank64").rename(tmp_path / "rank64")
    rows, trace = prompts(40), tmp_path / "trace"
    echo_job.write_input(rows)
    echo_job.set_engine(trace=str(trace))
    long = {**WIDE, "shape": "long"}
    echo_job.run(shared_client, **long)
    with pytest.raises(OutputConflictError, match=r"shape: was 'long', now 'wide'"):
        echo_job.run(shared_client, **WIDE)
    # another shape is no other question
    assert (
        "160 rows keep their answers, none is computed"
        in lorabatch.plan(**echo_job.options(update=True, **WIDE)).to_text()
    )
    assert echo_job.run(shared_client, update=True, **WIDE).num_reused == 160
    assert found(echo_job) == expected(echo_job, rows)
    computed = num_traced(trace)

    shutil.copytree(tmp_path / "rank64", echo_job.adapters / "rank64")
    assert "160 rows keep their answers, 40 new" in lorabatch.plan(**echo_job.options(update=True, **WIDE)).to_text()
    result = echo_job.run(shared_client, update=True, **WIDE)
    assert (result.num_rows, result.num_reused) == (200, 160)
    assert found(echo_job) == expected(echo_job, rows)
    assert num_traced(trace) == computed + 40 * 4

    # an adapter with another content under its name: the plain command computes its column
    shutil.rmtree(echo_job.adapters / "rank20")
    shutil.copytree(echo_job.adapters / "rank1", echo_job.adapters / "rank20")
    echo_job.run(shared_client, **WIDE)
    assert found(echo_job) == expected(echo_job, rows)
    assert num_traced(trace) == computed + 2 * 40 * 4

    # rows that leave and come, and back to the other shape
    rows = [*rows[5:], *prompts(43)[40:]]
    echo_job.write_input(rows)
    result = echo_job.run(shared_client, update=True, **WIDE)
    assert (result.num_rows, result.num_reused) == (190, 175)
    assert found(echo_job) == expected(echo_job, rows)
    assert echo_job.run(shared_client, update=True, **long).num_reused == 190
    assert len(echo_job.rows()) == 190
    assert not list(echo_job.output.glob("_lorabatch/parts/*"))


@pytest.mark.long
@pytest.mark.parametrize("update", [False, True])
def test_a_command_killed_while_files_are_written_goes_on_with_its_parts(
    echo_job: EchoJob, tmp_path: Path, update: bool
) -> None:
    rows, trace = prompts(160), tmp_path / "trace"
    echo_job.write_input(rows)
    if update:
        echo_job.run(**WIDE | {"include_base": False})
        before = sorted((file.name, file.read_bytes()) for file in echo_job.output.glob("*.parquet"))
    echo_job.set_engine(trace=str(trace))
    options = WIDE | {"rows_per_shard": 4, "update": update}
    job_file = tmp_path / "job.yaml"
    job_file.write_text(json.dumps(echo_job.options(**options)))
    words = [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), "run", str(job_file)]
    client = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = echo_job.output / "_lorabatch" / "update-001" if update else echo_job.output
    wait_until(lambda: len(list(folder.glob("part-*.parquet"))) >= 2)
    client.kill()
    client.wait(60)
    assert 2 <= len(list(folder.glob("part-*.parquet"))) < 40, "the command was killed too late for this test"
    assert not (folder / "_SUCCESS").exists()
    if update:
        assert before == sorted((file.name, file.read_bytes()) for file in echo_job.output.glob("*.parquet"))
    computed = num_traced(trace)
    result = echo_job.run(**options)
    assert result.num_reused == result.num_rows == 800
    assert num_traced(trace) == computed
    assert found(echo_job) == expected(echo_job, rows)


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({}, {"for_each_adapter": ()}, "shape='wide': is for jobs of several adapters a row"),
        ({"rank8": 1}, {}, "adapter 'rank8': 'rank8' is its column and another one"),
        ({"base_model": 1}, {}, "'base_model' is its column and another one"),
        ({}, {"adapters": {"id": "rank8"}}, "adapter 'id': 'id' is its column and another one"),
        ({}, {"adapters": {"sample": "rank8"}, "n": 2}, "adapter 'sample': 'sample' is its column and another one"),
        ({}, {"adapters": {"base_model": "rank8"}}, "adapter 'base_model': 'base_model' is its column and another"),
        ({"a_rank8": 1}, {"output_prefix": "a_"}, "'a_rank8' is its column and another one"),
        ({}, {"shape": "broad"}, "shape='broad'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    echo_job: EchoJob, row: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    echo_job.write_input([{"id": 1, "prompt_token_ids": [3]} | row])
    given = WIDE | options
    if isinstance(given.get("adapters"), dict):
        given["adapters"] = {name: str(echo_job.adapters / folder) for name, folder in given["adapters"].items()}
    if not given["for_each_adapter"]:
        del given["include_base"]
    with pytest.raises(JobRequestError) as planning:
        lorabatch.plan(**echo_job.options(**given))
    with pytest.raises(JobRequestError) as running:
        echo_job.run(**given)
    assert said in str(planning.value)
    assert said in str(running.value)
    assert not echo_job.store.contents().has_job


@pytest.mark.long
def test_a_prefix_is_before_the_columns_of_adapters(shared_client: Any, echo_job: EchoJob) -> None:
    echo_job.write_input([{**row, "rank8": "data", "completion": "x"} for row in prompts(3)])
    echo_job.run(shared_client, output_prefix="a_", **WIDE)
    table = lorabatch.Job(str(echo_job.output)).to_arrow()
    names = ["id", "prompt_token_ids", "note", "rank8", "completion", "a_base_model"]
    assert table.column_names == [*names, "a_rank1", "a_rank20", "a_rank64", "a_rank8"]
    assert table.schema.field("a_rank8").type.get_field_index("completion") == 0
    assert table["rank8"].to_pylist() == ["data"] * 3


def test_a_job_without_rows_has_one_file_with_the_columns(shared_client: Any, echo_job: EchoJob) -> None:
    echo_job.write_input(prompts(1))
    pq.write_table(pq.read_table(echo_job.folder / "input.parquet").slice(0, 0), echo_job.folder / "input.parquet")
    echo_job.run(shared_client, **WIDE)
    assert found(echo_job) == []
    assert "rank8" in pq.read_schema(echo_job.output / "part-00000.parquet").names


@pytest.mark.long
def test_a_wide_output_in_an_object_store_is_updated_there(
    shared_client: Any, echo_job: EchoJob, bucket: Bucket, tmp_path: Path
) -> None:
    (echo_job.adapters / "rank64").rename(tmp_path / "rank64")
    rows, url = prompts(40), "s3://bucket/out"
    echo_job.write_input(rows)
    options = WIDE | {"output": url, "storage_options": bucket.options, "rows_per_shard": 15}
    echo_job.run(shared_client, **options)
    shutil.copytree(tmp_path / "rank64", echo_job.adapters / "rank64")
    result = echo_job.run(shared_client, update=True, **options)
    assert (result.num_rows, result.num_reused) == (200, 160)
    job = lorabatch.Job(url, bucket.options)
    sha = {adapter.name: adapter.sha256 for adapter in job.status().record.adapters}
    found = job.to_arrow()
    assert found["id"].to_pylist() == [row["id"] for row in rows]
    for name in (None, *sha):
        texts = [value["completion"] for value in found[name or "base_model"].to_pylist()]
        assert texts == [echo_engine.answer(row["prompt_token_ids"], sha.get(name), 4) for row in rows]
    assert job.to_arrow(wide=False).num_rows == 200
    assert {"part-00000.parquet", "part-00001.parquet", "part-00002.parquet", "_SUCCESS"} <= bucket.names("out")
    assert "update-001" not in bucket.names("out/_lorabatch")
