"""Tables of other tools get a message that says what to write, and what it says works."""

from __future__ import annotations

import shlex

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.text.chat.prompt_template import PromptTemplate
from lorabatch.jobs.input.columns import find_roles
from lorabatch.jobs.input.known_tables import table_hint

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


@pytest.mark.parametrize("name", ["conversations", "prompt", "my talk"])
def test_share_gpt_s_conversations_get_a_command_that_converts_them(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}, {"from": "system", "value": "s"}]
    table = pa.table({"id": [1, 2], name: pa.array([talk, talk[:1]], TURN)})
    said = problem(table.schema)
    assert "holds ShareGPT's conversations (from, value), expected messages (role, content)" in said
    words = shlex.split(said[said.index("duckdb -c") :].replace(";", " ; "))
    monkeypatch.chdir(tmp_path_factory.mktemp("rows"))
    pq.write_table(table, "rows.parquet")
    duckdb.sql(words[2])
    found = pq.read_table("messages.parquet")
    assert find_roles(found.schema, {})[1] == []
    assert found.column("messages").to_pylist() == [
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "system", "content": "s"},
        ],
        [{"role": "user", "content": "hi"}],
    ]
    if name == "conversations":
        assert problem(table.schema, {"messages": name}).endswith("takes a last answer out of the prompt.")


@pytest.mark.parametrize("name", ["prompt", "chat", "two words"])
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
