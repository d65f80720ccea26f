"""Tables of other tools get a message that says what to write, and what it says works."""

from __future__ import annotations

import json
import shlex

import pyarrow as pa
import pytest

from lorabatch.engine.text.chat.prompt_template import PromptTemplate
from lorabatch.jobs.input.columns import find_roles
from lorabatch.jobs.input.known_tables import table_hint, turns_as_messages
from lorabatch.pipeline.dataset.row_checks import read_messages

TURN = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
MESSAGE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def problem(schema: pa.Schema, columns: dict[str, str] | None = None) -> str:
    (found,) = find_roles(schema, columns or {})[1]
    return found


@pytest.mark.parametrize("with_input", [True, False])
def test_alpaca_s_columns_get_a_template_that_renders_them(with_input: bool) -> None:
    names = ["instruction", *(["input"] if with_input else []), "output"]
    said = problem(pa.schema([pa.field(name, pa.string()) for name in names]))
    assert "The columns are Alpaca's: add --prompt-template " in said
    (_, template) = shlex.split(said[said.index("--prompt-template") :].removesuffix("."))
    source = template.replace("\\n", "\n")
    rows = [
        {"instruction": "Add.", "input": "1, 2"},
        {"instruction": "Sing.", "input": ""},
        {"instruction": "a", "input": None},
    ]
    found = [texts[0] for texts in PromptTemplate([source]).render_all(rows)]
    assert found == (["Add.\n\n1, 2", "Sing.", "a"] if with_input else ["Add.", "Sing.", "a"])


@pytest.mark.parametrize("name", ["talks", "my talk"])
def test_share_gpt_s_conversations_get_the_option_that_reads_them(name: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field(name, TURN)])
    said = problem(schema)
    assert "holds ShareGPT's conversations: add --column " in said
    role, _, column = shlex.split(said[said.index("--column") :].replace(",", " "))[1].partition("=")
    assert find_roles(schema, {role: column}) == ({"id": "id", "messages": name}, [])


def test_turns_of_share_gpt_are_messages() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "hi", "weight": 0},
        {"from": "gpt", "value": "yes"},
        {"from": "observation", "value": "42"},
    ]
    roles = ("system", "user", "assistant", "observation")
    expected = [{"role": role, "content": turn["value"]} for role, turn in zip(roles, turns, strict=True)]
    expected[1]["weight"] = 0
    assert turns_as_messages(turns) == expected
    assert read_messages(json.dumps(turns[:2]), None) == expected[:2]
    assert read_messages(turns[1:2], "be brief") == [{"role": "system", "content": "be brief"}, expected[1]]
    assert "messages[0].content=" in str(read_messages([{"from": "human", "value": None}], None))
    for other in ("text", [], [1], [{"role": "user", "content": "a", "from": "x", "value": "y"}], [turns[0], {}]):
        assert turns_as_messages(other) == other


@pytest.mark.parametrize("kind", [TURN, MESSAGE, pa.large_list(TURN.value_type)])
@pytest.mark.parametrize("name", ["conversations", "prompt"])
def test_conversations_of_a_known_name_and_type_are_read_without_an_option(name: str, kind: pa.DataType) -> None:
    text = pa.string()
    schema = pa.schema(
        [pa.field("id", text), pa.field(name, kind), pa.field("tools", text), pa.field("category", text)]
    )
    assert find_roles(schema, {}) == ({"id": "id", "messages": name, "tools": "tools"}, [])
    # The user's word comes first.
    assert find_roles(schema, {"prompt": "category"})[0] == {"id": "id", "prompt": "category"}
    assert "messages" not in find_roles(schema, {"messages": ""})[0]
    assert "messages" not in find_roles(schema, {}, is_made=True)[0]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"conversations": TURN, "prompt": pa.string()}, {"prompt": "prompt"}),
        ({"conversations": TURN, "messages": MESSAGE}, {"messages": "messages"}),
        ({"prompt": MESSAGE, "messages": MESSAGE}, None),
        ({"conversations": TURN, "system": pa.string()}, None),
        ({"conversations": pa.string()}, None),
        ({"conversations": pa.list_(pa.struct([("from", pa.string())]))}, None),
        ({"conversations": TURN.value_type}, None),
        ({"conversation": TURN}, None),
        ({"prompt": pa.string(), "completion": MESSAGE}, {"prompt": "prompt"}),
    ],
)
def test_what_may_be_meant_otherwise_is_not_taken_for_messages(
    columns: dict[str, pa.DataType], expected: dict[str, str] | None
) -> None:
    roles, problems = find_roles(pa.schema(list(columns.items())), {}, prefix="answer_")
    if expected is None:
        assert problems
    else:
        assert (roles, problems) == (expected, [])


@pytest.mark.parametrize("name", ["chat", "two words"])
def test_lists_of_messages_get_the_option_that_reads_them(name: str) -> None:
    schema = pa.schema([pa.field("id", pa.string()), pa.field(name, MESSAGE)])
    said = problem(schema)
    words = shlex.split(said[said.index("--column") :].removesuffix("."))
    role, _, column = words[1].partition("=")
    assert find_roles(schema, {role: column}) == ({"id": "id", "messages": name}, [])


def test_other_tables_are_shown_both_ways() -> None:
    schema = pa.schema([("n", pa.int64()), ("frage", pa.string())])
    said = problem(schema)
    assert said.endswith(
        "Rename one with --column, for example --column prompt=text, or make prompts of columns with "
        "--prompt-template 'Question: {{ frage }}'."
    )
    assert table_hint(schema) == ""
    assert table_hint(pa.schema([("instruction", pa.string())])) == ""
