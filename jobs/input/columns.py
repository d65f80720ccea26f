"""Finds which input column plays which role, and checks its type: an Arrow schema in, roles and problems out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from ...engine.request import SAMPLING_OPTIONS, LogitBias
from ...engine.structured_output import FORMS
from ...system.untrusted import shown_name
from ..options.stages import stages_of
from ..options.values import ALL_SETTINGS, COLUMN_ROLES, OUR_PREFIX, PROMPT_ROLES, SAMPLING_COLUMNS, SETTING_ROLES
from ..record import JobRecord
from ..spec import JobSpec
from .answer_type import answer_type
from .completions import listed
from .files import unpack_schema
from .known_tables import conversation_column, is_turn, messages_hint, table_hint, template_hint
from .teacher import teacher_fields

# Columns that every output adds; input columns must leave these names free.
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
    #: Text that each token adds to the completion; its bytes when the token is a part of a character.
    pa.field("token_texts", pa.list_(pa.string())),
    pa.field("token_bytes", pa.list_(pa.binary())),
)
_TOKEN = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("text", pa.string()), ("bytes", pa.binary())])
_CALL = pa.struct([(name, pa.string()) for name in ("id", "name", "arguments")])
#: Sum of the log-probabilities of a continuation's tokens.
SCORE_FIELD = pa.field("continuation_logprob", pa.float64())
#: Score of a completion, in the output of a job that says what is right.
RIGHT_SCORE_FIELD = pa.field("score", pa.float64())
#: Role of the column of right answers.
EXPECTED_ROLE = "expected"
#: Text that was chosen, in the output of a job with choices.
CHOICE_FIELD = pa.field("choice", pa.string())
#: Log-probability of each listed text.
CHOICE_SCORES_FIELD = pa.field(
    "choice_logprobs", pa.list_(pa.struct([("choice", pa.string()), ("logprob", pa.float64())]))
)
#: Relative probability of each listed text; the probabilities of a row add up to 1.
CHOICE_SHARES_FIELD = pa.field(
    "choice_probabilities", pa.list_(pa.struct([("choice", pa.string()), ("probability", pa.float64())]))
)
#: Likeliest label of a row that was classified; null where the head gives quantities.
LABEL_FIELD = pa.field("label", pa.string())
#: The head's number for each label, and the probability that it stands for.
SCORES_FIELD = pa.field(
    "scores",
    pa.list_(pa.struct([("label", pa.string()), ("logit", pa.float32()), ("probability", pa.float32())])),
)
EMBEDDING_FIELD = pa.field("embedding", pa.list_(pa.float32()))
#: Probability of the first of the two texts of a row that was reranked.
RELEVANCE_FIELD = pa.field("relevance", pa.float64())
#: Task -> the columns that the output of a job has in which rows may ask it.
TASK_FIELDS: Mapping[str, tuple[pa.Field, ...]] = {
    "classify": (LABEL_FIELD, SCORES_FIELD),
    "embed": (EMBEDDING_FIELD,),
    "rerank": (RELEVANCE_FIELD,),
}
#: Option or role -> the column that the output has when the job gives the option or an input column plays the role.
ASKED_FIELDS: Mapping[str, pa.Field] = {
    "top_logprobs": pa.field("token_top_logprobs", pa.list_(pa.list_(_TOKEN))),
    "prompt_logprobs": pa.field("prompt_token_logprobs", pa.list_(_TOKEN)),
    "prompt_top_logprobs": pa.field("prompt_token_top_logprobs", pa.list_(pa.list_(_TOKEN))),
    "continuation": SCORE_FIELD,
    "reasoning_markers": pa.field("reasoning", pa.string()),
    "tool_call_parser": pa.field("tool_calls", pa.list_(_CALL)),
}
OUTPUT_COLUMNS = tuple(field.name for field in ANSWER_FIELDS + LOGPROB_FIELDS)
#: Column of parsed answers, in the output of a job with a JSON Schema.
TYPED_COLUMN = "answer"
#: Number of a completion, from 0, in the output of a job that asks for several completions of a row.
SAMPLE_FIELD = pa.field("sample", pa.int32())
#: Column of the answers that a job has taken out of conversations (`split_answer`).
EXPECTED_FIELD = pa.field("answer_expected", pa.string())
DEFAULT_ID_COLUMN = "id"
#: Columns that the output of a job with stages has beside those of the stages.
STAGED_FIELDS = tuple(field for field in ANSWER_FIELDS if field.name in ("error", "attempts"))
# Among the `asked_options` of a job with stages, beside the names of the stages.
_STAGES = "stages"
#: Name of the struct column whose fields are settings, as in Ray Data and vLLM.
SAMPLING_PARAMS = "sampling_params"
#: Roles of the columns by which rows of the output are identified, counted and scored: always copied.
_NEEDED_ROLES = ("id", "adapter", "n", "continuation", EXPECTED_ROLE)
_PREFIXES = ("answer_", *(f"answer{number}_" for number in range(2, 100)))


def has_samples(asked: Collection[str], roles: Collection[str]) -> bool:
    """Whether rows may have several completions, each a row of the output."""
    return "samples" not in asked and ("n" in asked or "n" in roles or "continuation" in roles)


def asked_options(spec: JobSpec) -> list[str]:
    """Options given by a job that add columns to the output."""
    if spec.stages is not None:
        stages = [stage.name for stage in stages_of(spec.stages)]
        return [_STAGES, *(spec.output_columns or stages)]
    sampling = spec.sampling
    sampling = sampling.of_task("rerank") if sampling.task == "rerank" else sampling
    names = (*ASKED_FIELDS, "teacher_top_k", "json_schema", "choice", "score_choices")
    return [
        *(name for name in names if getattr(sampling, name, None)),
        *(["n"] if sampling.n > 1 else []),
        *(["samples"] if spec.samples == "lists" else []),
        *(["split_answer"] if spec.split_answer else []),
        *([sampling.task] if sampling.task in TASK_FIELDS else []),
        *([EXPECTED_ROLE] if spec.expected is not None else []),
    ]


def output_name(record: JobRecord, name: str) -> str:
    """The name that one of lorabatch's own columns has in the output of a job."""
    return f"{record.spec.output_prefix}{name}"


