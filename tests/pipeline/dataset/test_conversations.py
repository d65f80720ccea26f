"""Conversations of rows reach the prompt whole, as transformers renders them, or make error rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.status.notes import row_notes
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.column_values import without_filling
from lorabatch.pipeline.dataset.index import IndexTotals, index_chunk, list_chunks
from lorabatch.pipeline.dataset.schema import ERROR, TOKENS, arrow_file
from lorabatch.pipeline.dataset.writer import output_schema

CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}{{ m.content if m.content else '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS = {"role": "user", "content": "x"}


def prepared(job: Any) -> list[dict[str, Any]]:
    job.index()
    with arrow_file(job.store.rows_source(0)) as reader:
        return sorted(reader.read_all().to_pylist(), key=lambda row: row["id"])


def oracle(job: Any, template: str, messages: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(job.spec.model)
    found: list[int] = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    return found


def call(name: str, arguments: Any, **beside: Any) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": arguments}, **beside}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    "chats",
    [
        [[ASKS, call("w", {"c": "R"})], [ASKS, call("s", {"a": 1, "b": 2.5})], [ASKS]],
        [[ASKS, call("f", {"at": {"m": [{"a": 1}, {"b": 2}]}})], [ASKS, call("f", {"at": {"zip": "1"}})]],
        [[ASKS, call("f", {"a": 1}, index=0)], [ASKS, call("f", {"a": 1})]],
    ],
    ids=["other arguments", "nested", "a key of the call"],
)
def test_structs_lose_the_nulls_that_other_rows_fill_in(prepare_job: Callable[..., Any], chats: Any) -> None:
    rows = {"id": list(range(len(chats))), "messages": pa.array(chats)}
    job = prepare_job(pa.table(rows), chat_template=CALLS, max_tokens=1)
    found = prepared(job)
    assert [row[ERROR] for row in found] == [None] * len(chats)
    assert [row[TOKENS] for row in found] == [oracle(job, CALLS, chat) for chat in chats]


def test_nulls_that_a_row_means_stay(prepare_job: Callable[..., Any]) -> None:
    as_text = [ASKS, call("f", '{"unit": null, "n": [null]}')]
    in_json = [ASKS, call("f", {"unit": None, "deep": {"a": None}})]
    kind = pa.array([as_text]).type
    job = prepare_job(pa.table({"id": [0], "messages": pa.array([as_text], kind)}), chat_template=CALLS)
    as_objects = [ASKS, call("f", {"unit": None, "n": [None]})]
    assert prepared(job)[0][TOKENS] == oracle(job, CALLS, as_objects)
    job = prepare_job(pa.table({"id": [0], "messages": [json.dumps(in_json)]}), chat_template=CALLS)
    assert prepared(job)[0][TOKENS] == oracle(job, CALLS, in_json)


def test_values_of_nested_columns_are_the_json_that_they_stand_for() -> None:
    kind = pa.struct(
        [
            ("map", pa.map_(pa.string(), pa.int64())),
            ("whole", pa.decimal128(10, 0)),
            ("part", pa.decimal128(10, 2)),
            ("day", pa.date32()),
            ("words", pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            ("empty", pa.struct([("a", pa.int8())])),
        ]
    )
    value = {"map": [("a", None), ("b", 1)], "whole": Decimal(3), "part": Decimal("1.50"), "day": date(2026, 1, 2)}
    given = pa.array([value | {"words": ["x", None], "empty": {"a": None}}, {"map": []}], kind)
    assert [without_filling(item, kind) for item in given.to_pylist()] == [
        {"map": {"a": None, "b": 1}, "whole": 3, "part": 1.5, "day": "2026-01-02", "words": ["x", None], "empty": {}},
        {"map": {}},
    ]


@pytest.mark.parametrize("form", ["JSON", "structs"])
def test_parts_reach_templates_as_parts(prepare_job: Callable[..., Any], form: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("MY", "QUESTION")]
    chats = [[{"role": "user", "content": parts}], [{"role": "user", "content": parts[1:]}]]
    column = pa.array(chats) if form == "structs" else list(map(json.dumps, chats))
    job = prepare_job(pa.table({"id": [0, 1], "messages": column}), chat_template=PARTS)
    found = prepared(job)
    assert [row[TOKENS] for row in found] == [oracle(job, PARTS, chat) for chat in chats]


def test_a_template_that_takes_no_parts_gets_their_texts(prepare_job: Callable[..., Any]) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("one", "two")]}]
    for template in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ '' + m.content }}{% endfor %}",
    ):
        job = prepare_job(pa.table({"id": [0], "messages": [json.dumps(chat)]}), chat_template=template)
        assert prepared(job)[0][TOKENS] == oracle(job, template, [{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(("zone", "offset"), [("Asia/Tokyo", "+09:00"), ("Etc/GMT+12", "-12:00"), ("UTC", "+00:00")])
def test_templates_see_the_client_s_time_of_day_on_all_workers(
    prepare_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, zone: str, offset: str
) -> None:
    template = "{{ strftime_now('%Y-%m-%d %H|%Z|%z') }} {{ messages[0].content }}"
    table = pa.table({"id": [0], "messages": [json.dumps([ASKS])]})
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        job = prepare_job(table, chat_template=template)
        expected = oracle(job, template, [ASKS])
        assert job.record.local_time.endswith(offset)
        assert datetime.fromisoformat(job.record.local_time) == datetime.fromisoformat(job.record.created_at)
        assert job.record.time_zone
    finally:
        monkeypatch.undo()
        time.tzset()
    (row,) = prepared(job)  # by a worker in another zone
    now = datetime.fromisoformat(job.record.local_time)
    assert row[TOKENS] == expected or now.minute == now.second == 0


def test_an_answer_at_the_end_is_counted_and_can_be_taken_out(prepare_job: Callable[..., Any]) -> None:
    chats = [
        [ASKS, {"role": "assistant", "content": "gold"}],
        [ASKS],
        [ASKS, {"role": "assistant", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]}],
        [{"role": "system", "content": "s"}, {"role": "assistant", "content": "alone"}],
        [ASKS, call("f", {"a": 1})],
    ]
    table = pa.table({"id": list(range(5)), "messages": list(map(json.dumps, chats))})
    job = prepare_job(table, chat_template=PARTS)
    assert prepared(job)[0][TOKENS] == oracle(job, PARTS, chats[0]), "it stays where nothing is said"
    totals = IndexTotals.of(
        index_chunk(chunk, IndexJob.from_record(job.record, job.spec), job.store) for chunk in list_chunks(job.record)
    )
    *_, note = row_notes(job.record, {"": 5}, totals.peculiar_rows)
    assert note.startswith("messages: 4 rows end with a message of the assistant")
    assert "--split-answer" in note
    split = prepare_job(table, chat_template=PARTS, split_answer=True, output_prefix="our_")
    found = prepared(split)
    assert [row["our_answer_expected"] for row in found[:4]] == ["gold", None, "in\nparts", "alone"]
    assert json.loads(found[4]["our_answer_expected"])[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [row[TOKENS] for row in found[:3]] == [oracle(split, PARTS, chat[:1]) for chat in chats[:3]]
    assert found[3][ERROR] == "messages: an answer alone, expected a message before it. Give one (split_answer)."
    assert "our_answer_expected" in output_schema(split.record).names
    continued = prepare_job(
        table.append_column("continue_final_message", pa.array([True] * 5)), chat_template=PARTS, split_answer=True
    )
    assert prepared(continued)[0][ERROR].startswith("split_answer=True, continue_final_message=True:")
    with pytest.raises(JobRequestError, match="a last message is taken out of the prompt, or it is continued"):
        prepare_job(table, split_answer=True, continue_final_message=True)
    with pytest.raises(JobRequestError, match="split_answer: the prompts of this input are in column 'prompt'"):
        prepare_job(pa.table({"id": [0], "prompt": ["x"]}), split_answer=True)
