"""Who plays which role, and who cannot."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lorabatch.jobs.input.columns import OUTPUT_COLUMNS, copied_names, find_roles
from lorabatch.jobs.options.values import SETTING_ROLES

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


def test_columns_play_the_role_of_their_name() -> None:
    given = schema(id=pa.int64(), adapter=pa.string(), prompt=pa.string(), seed=pa.int8(), note=pa.string())
    roles, problems = find_roles(given, {})
    assert problems == []
    assert roles == {"id": "id", "adapter": "adapter", "prompt": "prompt"}


@pytest.mark.parametrize("name", SETTING_ROLES)
def test_a_column_is_a_setting_only_where_the_job_asks_for_it(name: str) -> None:
    of_users = schema(prompt=pa.string(), limit=pa.int32()).append(pa.field(name, pa.duration("s")))
    assert find_roles(of_users, {}) == ({"prompt": "prompt"}, [])
    for asked in ("all", name):
        roles, problems = find_roles(of_users, {}, row_settings=[asked])
        assert roles == {"prompt": "prompt", name: name}
        assert f"column '{name}' ({name}): type duration[s], expected" in problems[0]
        assert "leave it out of --row-settings" in problems[0] or name == "tools"
    named = find_roles(of_users, {"max_tokens": "limit"})[0]
    assert named == {"prompt": "prompt", "max_tokens": "limit"}


def test_tools_beside_messages_and_a_struct_of_sampling_parameters_need_no_asking() -> None:
    tools = pa.field("tools", pa.string())
    assert find_roles(schema(messages=pa.string()).append(tools), {})[0]["tools"] == "tools"
    assert "tools" not in find_roles(schema(prompt=pa.string()).append(tools), {})[0]
    params = pa.struct([("max_tokens", pa.int32()), ("temperature", pa.float64())])
    given = schema(prompt=pa.string(), sampling_params=params)
    assert find_roles(given, {}) == (
        {
            "prompt": "prompt",
            "max_tokens": "sampling_params.max_tokens",
            "temperature": "sampling_params.temperature",
        },
        [],
    )
    assert find_roles(schema(prompt=pa.string(), sampling_params=pa.string()), {}) == ({"prompt": "prompt"}, [])


@pytest.mark.parametrize(
    ("fields", "more", "said"),
    [
        ({"best_of": pa.int32()}, {}, "its field 'best_of' is no setting"),
        ({"max_tokens": pa.string()}, {}, "type string, expected integer"),
        ({"seed": pa.int32()}, {"seed": pa.int32()}, "its field seed and column 'seed' are one setting"),
    ],
)
def test_fields_of_sampling_parameters_that_cannot_be_read_are_named(
    fields: dict[str, pa.DataType], more: dict[str, pa.DataType], said: str
) -> None:
    given = schema(prompt=pa.string(), sampling_params=pa.struct(list(fields.items())), **more)
    (problem,) = find_roles(given, {}, row_settings=["all"])[1]
    assert "sampling_params" in problem
    assert said in problem


def test_a_setting_that_is_asked_for_and_not_there_is_said() -> None:
    (problem,) = find_roles(schema(prompt=pa.string()), {}, row_settings=["seed"])[1]
    assert problem.startswith("row_settings='seed': the input has no such column.")
    assert "--column seed=NAME" in problem


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
    _, problems = find_roles(schema(**{role: kind}, **prompt), {}, row_settings=["all"])
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
    _, (problem,) = find_roles(schema(**{role: kind}, **prompt), {}, row_settings=["all"])
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
    taken = "the output has a column of that name. Put a text before the names of the output's own with --output-prefix"
    (problem,) = find_roles(given, {}, ["reasoning_markers"])[1]
    assert problem == f"input column 'reasoning': {taken} answer_, or leave it out with --drop reasoning."
    with_role = given.append(pa.field("tool_call_parser", pa.string()))
    (problem,) = find_roles(with_role, {}, row_settings=["tool_call_parser"])[1]
    assert problem.startswith(f"input column 'tool_calls': {taken}")


def test_a_prefix_or_a_column_that_is_not_copied_ends_a_collision() -> None:
    names = {"completion": pa.string(), "answer_mode": pa.string(), "error": pa.string()}
    given = schema(prompt=pa.string(), choice=pa.string(), **names)
    (problem,) = find_roles(given, {})[1]
    assert problem.startswith("input columns 'completion', 'error': the output has columns of these names.")
    # the text that is advised collides with none
    assert "--output-prefix answer2_, or leave them out with --drop completion --drop error." in problem
    assert find_roles(given, {}, prefix="answer2_")[1] == []
    assert "'answer_mode'" in find_roles(given, {}, prefix="answer_")[1][0]
    assert find_roles(given, {}, copied=["prompt", "choice"])[1] == []


def test_gold_labels_in_a_column_choice_are_no_answers() -> None:
    given = schema(prompt=pa.string(), choice=pa.string())
    assert "'choice'" in find_roles(given, {}, ["choice"])[1][0]
    assert find_roles(given, {}, ["choice"], prefix="our_")[1] == []
    # lists of texts that the job reads are copied instead
    assert find_roles(given, {}, row_settings=["choice"])[1] == []


def test_the_output_has_the_columns_that_are_asked_for_and_those_that_tell_rows_apart() -> None:
    given = schema(key=pa.string(), adapter=pa.string(), prompt=pa.string(), a=pa.int8(), b=pa.int8())
    roles = {"id": "key", "adapter": "adapter", "prompt": "prompt"}
    assert copied_names(given, roles, ["b"], []) == (["key", "adapter", "b"], [])
    assert copied_names(given, roles, [], ["prompt", "a"]) == (["key", "adapter", "b"], [])
    assert "drop='key': the output needs this column (id)" in copied_names(given, roles, [], ["key"])[1][0]
    assert "keep='c': the input has no such column" in copied_names(given, roles, ["c"], [])[1][0]


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
    roles, problems = find_roles(schema(messages=pa.string()).append(pa.field(role, kind)), {}, row_settings=["all"])
    assert roles[role] == role
    assert (problems == []) == is_right
    assert is_right or f"column {role!r} ({role}): type " in problems[0]


@pytest.mark.parametrize("name", [*OUTPUT_COLUMNS, "__lb_tokens"])
def test_names_that_the_output_needs_are_refused(name: str) -> None:
    _, (problem,) = find_roles(schema(prompt=pa.string(), **{name: pa.string()}), {})
    said = "names that begin with __lb_ are" if name.startswith("__lb_") else "the output has a column of that name"
    assert f"input column {name!r}: {said}" in problem


def test_a_named_column_that_is_not_there_is_said_with_those_that_are() -> None:
    _, problems = find_roles(schema(text=pa.string()), {"prompt": "txt", "seed": "s"})
    assert len(problems) == 2
    assert "column prompt='txt': the input has no such column. Name one of text." in problems


def test_all_problems_are_found_at_once() -> None:
    given = schema(prompt=pa.int64(), error=pa.string(), seed=pa.string(), id=pa.bool_())
    assert len(find_roles(given, {"adapter": "none"}, row_settings=["seed"])[1]) == 5


def test_names_of_columns_are_shown_without_control_characters() -> None:
    given = pa.schema([("\x1b[2Jid", pa.int64())])
    problems = [*find_roles(given, {})[1], *find_roles(given, {"prompt": "text"})[1]]
    assert len(problems) == 2
    assert all(r"\x1b[2Jid" in problem and problem.isprintable() for problem in problems)