def answer_fields(record: JobRecord) -> tuple[pa.Field, ...]:
    """The answer columns of a job's output, under the names that they have there."""
    fields = completion_fields(record)
    fields = tuple(map(listed, fields)) if record.has_lists else fields
    return tuple(field.with_name(output_name(record, field.name)) for field in fields)


def sample_field(record: JobRecord) -> pa.Field:
    """The column with the number of a completion, under the name that it has in the job's output."""
    return SAMPLE_FIELD.with_name(output_name(record, SAMPLE_FIELD.name))


def expected_field(record: JobRecord) -> pa.Field | None:
    """The column of answers taken out of conversations, under its name in the job's output; None when none are."""
    if not record.spec.split_answer:
        return None
    return EXPECTED_FIELD.with_name(output_name(record, EXPECTED_FIELD.name))


def copied_schema(record: JobRecord) -> pa.Schema:
    """The columns of the input that the output has."""
    schema = unpack_schema(record.input.schema_ipc).remove_metadata()
    return pa.schema([column for column in schema if column.name not in record.input.dropped])


def role_values(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The values of the column that plays a role, or of the field of `sampling_params` that does."""
    if name in batch.schema.names:
        return batch.column(name)
    column, _, setting = name.partition(".")
    return pc.struct_field(batch.column(column), setting)


def completion_fields(record: JobRecord) -> tuple[pa.Field, ...]:
    """The output columns about one completion. Their names lack the `output_prefix`."""
    asked = asked_options(record.spec)
    fields = [*ANSWER_FIELDS, *(LOGPROB_FIELDS if record.with_logprobs else ())]
    fields += _asked_fields(asked, record.input.roles)
    fields += teacher_fields(record.spec.sampling.teacher_top_k)
    if "json_schema" in asked:
        fields.append(pa.field(TYPED_COLUMN, answer_type(record.spec.sampling.json_schema).arrow))
    fields += choice_fields(asked, record.input.roles, record.spec.output_prefix)
    right = [RIGHT_SCORE_FIELD] if EXPECTED_ROLE in asked else []
    return (*fields, *_task_fields(record.tasks), *right)


def _task_fields(tasks: Collection[str]) -> list[pa.Field]:
    return [field for task, fields in TASK_FIELDS.items() if task in tasks for field in fields]


def right_column(record: JobRecord) -> str:
    """The column of right answers in prepared rows and in the output; "" for a job that scores no answers."""
    if record.spec.expected is None:
        return ""
    column, taken_out = record.input.roles.get(EXPECTED_ROLE), expected_field(record)
    return column or (taken_out.name if taken_out else "")


def _asked_fields(asked: Collection[str], roles: Collection[str]) -> list[pa.Field]:
    given = {*asked, *roles}
    # the likeliest tokens come beside the prompt's own tokens
    given |= {"prompt_logprobs"} if "prompt_top_logprobs" in given else set()
    return [field for option, field in ASKED_FIELDS.items() if option in given]


def choice_fields(asked: Collection[str], roles: Mapping[str, str], prefix: str = "") -> list[pa.Field]:
    """The columns that choices add to the output of a job. An input column `choice` with the lists of texts stays as it
    is: without a `prefix`, the column of the chosen text is not added.
    """
    if "choice" not in asked and {"choice", "structured_outputs", "task"}.isdisjoint(roles):
        return []
    scores = [CHOICE_SCORES_FIELD, CHOICE_SHARES_FIELD] if "score_choices" in asked or "score_choices" in roles else []
    is_taken = roles.get("choice") == CHOICE_FIELD.name and not prefix
    return [*([] if is_taken else [CHOICE_FIELD]), *scores]


def records_samples(record: JobRecord) -> bool:
    """Whether the rows of a job have the column `sample`."""
    return has_samples(asked_options(record.spec), record.input.roles)


def readable(item: pa.Scalar) -> Any:
    """The Python value of a scalar; text that is not UTF-8 has U+FFFD where it cannot be decoded.

    Columns that are passed through keep such text as it is, so code that counts or shows values uses this function.
    """
    try:
        return item.as_py()
    except UnicodeDecodeError as error:
        return bytes(error.object).decode("utf-8", "replace")


def readable_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The Python values of a column, each made `readable`."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [readable(item) for item in column]


def find_roles(
    schema: pa.Schema,
    columns: Mapping[str, str],
    asked: Collection[str] = (),
    row_settings: Collection[str] = (),
    *,
    copied: Collection[str] | None = None,
    prefix: str = "",
    is_made: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """Role -> input column, and every problem found.

    `columns`: roles that the user has assigned. Other roles are played by the column of their own name, if there is
    one: the id, the adapter, the prompt, tools beside messages, fields of a struct `sampling_params`, and settings only
    where `row_settings` has their name or `all`. A `conversation_column` has messages. `asked`: the job's options that
    add columns to the output; see `asked_options`. `copied`: input columns that the output has, by default all.
    `prefix`: before the names of lorabatch's own columns. `is_made`: a template of the job makes the prompts, so that
    no column has them. A role that is given to "" is played by no column.
    """
    if not is_made and (conversation := conversation_column(schema, columns)):
        columns = {**columns, "messages": conversation}
    roles = {role: name for role, name in columns.items() if name}
    problems = [
        f"column {role}={name!r}: the input has no such column. Name one of {_names(schema) or 'none'}."
        for role, name in roles.items()
        if name not in schema.names
    ]
    problems += [
        f"row_settings={role!r}: the input has no such column. Name one that it has, or give the column that is this "
        f"setting, as in --column {role}=NAME."
        for role in row_settings
        if role not in (ALL_SETTINGS, *roles, *schema.names)
    ]
    wanted = SETTING_ROLES if ALL_SETTINGS in row_settings else row_settings
    for role in COLUMN_ROLES:
        is_other_prompt = role in PROMPT_ROLES and (is_made or any(map(columns.get, PROMPT_ROLES)))
        is_asked = role not in SETTING_ROLES or role in wanted or (role == "tools" and "messages" in roles)
        if role not in columns and role in schema.names and is_asked and not is_other_prompt:
            roles[role] = role
    problems += [] if is_made else _prompt_problems(roles, schema)
    for role, name in roles.items():
        if name in schema.names:
            problems += _type_problems(role, name, schema.field(name).type)
    problems += _add_sampling_params(roles, schema)
    return roles, problems + _name_clashes(schema, roles, asked, copied, prefix)


def settings_in(roles: Mapping[str, str]) -> dict[str, str]:
    """Setting -> the input column that gives it."""
    return {role: roles[role] for role in SETTING_ROLES if role in roles}


def seeming_settings(record: JobRecord) -> list[str]:
    """Columns that are copied as data although they have a setting's name, or the name `sampling_params`."""
    taken = {name.partition(".")[0] for name in record.input.roles.values()} | {*record.input.roles.values()}
    taken |= {*record.input.template_columns}
    names = copied_schema(record).names
    return [name for name in names if name in (*SETTING_ROLES, SAMPLING_PARAMS) and name not in taken]


def names_beside_ours(record: JobRecord) -> list[str]:
    """Columns of the input with a name that one of the output's own columns would have without its `output_prefix`."""
    if not record.spec.output_prefix:
        return []
    return _taken_names(copied_schema(record).names, record.input.roles, asked_options(record.spec), "")


def copied_names(
    schema: pa.Schema, roles: Mapping[str, str], keep: Collection[str], drop: Collection[str]
) -> tuple[list[str], list[str]]:
    """Columns of the input that the output has, and every problem of `keep` and `drop`: an unknown name, or a dropped
    column that the output needs.
    """
    problems = [
        f"{option}={name!r}: the input has no such column. Name one of {_names(schema)}."
        for option, names in (("keep", keep), ("drop", drop))
        for name in names
        if name not in schema.names
    ]
    needed = {name.partition(".")[0]: role for role in _NEEDED_ROLES if (name := roles.get(role))}
    needed |= {name: role for role in _NEEDED_ROLES if (name := roles.get(role))}
    problems += [
        f"drop={name!r}: the output needs this column ({needed[name]}), by which its rows are told apart, counted "
        "or scored. Leave it in."
        for name in drop
        if name in needed
    ]
    copied = {*keep, *needed} if keep else {*schema.names} - {*drop}
    return [name for name in schema.names if name in copied], problems


def _type_problems(role: str, name: str, kind: pa.DataType) -> list[str]:
    expected = _TYPE_OF_ROLE[role]
    if expected.accepts(_plain(kind)):
        return []
    is_setting = (
        ", or leave it out of --row-settings: it is data then" if role in SETTING_ROLES and role != "tools" else ""
    )
    hint = messages_hint(name, _plain(kind)) if role in ("prompt", "messages") else ""
    hint = hint or f"Write the column with that type, or name another one with --column{is_setting}."
    return [f"column {name!r} ({role}): type {kind}, expected {expected.expected}. {hint}"]


def _add_sampling_params(roles: dict[str, str], schema: pa.Schema) -> list[str]:
    """Adds the fields of a struct `sampling_params` to `roles`. Returns problems, as sentences."""
    if SAMPLING_PARAMS not in schema.names or not t.is_struct(_plain(schema.field(SAMPLING_PARAMS).type)):
        return []
    kind, problems = _plain(schema.field(SAMPLING_PARAMS).type), []
    for name in (kind.field(i).name for i in range(kind.num_fields)):
        path = f"{SAMPLING_PARAMS}.{name}"
        if name not in SAMPLING_COLUMNS:
            problems.append(
                f"column {SAMPLING_PARAMS!r}: its field {name!r} is no setting; expected fields of "
                f"{', '.join(SAMPLING_COLUMNS)}. Leave the field out, or give the column another name: it is data then."
            )
        elif name in roles or path in schema.names:
            problems.append(
                f"column {SAMPLING_PARAMS!r}: its field {name} and column {roles.get(name, path)!r} are one setting. "
                "Leave one of them out."
            )
        else:
            roles[name] = path
            problems += _type_problems(name, path, kind.field(name).type)
    return problems


def _prompt_problems(roles: Mapping[str, str], schema: pa.Schema) -> list[str]:
    prompts = [role for role in PROMPT_ROLES if role in roles]
    if len(prompts) == 1:
        return []
    if prompts:
        return [
            f"input columns {' and '.join(prompts)}: a row must have one kind of prompt. Say which one to use, "
            f"for example --column {prompts[0]}={roles[prompts[0]]}."
        ]
    hint = table_hint(schema) or (
        "Rename one with --column, for example --column prompt=text, or make prompts of columns with "
        f"--prompt-template {template_hint(schema)}."
    )
    return [
        f"input: no prompt column. Expected one of {', '.join(PROMPT_ROLES)}; the columns are "
        f"{_names(schema) or 'none'}. {hint}"
    ]


def _names(schema: pa.Schema) -> str:
    return ", ".join(map(shown_name, schema.names))


def _name_clashes(
    schema: pa.Schema, roles: Mapping[str, str], asked: Collection[str], copied: Collection[str] | None, prefix: str
) -> list[str]:
    """Why columns of the input and of the output would have one name."""
    names = [name for name in schema.names if copied is None or name in copied]
    taken = _taken_names(names, roles, asked, prefix)
    problems = []
    if taken:
        free = _free_prefix(names, roles, asked)
        several = len(taken) > 1
        problems.append(
            f"input column{'s' if several else ''} {', '.join(map(repr, taken))}: the output has "
            f"{'columns of these names' if several else 'a column of that name'}. Put a text before the names of the "
            f"output's own with --output-prefix {free}, or leave {'them' if several else 'it'} out with "
            f"{' '.join(f'--drop {quote(name)}' for name in taken)}."
        )
    problems += [
        f"input column {name!r}: names that begin with {OUR_PREFIX} are lorabatch's own. Rename the column."
        for name in schema.names
        if name.startswith(OUR_PREFIX)
    ]
    return problems


def task_clashes(record: JobRecord) -> list[str]:
    """Why columns of the input and of the tasks that adapters bring with them would have one name, as sentences. Other
    clashes are found before adapters are read.
    """
    if record.spec.stages is not None:
        return []  # columns of answers are fields of their stage
    ours = {output_name(record, field.name) for field in _task_fields(record.tasks)}
    taken = [name for name in copied_schema(record).names if name in ours]
    return [
        f"input column {name!r}: the output has a column of that name, since rows are classified or embedded. Put a "
        f"text before the names of the output's own with --output-prefix answer_, or leave it out with --drop "
        f"{quote(name)}."
        for name in taken
    ]


def default_prefix(copied: Collection[str], roles: Mapping[str, str], asked: Collection[str]) -> str:
    """The `output_prefix` of a job that gives none: "" unless `completion`, and no other name that the output needs, is
    a column of the input, as in tables of TRL. `copied`: input columns that the output has.
    """
    is_trl = _taken_names(copied, roles, asked, "") == [ANSWER_FIELDS[0].name]
    return _free_prefix(copied, roles, asked) if is_trl else ""


def _taken_names(copied: Collection[str], roles: Mapping[str, str], asked: Collection[str], prefix: str) -> list[str]:
    ours = _added_names(roles, asked, prefix)
    return [name for name in copied if name in ours]


def _free_prefix(copied: Collection[str], roles: Mapping[str, str], asked: Collection[str]) -> str:
    return next((p for p in _PREFIXES if _added_names(roles, asked, p).isdisjoint(copied)), "ours_")


def _added_names(roles: Mapping[str, str], asked: Collection[str], prefix: str) -> set[str]:
    if _STAGES in asked:
        return {*asked} - {_STAGES} | {f"{prefix}{field.name}" for field in STAGED_FIELDS}
    ours = {*OUTPUT_COLUMNS, *(field.name for field in _asked_fields(asked, roles))}
    ours |= {TYPED_COLUMN} if "json_schema" in asked else set()
    others = (*teacher_fields(int("teacher_top_k" in asked)), *choice_fields(asked, roles, prefix))
    ours |= {field.name for field in others}
    ours |= {EXPECTED_FIELD.name} if "split_answer" in asked else set()
    ours |= {RIGHT_SCORE_FIELD.name} if EXPECTED_ROLE in asked else set()
    ours |= {SAMPLE_FIELD.name} if has_samples(asked, roles) else set()
    ours |= {field.name for field in _task_fields(TASK_FIELDS if "task" in roles else asked)}
    return {f"{prefix}{name}" for name in ours}


def is_number(role: str) -> bool:
    """Whether a role accepts numbers, and no text that stands for one."""
    kind = SAMPLING_OPTIONS[role].kind if role in SAMPLING_OPTIONS else None
    return kind in (int, float)


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
    return ("role" in names and "content" in names) or is_turn(names)


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
    """The Arrow types that a role accepts."""

    #: Whether a type is accepted.
    accepts: Callable[[pa.DataType], bool]
    #: The accepted types in words.
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
#: Roles whose columns may hold objects with fields of their own, or the JSON of them.
JSON_SETTINGS = (*FORMS, "json_schema", "tools", "chat_template_kwargs", "logit_bias")
