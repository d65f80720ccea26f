"""The teacher's columns hold what journals and parts are given, in lists of one length, and give it back."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.request import Request
from lorabatch.engine.teacher import pack, token_bytes
from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.jobs.input.teacher import LOGPROBS, PROMPT, TOKENS, packed_places, teacher_arrays, teacher_fields
from lorabatch.pipeline.dataset.answers import BegunRow, RowAnswer, decode_journal, encode_answers, encode_begun
from lorabatch.pipeline.dataset.reader import ShardReader, ShardRows
from lorabatch.pipeline.dataset.writer import answers_in_part, output_schema, part_bytes
from lorabatch.pipeline.planning import prediction

Prepare = Callable[..., Any]
Echo = Callable[..., Any]
K = 5


def table_of(num_rows: int = 24) -> pa.Table:
    return pa.table(
        {
            "id": range(num_rows),
            "adapter": [("alpha", "beta", None, "broken")[i % 4] for i in range(num_rows)],
            "prompt": ["" if i % 9 == 8 else f"p {i}" for i in range(num_rows)],
            "continuation": [["x", " a b c", "y"] if i % 7 == 6 else None for i in range(num_rows)],
        }
    )


def taught(rows: ShardRows, answers: dict[str, RowAnswer]) -> dict[str, RowAnswer]:
    """Answers with places of their own; one is an error."""
    generator, found = np.random.default_rng(len(answers)), {}
    for number, (name, answer) in enumerate(answers.items()):
        shape = (answer.completion_tokens, K)
        places = pack(generator.integers(0, 2**32, shape, np.uint32), -generator.random(shape, np.float32) * 30)
        ids = tuple(range(answer.completion_tokens))
        found[name] = replace(answer, token_ids=ids, token_logprobs=tuple(-1.0 for _ in ids), teacher=places)
        if number == 1:
            found[name] = replace(answer, completion=None, error="died", finish_reason="error", completion_tokens=0)
    return found


@pytest.mark.parametrize("samples", ["rows", "lists"])
def test_parts_give_back_what_they_were_given(prepare_job: Prepare, answer_by_echo: Echo, samples: str) -> None:
    job = prepare_job(table_of(), rows_per_shard=7, samples=samples, teacher_top_k=K, output_prefix="my_")
    for rows in job.shards():
        answers = taught(rows, answer_by_echo(rows))
        assert list(decode_journal(encode_answers(answers.values()))) == list(answers.values())
        part = part_bytes(rows, answers, job.record, "run")
        assert pq.read_schema(io.BytesIO(part)).equals(output_schema(job.record))
        read = answers_in_part(io.BytesIO(part), rows, job.record, with_errors=True)
        assert {name: answer.teacher for name, answer in read.items()} == {n: a.teacher for n, a in answers.items()}
        assert part_bytes(rows, read, job.record, "run") == part
        table = pq.read_table(io.BytesIO(part))
        if samples == "lists":
            continue
        for request, row in zip(rows.requests, table.to_pylist(), strict=True):
            columns = [row[f"my_{name}"] for name in (PROMPT, TOKENS, LOGPROBS)]
            if row["my_error"] is not None:
                assert columns == [None] * 3
                continue
            assert isinstance(request, Request)
            assert columns[0] == list(request.prompt_token_ids)
            assert {len(places) for places in columns[1:]} == {len(row["my_token_ids"])}
            assert {len(place) for places in columns[1:] for place in places} == {K}


def test_readers_that_know_no_lists_of_one_length_lose_nothing() -> None:
    packed = [pack(np.arange(2 * K).reshape(2, K), -np.arange(2 * K).reshape(2, K)), None, b""]
    arrays = teacher_arrays(packed, K)
    columns = [pa.chunked_array([arrays[name]]) for name in (TOKENS, LOGPROBS)]
    assert [column.type for column in columns] == [field.type for field in teacher_fields(K)[1:]]
    assert packed_places(*columns, K) == packed
    plain = [columns[0].cast(pa.list_(pa.list_(pa.uint32()))), columns[1].cast(pa.list_(pa.list_(pa.float16())))]
    assert packed_places(*plain, K) == packed
    assert packed_places(*(column.slice(1) for column in columns), K) == packed[1:]


def test_begun_rows_keep_their_places() -> None:
    row = BegunRow(b"f" * 16, None, (5, 6), (-1.0, -2.0), (), bytes(range(2 * token_bytes(K))))
    assert list(decode_journal(encode_begun([row]))) == [row]


def test_shards_hold_fewer_rows_where_answers_take_more_memory(
    prepare_job: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(40).drop_columns(["continuation"])
    assert len(prepare_job(table, max_tokens=16).plan().shards) < 10
    monkeypatch.setattr(prediction, "_SHARD_ANSWER_BYTES", 3 * 16 * token_bytes(64))
    shards = prepare_job(table, max_tokens=16, teacher_top_k=64).plan().shards
    assert len(shards) >= 10
    assert max(shard.num_rows for shard in shards) <= 6


def test_a_shard_is_refused_whose_answers_may_be_too_large(prepare_job: Prepare) -> None:
    job = prepare_job(table_of(), rows_per_shard=24, teacher_top_k=64, max_tokens=64)
    job.plan()
    with pytest.raises(StorageError, match="Start over with fewer --rows-per-shard"):
        ShardReader(job.store, job.record, max_bytes=64 * token_bytes(64)).rows(0)


def test_a_given_text_counts_with_its_prompt(prepare_job: Prepare) -> None:
    table = pa.table({"id": [0, 1], "prompt": ["p", "p"], "continuation": [" a b c d e f", None]})
    plain, job = prepare_job(table), prepare_job(table, teacher_top_k=K)
    shards = [sum(shard.prompt_tokens for shard in each.plan().shards) for each in (plain, job)]
    outputs = [sum(shard.predicted_output_tokens for shard in each.plan().shards) for each in (plain, job)]
    assert shards[1] - shards[0] == outputs[0] - outputs[1] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"teacher_top_k": 1025}, "teacher_top_k=1025: expected from 0 to 1024"),
        ({"teacher_top_k": -1}, "teacher_top_k=-1"),
        ({"teacher_top_k": 4, "choice": ["a", "b"]}, "expected score_choices=False"),
        ({"teacher_top_k": 1000}, "the tokens of the model"),
        ({"teacher_top_k": 4, "row_settings": "teacher_top_k"}, "teacher_top_k"),
    ],
)
def test_options_that_cannot_be_served_are_refused_by_name(
    prepare_job: Prepare, options: dict[str, Any], problem: str
) -> None:
    table = table_of().drop_columns(["continuation"])
    with pytest.raises(JobRequestError, match=problem):
        prepare_job(table, **options)


def test_a_column_of_the_option_s_name_is_data(prepare_job: Prepare) -> None:
    table = table_of().append_column("teacher_top_k", pa.array(range(24)))
    job = prepare_job(table)
    assert "teacher_top_k" in output_schema(job.record).names
    assert TOKENS not in output_schema(job.record).names
    clash = table_of().append_column(TOKENS, pa.array(range(24)))
    with pytest.raises(JobRequestError, match=TOKENS):
        prepare_job(clash, teacher_top_k=3)
