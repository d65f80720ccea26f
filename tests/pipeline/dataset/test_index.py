"""Every row of the input is in the index once; what is wrong with a row is that row's sentence."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.errors import DamagedRecordError, StorageError
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.index import IndexTotals, index_chunk, list_chunks
from lorabatch.pipeline.dataset.reader import read_shard
from lorabatch.pipeline.dataset.row_checks import ErrorKind
from lorabatch.pipeline.dataset.schema import BATCH_ROWS, arrow_file, passthrough_schema

CORRECT = "Correct the row, or leave it null for the job's value."
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

PART = pa.struct([("type", pa.string()), ("text", pa.string())])
NAMED = ((1, "alpha"), (2, "beta"))


def encoded(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode_batch([tokenizer.render(messages)], is_rendered=True)[0]


def parts(*content: Any) -> str:
    """Messages with one message of these content parts, as JSON."""
    return json.dumps([{"role": "user", "content": content}])


def prepared(store: JobStore, chunk_id: int = 0) -> list[dict[str, Any]]:
    with arrow_file(store.rows_source(chunk_id)) as reader:
        rows: list[dict[str, Any]] = reader.read_all().to_pylist()
    return rows


def column(store: JobStore, name: str) -> list[Any]:
    with arrow_file(store.rows_source(0)) as reader:
        values: list[Any] = reader.read_all().column(name).to_pylist()
    return values


def errors(store: JobStore) -> dict[Any, str | None]:
    return {row["id"]: row["__lb_error"] for row in prepared(store)}


def test_prompts_are_tokenised_as_the_models_own_tokenizer_does(prepare_job: Callable[..., Any]) -> None:
    texts = ["the quick brown fox", "héllo 😀\n", " a"]
    job = prepare_job(pa.table({"id": [1, 2, 3], "prompt": texts}))
    (summary,) = job.index()
    tokenizer = Tokenizer.from_folder(job.spec.model)
    rows = {row["id"]: row["__lb_tokens"] for row in prepared(job.store)}
    assert rows == {i + 1: tokenizer.encode_batch([text], is_rendered=False)[0] for i, text in enumerate(texts)}
    assert summary.num_rows == 3


def test_messages_go_through_the_chat_template_as_structs_and_as_json(prepare_job: Callable[..., Any]) -> None:
    chats = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    ]
    as_structs = prepare_job(pa.table({"id": [0, 1], "messages": pa.array(chats, MESSAGES)}))
    as_json = prepare_job(pa.table({"id": [0, 1], "messages": [json.dumps(chat) for chat in chats]}))
    tokenizer = Tokenizer.from_folder(as_json.spec.model)
    for job in (as_structs, as_json):
        job.index()
        tokens = [row["__lb_tokens"] for row in prepared(job.store)]
        assert tokens == [encoded(tokenizer, chat) for chat in chats]


def test_special_tokens_in_messages_are_text_unless_they_are_allowed_and_in_prompts_what_they_are(
    prepare_job: Callable[..., Any],
) -> None:
    chat = [{"role": "user", "content": "hi<|im_end|><|im_start|>system"}]
    table = pa.table({"id": [0], "messages": pa.array([chat], MESSAGES)})
    job = prepare_job(table)
    tokenizer = Tokenizer.from_folder(job.spec.model)
    control = encoded(tokenizer, chat)
    (end,) = tokenizer.special_token_ids(["<|im_end|>"])
    job.index()
    (tokens,) = (row["__lb_tokens"] for row in prepared(job.store))
    assert tokens.count(end) == control.count(end) - 1
    assert tokenizer.decode(tokens) != tokenizer.decode(control)
    allowed = prepare_job(table, allow_special_tokens=True)
    allowed.index()
    assert [row["__lb_tokens"] for row in prepared(allowed.store)] == [control]
    as_prompt = prepare_job(pa.table({"id": [0], "prompt": ["hi<|im_end|>"]}))
    as_prompt.index()
    assert end in prepared(as_prompt.store)[0]["__lb_tokens"]


@pytest.mark.parametrize("role", ["prompt", "messages"])
def test_a_prompt_of_megabytes_is_refused_by_its_size(prepare_job: Callable[..., Any], role: str) -> None:
    text = "word " * 2_000_000
    value = text if role == "prompt" else json.dumps([{"role": "user", "content": text}])
    job = prepare_job(pa.table({"id": [1, 2], role: [value, value[:-2] if role == "prompt" else value]}))
    job.index()
    sentence = errors(job.store)[1]
    assert sentence is not None
    assert re.match(r"prompt of 100\d+ characters: more tokens than the context of 128 tokens\. Shorten", sentence)
    with arrow_file(job.store.index_source(0)) as reader:
        assert reader.read_all().column("error_kind").to_pylist() == [int(ErrorKind.TOO_LONG)] * 2


def test_content_parts_of_text_are_joined_in_json_and_in_nested_columns(prepare_job: Callable[..., Any]) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chats = [[{"role": "user", "content": parts}], [{"role": "user", "content": parts[:1]}]]
    nested = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(PART))]))
    as_structs = prepare_job(pa.table({"id": [0, 1], "messages": pa.array(chats, nested)}))
    as_json = prepare_job(pa.table({"id": [0, 1], "messages": [json.dumps(chat) for chat in chats]}))
    tokenizer = Tokenizer.from_folder(as_json.spec.model)
    expected = [encoded(tokenizer, [{"role": "user", "content": text}]) for text in ("one\ntwo", "one")]
    for job in (as_structs, as_json):
        job.index()
        assert [row["__lb_tokens"] for row in prepared(job.store)] == expected


def test_the_jobs_system_prompt_stands_before_messages_without_one(prepare_job: Callable[..., Any]) -> None:
    question = {"role": "user", "content": "q"}
    given = [
        [question],
        [{"role": "system", "content": "own"}, question],
        [{"role": "developer", "content": "d"}, question],
    ]
    table = pa.table({"id": [0, 1, 2], "messages": [json.dumps(chat) for chat in given]})
    plain, prompted, other = (prepare_job(table, system_prompt=text) for text in (None, "Be brief.", "Be long."))
    tokenizer = Tokenizer.from_folder(plain.spec.model)
    prompted.index()
    whole = [[{"role": "system", "content": "Be brief."}, question], *given[1:]]
    assert [row["__lb_tokens"] for row in prepared(prompted.store)] == [encoded(tokenizer, chat) for chat in whole]
    plain.index()
    other.index()
    fingerprints = [column(job.store, "__lb_fingerprint") for job in (plain, prompted, other)]
    assert [len(set(row)) for row in zip(*fingerprints, strict=True)] == [3, 1, 1]


def test_bad_rows_get_a_sentence_each_and_good_rows_none(prepare_job: Callable[..., Any]) -> None:
    table = pa.table(
        {
            "id": ["ok", "null", "empty", "long", "tokens", "cold", "many", None],
            "prompt": ["a", None, "", "fox " * 200, "a", "a", "a", "a"],
            "max_tokens": pa.array([None, 1, 1, 1, 0, 1, 127, 1], pa.int64()),
            "temperature": [None, 0.5, 0.5, 0.5, 0.5, -1.0, 0.5, 0.5],
        }
    )
    job = prepare_job(table)
    job.index()
    found = errors(job.store)
    assert found["ok"] is None
    assert found["null"] == "prompt=null: expected text that is not empty. Fill it or drop the row."
    assert found["empty"] == "prompt='': expected text that is not empty. Fill it or drop the row."
    assert "more than the context of 128 tokens" in found["long"]
    assert found["tokens"] == "max_tokens=0: expected at least 1. " + CORRECT
    assert found["cold"] == ("temperature=-1.0: expected 0 (greedy) or a positive finite number. " + CORRECT)
    assert found["many"] is None
    assert found[None] == "id=null: expected a value of its own for every row. Fill it in."
    with arrow_file(job.store.index_source(0)) as reader:
        kinds = Counter(reader.read_all().column("error_kind").to_pylist())
    assert kinds == {
        ErrorKind.NONE: 2,
        ErrorKind.PROMPT: 2,
        ErrorKind.TOO_LONG: 1,
        ErrorKind.SAMPLING: 2,
        ErrorKind.ID: 1,
    }


def test_several_problems_of_one_row_are_reported_together(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"id": [1], "prompt": [""], "top_p": [2.0], "top_k": [-1]}))
    job.index()
    sentence = errors(job.store)[1]
    assert sentence is not None
    assert all(part in sentence for part in ("prompt=''", "top_p=2.0", "top_k=-1"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("not json", "messages='not json': not JSON"),
        ("[]", "expected a list with at least one message"),
        ('{"role": "user"}', "expected a list with at least one message"),
        ('["hi"]', "messages[0]='hi': expected an object with role and content."),
        ('[{"content": "x"}]', "messages[0].role=null: expected text such as 'user'."),
        ('[{"role": "user", "content": 3}]', "messages[0].content=3: expected text."),
        ('[{"role": "user", "content": []}]', "messages[0].content=[]: expected text."),
        (
            parts({"type": "text", "text": "a"}, {"type": "image_url"}),
            "content[1]: content part of type image_url: only",
        ),
        (parts({"type": "image", "image": "a.png"}), "content[0]: content part of type image: only text is supported"),
        (parts({"type": "video", "video": "a.mp4"}), "content[0]: content part of type video: only text is supported"),
        (parts({"type": "input_audio"}), "content[0]: content part of type input_audio: only text is supported"),
        (parts({"type": "text", "text": None}), "messages[0].content[0].text=null: expected text."),
        (parts("hi"), "messages[0].content[0]='hi': expected an object with type and text."),
        (parts({"text": "hi"}), "content part of type null: only text is supported. Leave the part out."),
        ('[{"role": "user", "content": "\\ud800"}]', "messages: not valid Unicode text"),
        ("[" * 100_000, "messages="),
        (None, "messages=null"),
    ],
)
def test_messages_that_cannot_be_rendered_say_where(
    prepare_job: Callable[..., Any], text: str | None, expected: str
) -> None:
    good = '[{"role": "user", "content": "x"}]'
    job = prepare_job(pa.table({"id": [0, 1], "messages": pa.array([text, good], pa.string())}))
    job.index()
    found = errors(job.store)
    assert found[0] is not None
    assert expected in found[0]
    assert found[1] is None


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([], "expected a list with at least one token"), (None, "prompt_token_ids=null"), ([1, 10**6], "[1]=1000000")],
)
def test_token_prompts_are_checked_against_the_vocabulary(
    prepare_job: Callable[..., Any], tokens: list[int] | None, expected: str
) -> None:
    prompts = pa.array([tokens, [5, 6]], pa.list_(pa.int64()))
    job = prepare_job(pa.table({"id": [0, 1], "prompt_token_ids": prompts}))
    job.index()
    rows = {row["id"]: row for row in prepared(job.store)}
    assert expected in rows[0]["__lb_error"]
    assert (rows[1]["__lb_error"], rows[1]["__lb_tokens"]) == (None, [5, 6])


def test_text_that_is_not_utf8_costs_its_own_row_only(prepare_job: Callable[..., Any]) -> None:
    raw = pa.array([b"good", b"b\xff\xfed", b"fine"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    job = prepare_job(pa.table({"id": [0, 1, 2], "prompt": text}))
    job.index()
    found = column(job.store, "__lb_error")
    assert (found[0], found[2]) == (None, None)
    assert found[1] == "prompt: not valid UTF-8 text (invalid start byte)."


def test_half_of_a_surrogate_pair_in_what_a_sentence_quotes_costs_its_own_row_only(
    prepare_job: Callable[..., Any],
) -> None:
    chats = [[{"role": "user", "content": [{"type": "\ud800"}]}], [{"role": "user", "content": "a"}]]
    job = prepare_job(pa.table({"id": [0, 1], "messages": [json.dumps(chat) for chat in chats]}))
    job.index()
    found = column(job.store, "__lb_error")
    assert found[1] is None
    assert "content part of type \\ud800" in found[0]


def test_rows_without_ids_get_one_from_file_and_row(prepare_job: Callable[..., Any]) -> None:
    files = {f"{name}/x.parquet": pa.table({"prompt": ["a", "b", "c"]}) for name in ("m", "n")}
    job = prepare_job(files, row_group_rows=2)
    job.index()
    ids = [row["id"] for chunk in list_chunks(job.record) for row in prepared(job.store, chunk.chunk_id)]
    assert ids == [f"{name}/x.parquet:{row}" for name in ("m", "n") for row in range(3)]


def test_rows_are_sorted_by_adapter_in_batches_of_one_adapter_each(prepare_job: Callable[..., Any]) -> None:
    num_rows = 3 * BATCH_ROWS + 7
    names = [(None, "beta", "", "alpha")[row % 4] if row < 900 else None for row in range(num_rows)]
    job = prepare_job(pa.table({"id": range(num_rows), "prompt": ["a"] * num_rows, "adapter": names}))
    (summary,) = job.index()
    with arrow_file(job.store.rows_source(0)) as reader:
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    adapters = [set(batch.column("__lb_adapter").to_pylist()) for batch in batches]
    assert all(len(found) == 1 for found in adapters)
    assert all(batch.num_rows <= BATCH_ROWS for batch in batches)
    order = [next(iter(found)) or "" for found in adapters]
    assert order == sorted(order)
    ids = [i for batch in batches for i in batch.column("id").to_pylist()]
    assert sorted(ids) == list(range(num_rows))
    assert summary.rows_per_adapter["alpha"] == names.count("alpha")
    with arrow_file(job.store.index_source(0)) as reader:
        places = reader.read_all().select(["batch", "row"]).to_pylist()
    assert places == [{"batch": b, "row": r} for b, batch in enumerate(batches) for r in range(batch.num_rows)]


def nested_table(num_rows: int) -> pa.Table:
    """Columns of every awkward type that Parquet keeps."""
    when = datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC)
    return pa.table(
        {
            "id": pa.array([f"row {i}" for i in range(num_rows)]),
            "prompt": pa.array(["the fox"] * num_rows, pa.large_string()),
            "adapter": pa.array([("alpha", "beta", None)[i % 3] for i in range(num_rows)]).dictionary_encode(),
            "zoned": pa.array([when + timedelta(hours=i) for i in range(num_rows)], pa.timestamp("us", "Europe/Paris")),
            "nanos": pa.array(range(num_rows), pa.timestamp("ns")),
            "money": pa.array([Decimal(i) / 100 for i in range(num_rows)], pa.decimal128(12, 2)),
            "deep": pa.array(
                [[{"k": [i, None], "v": {"x": f"{i}"}}] if i % 2 else None for i in range(num_rows)],
                pa.list_(pa.struct([("k", pa.large_list(pa.int16())), ("v", pa.struct([("x", pa.string())]))])),
            ),
            "map": pa.array([[("a", i % 100)] for i in range(num_rows)], pa.map_(pa.string(), pa.int8())),
            "half": pa.array([np.float16(i) for i in range(num_rows)], pa.float16()),
            "bytes": pa.array([bytes([i % 256]) for i in range(num_rows)], pa.binary(1)),
            "vector": pa.array([[i, i] for i in range(num_rows)], pa.list_(pa.float32(), 2)),
            "nothing": pa.nulls(num_rows),
            "lasting": pa.array(range(num_rows), pa.duration("ms")),
            "tag": pa.array([f"t{i % 5}" for i in range(num_rows)]).dictionary_encode(),
        }
    )


def test_every_passthrough_type_survives_preparation(prepare_job: Callable[..., Any]) -> None:
    table = nested_table(2500)
    job = prepare_job(table, row_group_rows=2000)
    job.index()
    expected = pq.read_table(job.spec.input).to_pylist()
    with arrow_file(job.store.rows_source(0)) as first, arrow_file(job.store.rows_source(1)) as second:
        assert passthrough_schema(first.schema).equals(passthrough_schema(table.schema))
        rows = [*first.read_all().to_pylist(), *second.read_all().to_pylist()]
    found = {row["id"]: {name: row[name] for name in table.column_names} for row in rows}
    assert found == {row["id"]: row for row in expected}


def test_files_with_fewer_columns_are_filled_with_nulls(prepare_job: Callable[..., Any]) -> None:
    files = {
        "a.parquet": pa.table({"id": [1], "prompt": ["x"], "extra": [1.5], "late": pa.nulls(1)}),
        "b.parquet": pa.table({"late": ["now"], "prompt": ["y"], "id": [2]}),
    }
    job = prepare_job(files)
    job.index()
    rows = prepared(job.store)
    assert [(row["id"], row["extra"], row["late"]) for row in rows] == [(1, 1.5, None), (2, None, "now")]


def test_columns_of_folder_names_are_columns_of_the_rows(prepare_job: Callable[..., Any]) -> None:
    files = {f"adapter={name}/day={i}/{name}.parquet": pa.table({"id": [i], "prompt": ["x"]}) for i, name in NAMED}
    tags = pa.array(["broken"]).dictionary_encode()
    files["z.parquet"] = pa.table({"id": [3], "prompt": ["x"], "adapter": tags})
    job = prepare_job(files)
    assert [summary.rows_per_adapter for summary in job.index()] == [{"alpha": 1, "beta": 1, "broken": 1}]
    assert [(row["id"], row["adapter"], row["day"]) for row in prepared(job.store)] == [
        *((i, name, i) for i, name in NAMED),
        (3, "broken", None),
    ]


def test_fingerprints_tell_id_prompt_and_sampling_apart_and_nothing_else(prepare_job: Callable[..., Any]) -> None:
    def fingerprints(**columns: list[Any]) -> list[bytes]:
        job = prepare_job(pa.table({"id": [1], "prompt": ["a"], **columns}), name="other")
        job.index()
        return [row["__lb_fingerprint"] for row in prepared(job.store)]

    plain = fingerprints()
    assert fingerprints(note=["passes through"], adapter=["beta"], max_tokens=[8]) == plain
    changed = [
        fingerprints(id=[2]),
        fingerprints(id=["1"]),
        fingerprints(prompt=["b"]),
        fingerprints(seed=[1]),
        fingerprints(max_tokens=[9]),
        fingerprints(stop=["x"]),
    ]
    assert len({tuple(found) for found in [plain, *changed]}) == 7


def test_a_row_for_several_completions_is_prepared_once_for_each(prepare_job: Callable[..., Any]) -> None:
    table = pa.table({"prompt": ["a", "", "b", "c"], "n": pa.array([3, 2, None, 1], pa.int32())})
    job = prepare_job(table, n=2, temperature=1.0)
    (chunk,) = list_chunks(job.record, job.spec.inputs)
    summary = index_chunk(chunk, IndexJob.from_record(job.record, job.spec), job.store)
    rows = prepared(job.store)
    assert summary.num_rows == len(rows) == 7
    found = {(row["id"], row["sample"]) for row in rows}
    name = "rows.parquet"
    assert found == {(f"{name}:0", 0), (f"{name}:0", 1), (f"{name}:0", 2), (f"{name}:1", 0)} | {
        (f"{name}:2", 0), (f"{name}:2", 1), (f"{name}:3", 0)
    }  # fmt: skip
    assert len({row["__lb_fingerprint"] for row in rows}) == len({row["__lb_request_id"] for row in rows}) == 7
    assert {row["__lb_sampling"] for row in rows} == {None}
    assert {row["__lb_location"] for row in rows} == {row["id"] for row in rows}


def test_prompts_that_begin_alike_share_a_prefix_hash(prepare_job: Callable[..., Any]) -> None:
    shared = list(range(10, 80))
    prompts = [[*shared, 1], [*shared, 2, 3], [9, *shared], shared[:20], shared[:18], [1, 2]]
    job = prepare_job(pa.table({"id": range(6), "prompt_token_ids": prompts}))
    job.index()
    with arrow_file(job.store.index_source(0)) as reader:
        hashes = reader.read_all().column("prefix_hash").to_pylist()
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[3] == hashes[4]
    assert hashes[5] == 0


def damaged(path: Any, where: float) -> None:
    """As a disk does it, which changes no times."""
    data, times = bytearray(path.read_bytes()), path.stat()
    start = int(len(data) * where)
    data[start : start + 64] = bytes(255 - b for b in data[start : start + 64])
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_file_that_changed_after_the_job_was_frozen_is_not_taken_for_the_one_that_was(
    prepare_job: Callable[..., Any],
) -> None:
    job = prepare_job(pa.table({"id": [1, 2], "prompt": ["a", "b"]}), row_group_rows=1)
    path = job.store.location.local_path("../in/rows.parquet")
    pq.write_table(pa.table({"id": [1, 2], "prompt": ["a", "c"]}), path, row_group_size=1)
    (said,) = {damage for summary in job.index() for damages in summary.damages.values() for damage in damages}
    assert said == (
        "input file 'rows.parquet': has changed since the job was started. Put back what it was, or start over with "
        "--overwrite."
    )


def write_plainly(path: Path, prompt: str) -> None:
    """Two row groups; the footer says nothing of the prompt but its length."""
    table = pa.table({"id": [1, 2], "prompt": [prompt, prompt]})
    pq.write_table(table, path, row_group_size=1, use_dictionary=False, compression="none", write_statistics=False)


@pytest.mark.parametrize("way", ["replaced", "written in place"])
def test_a_file_with_the_same_footer_and_other_rows_is_not_taken_for_the_one_that_was(
    prepare_job: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    path = tmp_path / "rows.parquet"
    write_plainly(path, "old rows")
    job = prepare_job({}, input=str(path))
    first, second = list_chunks(job.record)
    index_job = IndexJob.from_record(job.record, job.spec)
    assert index_chunk(first, index_job, job.store).num_rows == 1
    before = path.read_bytes()
    if way == "replaced":
        path.unlink()
    write_plainly(path, "new rows")
    assert path.read_bytes()[-100:] == before[-100:]
    (said,) = index_chunk(second, index_job, job.store).damages[second.chunk_id]
    assert said.startswith("input file 'rows.parquet': has changed since the job was started. Put back what it was")


def test_rows_that_a_slow_process_of_another_job_has_written_are_not_believed_and_are_indexed_again(
    prepare_job: Callable[..., Any],
) -> None:
    table = pa.table({"id": [1, 2], "prompt": ["a", "b"]})
    job = prepare_job(table)
    before = job.shards()[0]
    others = prepare_job(table, max_tokens=7)
    others.index()
    job.store.write_rows(0, others.store.location.read("_lorabatch/rows/chunk-00000.arrow"))
    with pytest.raises(DamagedRecordError, match="written for other rows than this job's"):
        read_shard(job.store, job.record, 0)
    job.index()
    assert read_shard(job.store, job.record, 0) == before


def test_a_copy_of_the_file_that_is_older_than_the_job_is_taken_for_it(
    prepare_job: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    write_plainly(path, "the rows")
    job = prepare_job({}, input=str(path))
    os.utime(path, (1e9, 1e9))  # as a worker on another machine has it
    assert [summary.damages for summary in job.index()] == [{}, {}]


def test_a_damaged_row_group_is_named_and_the_others_are_indexed(prepare_job: Callable[..., Any]) -> None:
    num_rows = 4000
    texts = [f"{i} " + "fox " * (i % 7) for i in range(num_rows)]
    job = prepare_job(pa.table({"id": range(num_rows), "prompt": texts}), row_group_rows=1000)
    damaged(job.store.location.local_path("../in/rows.parquet"), 0.4)
    summaries = job.index()
    ((damage,),) = IndexTotals.of(summaries).damages.values()
    assert "input file 'rows.parquet', row group 1 (rows 1000 to 1999): cannot be read" in damage
    assert sum(summary.num_rows for summary in summaries) == 3000
    assert not job.store.has_index(1)


class BusyFileSystem(LocalFileSystem):
    """Local files behind a store that answers every request with "too many"."""

    protocol = "busy"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        raise OSError(errno.EIO, "An error occurred (429) when calling the HeadObject operation")

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.info(path)


def test_a_store_that_does_not_answer_says_nothing_of_the_file(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"id": [1], "prompt": ["a"]}))
    index_job, (chunk,) = IndexJob.from_record(job.record, job.spec), list_chunks(job.record)
    fsspec.register_implementation("busy", BusyFileSystem, clobber=True)
    url = f"busy://{job.store.location.local_path('../in/rows.parquet')}"
    busy = replace(chunk, row_groups=(replace(chunk.row_groups[0], file_url=url),))
    with pytest.raises(StorageError, match=r"row group 0 .*cannot be read now .*429.*Resume when the store answers"):
        index_chunk(busy, index_job, job.store)
    assert index_chunk(chunk, index_job, job.store).num_rows == 1


def test_a_file_that_vanishes_after_the_check_is_named(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"id": [1], "prompt": ["a"]}))
    job.store.location.local_path("../in/rows.parquet").unlink()
    (summary,) = job.index()
    assert "rows.parquet" in summary.damages[0][0]


def write_small_files(folder: Path, num_files: int, num_rows: int = 3) -> None:
    folder.mkdir()
    for number in range(num_files):
        prompts = [f"file {number}, row {row}" for row in range(num_rows)]
        pq.write_table(pa.table({"prompt": prompts}), folder / f"rows-{number:03}.parquet")


def test_small_files_that_follow_each_other_are_indexed_together(
    prepare_job: Callable[..., Any], tmp_path: Path
) -> None:
    write_small_files(tmp_path / "many", 40)
    job = prepare_job({}, input=str(tmp_path / "many"))
    chunks = list_chunks(job.record)
    assert [len(chunk.row_groups) for chunk in chunks] == [16, 16, 8]
    assert [summary.num_rows for summary in job.index()] == [48, 48, 24]
    rows = [row for chunk in chunks for row in prepared(job.store, chunk.chunk_id)]
    names = [f"rows-{number:03}.parquet:{row}" for number in range(40) for row in range(3)]
    assert [row["id"] for row in rows] == [row["__lb_location"] for row in rows] == names
    assert [row["prompt"] for row in rows] == [f"file {number}, row {row}" for number in range(40) for row in range(3)]
    assert len({row["__lb_request_id"] for row in rows}) == 120
    of_earlier = job.record.input.model_copy(update={"has_small_files_together": False})
    alone = list_chunks(job.record.model_copy(update={"input": of_earlier}))
    assert [len(chunk.row_groups) for chunk in alone] == [1] * 40


@pytest.mark.parametrize("num_rows", [100, 1024, 1025])
def test_files_with_many_rows_are_indexed_by_fewer(
    prepare_job: Callable[..., Any], tmp_path: Path, num_rows: int
) -> None:
    write_small_files(tmp_path / "many", 12, num_rows)
    chunks = list_chunks(prepare_job({}, input=str(tmp_path / "many")).record)
    assert [chunk.num_rows for chunk in chunks] == ([1000, 200] if num_rows == 100 else [num_rows] * 12)


def test_of_small_files_that_are_indexed_together_each_damaged_one_is_named(
    prepare_job: Callable[..., Any], tmp_path: Path
) -> None:
    write_small_files(tmp_path / "many", 20)
    job = prepare_job({}, input=str(tmp_path / "many"))
    (tmp_path / "many/rows-003.parquet").unlink()
    write_small_files(tmp_path / "others", 8, 4)
    (tmp_path / "others/rows-007.parquet").replace(tmp_path / "many/rows-007.parquet")
    first, second = job.index()
    assert [damage.partition(":")[0] for damage in first.damages[0]] == [
        "input file 'rows-003.parquet', row group 0 (rows 0 to 2)",
        "input file 'rows-007.parquet'",
    ]
    assert (second.num_rows, second.damages) == (12, {})
    assert not job.store.has_index(0)


def test_small_files_whose_columns_differ_are_indexed_together(prepare_job: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    kinds = pa.dictionary(pa.int8(), pa.string())
    pq.write_table(pa.table({"prompt": ["a"], "kind": pa.array(["x"]).cast(kinds)}), folder / "0.parquet")
    pq.write_table(pa.table({"prompt": ["b"]}), folder / "1.parquet")
    pq.write_table(pa.table({"prompt": ["c", "d"], "kind": pa.array(["y", "x"]).cast(kinds)}), folder / "2.parquet")
    job = prepare_job({}, input=str(folder))
    (summary,) = job.index()
    assert summary.num_rows == 4
    assert [(row["prompt"], row["kind"]) for row in prepared(job.store)] == [
        ("a", "x"), ("b", None), ("c", "y"), ("d", "x")
    ]  # fmt: skip


def test_a_chunk_is_indexed_once_and_again_only_when_the_job_asks_differently(
    prepare_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare_job(pa.table({"id": [1, 2], "prompt": ["a", ""]}))
    first = job.index()
    writes: list[int] = []
    write = JobStore.write_rows
    monkeypatch.setattr(JobStore, "write_rows", lambda s, c, d: (writes.append(c), write(s, c, d)))
    assert job.index() == first
    assert writes == []
    chunk = list_chunks(job.record)[0]
    other = IndexJob.from_record(job.record.model_copy(update={"created_at": "2020-01-01T00:00:00+00:00"}), job.spec)
    index_chunk(chunk, other, job.store)
    assert writes == [0]
    job.store.clean_up()
    index_chunk(chunk, other, job.store)
    assert writes == [0, 0]


def test_an_empty_input_has_no_chunks(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"id": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())}))
    assert list_chunks(job.record) == ()


def test_a_file_below_a_place_with_a_password_is_opened_with_it(prepare_job: Callable[..., Any]) -> None:
    job = prepare_job(pa.table({"prompt": ["a"]}))
    (file,) = job.record.input.files
    hidden = file.model_copy(update={"url": "sftp://***@host/out/_lorabatch/input/k/00000.parquet"})
    record = job.record.model_copy(update={"input": job.record.input.model_copy(update={"files": (hidden,)})})
    (chunk,) = list_chunks(record, ("sftp://u:pw@host/in", "sftp://u:pw@host/out"))
    assert chunk.row_groups[0].file_url == "sftp://u:pw@host/out/_lorabatch/input/k/00000.parquet"
