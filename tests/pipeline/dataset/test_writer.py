"""Parts that any Parquet reader takes as one table: input columns untouched, answers beside them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.columns import ANSWER_FIELDS, LOGPROB_FIELDS, answer_fields
from lorabatch.pipeline.coordinator.summary import account_parts
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.writer import answers_in_part, output_schema, part_bytes, part_schema

Prepare = Callable[..., Any]
Echo = Callable[..., Any]


def mixed_table(num_rows: int = 24) -> pa.Table:
    """Good rows, a refused adapter's and an empty prompt's, with nested and dictionary columns."""
    return pa.table(
        {
            "id": [f"r{i}" for i in range(num_rows)],
            "adapter": [("alpha", "beta", None, "broken")[i % 4] for i in range(num_rows)],
            "prompt": ["" if i % 9 == 8 else f"p {i}" for i in range(num_rows)],
            "tag": pa.array([f"t{i % 3}" for i in range(num_rows)]).dictionary_encode(),
            "deep": [[{"a": i, "b": [str(i)]}] if i % 2 else None for i in range(num_rows)],
            "when": pa.array(range(num_rows), pa.timestamp("ns", "Asia/Tokyo")),
        }
    )


def write_all(job: Any, answer_by_echo: Echo) -> None:
    for rows in job.shards():
        part = part_bytes(rows, answer_by_echo(rows), job.record)
        assert job.store.commit_part(rows.shard_id, part)
    job.store.mark_success()


def test_all_parts_together_are_the_input_answered_once(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = mixed_table()
    job = prepare_job(table, row_group_rows=5, rows_per_shard=3)
    write_all(job, answer_by_echo)
    output = ds.dataset(job.store.url, format="parquet").to_table().sort_by("id")
    expected = table.sort_by("id")
    assert output.select(table.column_names).to_pylist() == expected.to_pylist()
    names = [field.name for field in ANSWER_FIELDS]
    assert output.column_names == [*table.column_names, *names]
    for row in output.to_pylist():
        is_bad = row["adapter"] == "broken" or row["prompt"] == ""
        assert (row["error"] is not None) == is_bad
        assert row["finish_reason"] == ("error" if is_bad else "stop")
        assert (row["completion"] is None) == is_bad
        assert row["adapter_sha256"] == {"alpha": "a" * 64, "beta": "b" * 64}.get(row["adapter"])
        assert row["mode"] == (None if is_bad else "unmerged" if row["adapter"] else "base")
        assert row["attempts"] == (0 if is_bad else 1)


def test_every_part_has_the_same_schema_and_exact_types(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = mixed_table()
    job = prepare_job(table, row_group_rows=4, rows_per_shard=2)
    write_all(job, answer_by_echo)
    parts = sorted(Path(job.store.url).glob("part-*.parquet"))
    schemas = [pq.read_schema(part) for part in parts]
    assert len(parts) > 3
    first = schemas[0].remove_metadata()  # which says of each part what it was made of
    assert all(schema.remove_metadata().equals(first, check_metadata=True) for schema in schemas)
    assert [schemas[0].field(name).type for name in table.column_names] == table.schema.types
    only_errors = [rows for rows in job.shards() if all(isinstance(r, RowAnswer) for r in rows.requests)]
    assert only_errors
    assert pq.read_metadata(parts[0]).row_group(0).column(0).compression == "ZSTD"


def test_duckdb_reads_the_folder_without_knowing_us(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(mixed_table(), rows_per_shard=4)
    write_all(job, answer_by_echo)
    query = f"select count(*), count(distinct id), count(error), max(deep[1].a) from '{job.store.url}/*.parquet'"
    rows, ids, errors, deepest = duckdb.sql(query).fetchall()[0]
    assert (rows, ids, deepest) == (24, 24, 23)
    assert errors == sum(row["adapter"] == "broken" or row["prompt"] == "" for row in mixed_table().to_pylist())


def test_logprobs_add_their_columns_to_every_part(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    asks = [True, None, False] * 4
    job = prepare_job(pa.table({"id": range(12), "prompt": ["a"] * 12, "logprobs": asks}), rows_per_shard=2)
    assert job.record.with_logprobs
    write_all(job, answer_by_echo)
    output = ds.dataset(job.store.url, format="parquet").to_table()
    for field in LOGPROB_FIELDS:
        assert output.schema.field(field.name).type == field.type
    for row in output.to_pylist():
        assert (row["token_ids"] is not None) == bool(row["logprobs"])
        assert (row["token_logprobs"] is not None) == bool(row["logprobs"])
        assert row["token_texts"] is row["token_bytes"] is None, "no tokenizer was there"


def test_reasoning_and_tool_calls_are_written_and_read_back(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": [1, 2, 3], "prompt": ["a", "b", ""], "reasoning": ["mine"] * 3})
    with pytest.raises(JobRequestError, match="input column 'reasoning': the output has a column of that name"):
        prepare_job(table, reasoning_markers="<t>,</t>")
    assert "tool_calls" not in output_schema(prepare_job(table).record).names
    asked = {"reasoning_markers": "<t>,</t>", "tool_call_parser": "hermes", "rows_per_shard": 9}
    job = prepare_job(table.drop_columns("reasoning"), **asked)
    said = iter([("so", (("a1b2c3000", "f", '{"a": 1}'),)), (None, ())])
    written = []
    for rows in job.shards():
        answers = {}
        for name, answer in answer_by_echo(rows).items():
            reasoning, calls = next(said)
            answers[name] = replace(answer, reasoning=reasoning, tool_calls=calls)
        part = part_bytes(rows, answers, job.record)
        assert pq.read_schema(io.BytesIO(part)).equals(output_schema(job.record))
        assert answers_in_part(io.BytesIO(part), rows, job.record) == answers
        written += pq.read_table(io.BytesIO(part)).to_pylist()
    written.sort(key=lambda row: row["id"])
    assert [(row["reasoning"], row["tool_calls"]) for row in written] == [
        ("so", [{"id": "a1b2c3000", "name": "f", "arguments": '{"a": 1}'}]),
        (None, []),
        (None, None),
    ]


def test_choices_are_written_with_their_scores_and_read_back(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": [1, 2, 3, 4], "prompt": ["a", "b", "c", ""], "regex": [None, None, ".*", None]})
    job = prepare_job(table, choice=["x", "y"], rows_per_shard=9)
    said: dict[Any, Any] = {1: {"completion": "y", "choice_logprobs": (-1.5, -0.25)}}
    said[2] = {"finish_reason": "length", "choice_logprobs": (-2.0, -3.0)}
    written = []
    for rows in job.shards():
        ids = dict(zip(*(rows.table.column(name).to_pylist() for name in ("__lb_request_id", "id")), strict=True))
        answers = {name: replace(a, **said.get(ids[name], {})) for name, a in answer_by_echo(rows).items()}
        part = part_bytes(rows, answers, job.record)
        assert pq.read_schema(io.BytesIO(part)).equals(output_schema(job.record))
        assert answers_in_part(io.BytesIO(part), rows, job.record) == answers
        written.append(pq.read_table(io.BytesIO(part)))
    query = "select id, choice, [(s.choice, s.logprob) for s in choice_logprobs] from found order by id"
    found = pa.concat_tables(written)
    assert duckdb.sql(query).fetchall() == [
        (1, "y", [("x", -1.5), ("y", -0.25)]),
        (2, None, [("x", -2.0), ("y", -3.0)]),
        (3, None, None),
        (4, None, None),
    ]
    shares = {row["id"]: row["choice_probabilities"] for row in found.to_pylist()}
    assert shares[3] is shares[4] is None
    assert [share["choice"] for share in shares[1]] == ["x", "y"]
    assert sum(share["probability"] for share in shares[1]) == pytest.approx(1.0, abs=1e-12)
    assert shares[2][0]["probability"] / shares[2][1]["probability"] == pytest.approx(math.e)


def test_log_probabilities_of_prompts_are_written_and_read_back(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": [1, 2, 3], "prompt_token_ids": [[5, 6, 7], [8], [9, 9]], "prompt_top_logprobs": [2, 0, 0]})
    job = prepare_job(table, prompt_logprobs=True, rows_per_shard=9)
    written = []
    for rows in job.shards():
        answers = answer_by_echo(rows)
        for request in rows.requests:
            count = len(request.prompt_token_ids) - 1
            tops = (((5, -0.25), (6, -2.0)),) * count if request.sampling.prompt_top_logprobs else None
            asked = {"prompt_token_logprobs": (-0.5,) * count, "prompt_token_top_logprobs": tops}
            answers[request.request_id] = replace(answers[request.request_id], **asked)
        part = part_bytes(rows, answers, job.record, spell=lambda adapter, ids: [bytes([95 + i, 255]) for i in ids])
        assert pq.read_schema(io.BytesIO(part)).equals(output_schema(job.record))
        assert answers_in_part(io.BytesIO(part), rows, job.record) == answers
        written += pq.read_table(io.BytesIO(part)).to_pylist()
    first, second, _ = sorted(written, key=lambda row: row["id"])
    assert [tuple(token.values()) for token in first["prompt_token_logprobs"]] == [
        (5, None, "d\ufffd", b"d\xff"),
        (6, -0.5, "e\ufffd", b"e\xff"),
        (7, -0.5, "f\ufffd", b"f\xff"),
    ]
    assert first["prompt_token_top_logprobs"][1][0]["bytes"][1:] == b"\xff"
    assert [len(top) for top in first["prompt_token_top_logprobs"]] == [0, 2, 2]
    assert (second["prompt_token_logprobs"], second["prompt_token_top_logprobs"]) == (
        [{"token_id": 8, "logprob": None, "text": "g\ufffd", "bytes": b"g\xff"}],
        None,
    )


def test_a_column_of_choices_stays_beside_their_scores(prepare_job: Prepare) -> None:
    table = pa.table({"id": [1], "prompt": ["a"], "choice": [["x", "y"]]})
    schema = output_schema(prepare_job(table).record)
    assert schema.field("choice").type == pa.list_(pa.string())
    assert "choice_logprobs" in schema.names
    assert "choice_logprobs" not in output_schema(prepare_job(table, score_choices=False).record).names
    named = prepare_job(table.rename_columns(["id", "prompt", "labels"]), columns={"choice": "labels"})
    assert output_schema(named.record).field("choice").type == pa.string()
    clash = table.append_column("choice_logprobs", pa.array([1.0]))
    with pytest.raises(JobRequestError, match="input column 'choice_logprobs': the output has a column of that name"):
        prepare_job(clash)


def test_columns_that_follow_from_answers_are_not_read_back(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    table = pa.table({"id": [1, 2], "prompt": ["a", "b"], "continuation": [" x", None]})
    job = prepare_job(table, json_schema='{"type": "string"}', rows_per_shard=9)
    [rows] = job.shards()
    answers = {name: replace(answer, completion='"x"') for name, answer in answer_by_echo(rows).items()}
    part = part_bytes(rows, answers, job.record)
    assert pq.read_table(io.BytesIO(part)).sort_by("id").column("answer").to_pylist() == [None, "x"]
    assert answers_in_part(io.BytesIO(part), rows, job.record) == answers


def test_a_part_without_all_answers_is_not_written(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table({"id": [1, 2], "prompt": ["a", "b"]}), rows_per_shard=9)
    (rows,) = job.shards()
    answers = answer_by_echo(rows)
    answers.popitem()
    with pytest.raises(AssertionError, match="1 rows have no answer"):
        part_bytes(rows, answers, job.record)


def test_a_made_up_id_is_a_column_of_the_output(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table({"prompt": ["a", "b"]}))
    write_all(job, answer_by_echo)
    output = ds.dataset(job.store.url, format="parquet").to_table()
    assert sorted(output.column("id").to_pylist()) == ["rows.parquet:0", "rows.parquet:1"]


def test_answers_read_from_a_part_are_those_written(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    for logprobs in (False, True):
        job = prepare_job(mixed_table(), logprobs=logprobs)
        for rows in job.shards():
            answers = answer_by_echo(rows, attempts=3)
            part = part_bytes(rows, answers, job.record)
            assert answers_in_part(io.BytesIO(part), rows, job.record) == answers


def test_answers_of_an_adapter_that_changed_do_not_hold(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table({"id": range(4), "prompt": ["a"] * 4, "adapter": ["alpha", "beta"] * 2}))
    job.plan()
    alpha = job.record.adapters[0].model_copy(update={"sha256": "d" * 64})
    changed = job.record.model_copy(update={"adapters": (alpha, *job.record.adapters[1:])})
    from lorabatch.pipeline.dataset.reader import read_shard

    kept = []
    for rows in job.shards():
        part = io.BytesIO(part_bytes(rows, answer_by_echo(rows), job.record))
        kept += answers_in_part(part, read_shard(job.store, changed, rows.shard_id), changed).values()
    assert [answer.adapter_sha256 for answer in kept] == ["b" * 64] * 2


def test_a_part_says_which_of_its_rows_an_earlier_run_had_done(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table({"id": range(6), "prompt": ["a"] * 6, "adapter": ["alpha", "beta"] * 3}))
    all_rows = list(job.shards())
    assert len(all_rows) > 1
    for number, rows in enumerate(all_rows):
        part = part_bytes(rows, answer_by_echo(rows), job.record, f"run-{number}", num_reused=1)
        job.store.commit_part(rows.shard_id, part)
    shard_ids = [rows.shard_id for rows in all_rows]
    others = sum(rows.num_rows for rows in all_rows[1:])
    assert account_parts(shard_ids, job.store, job.record, "run-0").num_reused == 1 + others
    assert account_parts(shard_ids, job.store, job.record, "run-new").num_reused == 6
    # Readers of the folder do not mind that the runs differ.
    assert ds.dataset(job.store.url, format="parquet").to_table().num_rows == 6


def test_a_part_of_other_rows_has_no_answers(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table({"id": [1, 2], "prompt": ["a", "b"]}), rows_per_shard=9)
    (ours,) = job.shards()
    (other,) = prepare_job(pa.table({"id": [1, 3], "prompt": ["a", "b"]}), rows_per_shard=9).shards()
    part = part_bytes(other, answer_by_echo(other), job.record)
    assert answers_in_part(io.BytesIO(part), ours, job.record) is None
    whole = part_bytes(ours, answer_by_echo(ours), job.record)
    assert answers_in_part(io.BytesIO(whole), ours, job.record) == answer_by_echo(ours)
    for size in (0, 3, 40, len(whole) - 1):
        assert answers_in_part(io.BytesIO(bytes(whole)[:size]), ours, job.record) is None


def test_a_part_that_another_job_wrote_has_no_answers(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    # A worker that did not hear of `--overwrite` answers the same rows with the sampling of then.
    table = pa.table({"id": [1, 2], "prompt": ["a", "b"]})
    before, now = prepare_job(table, rows_per_shard=9), prepare_job(table, rows_per_shard=9, temperature=0.5)
    ((ours,), (theirs,)) = (now.shards(), before.shards())
    part = part_bytes(theirs, answer_by_echo(theirs), before.record)
    assert answers_in_part(io.BytesIO(part), ours, now.record) is None
    now.store.commit_part(0, part)
    problem = f"was written by {before.record.job_id}, not by {now.record.job_id}"
    assert account_parts([0], now.store, now.record, "run").unusable == {0: problem}


def test_the_part_schema_is_known_before_any_row_is_answered(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(mixed_table())
    for rows in job.shards():
        part = io.BytesIO(part_bytes(rows, answer_by_echo(rows), job.record))
        assert pq.read_schema(part).equals(part_schema(rows.table.schema, answer_fields(job.record)))
