"""Finds which input column plays which role, and checks its type: an Arrow schema in, roles and problems out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from ...engine.request import SAMPLING_OPTIONS, LogitBias
from ...engine.structured_output import FORMS
from ...engine.untrusted import shown_name
from ..record import JobRecord
from ..spec import COLUMN_ROLES, PROMPT_ROLES
from .answer_type import answer_type
from .completions import listed
from .files import unpack_schema

# What the output adds; input columns must leave these names free.
ANSWER_FIELDS = (
    pa.field("completion", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("error", pa.string()),
    pa.field("adapter_sha256", pa.string()),
    pa.field("mode", pa.string()),
    pa.field("attempts", pa.int32()),
)
LOGPROB_FIELDS = (
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("token_logprobs", pa.list_(pa.float32())),
)
_TOKEN = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
_CALL = pa.struct([(name, pa.string()) for name in ("id", "name", "arguments")])
#: Of rows with a continuation: the sum of its tokens' log-probabilities.
SCORE_FIELD = pa.field("continuation_logprob", pa.float64())
#: In the output of a job with choices: the text that was chosen, and the log-probability of each.
CHOICE_FIELD = pa.field("choice", pa.string())
CHOICE_SCORES_FIELD = pa.field(
    "choice_logprobs", pa.list_(pa.struct([("choice", pa.string()), ("logprob", pa.float64())]))
)
#: Option or role -> the column that the output has where a job or a column gives it.
ASKED_FIELDS: Mapping[str, pa.Field] = {
    "top_logprobs": pa.field("token_top_logprobs", pa.list_(pa.list_(_TOKEN))),
    "prompt_logprobs": pa.field("prompt_token_logprobs", pa.list_(_TOKEN)),
    "prompt_top_logprobs": pa.field("prompt_token_top_logprobs", pa.list_(pa.list_(_TOKEN))),
    "continuation": SCORE_FIELD,
    "reasoning_markers": pa.field("reasoning", pa.string()),
    "tool_call_parser": pa.field("tool_calls", pa.list_(_CALL)),
}
OUTPUT_COLUMNS = tuple(field.name for field in ANSWER_FIELDS + LOGPROB_FIELDS)
#: In the output of a job with a JSON Schema.
TYPED_COLUMN = "answer"
#: In the output of a job that asks for several completions of a row: their number, from 0.
SAMPLE_FIELD = pa.field("sample", pa.int32())
OUR_PREFIX = "__lb_"
DEFAULT_ID_COLUMN = "id"


def has_samples(asked: Collection[str], roles: Collection[str]) -> bool:
    """Whether rows may have several completions, each a row of the output."""
    return "samples" not in asked and ("n" in asked or "n" in roles or "continuation" in roles)


def asked_options(spec: Mapping[str, Any]) -> list[str]:
    """Options of a job that are given and bring columns of the output."""
    return [
        *(name for name in (*ASKED_FIELDS, "json_schema", "choice") if spec.get(name)),
        *(["score_choices"] if spec.get("score_choices", True) else []),
        *(["n"] if spec.get("n", 1) > 1 else []),
        *(["samples"] if spec.get("samples") == "lists" else []),
    ]


def answer_fields(record: JobRecord) -> tuple[pa.Field, ...]:
    """What the output of a job adds to its input."""
    fields = completion_fields(record)
    return tuple(map(listed, fields)) if record.has_lists else fields


def completion_fields(record: JobRecord) -> tuple[pa.Field, ...]:
    """What the output of a job says of one completion."""
    asked = asked_options(record.spec)
    fields = [*ANSWER_FIELDS, *(LOGPROB_FIELDS if record.with_logprobs else ())]
    fields += _asked_fields(asked, record.input.roles)
    if "json_schema" in asked:
        fields.append(pa.field(TYPED_COLUMN, answer_type(record.spec["json_schema"]).arrow))
    columns = unpack_schema(record.input.schema_ipc).names
    return (*fields, *choice_fields(asked, record.input.roles, columns))


def _asked_fields(asked: Collection[str], roles: Collection[str]) -> list[pa.Field]:
    given = {*asked, *roles}
    # the likeliest tokens come beside those of the prompt
    given |= {"prompt_logprobs"} if "prompt_top_logprobs" in given else set()
    return [field for option, field in ASKED_FIELDS.items() if option in given]


def choice_fields(asked: Collection[str], roles: Collection[str], columns: Collection[str]) -> list[pa.Field]:
    """What choices add to the output of a job. `columns`: of the input; one that is called `choice` stays as it is."""
    if "choice" not in asked and {"choice", "structured_outputs"}.isdisjoint(roles):
        return []
    scores = [CHOICE_SCORES_FIELD] if "score_choices" in asked or "score_choices" in roles else []
    return [*([] if CHOICE_FIELD.name in columns else [CHOICE_FIELD]), *scores]


def records_samples(record: JobRecord) -> bool:
    """Whether the rows of a job have the column `sample`."""
    return has_samples(asked_options(record.spec), record.input.roles)


def readable(item: pa.Scalar) -> Any:
    """The Python value of a scalar; text that is not UTF-8 has U+FFFD where it cannot be decoded.

    Columns that are passed through keep such text as it is, so whatever reads a value to count or to show it reads it
    with this.
    """
    try:
        return item.as_py()
    except UnicodeDecodeError as error:
        return bytes(error.object).decode("utf-8", "replace")


def readable_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The Python values of a column, `readable` each."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [readable(item) for item in column]


def find_roles(
    schema: pa.Schema, columns: Mapping[str, str], asked: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Role -> input column, and every problem found.

    `columns`: roles that the user has assigned; any other role is played by the column of its own name, if
    there is one. `asked`: options of the job that are given and bring columns of the output.
    """
    roles = dict(columns)
    problems = [
        f"column {role}={name!r}: the input has no such column. Name one of {_names(schema) or 'none'}."
        for role, name in columns.items()
        if name not in schema.names
    ]
    for role in COLUMN_ROLES:
        is_other_prompt = role in PROMPT_ROLES and any(prompt in columns for prompt in PROMPT_ROLES)
        if role not in roles and role in schema.names and not is_other_prompt:
            roles[role] = role
    problems += _prompt_problems(roles, schema)
    for role, name in roles.items():
        expected = _TYPE_OF_ROLE[role]
        if name in schema.names and not expected.accepts(_plain(schema.field(name).type)):
            problems.append(
                f"column {name!r} ({role}): type {schema.field(name).type}, expected {expected.expected}. Write the "
                "column with that type, or name another one with --column."
            )
    return roles, problems + _name_clashes(schema, roles, asked)


