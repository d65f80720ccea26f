"""A row's completions as lists in one row of the output: nothing is lost on the way there and back."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.completions import as_lists, completions
from lorabatch.jobs.parts import PartMark
from lorabatch.pipeline.coordinator.summary import account_parts
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.writer import answers_in_part, output_schema, part_bytes

Prepare = Callable[..., Any]
Echo = Callable[..., Any]


def table_of(num_rows: int = 30) -> pa.Table:
    """Rows of no, some and a refused adapter, with 1 to 5 completions, or given ones; some have no prompt."""
    return pa.table(
        {
            "id": range(num_rows),
            "adapter": [("alpha", "beta", None, "broken")[i % 4] for i in range(num_rows)],
            "prompt": ["" if i % 9 == 8 else f"p {i}" for i in range(num_rows)],
            "n": pa.array([i % 5 + 1 for i in range(num_rows)], pa.int32()),
            "continuation": [["x", " a b c", "y"] if i % 7 == 6 else None for i in range(num_rows)],
            "sample": [str(i) for i in range(num_rows)],
        }
    )


def expected_count(row: dict[str, Any]) -> int:
    if row["prompt"] == "":
        return 1
    return len(row["continuation"]) if row["continuation"] else int(row["n"])


@pytest.mark.parametrize("rows_per_shard", [1, 3, 8])
def test_rows_are_whole_however_shards_are_cut(prepare_job: Prepare, answer_by_echo: Echo, rows_per_shard: int) -> None:
    table = table_of()
    job = prepare_job(table, row_group_rows=11, rows_per_shard=rows_per_shard, samples="lists", logprobs=True)
    for rows in job.shards():
        answers = {
            name: replace(answer, completion=f"{name} {answer.completion}", attempts=number + 1)
            for number, (name, answer) in enumerate(answer_by_echo(rows).items())
        }
        part = part_bytes(rows, answers, job.record, "run", 2)
        assert pq.read_schema(io.BytesIO(part)).equals(output_schema(job.record))
        read = answers_in_part(io.BytesIO(part), rows, job.record)
        of_row = {name: replace(answer, attempts=read[name].attempts) for name, answer in answers.items()}
        assert read == of_row
        assert part_bytes(rows, read, job.record, "run", 2) == part, "what is read back writes the same part"
        mark = PartMark.of(pq.read_schema(io.BytesIO(part)))
        assert [mark.reused_by(run) for run in ("run", "other")] == [2, rows.num_rows]
        assert job.store.commit_part(rows.shard_id, part)
    output = ds.dataset(job.store.url, format="parquet").to_table().sort_by("id")
    assert output.select(table.column_names).to_pylist() == table.to_pylist()
    for row in output.to_pylist():
        count = expected_count(row)
        lists = (row[name] for name in ("completion", "finish_reason", "completion_tokens", "token_ids"))
        assert {len(values) for values in lists} == {count}
        is_bad = row["adapter"] == "broken" or row["prompt"] == ""
        assert row["finish_reason"] == ["error" if is_bad else "stop"] * count
        assert (row["error"] is not None) == is_bad
    account = account_parts([rows.shard_id for rows in job.shards()], job.store, job.record, "run")
    account.check_complete(job.plan())
    assert account.num_rows == sum(map(expected_count, table.to_pylist()))


def test_answers_are_those_of_rows_of_their_own(prepare_job: Prepare) -> None:
    """Identity and random streams of completions do not depend on how they are written."""
    asked = {}
    for samples in ("rows", "lists"):
        table = table_of().drop_columns("sample")
        job = prepare_job(table, rows_per_shard=4, samples=samples)
        asked[samples] = {
            fingerprint: None if isinstance(request, RowAnswer) else (request.stream_id, request.sampling)
            for rows in job.shards()
            for fingerprint, request in zip(rows.fingerprints, rows.requests, strict=True)
        }
    assert asked["rows"] == asked["lists"]


def test_blocks_of_a_plan_end_where_rows_do(prepare_job: Prepare) -> None:
    job = prepare_job(table_of(40), rows_per_shard=3, samples="lists")
    plan = job.plan(block_rows=7)
    places = []
    for shard in plan.shards:
        rows = job_rows(job, shard.shard_id)
        assert rows[0][1] == 0, "a shard begins with the first completion of a row"
        places += rows
    expected = [(row["id"], n) for row in table_of(40).to_pylist() for n in range(expected_count(row))]
    assert sorted(places) == expected


def job_rows(job: Any, shard_id: int) -> list[tuple[int, int]]:
    from lorabatch.pipeline.dataset.reader import read_shard

    table = read_shard(job.store, job.record, shard_id).table
    return list(zip(table.column("id").to_pylist(), table.column("__lb_sample").to_pylist(), strict=True))


def test_a_completion_that_failed_is_the_row_s_error_beside_the_others(
    prepare_job: Prepare, answer_by_echo: Echo
) -> None:
    job = prepare_job(pa.table({"id": [1], "prompt": ["a"]}), n=3, samples="lists")
    [rows] = job.shards()
    answers = answer_by_echo(rows)
    second = list(answers)[1]
    failed = {"completion": None, "finish_reason": "error", "error": "too hot.", "completion_tokens": 0}
    answers[second] = replace(answers[second], **failed)
    part = part_bytes(rows, answers, job.record)
    [row] = pq.read_table(io.BytesIO(part)).to_pylist()
    assert (row["error"], row["finish_reason"]) == ("too hot.", ["stop", "error", "stop"])
    assert [text is None for text in row["completion"]] == [False, True, False]
    assert answers_in_part(io.BytesIO(part), rows, job.record) == {k: v for k, v in answers.items() if k != second}
    assert answers_in_part(io.BytesIO(part), rows, job.record, with_errors=True) == answers


def test_a_part_of_other_rows_has_no_answers(prepare_job: Prepare, answer_by_echo: Echo) -> None:
    job = prepare_job(pa.table({"id": [1, 2], "prompt": ["a", "b"]}), n=2, samples="lists")
    rows, *_ = job.shards()
    part = pq.read_table(io.BytesIO(part_bytes(rows, answer_by_echo(rows), job.record)))
    sink = io.BytesIO()
    pq.write_table(part.set_column(0, "id", pa.array([7] * part.num_rows)), sink)
    assert answers_in_part(sink, rows, job.record) is None


def test_jobs_say_which_names_they_need(prepare_job: Prepare) -> None:
    table = pa.table({"id": [1], "prompt": ["a"], "sample": [1]})
    with pytest.raises(JobRequestError, match="input column 'sample': the output has a column of that name"):
        prepare_job(table, n=2)
    assert "sample" in output_schema(prepare_job(table, n=2, samples="lists").record).names
    with pytest.raises(JobRequestError, match="samples='list': expected 'rows' or 'lists'"):
        prepare_job(table, samples="list")


@given(st.lists(st.lists(st.sampled_from(["base", "merged", "unmerged"]), min_size=1, max_size=4), max_size=9))
def test_lists_are_taken_apart_again(modes: list[list[str]]) -> None:
    flat = [{"completion": f"{i}.{j}", "finish_reason": "stop", "mode": mode, "attempts": j, "prompt_tokens": i,
             "error": None} for i, row in enumerate(modes) for j, mode in enumerate(row)]  # fmt: skip
    names = ("completion", "finish_reason", "mode", "attempts", "prompt_tokens", "error")
    types = (pa.string(), pa.string(), pa.string(), pa.int32(), pa.int32(), pa.string())
    columns = {name: pa.array([row[name] for row in flat], kind) for name, kind in zip(names, types, strict=True)}
    first = [sum(map(len, modes[:i])) for i in range(len(modes))]
    rows = pa.table(as_lists(columns, pa.array(first, pa.int64()).to_numpy(), len(flat))).to_pylist()
    again = [each for row in rows for each in completions(row, ("completion", "finish_reason"))]
    for i, row in enumerate(rows):
        assert row["attempts"] == len(modes[i]) - 1
        assert row["mode"] == (modes[i][0] if len(set(modes[i])) == 1 else "mixture")
    assert [(row["completion"], row["prompt_tokens"]) for row in again] == [
        (row["completion"], row["prompt_tokens"]) for row in flat
    ]
