"""Which columns the output has, by which names, and which of the input's are settings of their rows."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.columns import ANSWER_FIELDS
from lorabatch.jobs.input.file_metadata import SETTINGS_KEY
from lorabatch.jobs.openai_batch.exporting import export_batch
from lorabatch.jobs.openai_batch.importing import import_batch
from lorabatch.jobs.status.notes import job_notes
from lorabatch.pipeline.coordinator.summary import account_parts
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.writer import answers_in_part, part_bytes

Prepare = Callable[..., Any]
Echo = Callable[..., Any]
OURS = [field.name for field in ANSWER_FIELDS]
WEATHER = {
    "id": ["a", "b"], "prompt": ["x", "y"], "n": [12, 40], "temperature": [18.5, 21.5], "choice": ["pos", "neg"],
    "seed": ["s", "t"], "stop": ["A", "B"], "continuation": ["own", "text"], "note": [1, 2],
}  # fmt: skip


def answered(job: Any, answer_by_echo: Echo) -> pa.Table:
    parts = []
    for rows in job.shards():
        part = part_bytes(rows, answer_by_echo(rows), job.record)
        assert answers_in_part(io.BytesIO(part), rows, job.record) == answer_by_echo(rows)
        assert job.store.commit_part(rows.shard_id, part)
        parts.append(pq.read_table(io.BytesIO(part)))
    job.store.write_summary({})
    job.store.mark_success()
    return pa.concat_tables(parts).sort_by("id")


def test_columns_with_names_of_settings_are_data_and_said(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table(WEATHER), row_settings=())
    found = answered(job, answer_by_echo)
    assert found.column_names == [*WEATHER, *OURS]
    assert found.select(list(WEATHER)).to_pydict() == WEATHER
    assert job.record.input.roles == {"id": "id", "prompt": "prompt"}
    (note,) = [note for note in job_notes(job.record) if "look" in note]
    names = "n, temperature, choice, seed, stop, continuation"
    option = "--row-settings n,temperature,choice,seed,stop,continuation"
    assert note == f"input: columns {names} look like settings and are copied; {option} makes them settings"


def test_settings_that_are_asked_for_are_read_and_listed(prepare_job: Prepare) -> None:
    table = pa.table({"prompt": ["x", "y"], "max_tokens": [3, None], "limit": [5, 6], "seed": [7, None]})
    job = prepare_job(table, row_settings="seed", columns={"max_tokens": "limit"})
    requests = [request for rows in job.shards() for request in rows.requests]
    assert sorted((r.sampling.max_tokens, r.sampling.seed) for r in requests) == [(5, 7), (6, 0)]
    notes = job_notes(job.record)
    assert "input: settings of rows are read from columns: max_tokens (limit), seed" in notes
    assert any("column max_tokens looks like a setting and is copied" in note for note in notes)


def test_sampling_parameters_in_a_struct_are_settings(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    values = [{"max_tokens": 3, "stop": ["x"]}, None, {"max_tokens": None, "stop": None}, {"max_tokens": 0, "stop": []}]
    params = pa.array(values, pa.struct([("max_tokens", pa.int32()), ("stop", pa.list_(pa.string()))]))
    table = pa.table({"id": ["a", "b", "c", "d"], "prompt": ["x"] * 4, "sampling_params": params})
    job = prepare_job(table, row_settings=())
    found = answered(job, answer_by_echo)
    asked = {}
    for rows in job.shards():
        for row_id, request in zip(rows.table.column("id").to_pylist(), rows.requests, strict=True):
            is_error = isinstance(request, RowAnswer)
            asked[row_id] = request.error if is_error else (request.sampling.max_tokens, request.sampling.stop)
    assert (asked["a"], asked["b"], asked["c"]) == ((3, ("x",)), (8, ()), (8, ()))
    assert "max_tokens=0" in asked["d"]
    assert found.column("sampling_params").to_pylist() == values


def test_a_prefix_stands_before_every_column_of_ours_and_the_output_is_an_input(
    prepare_job: Prepare, answer_by_echo: Echo, tmp_path: Path
) -> None:
    options = {"output_prefix": "answer_", "n": 2, "logprobs": True, "choice": ["a", "b"], "row_settings": ()}
    table = pa.table({"id": ["a", "b"], "prompt": ["x", ""], "completion": ["gold", "gold"], "choice": ["a", "b"]})
    job = prepare_job(table, **options)
    found = answered(job, answer_by_echo)
    assert found.column_names[:4] == table.column_names
    assert all(name.startswith("answer_") for name in found.column_names[4:])
    assert {f"answer_{name}" for name in [*OURS, "sample", "choice", "token_ids"]} <= set(found.column_names)
    assert set(found.column("completion").to_pylist()) == {"gold"}
    account = account_parts(job.store.committed_parts(), job.store, job.record, "run")
    assert (account.num_rows, sum(count.num_rows for count in account.adapter_outcomes())) == (3, 3)
    results = tmp_path / "results.jsonl"
    exported = export_batch(job.store, str(results), {})
    assert exported.endswith(": 1 response, 1 error")
    bodies = [json.loads(line)["response"] for line in results.read_text().splitlines()]
    assert [len(body["body"]["choices"]) for body in bodies if body] == [2]
    again = found.filter(pc.equal(found["answer_sample"], 0))
    with pytest.raises(JobRequestError, match="--output-prefix answer2_"):
        prepare_job(again, output_prefix="answer_", row_settings=())
    second = answered(prepare_job(again, output_prefix="second_", row_settings=()), answer_by_echo)
    assert second.column_names == [*again.column_names, *(f"second_{name}" for name in OURS)]


def test_a_table_of_prompts_and_completions_runs_as_it_is_and_so_does_its_output(
    prepare_job: Prepare, answer_by_echo: Echo, tmp_path: Path
) -> None:
    table = pa.table({"id": ["a", "b"], "prompt": ["x", ""], "completion": ["gold", "gold"]})
    job = prepare_job(table)
    found = answered(job, answer_by_echo)
    assert found.column_names == [*table.column_names, *(f"answer_{name}" for name in OURS)]
    assert found.select(table.column_names).to_pydict() == table.to_pydict()
    account = account_parts(job.store.committed_parts(), job.store, job.record, "run")
    assert account.num_rows == 2
    assert export_batch(job.store, str(tmp_path / "results.jsonl"), {}).endswith(": 1 response, 1 error")
    again = answered(prepare_job(found), answer_by_echo)
    assert again.column_names == [*found.column_names, *(f"answer2_{name}" for name in OURS)]


def test_a_job_of_columns_is_exported_as_a_conversation(
    prepare_job: Prepare, answer_by_echo: Echo, tmp_path: Path
) -> None:
    kinds = {}
    for chat in (True, False):
        job = prepare_job(pa.table({"id": ["a"], "q": ["x"]}), prompt_template="{{ q }}", chat=chat)
        answered(job, answer_by_echo)
        export_batch(job.store, str(tmp_path / "results.jsonl"), {})
        kinds[chat] = json.loads((tmp_path / "results.jsonl").read_text())["response"]["body"]["object"]
    assert kinds == {True: "chat.completion", False: "text_completion"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"drop": ["prompt", "note"]}, ["id", "adapter", "deep"]),
        ({"keep": ["deep"]}, ["id", "adapter", "deep"]),
        ({"keep": ["prompt", "id"]}, ["id", "adapter", "prompt"]),
        ({"drop": "deep"}, ["id", "adapter", "prompt", "note"]),
    ],
)
def test_columns_are_copied_as_asked(
    prepare_job: Prepare, answer_by_echo: Echo, options: dict[str, Any], kept: list[str]
) -> None:
    table = pa.table(
        {"id": ["a", "b"], "adapter": ["alpha", None], "prompt": ["x", "y"], "note": [1, 2], "deep": [{"a": 1}, None]}
    )
    files = {"a.parquet": table, "b.parquet": table.drop_columns("note").set_column(0, "id", pa.array(["c", "d"]))}
    job = prepare_job(files, **options)
    found = answered(job, answer_by_echo)
    assert found.column_names == [*kept, *OURS]
    assert found.num_rows == 4
    assert found.column("completion").null_count == 0


def test_batch_files_say_which_of_their_columns_are_settings(prepare_job: Prepare, tmp_path: Path) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 9}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    line["body"] = {"model": "base", "prompt": "hi", "max_tokens": 3, "seed": 9}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line))
    target = tmp_path / "batch.parquet"
    import_batch([str(tmp_path / "batch.jsonl")], str(target), ["base"], {})
    job = prepare_job({"batch.parquet": target.read_bytes()}, row_settings=())
    (rows,) = job.shards()
    assert [(r.sampling.max_tokens, r.sampling.seed) for r in rows.requests] == [(3, 9)]
    assert any(
        note.startswith("input: settings of rows are read from columns: max_tokens,") for note in job_notes(job.record)
    )
    other = pa.table({"id": ["z"], "prompt": ["x"], "max_tokens": [5]})
    both = {"batch.parquet": target.read_bytes(), "other.parquet": other}
    with pytest.raises(JobRequestError, match=r"'other.parquet': column 'max_tokens' is data there and a setting in"):
        prepare_job(both, row_settings=())
    assert prepare_job(both, row_settings="max_tokens").record.input.roles["max_tokens"] == "max_tokens"
    without = {"batch.parquet": target.read_bytes(), "other.parquet": other.drop_columns("max_tokens")}
    assert "max_tokens" in prepare_job(without, row_settings=()).record.input.roles


def test_damaged_metadata_of_settings_names_none(prepare_job: Prepare) -> None:
    for text in ("{", "7", '["nope", 3, null]', '["note"]'):
        table = pa.table({"prompt": ["x"], "note": [1], "n": [3]}).replace_schema_metadata({SETTINGS_KEY: text})
        assert prepare_job(table, row_settings=()).record.input.roles == {"prompt": "prompt"}


def test_metadata_of_files_is_kept_or_named(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    geo = {
        "version": "1.0.0",
        "primary_column": "place",
        "columns": {"place": {"encoding": "WKB", "bbox": [0, 0, 1, 1]}},
    }
    table = pa.table({"id": ["a"], "prompt": ["x"], "place": [b"\x01"]})
    with_geo = table.replace_schema_metadata({"geo": json.dumps(geo), "owner": "me"})
    job = prepare_job(with_geo)
    answered(job, answer_by_echo)
    kept = pq.read_schema(Path(job.store.url) / "part-00000.parquet").metadata
    assert json.loads(kept[b"geo"])["columns"] == {"place": {"encoding": "WKB"}}
    assert b"owner" not in kept
    assert "input: metadata of files that the output does not have: owner" in job_notes(job.record)
    two = {"a.parquet": with_geo, "b.parquet": table.set_column(0, "id", pa.array(["b"]))}
    assert any(note.endswith("does not have: geo, owner") for note in job_notes(prepare_job(two).record))


def test_types_of_folder_columns_are_said(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": ["a"], "prompt": ["x"]})
    other = table.set_column(0, "id", pa.array(["b"]))
    job = prepare_job({"zip=007/day=3/000000_0": table, "zip=08/day=4/x.snappy": other})
    assert "input: columns of folder names: zip (string), day (int32)" in job_notes(job.record)
    assert answered(job, answer_by_echo).select(["zip", "day"]).to_pylist() == [
        {"zip": "007", "day": 3},
        {"zip": "08", "day": 4},
    ]
    rows = duckdb.sql(f"SELECT zip FROM '{job.store.url}/*.parquet' ORDER BY id").fetchall()
    assert rows == [("007",), ("08",)]