def _prompt_problems(roles: Mapping[str, str], schema: pa.Schema) -> list[str]:
    prompts = [role for role in PROMPT_ROLES if role in roles]
    if len(prompts) == 1:
        return []
    if prompts:
        return [
            f"input columns {' and '.join(prompts)}: a row must have one kind of prompt. Say which one to use, "
            f"for example --column {prompts[0]}={roles[prompts[0]]}."
        ]
    return [
        f"input: no prompt column. Expected one of {', '.join(PROMPT_ROLES)}; the columns are "
        f"{_names(schema) or 'none'}. Rename one with --column, for example --column prompt=text."
    ]


def _names(schema: pa.Schema) -> str:
    return ", ".join(map(shown_name, schema.names))


def _name_clashes(schema: pa.Schema, roles: Mapping[str, str], asked: Collection[str]) -> list[str]:
    ours = {*OUTPUT_COLUMNS, *(field.name for field in _asked_fields(asked, roles))}
    ours |= {TYPED_COLUMN} if "json_schema" in asked else set()
    ours |= {field.name for field in choice_fields(asked, roles, schema.names)}
    ours |= {SAMPLE_FIELD.name} if has_samples(asked, roles) else set()
    taken = [name for name in schema.names if name in ours or name.startswith(OUR_PREFIX)]
    if roles.get("id") is None and DEFAULT_ID_COLUMN in schema.names:
        taken.append(DEFAULT_ID_COLUMN)
    return [f"input column {name!r}: the output has a column of that name. Rename it." for name in taken]


