"""Who plays which role, and who cannot."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lorabatch.jobs.input.columns import OUTPUT_COLUMNS, find_roles

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


def test_columns_play_the_role_of_their_name() -> None:
    given = schema(id=pa.int64(), adapter=pa.string(), prompt=pa.string(), seed=pa.int8(), note=pa.string())
    roles, problems = find_roles(given, {})
    assert problems == []
    assert roles == {"id": "id", "adapter": "adapter", "prompt": "prompt", "seed": "seed"}


def test_named_columns_play_the_role_they_are_given() -> None:
    given = schema(uid=pa.string(), text=pa.string(), tenant=pa.string(), prompt=pa.int64(), id=pa.float64())
    roles, problems = find_roles(given, {"id": "uid", "prompt": "text", "adapter": "tenant"})
    assert problems == []
    assert roles == {"id": "uid", "prompt": "text", "adapter": "tenant"}


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("id", pa.uint64()),
        ("id", pa.large_string()),
        ("prompt", pa.dictionary(pa.int32(), pa.string())),
        ("prompt", pa.string_view()),
        ("messages", pa.list_(MESSAGE)),
        ("messages", pa.large_list(pa.struct([*MESSAGE, ("name", pa.string())]))),
        ("messages", pa.string()),
        ("prompt_token_ids", pa.list_(pa.uint16())),
        ("prompt_token_ids", pa.list_(pa.int32(), 4)),
        ("adapter", pa.null()),
        ("temperature", pa.int32()),
        ("temperature", pa.float32()),
        ("stop", pa.string()),
        ("stop", pa.list_(pa.string())),
        ("max_tokens", pa.null()),
        ("logprobs", pa.bool_()),
    ],
)
def test_types_that_fit_a_role_are_taken(role: str, kind: pa.DataType) -> None:
    prompt = {} if role in ("messages", "prompt_token_ids", "prompt") else {"prompt": pa.string()}
    _, problems = find_roles(schema(**{role: kind}, **prompt), {})
    assert problems == []


@pytest.mark.parametrize(
    ("role", "kind", "expected"),
    [
        ("id", pa.float64(), "string or integer"),
        ("prompt", pa.int64(), "string"),
        ("prompt", pa.binary(), "string"),
        ("messages", pa.list_(pa.string()), "list<struct<role, content>>"),
        ("messages", pa.list_(pa.struct([("role", pa.string())])), "list<struct<role, content>>"),
        ("prompt_token_ids", pa.list_(pa.float32()), "list of integers"),
        ("adapter", pa.int64(), "string"),
        ("max_tokens", pa.string(), "integer"),
        ("max_tokens", pa.float64(), "integer"),
        ("temperature", pa.string(), "number"),
        ("stop", pa.list_(pa.int64()), "string or list of strings"),
        ("ignore_eos", pa.int8(), "boolean"),
    ],
)
def test_types_that_do_not_fit_are_named_with_what_is_expected(role: str, kind: pa.DataType, expected: str) -> None:
    prompt = {} if role in ("messages", "prompt_token_ids", "prompt") else {"prompt": pa.string()}
    _, (problem,) = find_roles(schema(**{role: kind}, **prompt), {})
    assert f"column '{role}' ({role}): type {kind}, expected {expected}" in problem


def test_a_row_must_have_one_kind_of_prompt() -> None:
    _, (none,) = find_roles(schema(text=pa.string(), id=pa.int64()), {})
    assert "no prompt column" in none
    assert "text, id" in none
    assert "--column prompt=text" in none
    both = schema(prompt=pa.string(), messages=pa.list_(MESSAGE))
    _, (two,) = find_roles(both, {})
    assert "prompt and messages" in two
    assert "--column prompt=prompt" in two
    roles, problems = find_roles(both, {"messages": "messages"})
    assert (roles, problems) == ({"messages": "messages"}, [])
    _, (asked_twice,) = find_roles(both, {"messages": "messages", "prompt": "prompt"})
    assert "one kind of prompt" in asked_twice


def test_columns_that_an_option_adds_are_taken_where_it_is_given() -> None:
    given = schema(prompt=pa.string(), reasoning=pa.string(), tool_calls=pa.int64())
    assert find_roles(given, {})[1] == []
    taken = "the output has a column of that name. Rename it."
    assert find_roles(given, {}, ["reasoning_markers"])[1] == [f"input column 'reasoning': {taken}"]
    with_role = given.append(pa.field("tool_call_parser", pa.string()))
    assert find_roles(with_role, {})[1] == [f"input column 'tool_calls': {taken}"]


@pytest.mark.parametrize(
    ("role", "kind", "is_right"),
    [
        ("tools", pa.string(), True),
        ("tools", pa.null(), True),
        ("tools", pa.list_(pa.struct([("type", pa.string())])), True),
        ("tools", pa.list_(pa.string()), False),
        ("chat_template_kwargs", pa.struct([("a", pa.bool_())]), True),
        ("chat_template_kwargs", pa.map_(pa.string(), pa.string()), False),
        ("continue_final_message", pa.bool_(), True),
        ("add_generation_prompt", pa.string(), False),
    ],
)
def test_columns_beside_messages_have_types_that_templates_read(role: str, kind: pa.DataType, is_right: bool) -> None:
    roles, problems = find_roles(schema(messages=pa.string()).append(pa.field(role, kind)), {})
    assert roles[role] == role
    assert (problems == []) == is_right
    assert is_right or f"column {role!r} ({role}): type " in problems[0]


@pytest.mark.parametrize("name", [*OUTPUT_COLUMNS, "__lb_tokens"])
def test_names_that_the_output_needs_are_refused(name: str) -> None:
    _, (problem,) = find_roles(schema(prompt=pa.string(), **{name: pa.string()}), {})
    assert f"input column {name!r}: the output has a column of that name" in problem


def test_a_named_column_that_is_not_there_is_said_with_those_that_are() -> None:
    _, problems = find_roles(schema(text=pa.string()), {"prompt": "txt", "seed": "s"})
    assert len(problems) == 2
    assert "column prompt='txt': the input has no such column. Name one of text." in problems


def test_all_problems_are_found_at_once() -> None:
    given = schema(prompt=pa.int64(), error=pa.string(), seed=pa.string(), id=pa.bool_())
    assert len(find_roles(given, {"adapter": "none"})[1]) == 5


def test_names_of_columns_are_shown_without_control_characters() -> None:
    given = pa.schema([("\x1b[2Jid", pa.int64())])
    problems = [*find_roles(given, {})[1], *find_roles(given, {"prompt": "text"})[1]]
    assert len(problems) == 2
    assert all(r"\x1b[2Jid" in problem and problem.isprintable() for problem in problems)
