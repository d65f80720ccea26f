"""Recognises tables in the layouts of other tools, and says what to write for them; reads ShareGPT's turns as messages.

Known are Alpaca's columns (instruction, input, output), ShareGPT's conversations (lists of structs with from and value)
and lists of messages in the column `prompt`, as TRL has them. The latter two are read without an option where nothing
else in the table can be meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from ...system.untrusted import shown_name
from ..options.values import PROMPT_ROLES

_ALPACA = "{{ instruction }}{% if input %}\\n\\n{{ input }}{% endif %}"
_ALPACA_ALONE = "{{ instruction }}"
# ShareGPT's names of speakers -> roles. Every other name stays what it is.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_TURN = {"from", "value"}
_MESSAGE = {"role", "content"}
# Names of columns that are read as messages if they have the type, and columns beside them that may be a part of the
# conversation.
_CONVERSATIONS = ("conversations", "prompt")
_BESIDE = {"system", "system_prompt"}


def list_fields(kind: pa.DataType) -> frozenset[str]:
    """Names of the fields of a column of lists of structs; none for other types."""
    if not (t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)):
        return frozenset()
    item = kind.value_type
    return frozenset(item.field(i).name for i in range(item.num_fields)) if t.is_struct(item) else frozenset()


def is_turn(names: Collection[str]) -> bool:
    """Whether these are the fields of a turn in ShareGPT's conversations: a speaker and what they said."""
    return {*names} >= _TURN and not _MESSAGE & {*names}


def conversation_column(schema: pa.Schema, columns: Mapping[str, str]) -> str | None:
    """The column of a known layout that is read as messages although it has another name; None where there is none, or
    where another column may have the prompt or a part of it. `columns`: roles that the user has assigned.
    """
    names = {*schema.names}
    if len({*_CONVERSATIONS, *PROMPT_ROLES} & names) != 1 or _BESIDE & names or {*PROMPT_ROLES} & columns.keys():
        return None
    name = next((name for name in _CONVERSATIONS if name in names), None)
    fields = list_fields(schema.field(name).type) if name is not None else ()
    return name if is_turn(fields) or {*fields} >= _MESSAGE else None


def conversation_note(kind: pa.DataType) -> str:
    """The form of the conversations in a column, in words."""
    return "ShareGPT's conversations (from, value)" if is_turn(list_fields(kind)) else "lists of messages"


def turns_as_messages(value: Any) -> Any:
    """ShareGPT's turns as messages with role and content; every other value as it is."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) and is_turn(turn) for turn in value):
        return value
    return [
        {"role": _SPEAKERS.get(turn["from"], turn["from"]) if isinstance(turn["from"], str) else turn["from"]}
        | {"content": turn["value"]}
        | {name: item for name, item in turn.items() if name not in _TURN}
        for turn in value
    ]


def messages_hint(name: str, kind: pa.DataType) -> str:
    """A sentence that says what to write for a prompt column that holds conversations; "" for other types."""
    fields = list_fields(kind)
    if fields >= _MESSAGE:
        return f"It holds lists of messages: add --column {quote(f'messages={name}')}."
    return _share_gpt_hint(name) if is_turn(fields) else ""


def table_hint(schema: pa.Schema) -> str:
    """A sentence that says what to write for a table without prompts whose layout is known; "" for others."""
    for column in schema:
        fields = list_fields(column.type)
        if fields >= _MESSAGE:
            return f"Column {column.name!r} holds lists of messages: add --column {quote(f'messages={column.name}')}."
        if is_turn(fields):
            return _share_gpt_hint(column.name)
    if {"instruction", "output"} <= {*schema.names} or {"instruction", "input"} <= {*schema.names}:
        template = _ALPACA if "input" in schema.names else _ALPACA_ALONE
        return f"The columns are Alpaca's: add --prompt-template {quote(template)}."
    return ""


def template_hint(schema: pa.Schema) -> str:
    """A template of the first text column, for a message."""
    texts = [column.name for column in schema if t.is_string(column.type) or t.is_large_string(column.type)]
    name = next((name for name in texts if name.isidentifier()), "question")
    return quote(f"Question: {{{{ {name} }}}}")


def _share_gpt_hint(name: str) -> str:
    return (
        f"Column {shown_name(name)!r} holds ShareGPT's conversations: add --column {quote(f'messages={name}')}, and "
        "--split-answer to take a last answer out of the prompt."
    )
