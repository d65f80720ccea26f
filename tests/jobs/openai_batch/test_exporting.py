"""A job's rows become lines that the `openai` package reads, the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from lorabatch.jobs.contents import part_name
from lorabatch.jobs.errors import DamagedRecordError, JobRequestError, OutputConflictError, StorageError
from lorabatch.jobs.input.columns import ANSWER_FIELDS, ASKED_FIELDS, LOGPROB_FIELDS, SAMPLE_FIELD
from lorabatch.jobs.openai_batch.exporting import _Layout, export_batch
from lorabatch.jobs.record import InputRecord, JobRecord
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.store import JobStore

Place = tuple[str, dict[str, Any]]
ROLES = {"id": "id", "adapter": "adapter", "messages": "messages"}
ANSWER = {
    "id": "a", "adapter": "tenant", "messages": "[]", "openai_model": "tenant", "openai_error": None,
    "completion": "Hello.", "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2, "error": None,
    "adapter_sha256": "a" * 64, "mode": "unmerged", "attempts": 1, "token_ids": None, "token_logprobs": None,
}  # fmt: skip
OURS = {field.name: field.type for field in (*ANSWER_FIELDS, *LOGPROB_FIELDS, *ASKED_FIELDS.values(), SAMPLE_FIELD)}


def part(*rows: dict[str, Any]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(ANSWER)
    columns = {name: pa.array([row.get(name) for row in rows], OURS.get(name)) for name in names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


@pytest.fixture
def make_store(tmp_path: Path, record: Callable[..., JobRecord]) -> Callable[..., JobStore]:
    """`make_store(*parts, roles)`: a finished job with these parts, each a list of rows."""

    def make(
        *parts: list[dict[str, Any]], roles: dict[str, str] = ROLES, url: str = "", options: Any = None
    ) -> JobStore:
        store = JobStore(url or str(tmp_path / "job"), options)
        store.freeze(record(input=InputRecord(files=(), roles=roles, schema_ipc="")))
        for shard_id, rows in enumerate(parts):
            store.commit_part(shard_id, part(*rows))
        store.write_summary({})
        store.mark_success()
        return store

    return make


def exported(store: JobStore, target: Path, **options: Any) -> list[dict[str, Any]]:
    export_batch(store, str(target), {}, **options)
    return [json.loads(line) for line in target.read_bytes().splitlines()]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_a_chat_is_a_line_with_a_chat_completion(make_store: Callable[..., JobStore], target: Path) -> None:
    (line,) = exported(make_store([ANSWER]), target)
    name = line["id"].removeprefix("batch_req_")
    assert line == {
        "id": f"batch_req_{name}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{name}",
            "body": {
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": 1735689600,
                "model": "tenant",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello.", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }
    ChatCompletion.model_validate(line["response"]["body"], strict=True)


def test_completions_of_one_row_are_choices_of_one_line(make_store: Callable[..., JobStore], target: Path) -> None:
    several = [ANSWER | {"n": 3, "sample": i, "completion": f"Hello {i}."} for i in range(3)]
    alone = ANSWER | {"id": "b", "n": None, "sample": 0}
    wrong = ANSWER | {"id": "c", "n": 2, "sample": 0, "finish_reason": "error", "error": "Bad.", "attempts": 0}
    failed = [ANSWER | {"id": "d", "n": 2, "sample": 0}, ANSWER | {"id": "d", "n": 2, "sample": 1, "error": "No."}]
    failed[1] |= {"finish_reason": "error"}
    store = make_store(
        [several[2], alone, several[0], failed[0]], [wrong, failed[1], several[1]], roles=ROLES | {"n": "n"}
    )
    found = {line["custom_id"]: line for line in exported(store, target)}
    assert found.keys() == {"a", "b", "c", "d"}
    chat = ChatCompletion.model_validate(found["a"]["response"]["body"], strict=True)
    assert [(c.index, c.message.content) for c in chat.choices] == [(i, f"Hello {i}.") for i in range(3)]
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (3, 6)
    assert len(found["b"]["response"]["body"]["choices"]) == 1
    assert found["c"]["error"] == {"code": "invalid_request", "message": "Bad."}
    assert found["d"]["error"] == {"code": "server_error", "message": "No."}


def test_completions_whose_others_are_missing_are_exported_with_what_is_there(
    make_store: Callable[..., JobStore], target: Path
) -> None:
    store = make_store([ANSWER | {"n": 2, "sample": 1}], [ANSWER | {"n": 2, "sample": 0}], roles=ROLES | {"n": "n"})
    store.remove_part(1)
    (line,) = exported(store, target, is_partial=True)
    assert [choice["index"] for choice in line["response"]["body"]["choices"]] == [1]


def test_tool_calls_reasoning_and_alternatives_are_part_of_a_chat(
    make_store: Callable[..., JobStore], target: Path
) -> None:
    row = ANSWER | {
        "reasoning": "Hm.", "tool_calls": [{"id": "x", "name": "get", "arguments": "{}"}],
        "token_ids": [5], "token_logprobs": [-0.5],
        "token_top_logprobs": [[{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": float("-inf")}]],
    }  # fmt: skip
    (line,) = exported(make_store([row]), target)
    (choice,) = ChatCompletion.model_validate(line["response"]["body"]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].to_dict() == {
        "id": "x", "type": "function", "function": {"name": "get", "arguments": "{}"}
    }  # fmt: skip
    assert line["response"]["body"]["choices"][0]["message"]["reasoning_content"] == "Hm."
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    tops = choice.logprobs.content[0].top_logprobs
    assert [(top.token, top.logprob) for top in tops] == [("token_id:5", -0.5), ("token_id:6", -9999.0)]


@pytest.mark.parametrize("role", ["prompt", "prompt_token_ids"])
def test_a_prompt_is_a_line_with_a_completion(make_store: Callable[..., JobStore], target: Path, role: str) -> None:
    store = make_store([ANSWER | {"finish_reason": "length"}], roles={"id": "id", role: role})
    (line,) = exported(store, target)
    found = Completion.model_validate(line["response"]["body"], strict=True)
    assert (found.object, found.choices[0].text, found.choices[0].finish_reason) == (
        "text_completion",
        "Hello.",
        "length",
    )


def test_an_error_row_is_a_line_with_an_error(make_store: Callable[..., JobStore], target: Path) -> None:
    wrong = ANSWER | {"completion": None, "finish_reason": "error", "mode": None, "attempts": 0, "error": "too long."}
    rows = [
        wrong,
        wrong | {"id": "b", "openai_error": "batch.jsonl:2: n=2: not supported.", "openai_model": None},
        wrong | {"id": "c", "attempts": 3, "error": "the engine ended."},
        wrong | {"id": None},
    ]
    found = exported(make_store(rows), target)
    assert [(line["custom_id"], line["response"], line["error"]) for line in found] == [
        ("a", None, {"code": "invalid_request", "message": "too long."}),
        ("b", None, {"code": "invalid_request", "message": "batch.jsonl:2: n=2: not supported."}),
        ("c", None, {"code": "server_error", "message": "the engine ended."}),
        (None, None, {"code": "invalid_request", "message": "too long."}),
    ]


@pytest.mark.parametrize(
    ("row", "roles", "model"),
    [
        ({}, ROLES, "tenant"),
        ({"openai_model": None}, ROLES, "tenant"),
        ({"openai_model": None, "adapter": None}, ROLES, "model"),
        ({"openai_model": None, "adapter": ""}, ROLES, "model"),
        ({"openai_model": "gpt-x", "adapter": None}, ROLES, "gpt-x"),
        ({"openai_model": {"of": "another tool"}}, ROLES, "tenant"),
        ({"openai_model": None, "who": "me"}, ROLES | {"adapter": "who"}, "me"),
        ({"openai_model": None}, {"id": "id", "messages": "messages"}, "model"),
    ],
)
def test_the_model_is_the_one_that_was_asked(
    make_store: Callable[..., JobStore], target: Path, row: dict[str, Any], roles: dict[str, str], model: str
) -> None:
    (line,) = exported(make_store([ANSWER | row], roles=roles), target)
    assert line["response"]["body"]["model"] == model


def test_jobs_of_any_input_are_exported(make_store: Callable[..., JobStore], target: Path) -> None:
    row = {name: value for name, value in ANSWER.items() if name in {*OURS, "messages"} and "token_" not in name}
    store = make_store([row | {"row": 7}], roles={"id": "row", "messages": "messages"})
    (line,) = exported(store, target)
    assert (line["custom_id"], line["response"]["body"]["model"]) == ("7", "model")


def test_log_probabilities_name_tokens_by_their_ids(make_store: Callable[..., JobStore], target: Path) -> None:
    row = ANSWER | {"token_ids": [5, 7], "token_logprobs": [-0.5, float("-inf")]}
    (line,) = exported(make_store([row]), target)
    logprobs = ChatCompletion.model_validate(line["response"]["body"], strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.logprob) for one in logprobs.content] == [("token_id:5", -0.5), ("token_id:7", -9999.0)]
    store = make_store([row], roles={"id": "id", "prompt": "messages"}, url=str(target.parent / "other"))
    (line,) = exported(store, target)
    found = Completion.model_validate(line["response"]["body"], strict=True).choices[0].logprobs
    assert found is not None
    assert (found.tokens, found.token_logprobs) == (["token_id:5", "token_id:7"], [-0.5, -9999.0])


def test_lines_stand_as_rows_do_in_the_parts_and_are_the_same_each_time(
    make_store: Callable[..., JobStore], target: Path
) -> None:
    parts = [[ANSWER | {"id": f"{part}-{row}"} for row in (2, 0, 1)] for part in range(12)]
    store = make_store(*parts)
    found = exported(store, target)
    before = target.read_bytes()
    assert [line["custom_id"] for line in found] == [row["id"] for rows in parts for row in rows]
    assert len({line["id"] for line in found}) == len(found)
    exported(store, target)
    assert target.read_bytes() == before


def test_a_job_without_rows_is_a_file_without_lines(make_store: Callable[..., JobStore], target: Path) -> None:
    assert exported(make_store([]), target) == []
    assert target.exists()


@given(st.text() | st.sampled_from(["\u2028", "\x00", "\r\n", "\x85"]))
def test_texts_survive_and_no_sign_in_them_ends_a_line(text: str) -> None:
    line = json.dumps(
        _Layout("job", 0, ROLES, "base", 1, is_chat=True).line([ANSWER | {"completion": text, "id": text}])
    )
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert (found["custom_id"], found["response"]["body"]["choices"][0]["message"]["content"]) == (text, text)


def test_a_job_that_has_not_finished_is_exported_only_when_that_is_asked(
    make_store: Callable[..., JobStore], target: Path
) -> None:
    store = make_store([ANSWER], [ANSWER | {"id": "b"}])
    store.remove_part(1)
    with pytest.raises(JobRequestError, match="has not finished"):
        exported(store, target)
    assert not target.exists()
    assert [line["custom_id"] for line in exported(store, target, is_partial=True)] == ["a"]


def test_wrong_requests_are_refused_and_nothing_is_written(
    make_store: Callable[..., JobStore], target: Path, tmp_path: Path
) -> None:
    with pytest.raises(JobRequestError, match="no job there"):
        exported(JobStore(str(tmp_path / "nothing")), target)
    store = make_store([ANSWER])
    with pytest.raises(JobRequestError, match=r"ends with .jsonl"):
        exported(store, tmp_path / "results.parquet")
    with pytest.raises(JobRequestError, match="lies in the job's output"):
        exported(store, tmp_path / "job" / "results.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"job"}


def test_an_export_that_fails_leaves_the_file_that_was_there(
    make_store: Callable[..., JobStore], target: Path, record: Callable[..., JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store([ANSWER], [ANSWER | {"id": "b"}])
    target.write_bytes(b"old")
    path = store.location.local_path(part_name(1))
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"", part({"id": "b"})):
        path.write_bytes(damaged)
        with pytest.raises((DamagedRecordError, StorageError), match=r"part-00001\.parquet"):
            exported(store, target)
    path.write_bytes(whole)
    monkeypatch.setattr(store, "check_holder", lambda _: JobStore(store.url).check_holder("job-2"))
    with pytest.raises(OutputConflictError, match="was started over"):
        exported(store, target)
    assert target.read_bytes() == b"old"
    assert {path.name for path in target.parent.iterdir()} == {"job", "results.jsonl"}


def test_lines_are_written_to_any_store(make_store: Callable[..., JobStore], place: Place) -> None:
    url, options = place
    store = make_store([ANSWER], url=f"{url}/job", options=options)
    found = export_batch(store, f"{url}/results/results.jsonl", options)
    assert found.endswith("results/results.jsonl: 1 response, 0 errors")
    assert json.loads(Location(url, options).read("results/results.jsonl"))["custom_id"] == "a"
