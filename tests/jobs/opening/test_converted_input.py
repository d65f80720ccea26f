"""Input that is not Parquet: written once into the output, known by its content, and gone again with a refused job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lorabatch
from lorabatch.jobs.errors import JobRequestError, OutputConflictError
from lorabatch.jobs.opening.opened_job import OpenedJob, open_job
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.notes import job_notes

ROWS = [{"id": f"00{i}", "prompt": f"number {i}", "n": i} for i in range(5)]


@pytest.fixture
def given(weightless_model: Path, tmp_path: Path) -> dict[str, Any]:
    """A job without weights whose input is a CSV file."""
    (tmp_path / "rows.csv").write_text(pd.DataFrame(ROWS).to_csv(index=False))
    return {
        "model": str(weightless_model),
        "input": str(tmp_path / "rows.csv"),
        "output": str(tmp_path / "out"),
        "load_format": "dummy",
        "max_tokens": 8,
    }


def opened(given: dict[str, Any], **changes: Any) -> OpenedJob:
    return open_job(JobSpec(**given | changes))


def table_of(job: OpenedJob) -> pa.Table:
    options = job.spec.storage_options
    files = [fsspec.open(file.url, "rb", **options) for file in job.record.input.files]
    tables = []
    for file in files:
        with file as opened_file:
            tables.append(pq.read_table(opened_file))
    return pa.concat_tables(tables)


def kept(given: dict[str, Any]) -> list[Path]:
    """The converted files in the output."""
    return sorted(Path(given["output"], "_lorabatch", "input").rglob("*.parquet"))


def age(path: Path) -> None:
    """Let a file be an hour old, so that its time of change says that it is the same."""
    os.utime(path, (time.time() - 3600,) * 2)


def test_rows_are_written_once_into_the_output_and_used_again(given: dict[str, Any]) -> None:
    age(Path(given["input"]))
    job = opened(given)
    assert table_of(job).to_pylist() == ROWS
    (file,) = kept(given)
    assert job.record.input.files[0].url == str(file)
    assert job.record.input.files[0].name == "rows.csv"
    before = file.stat()
    age(file)
    again = opened(given)
    assert again.record.job_id == job.record.job_id
    assert kept(given) == [file]
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
    assert "input: CSV, read as 3 columns: id string, prompt string, n int64" in job_notes(job.record)


def test_a_file_of_the_same_content_and_another_time_is_the_same_input(given: dict[str, Any]) -> None:
    job = opened(given)
    Path(given["input"]).touch()
    assert opened(given).record.job_id == job.record.job_id
    assert opened(given, verify=True).record.job_id == job.record.job_id
    assert len(kept(given)) == 1


def test_a_source_with_other_rows_is_another_job_whatever_its_size_and_statistics(given: dict[str, Any]) -> None:
    opened(given)
    path = Path(given["input"])
    text = path.read_text()
    for changed in (text.replace("number 2", "number 7"), text.replace("2,number 2", "2,numbre 2"), text + "x,y,6\n"):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(OutputConflictError, match="its files or columns have changed"):
            opened(given)
        assert len(kept(given)) == 1
    path.write_text(text)
    assert table_of(opened(given)).to_pylist() == ROWS
    path.write_text(text + "x,y,6\n")
    assert table_of(opened(given, overwrite=True)).num_rows == 6
    assert len(kept(given)) == 1
    assert not list(Path(given["output"]).rglob(".staging*"))


def test_a_refused_request_leaves_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(JobRequestError) as caught:
        opened(given, columns={"prompt": "no such"}, adapters=str(tmp_path / "none"))
    assert len(caught.value.problems) == 2
    assert not Path(given["output"]).exists()
    Path(given["output"]).mkdir()
    with pytest.raises(JobRequestError):
        opened(given, columns={"prompt": "no such"})
    assert list(Path(given["output"]).iterdir()) == []


def test_all_problems_of_the_request_and_of_its_rows_are_listed(given: dict[str, Any], tmp_path: Path) -> None:
    Path(given["input"]).write_text("id,prompt\n1,a\n2,b,c\n")
    with pytest.raises(JobRequestError) as caught:
        opened(given, adapters=str(tmp_path / "none"))
    assert "line 3: 3 fields, expected 2" in str(caught.value)
    assert "adapters=" in str(caught.value)


def test_started_over_with_what_is_in_the_output_keeps_it(given: dict[str, Any]) -> None:
    first = opened(given)
    (file,) = kept(given)
    again = opened(given, overwrite=True)
    assert again.record.job_id != first.record.job_id
    assert kept(given) == [file]
    assert table_of(again).to_pylist() == ROWS
    pq.write_table(pa.table({"prompt": ["a"]}), Path(given["input"]).with_suffix(".parquet"))
    opened(given, overwrite=True, input=str(Path(given["input"]).with_suffix(".parquet")))
    assert kept(given) == []


def test_converted_rows_that_were_lost_are_made_again(given: dict[str, Any]) -> None:
    job = opened(given)
    (file,) = kept(given)
    file.unlink()
    assert opened(given).record.job_id == job.record.job_id
    assert kept(given) == [file]


@pytest.mark.parametrize("kind", ["pandas", "arrow", "rows", "columns"])
def test_a_table_is_known_by_its_content(given: dict[str, Any], kind: str) -> None:
    def table(rows: list[dict[str, Any]] = ROWS) -> Any:
        match kind:
            case "pandas":
                return pd.DataFrame(rows)
            case "arrow":
                whole = pa.Table.from_pylist(rows)
                return pa.concat_tables([whole.slice(0, 2), whole.slice(2)])
            case "columns":
                return pa.Table.from_pylist(rows).to_pydict()
        return [dict(row) for row in rows]

    job = opened(given, input=table())
    assert table_of(job).to_pylist() == ROWS
    assert job.spec.inputs == job.record.spec.inputs
    assert job.spec.inputs[0].startswith("table://")
    again = opened(given, input=table())
    assert again.record.job_id == job.record.job_id
    resumed = open_job(job.store.read_record().job_spec())
    assert resumed.record.job_id == job.record.job_id
    assert table_of(resumed).to_pylist() == ROWS
    with pytest.raises(OutputConflictError, match="input: was 'table://"):
        opened(given, input=table([*ROWS[:4], {**ROWS[4], "n": 17}]))
    assert len(kept(given)) == 1


def test_a_table_that_is_gone_from_the_output_is_asked_for_again(given: dict[str, Any]) -> None:
    job = opened(given, input=pd.DataFrame(ROWS))
    kept(given)[0].unlink()
    with pytest.raises(JobRequestError, match=r"the output has no more. Give it again: lorabatch.run\(input=…\)"):
        open_job(job.store.read_record().job_spec())
    assert table_of(opened(given, input=pd.DataFrame(ROWS))).to_pylist() == ROWS


def test_tables_and_files_are_one_input_in_their_order(given: dict[str, Any]) -> None:
    job = opened(given, input=[pa.Table.from_pylist(ROWS[:1]), given["input"], [{"id": "x", "prompt": "y", "n": 9}]])
    assert table_of(job).to_pylist() == [ROWS[0], *ROWS, {"id": "x", "prompt": "y", "n": 9}]


def test_columns_with_a_role_of_text_are_text(given: dict[str, Any]) -> None:
    Path(given["input"]).write_text("id,adapter,question,temperature,max_tokens\n1,,2,0.70,4\n2,,3,1,5\n")
    job = opened(given, columns={"prompt": "question"}, row_settings=["temperature", "max_tokens"])
    table = table_of(job)
    assert table.schema.field("question").type == table.schema.field("adapter").type == pa.string()
    assert table.column("temperature").to_pylist() == [0.7, 1.0]
    assert table.column("max_tokens").to_pylist() == [4, 5]


def test_an_output_and_an_input_in_a_bucket(given: dict[str, Any], s3_options: dict[str, Any]) -> None:
    fs = fsspec.filesystem("s3", **s3_options)
    fs.mkdir("converted-bucket")
    fs.put(given["input"], "converted-bucket/in/rows.csv")
    places = {"input": "s3://converted-bucket/in", "output": "s3://converted-bucket/out", "storage_options": s3_options}
    job = opened(given, **places)
    assert table_of(job).to_pylist() == ROWS
    names = sorted(fs.find("converted-bucket/out/_lorabatch/input"))
    assert [name.rpartition("/")[2] for name in names] == ["00000.parquet", "sources.json"]
    before = fs.info(names[0])["LastModified"]
    assert opened(given, **places).record.job_id == job.record.job_id
    assert fs.info(names[0])["LastModified"] == before
    fs.pipe_file("converted-bucket/in/rows.csv", b"id,prompt,n\n1,other,2\n")
    with pytest.raises(OutputConflictError):
        opened(given, **places)
    assert sorted(fs.find("converted-bucket/out/_lorabatch/input")) == names


_KILLED = """
import json, os, signal, sys
from lorabatch.jobs.input.conversion import {module}
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.spec import JobSpec
real, calls = {module}.{name}, 0
def dies(*args, **more):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
{module}.{name} = dies
open_job(JobSpec(**json.loads(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("converter", "read_csv", 2),
        pytest.param("converter", "write_parquet", 2, marks=pytest.mark.long),
        pytest.param("converter", "os.replace", 1, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_killed_while_it_converts_leaves_nothing_that_counts(
    given: dict[str, Any], tmp_path: Path, module: str, name: str, call: int
) -> None:
    given["input"] = [str(tmp_path / "rows.csv"), str(tmp_path / "more.csv")]
    (tmp_path / "more.csv").write_text("id,prompt,n\nlast,one,7\n")
    code = _KILLED.format(module=module, name=name, call=call)
    killed = subprocess.run([sys.executable, "-P", "-c", code, json.dumps(given)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not Path(given["output"], "_lorabatch", "job.json").exists()
    job = opened(given)
    assert table_of(job).to_pylist() == [*ROWS, {"id": "last", "prompt": "one", "n": 7}]
    assert len(kept(given)) == 2
    assert not list(Path(given["output"]).rglob(".staging*"))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.csv", "b.jsonl"], r"files of several formats there \(CSV, JSON Lines\): 1 .csv, 1 .jsonl. Name one"),
        (["train/state.json", "dataset_dict.json", "test/state.json"], "a data set with the splits test, train"),
        (["a.xlsx"], r"no Parquet files there \(1 .xlsx\). Expected a file of Parquet, CSV"),
    ],
)
def test_folders_whose_rows_are_not_clear_are_refused(
    given: dict[str, Any], tmp_path: Path, names: list[str], expected: str
) -> None:
    for name in names:
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text("{}")
    with pytest.raises(JobRequestError, match=expected):
        opened(given, input=str(tmp_path / "folder"))


def test_other_files_of_a_folder_are_named(given: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "folder" / "tenant=a"
    folder.mkdir(parents=True)
    (folder / "x.jsonl").write_text('{"prompt": "hello"}\n')
    (folder / "about.json").write_text("{}")
    (folder / "notes.txt").write_text("none")
    job = opened(given, input=str(tmp_path / "folder"))
    assert job.record.input.unread == ("about.json", "notes.txt")
    assert job.record.input.files[0].partition == {"tenant": "a"}
    notes = job_notes(job.record)
    assert "input: JSON Lines, read as 2 columns: prompt string, tenant string" in notes
    assert "input: files that are not read (1 .json, 1 .txt): about.json, notes.txt" in notes


def test_a_data_set_that_was_saved_is_the_files_that_it_lists(given: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    pieces = {"data-00000.arrow": table.slice(0, 3), "data-00001.arrow": table.slice(3), "cache-1.arrow": table}
    for name, piece in pieces.items():
        with pa.ipc.new_stream(folder / name, piece.schema) as writer:
            writer.write_table(piece)
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": name} for name in pieces if name.startswith("data")]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    job = opened(given, input=str(folder))
    assert table_of(job).to_pylist() == ROWS
    assert "cache-1.arrow" in job.record.input.unread
    (folder / "state.json").unlink()
    assert table_of(opened(given, input=str(folder), overwrite=True)).num_rows == 5  # as caches of the hub are
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x"}]}))
    with pytest.raises(JobRequestError, match="names files outside of the folder"):
        opened(given, input=str(folder), overwrite=True)


def test_a_plan_of_a_table_writes_nothing_into_an_output(given: dict[str, Any]) -> None:
    plan = lorabatch.plan(**given | {"input": pd.DataFrame(ROWS)})
    assert plan.num_rows == 5
    # pandas 3 gives Arrow long strings, pandas 2 short ones
    read = re.compile(r"pandas\.DataFrame, read as 3 columns: id (large_)?string\b")
    assert any(read.search(note) for note in plan.notes), plan.notes
    assert not Path(given["output"]).exists()
