"""Checks how a job makes its prompts: templates, chat template, system prompt, and options for rendering messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...engine.errors import EngineError, TokenizerError
from ...engine.text.chat.chat_template import ChatTemplate
from ...engine.text.chat.conversation import (
    AS_USUAL,
    RENDERING_OPTIONS,
    SPLIT_AND_CONTINUED,
    Conversation,
    RenderOptions,
    is_template_text,
    read_message_templates,
    read_tools,
    read_variables,
    write_line_breaks,
)
from ...engine.text.chat.prompt_template import columns_read, names_in
from ...engine.text.chat.sandbox import MAX_TEMPLATE_CHARACTERS
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...system.untrusted import NoProcessError, read_regular, shown, shown_name
from ..errors import JobRequestError, StorageError
from ..options.values import PROMPT_ROLES
from ..record import InputRecord
from ..spec import JobSpec
from ..storage.local_copy import is_remote
from ..storage.location import Location
from ..storage.redaction import redacted_url

_NAMES_SHOWN = 20


def with_template_text(spec: JobSpec) -> JobSpec:
    """The job with the text of its chat template in place of the file, so that a changed file is another job. Raises
    `JobRequestError`.
    """
    if spec.chat_template is None:
        return spec
    text = _text_of("chat_template", spec.chat_template, spec.storage_options)
    try:
        ChatTemplate(text, {})
    except (EngineError, NoProcessError) as error:
        raise _unusable("chat_template", spec.chat_template, str(error)) from None
    return spec.model_copy(update={"chat_template": text})


def with_templates(spec: JobSpec) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with the texts of its prompt or message templates, and each of the templates as jinja2 reads it.

    A file's text is recorded with its line break at the end dropped, in the form in which `\\n` is a line break. Equal
    templates are equal texts then. Raises `JobRequestError`.
    """
    update = {}
    if spec.prompt_template is not None:
        given = spec.prompt_template
        text = _text_of("prompt_template", given, spec.storage_options)
        if not is_template_text(given):
            text = write_line_breaks(text.replace("\r\n", "\n").removesuffix("\n"))
        update["prompt_template"] = text
    spec = spec.model_copy(update=update)
    texts = [template for _, template in spec.templates]
    if spec.prompt_template is not None:
        update["prompt_template"] = write_line_breaks(texts[0])
    elif spec.messages_template is not None:
        messages = read_message_templates(spec.messages_template)
        written = [
            {"role": message["role"], "content": write_line_breaks(text)}
            for message, text in zip(messages, texts, strict=True)
        ]
        update["messages_template"] = json.dumps(written, ensure_ascii=False)
    for place, text in enumerate(texts):
        _check_template(spec, place, text)
    return spec.model_copy(update=update), tuple(texts)


def template_columns(spec: JobSpec, templates: Sequence[str], schema: pa.Schema) -> tuple[tuple[str, ...], list[str]]:
    """Columns that the job's templates read, and every problem: a name that no column has, or no column at all.
    `templates`: those of `with_templates`.
    """
    read: set[str] = set()
    problems = []
    for place, template in enumerate(templates):
        columns, unknown = columns_read(template, schema.names)
        read.update(columns)
        problems += [_unknown_problem(_option(spec, place), name, schema.names) for name in unknown]
    if templates and not read and not problems:
        problems.append(
            f"{spec.template_option}: names no column, so that all rows would have one prompt. Print one of "
            f"{_shown(schema.names)}, as in {{{{ {(schema.names or ['question'])[0]} }}}}."
        )
    return tuple(sorted(read)), problems


def with_chat(spec: JobSpec, roles: Mapping[str, str], *, has_chat_template: bool) -> JobSpec:
    """The job with `chat` as it holds: for a prompt template on where the model has a chat template, else off. None
    where it changes nothing.
    """
    if spec.prompt_template is not None:
        return spec.model_copy(update={"chat": has_chat_template if spec.chat is None else spec.chat})
    return spec.model_copy(update={"chat": True if spec.chat and "prompt" in roles else None})


def prompt_problems(spec: JobSpec, asked_chat: bool | None, tokenizer: Tokenizer, given: InputRecord) -> list[str]:
    """Reasons why the job's prompts cannot be made as asked, as sentences. `spec`: after `with_chat`. `asked_chat`: the
    job's own `chat`.
    """
    if spec.stages is not None:
        return []  # each stage is checked as a job of its own
    problems = _chat_problems(asked_chat, given.roles)
    if spec.renders_messages(given.roles) and not tokenizer.has_chat_template:
        column, option = given.roles.get("messages"), "chat=True" if spec.chat else "messages_template"
        problems.append(
            f"{option if column is None else f'input column {column!r} (messages)'}: the model at "
            f"{redacted_url(spec.model)!r} has no chat template. Take an instruction-tuned model, or give "
            f"{'a prompt column' if column is not None else 'prompts that are text, with --no-chat'}."
        )
    if spec.system_prompt is not None:
        problems += _system_prompt_problems(spec, tokenizer, given)
    return problems + _rendering_problems(spec, tokenizer, given)


