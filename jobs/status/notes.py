"""Words notes that users should see without asking: on a job's adapters, files, and rows that name no adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from ...engine.peft.findings import Verdict
from ...engine.text.chat.conversation import FINAL_ANSWER, PLAIN, header_note
from ...system.untrusted import shown_name
from ..input.adapter_names import adapter_problem
from ..outcome import BASE_NAME
from ..progress import counted
from ..record import JobRecord
from ..stages import requests_of_stages

_NAMES_SHOWN = 8
_TYPES_SHOWN = 20


def job_notes(record: JobRecord, asked: Collection[str | None] | None = None) -> list[str]:
    """Notes on a job before a row is read: number of adapters by verdict, refused adapters and why, adapters with a
    tokenizer or chat template of their own, the base model, unread files, and columns that are settings. `asked`:
    adapters that rows ask for, of which alone the notes tell; None while that is not known.
    """
    adapters = tuple(adapter for adapter in record.adapters if asked is None or adapter.name in asked)
    notes = []
    if adapters:
        counts = {verdict: sum(adapter.verdict == verdict for adapter in adapters) for verdict in get_args(Verdict)}
        verdicts = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
        notes.append(f"{counted(len(adapters), 'adapter')}: {verdicts}")
    notes += [f"  {adapter_problem(a.name, {a.name: a})}" for a in adapters if a.is_refused]
    own = [adapter.name for adapter in adapters if adapter.tokenizer_sha256 and not adapter.is_refused]
    if own:
        notes.append(f"  with their own tokenizer or chat template: {_shown(own)}")
    with_towers = [adapter for adapter in adapters if adapter.num_tower_tensors and not adapter.is_refused]
    if with_towers:
        count = sum(adapter.num_tower_tensors for adapter in with_towers)
        notes.append(
            f"  exact for text; {counted(count, 'tensor')} of the vision tower are not used: "
            f"{_shown([adapter.name for adapter in with_towers])}"
        )
    notes += _header_notes(record)
    notes += _input_notes(record)
    notes += [f"model: {note}" for note in record.model.notes]
    sampling = record.spec.sampling
    other = {name: value for name, value in record.model.generation.items() if getattr(sampling, name, value) != value}
    if other:
        theirs = ", ".join(f"{name} {value:g}" for name, value in other.items())
        ours = ", ".join(f"{name} {getattr(sampling, name):g}" for name in other)
        notes.append(
            f"model: its generation_config.json has {theirs}; this job has {ours}. --generation-config takes what the "
            "model has"
        )
    return notes


def _input_notes(record: JobRecord) -> list[str]:
    """Notes on what the job reads of its input and what not: files, columns of folder names, settings, metadata."""
    # Other commands import this module and read no schemas.
    from ..input.columns import names_beside_ours, seeming_settings, settings_in
    from ..input.files import unpack_schema
    from ..input.finding import DELTA_LOG
    from ..input.known_tables import conversation_note

    given, notes = record.input, []
    made = {given.roles["adapter"]} if given.sole_adapter or record.swept else ()
    if given.converted:
        schema = unpack_schema(given.schema_ipc)
        shown = [f"{shown_name(column.name)} {column.type}" for column in schema if column.name not in made]
        notes.append(
            f"input: {', '.join(given.converted)}, read as {counted(len(shown), 'column')}: "
            f"{_shown(shown, _TYPES_SHOWN)}"
        )
    if given.json_columns:
        notes.append(f"input: values of several types, kept as their JSON: {_shown(given.json_columns)}")
    if given.unread:
        counts = f" ({given.unread_endings})" if given.unread_endings else ""
        notes.append(f"input: files that are not read{counts}: {_shown(given.unread, len(given.unread))}")
    if DELTA_LOG in given.unread:
        notes.append("input: the log of a Delta table is not read; files that the table has removed are read too")
    if given.sole_adapter:
        name = shown_name(given.sole_adapter)
        notes.append(f"input: no column names adapters; {name}, the only one of the job, answers all rows")
    conversation, schema = given.roles.get("messages", "messages"), unpack_schema(given.schema_ipc)
    if conversation != "messages" and "messages" not in record.spec.columns and conversation in schema.names:
        form = conversation_note(schema.field(conversation).type)
        notes.append(f"input: column {conversation!r} holds {form} and is read as messages")
    if record.swept:
        asked = [BASE_NAME if name is None else shown_name(name) for name in record.swept]
        verb = "answers" if len(asked) == 1 else "answer"
        notes.append(f"input: {counted(len(asked), 'adapter')} {verb} every row: {_shown(asked)}")
    folders = {name for file in given.files for name in file.partition if name not in made}
    if folders:
        schema = unpack_schema(given.schema_ipc)
        shown = [f"{column.name} ({column.type})" for column in schema if column.name in folders]
        notes.append(f"input: columns of folder names: {_shown(shown)}")
    settings = settings_in(given.roles)
    if settings:
        shown = [role if role == column else f"{role} ({column})" for role, column in settings.items()]
        notes.append(f"input: settings of rows are read from columns: {_shown(shown, len(shown))}")
    seeming = seeming_settings(record)
    if seeming:
        names, option = ", ".join(seeming), f"--row-settings {','.join(seeming)}"
        notes.append(
            f"input: column {names} looks like a setting and is copied; {option} makes it one"
            if len(seeming) == 1
            else f"input: columns {names} look like settings and are copied; {option} makes them settings"
        )
    beside = names_beside_ours(record)
    if beside:
        prefix = record.spec.output_prefix
        verb = "is a column" if len(beside) == 1 else "are columns"
        notes.append(
            f"input: {_shown(beside)} {verb} of the input; names of the output's own columns begin with {prefix}: "
            f"{_shown([f'{prefix}{name}' for name in beside])}"
        )
    if given.int96:
        notes.append(
            "input: timestamps stored as INT96 are INT64 without time zone in the output, the same instants; Spark "
            f"shows them as TIMESTAMP_NTZ: {_shown(given.int96)}"
        )
    if given.metadata_left_out:
        notes.append(f"input: metadata of files that the output does not have: {_shown(given.metadata_left_out)}")
    return notes


def _header_notes(record: JobRecord) -> list[str]:
    """Notes on chat templates whose prompts lack the header of an answer, with the adapters that they serve."""
    spec = record.spec
    if not record.renders_messages or spec.continue_final_message or spec.add_generation_prompt is False:
        return []
    served: dict[str, list[str]] = {}
    if record.model.missing_header:
        served[record.model.missing_header] = ["the model"]
    for adapter in record.adapters:
        # a template of the job takes the place of all others
        has_own = bool(adapter.tokenizer_sha256) and not spec.chat_template
        header = adapter.missing_header if has_own else record.model.missing_header
        if header and not adapter.is_refused:
            served.setdefault(header, []).append(f"adapter {adapter.name}")
    return [f"messages ({_shown(names)}): {header_note(header)}" for header, names in served.items()]


def messages_note(record: JobRecord) -> tuple[str, ...]:
    """Notes on a job whose prompts are made: of which columns, by the chat template, if it is not the model's, and how
    special tokens inside of messages and columns are read. Empty for other jobs.
    """
    notes, made = [], record.spec.template_option
    if record.spec.stages is not None:
        requests = requests_of_stages(record.spec, record.input.template_columns)
        notes.append(f"stages, with the requests of a row: {', '.join(one.to_text() for one in requests)}")
        made = ""
    if made:
        how = "messages" if made == "messages_template" else "a message of the user" if record.spec.chat else "text"
        columns = record.input.template_columns
        column = f"column{'s' if len(columns) > 1 else ''} {_shown(columns)}"
        notes.append(f"prompts: made by {made} of {column}, as {how}")
    elif record.spec.chat:
        notes.append(f"prompts: column {record.input.roles['prompt']!r} is a message of the user (chat)")
    is_allowed = record.spec.allow_special_tokens
    if not record.renders_messages:
        return (*notes, *_special_tokens_note("columns", is_allowed=is_allowed)) if notes else ()
    if record.spec.chat_template:
        own = [adapter.name for adapter in record.adapters if adapter.tokenizer_sha256 and not adapter.is_refused]
        also = f" and of those that adapters have: {_shown(own)}" if own else ""
        notes.append(f"messages: rendered by the job's chat template, instead of the model's{also}")
    return (*notes, *_special_tokens_note("messages", is_allowed=is_allowed))


def _special_tokens_note(place: str, *, is_allowed: bool) -> tuple[str, ...]:
    """A note on special tokens in texts that strangers may have written; none where they are text, as usual."""
    return (f"{place}: special tokens inside of them are control tokens (allow_special_tokens)",) if is_allowed else ()


def row_notes(
    record: JobRecord, rows_per_adapter: Mapping[str | None, int], peculiar_rows: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """Notes from the index: no row names an adapter, or which adapters no row names; prompts without a chat template;
    conversations that end with an answer; and parts of conversations that the chat template drops.

    `rows_per_adapter`: adapter, as rows name it (None: base model) -> rows. `peculiar_rows`: peculiarity -> rows; see
    `peculiarities`.
    """
    return (*_adapter_notes(record, rows_per_adapter), *_conversation_notes(record, peculiar_rows or {}))


def _conversation_notes(record: JobRecord, rows: Mapping[str, int]) -> list[str]:
    notes = []
    if num_plain := rows.get(PLAIN, 0):
        notes.append(
            f"prompts: {num_plain:,} rows of column {record.input.roles['prompt']!r} are plain text, without the chat "
            "template that the model has; --chat makes each a message of the user"
        )
    if num_answers := rows.get(FINAL_ANSWER, 0):
        notes.append(
            f"messages: {num_answers:,} rows end with a message of the assistant, behind which another answer is "
            "asked; --split-answer takes it out of the prompt into the column answer_expected, "
            "--continue-final-message continues it"
        )
    dropped = [f"{name} ({rows[name]:,} rows)" for name in record.model.template_drops if rows.get(name)]
    if dropped:
        notes.append(f"messages: the chat template drops by design: {', '.join(dropped)}")
    return notes


def _adapter_notes(record: JobRecord, rows_per_adapter: Mapping[str | None, int]) -> tuple[str, ...]:
    if record.spec.stages is not None:
        return ()  # the index knows the adapters of the first stage alone
    names = [adapter.name for adapter in record.adapters]
    unused = [name for name in names if not rows_per_adapter.get(name)]
    num_rows, column = sum(rows_per_adapter.values()), record.input.roles.get("adapter")
    if column is not None and num_rows and num_rows == rows_per_adapter.get(None):
        given = f", none of the {len(names)} adapters does" if len(names) > 1 else ", its adapter does not"
        return (
            f"column {column!r} (adapter): null or empty in all {num_rows:,} rows; the base model answers them"
            + (given if names else ""),
        )
    if unused and num_rows:
        verb = "is" if len(unused) == 1 else "are"
        return (f"{len(unused)} of {len(names)} adapters {verb} named by no row: {_shown(unused)}",)
    return ()


def _shown(names: Sequence[str], most: int = _NAMES_SHOWN) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