def text_columns(schema: pa.Schema) -> list[str]:
    """Columns of text, which could hold names."""
    return [field.name for field in schema if _is_text(_plain(field.type))]


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values: dictionaries and extensions unwrapped."""
    if t.is_dictionary(kind):
        return _plain(kind.value_type)
    return _plain(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def _is_text_or_null(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(t.is_null(kind))


def _is_list_of(accepts: Callable[[pa.DataType], bool], kind: pa.DataType) -> bool:
    is_list = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    return bool(is_list) and accepts(_plain(kind.value_type))


def _is_message(kind: pa.DataType) -> bool:
    if not t.is_struct(kind):
        return False
    names = [kind.field(i).name for i in range(kind.num_fields)]
    return "role" in names and "content" in names


def _is_struct(kind: pa.DataType) -> bool:
    return bool(t.is_struct(kind))


def _is_integer(kind: pa.DataType) -> bool:
    return bool(t.is_integer(kind) or t.is_null(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(_is_integer(kind) or t.is_floating(kind))


def _is_boolean(kind: pa.DataType) -> bool:
    return bool(t.is_boolean(kind) or t.is_null(kind))


@dataclass(frozen=True, slots=True)
class _ColumnType:
    """What the Arrow type of a column may be, as a test and in words."""

    accepts: Callable[[pa.DataType], bool]
    expected: str


_TYPE_OF_KIND: Mapping[Any, _ColumnType] = {
    int: _ColumnType(_is_integer, "integer"),
    float: _ColumnType(_is_number, "number"),
    bool: _ColumnType(_is_boolean, "boolean"),
    str: _ColumnType(lambda kind: _is_text_or_null(kind), "string"),
    tuple[str, ...]: _ColumnType(
        lambda kind: _is_text_or_null(kind) or _is_list_of(_is_text, kind), "string or list of strings"
    ),
    tuple[int, ...]: _ColumnType(
        lambda kind: _is_integer(kind) or _is_list_of(_is_integer, kind), "integer or list of integers"
    ),
    LogitBias: _ColumnType(
        lambda kind: _is_text_or_null(kind) or bool(t.is_map(kind)),
        "map of tokens and numbers, or string with its JSON",
    ),
}
_TYPE_OF_ROLE: Mapping[str, _ColumnType] = {
    "id": _ColumnType(lambda kind: _is_text(kind) or bool(t.is_integer(kind)), "string or integer"),
    "adapter": _ColumnType(_is_text_or_null, "string"),
    "prompt": _ColumnType(_is_text, "string"),
    "messages": _ColumnType(
        lambda kind: _is_text(kind) or _is_list_of(_is_message, kind),
        "list<struct<role, content>>, or string with its JSON",
    ),
    "prompt_token_ids": _ColumnType(
        lambda kind: _is_list_of(lambda item: bool(t.is_integer(item)), kind), "list of integers"
    ),
    "continuation": _TYPE_OF_KIND[tuple[str, ...]],
    "tools": _ColumnType(
        lambda kind: _is_text_or_null(kind) or _is_list_of(_is_struct, kind),
        "list<struct<type, function>>, or string with its JSON",
    ),
    "chat_template_kwargs": _ColumnType(
        lambda kind: _is_text_or_null(kind) or _is_struct(kind), "struct, or string with a JSON object"
    ),
    "add_generation_prompt": _TYPE_OF_KIND[bool],
    "continue_final_message": _TYPE_OF_KIND[bool],
    **{name: _TYPE_OF_KIND[option.kind] for name, option in SAMPLING_OPTIONS.items()},
    **dict.fromkeys(FORMS, _ColumnType(lambda kind: _is_text_or_null(kind) or _is_struct(kind), "string or struct")),
}