def _chat_problems(asked: bool | None, roles: Mapping[str, str]) -> list[str]:
    if asked is False and "messages" in roles:
        problem = f"chat=False: column {roles['messages']!r} has messages, which the chat template renders"
    elif asked and "prompt_token_ids" in roles:
        problem = f"chat=True: column {roles['prompt_token_ids']!r} has tokens, which no chat template renders"
    else:
        return []
    return [f"{problem}. Leave it out, or give prompts as text."]


def _without_chat(spec: JobSpec, given: InputRecord) -> tuple[str, str]:
    """The place of prompts that no chat template renders, and what to do, as clauses; empty texts for other jobs."""
    if spec.renders_messages(given.roles):
        return "", ""
    if spec.prompt_template is not None:
        return "the prompts of prompt_template are text", "take a model with a chat template, without --no-chat"
    role = next(role for role in PROMPT_ROLES if role in given.roles)
    where = f"the prompts of this input are in column {given.roles[role]!r}"
    return where, "give a messages column" + (", or make each a user message with --chat" if role == "prompt" else "")


def _system_prompt_problems(spec: JobSpec, tokenizer: Tokenizer, given: InputRecord) -> list[str]:
    """Reasons why the job's system prompt would not reach the model, as sentences."""
    where, instead = _without_chat(spec, given)
    if where:
        return [
            f"system_prompt: {where}, where a system message has no place. Write it into the prompts, or {instead}."
        ]
    if not tokenizer.has_chat_template:
        return []  # said already
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": spec.system_prompt},
        {"role": "user", "content": "?"},
    ]
    problem = _template_problem(tokenizer, messages)
    return [] if problem is None else [f"system_prompt: {problem}. Write it into the first message of each row."]


def _rendering_problems(spec: JobSpec, tokenizer: Tokenizer, given: InputRecord) -> list[str]:
    """Reasons why the job's rendering options would not reach the model, as sentences."""
    if spec.split_answer and spec.continue_final_message:
        return [SPLIT_AND_CONTINUED]
    options = ("chat_template", "split_answer", *RENDERING_OPTIONS)
    asked = [name for name in options if getattr(spec, name) not in (None, False)]
    if not asked:
        return []
    where, instead = _without_chat(spec, given)
    if where:
        return [f"{', '.join(asked)}: {where}, which no chat template renders. Leave it out, or {instead}."]
    tools = read_tools(spec.tools) if spec.tools else None
    variables = read_variables(spec.chat_template_kwargs) if spec.chat_template_kwargs else {}
    if not tokenizer.has_chat_template or not (tools or variables):
        return []
    problem = _template_problem(tokenizer, [{"role": "user", "content": "?"}], RenderOptions(tools, variables))
    if problem is None:
        return []
    names = [name for name in ("tools", "chat_template_kwargs") if name in asked]
    return [f"{', '.join(names)}: {problem}. Take another template with --chat-template, or leave it out."]


def _template_problem(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], options: RenderOptions = AS_USUAL
) -> TokenizerError | None:
    """Why the model's chat template makes no prompt that contains the whole conversation, or None."""
    (prompt,) = tokenizer.render_all([Conversation(messages, options)], must_be_whole=True)
    return prompt if isinstance(prompt, TokenizerError) else None


def _check_template(spec: JobSpec, place: int, text: str) -> None:
    try:
        names_in(text)
    except (EngineError, NoProcessError) as error:
        given = spec.templates[place][1]
        raise _unusable(_option(spec, place), given, str(error)) from None


def _option(spec: JobSpec, place: int) -> str:
    """The option of one of the job's templates, with the place of its message."""
    return "prompt_template" if spec.prompt_template is not None else f"messages_template[{place}].content"


def _unknown_problem(option: str, name: str, there: Sequence[str]) -> str:
    close = get_close_matches(name, there, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the columns are {_shown(there) or 'none'}."
    return f"{option}: names {shown_name(name)!r}, which no column of the input has; {hint}"


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(shown_name, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _text_of(option: str, given: str, storage_options: Mapping[str, Any]) -> str:
    """The text of a template that is given as a file, a URL, or its text. Raises `JobRequestError`."""
    try:
        return given if is_template_text(given) else _read_template(given, storage_options)
    except (StorageError, OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unusable(option, given, reason) from None


def _unusable(option: str, given: str, reason: str) -> JobRequestError:
    shown_value = shown(redacted_url(given))
    return JobRequestError(f"{option}={shown_value}: {reason}. Name a file with a jinja2 template, or give its text.")


def _read_template(url: str, storage_options: Mapping[str, Any]) -> str:
    most_bytes = 4 * MAX_TEMPLATE_CHARACTERS
    if not is_remote(url):
        return read_regular(Path(url.removeprefix("file://")), most_bytes).decode()
    folder, _, name = url.rpartition("/")
    with Location(folder, storage_options).open(name) as file:
        return file.read(most_bytes + 1).decode()
