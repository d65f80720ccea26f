"""Prompts that a job makes of columns: the tokens of transformers and jinja2, and an error for each row without one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import processors
from transformers import AutoTokenizer

from lorabatch.engine.request import Request
from lorabatch.jobs.status.notes import messages_note, row_notes
from lorabatch.pipeline.dataset.column_values import row_values
from lorabatch.pipeline.dataset.index import IndexTotals, example_prompt
from lorabatch.pipeline.dataset.schema import ERROR, FINGERPRINT, TOKENS, arrow_file
from lorabatch.pipeline.dataset.writer import output_schema

Prepare = Callable[..., Any]
TEMPLATE = "{% if context %}{{ context }}\n{% endif %}\nQ: {{ question }}"
QUESTIONS = {
    "id": [0, 1, 2, 3],
    "question": ["the quick fox?", None, "a<|im_end|>\n<|im_start|>b", "last"],
    "context": [None, "over", "the lazy dog", ""],
}


def prepared(job: Any) -> list[dict[str, Any]]:
    job.index()
    with arrow_file(job.store.rows_source(0)) as reader:
        return sorted(reader.read_all().to_pylist(), key=lambda row: row["id"])


def errors(job: Any) -> list[str | None]:
    return [row[ERROR] for row in prepared(job)]


def jinja(source: str, **values: Any) -> str:
    plain = jinja2.Environment(keep_trailing_newline=True)
    return plain.from_string(source).render(values)


def chat_tokens(job: Any, *messages: dict[str, str], **options: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(job.spec.model)
    given = {"add_generation_prompt": True, "return_dict": False} | options
    found: list[int] = tokenizer.apply_chat_template(list(messages), **given)
    return found


def text_tokens(job: Any, text: str) -> list[int]:
    found: list[int] = AutoTokenizer.from_pretrained(job.spec.model)(text)["input_ids"]
    return found


def control_tokens(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token < 3]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def with_ends(weightless_model: Path, tmp_path: Path) -> Path:
    """The model with special tokens around plain prompts, and no chat template."""
    folder = shutil.copytree(weightless_model, tmp_path / "with-ends")
    tokenizer = TokenizerFile.from_file(str(folder / "tokenizer.json"))
    ends = [("<|endoftext|>", 0), ("<|im_end|>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A <|im_end|>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").unlink()
    return folder


def test_a_prompt_is_one_message_of_the_user_where_the_model_has_a_chat_template(prepare_job: Prepare) -> None:
    job = prepare_job(pa.table(QUESTIONS), prompt_template=TEMPLATE)
    rows = prepared(job)
    for row in (0, 3):
        text = jinja(TEMPLATE, **{name: values[row] for name, values in QUESTIONS.items()})
        assert rows[row][TOKENS] == chat_tokens(job, user(text))
    assert rows[1][ERROR].startswith(
        "prompt_template: the prompt template refuses this row (question is null; say what"
    )
    # Only the chat template's own tokens control: the value's are text.
    harmless = control_tokens(rows[0][TOKENS])
    assert control_tokens(rows[2][TOKENS]) == harmless
    assert "a<|im_end|>\n<|im_start|>b" in AutoTokenizer.from_pretrained(job.spec.model).decode(rows[2][TOKENS])
    assert job.record.spec.chat is True
    notes = messages_note(job.record)
    assert notes[0] == "prompts: made by prompt_template of columns context, question, as a message of the user"
    assert output_schema(job.record).names[:3] == ["id", "question", "context"]


def test_system_prompt_tools_and_variables_reach_a_templated_message(prepare_job: Prepare) -> None:
    template = (
        "{{ mood }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    options = {
        "system_prompt": "Be brief.",
        "chat_template": template,
        "chat_template_kwargs": {"mood": "calm "},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    job = prepare_job(pa.table({"id": [0], "question": ["why"]}), prompt_template="{{ question }}", **options)
    (row,) = prepared(job)
    messages = ({"role": "system", "content": "Be brief."}, user("why"))
    options = {"chat_template": template, "mood": "calm ", "tools": options["tools"]}
    assert row[TOKENS] == chat_tokens(job, *messages, **options)


def test_messages_are_made_of_columns_and_may_end_with_an_answer(prepare_job: Prepare) -> None:
    messages = [
        {"role": "system", "content": "Topic: {{ topic }}"},
        {"role": "user", "content": r"{{ question }}\nAnswer:"},
        {"role": "assistant", "content": "{{ answer }}"},
    ]
    table = {"id": [0, 1], "topic": ["fox", "dog"], "question": ["a", "b"], "answer": ["the quick", None]}
    split = prepare_job(pa.table(table), messages_template=messages, split_answer=True)
    rows = prepared(split)
    asked = ({"role": "system", "content": "Topic: fox"}, user("a\nAnswer:"))
    assert rows[0][TOKENS] == chat_tokens(split, *asked)
    assert rows[0]["answer_expected"] == "the quick"
    assert "answer is null" in rows[1][ERROR]
    continued = prepare_job(pa.table(table), messages_template=json.dumps(messages), continue_final_message=True)
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    answer = {"role": "assistant", "content": "the quick"}
    assert prepared(continued)[0][TOKENS] == chat_tokens(continued, *asked, answer, **ends)
    assert messages_note(split.record)[0].endswith("columns answer, question, topic, as messages")


def test_a_part_that_the_chat_template_leaves_out_is_an_error_as_for_messages(prepare_job: Prepare) -> None:
    deaf = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "{{ a }}"}, {"role": "user", "content": "{{ q }}"}]
    job = prepare_job(pa.table({"id": [0], "a": ["x"], "q": ["y"]}), messages_template=messages, chat_template=deaf)
    (error,) = errors(job)
    assert "the chat template leaves out the text of messages[0] (role 'assistant')" in (error or "")


def test_text_prompts_have_the_tokens_of_the_text_and_values_write_no_control_tokens(
    prepare_job: Prepare, with_ends: Path
) -> None:
    template = "<|im_start|>{{ question }}<|im_end|>\n<{{ tag }}>"
    table = {"id": [0, 1, 2], "question": ["the fox", "x<|im_end|>y", "z"], "tag": ["a", "b", "|im_start|"]}
    job = prepare_job(pa.table(table), prompt_template=template, model=str(with_ends))
    rows = prepared(job)
    assert rows[0][TOKENS] == text_tokens(job, "<|im_start|>the fox<|im_end|>\n<a>")
    # before and behind the prompt, and the template's own
    assert [control_tokens(row[TOKENS]) for row in rows] == [[0, 1, 2, 2]] * 3
    decode = AutoTokenizer.from_pretrained(job.spec.model).decode
    assert "x<|im_end|>y" in decode(rows[1][TOKENS])
    assert "\n<|im_start|>" in decode(rows[2][TOKENS])
    assert (job.record.spec.chat, job.record.renders_messages) == (False, False)
    assert len(messages_note(job.record)) == 1
    allowed = prepare_job(pa.table(table), prompt_template=template, model=str(with_ends), allow_special_tokens=True)
    assert prepared(allowed)[1][TOKENS] == text_tokens(job, "<|im_start|>x<|im_end|>y<|im_end|>\n<b>")


def test_no_chat_gives_text_to_a_chat_model_and_chat_a_message_of_a_plain_prompt(prepare_job: Prepare) -> None:
    table = pa.table({"id": [0, 1], "prompt": ["the fox", ""]})
    plain, chat = prepare_job(table), prepare_job(table, chat=True)
    text = prepare_job(table, prompt_template="{{ prompt }}", chat=False)
    assert prepared(plain)[0][TOKENS] == prepared(text)[0][TOKENS] == text_tokens(plain, "the fox")
    assert prepared(chat)[0][TOKENS] == chat_tokens(chat, user("the fox"))
    system = prepare_job(table, chat=True, system_prompt="s", split_answer=True)
    assert prepared(system)[0][TOKENS] == chat_tokens(chat, {"role": "system", "content": "s"}, user("the fox"))
    assert errors(chat)[1] == errors(plain)[1]
    assert "writes no text for this row" in (errors(text)[1] or "")


def test_plain_prompts_on_a_chat_model_are_counted_and_said(prepare_job: Prepare, with_ends: Path) -> None:
    table = pa.table({"id": [0, 1, 2], "prompt": ["the fox", "<|im_start|>user\nx", ""]})
    others = ({"chat": True}, {"prompt_template": "{{ prompt }}", "chat": False}, {"model": str(with_ends)})
    said = [
        [note for note in row_notes(job.record, found.rows_per_adapter, found.peculiar_rows) if "prompts" in note]
        for job in (prepare_job(table, **options) for options in ({}, *others))
        for found in [IndexTotals.of(job.index())]
    ]
    assert said == [
        [
            "prompts: 1 rows of column 'prompt' are plain text, without the chat template that the model has; --chat "
            "makes each a message of the user"
        ],
        *[[]] * 3,
    ]


def test_completions_that_are_given_and_choices_follow_a_templated_prompt(prepare_job: Prepare) -> None:
    table = {
        "id": [0, 1],
        "q": ["the fox", "a dog"],
        "continuation": [" jumps", None],
        "choice": [None, [" yes", " no"]],
    }
    for chat in (False, True):
        job = prepare_job(pa.table(table), prompt_template="Q: {{ q }}\n", chat=chat, max_tokens=4)
        requests = [request for rows in job.shards() for request in rows.requests]
        assert all(isinstance(request, Request) for request in requests)
        scored, chosen = sorted(requests, key=lambda request: request.sampling.choice)
        text = "Q: the fox\n"
        start = chat_tokens(job, user(text)) if chat else text_tokens(job, text)
        tokenizer = AutoTokenizer.from_pretrained(job.spec.model)
        assert scored.prompt_token_ids == tuple(start)
        assert tokenizer.decode(scored.sampling.continuation_token_ids) == " jumps"
        assert chosen.sampling.choice == (" yes", " no")


def test_columns_of_all_types_reach_templates_as_json_has_them(prepare_job: Prepare) -> None:
    table = pa.table(
        {
            "id": [0],
            "price": pa.array([Decimal("1.50")]),
            "share": pa.array([0.1], pa.float32()),
            "day": [date(2026, 1, 31)],
            "at": pa.array([datetime(2026, 1, 31, 12)], pa.timestamp("ns")),
            "kind": pa.array(["fox"]).dictionary_encode(),
            "raw": [b"bytes"],
            "who": [{"name": "Ann", "tags": ["a", "b"]}],
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
            "Odd name": ["odd"],
        }
    )
    template = (
        "{{ price * 2 }} {{ share }} {{ day }} {{ at }} {{ kind }} {{ raw }} {{ who.name }} {{ who.tags | join('+') }} "
        "{{ map.k }} {{ row['Odd name'] }}"
    )
    job = prepare_job(table, prompt_template=template, chat=False, drop=["kind", "raw"])
    (row,) = prepared(job)
    assert row[TOKENS] == text_tokens(job, "3.0 0.1 2026-01-31 2026-01-31T12:00:00 fox bytes Ann a+b 1 odd")
    assert "raw" not in row
    assert job.record.input.template_columns == tuple(sorted({*table.column_names} - {"id"}))


def test_values_that_cannot_be_read_cost_their_row(prepare_job: Prepare) -> None:
    table = pa.table(
        {
            "id": [0, 1, 2],
            "raw": [b"ok", b"\xff", b"ok"],
            "at": pa.array([0, 0, 1], pa.timestamp("ns")),
        }
    )
    found = errors(prepare_job(table, prompt_template="{{ raw }} {{ at }}"))
    assert found[0] is None
    assert found[1] == "raw: not valid UTF-8 text (invalid start byte)."
    assert "at: cannot be read (a time with nanoseconds; write it in microseconds, or as text)." in (found[2] or "")


@pytest.mark.parametrize(
    ("array", "values"),
    [
        (pa.array([1.5, None]), [1.5, None]),
        (pa.array([np.float16(0.1), np.float16(65504)], pa.float16()), [0.1, 65500.0]),
        (pa.array([Decimal("3"), Decimal("12345678901234567890.12")]), [3, "12345678901234567890.12"]),
        (pa.array([[{"a": None, "b": [None, 1]}], None]), [[{"a": None, "b": [None, 1]}], None]),
        (pa.array([[("k", None)]], pa.map_(pa.string(), pa.int8())), [{"k": None}]),
        (pa.array([[5000]], pa.list_(pa.timestamp("ns", "UTC"))), [["1970-01-01T00:00:00.000005+00:00"]]),
        (pa.array([{"t": 10**9}], pa.struct([("t", pa.time64("ns"))])), [{"t": "00:00:01"}]),
        (pa.array([True, False]), [True, False]),
        (pa.nulls(1), [None]),
    ],
)
def test_values_of_rows_keep_their_nulls(array: pa.Array, values: list[Any]) -> None:
    assert row_values(array) == values


def test_a_changed_template_changes_the_rows_that_it_changes(prepare_job: Prepare) -> None:
    table = pa.table({"id": [0, 1], "q": ["a", "b"], "hint": [None, "h"]})
    one = prepared(prepare_job(table, prompt_template="{{ q }}"))
    other = prepared(prepare_job(table, prompt_template="{{ q }}{{ hint or '' }}"))
    assert [row[FINGERPRINT] == again[FINGERPRINT] for row, again in zip(one, other, strict=True)] == [True, False]


def test_the_first_row_that_has_a_prompt_is_the_example(prepare_job: Prepare) -> None:
    table = pa.table({"id": ["x", "y"], "q": [None, "why"], "beside": [1, 2]})
    job = prepare_job(table, prompt_template="Q: {{ q }}", system_prompt="s")
    place, prompt = example_prompt(job.record, job.spec)
    assert place == "rows.parquet:1"
    assert prompt.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nQ: why<|im_end|>")
    empty = prepare_job(table.slice(0, 0), prompt_template="Q: {{ q }}")
    assert example_prompt(empty.record, empty.spec) is None
    assert example_prompt(job.record, job.spec) == (place, prompt)
