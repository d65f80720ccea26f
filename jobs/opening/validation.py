"""Checks everything that a job names before any work, and reports all problems at once.

Reads configuration files, Parquet footers and listings; no weights, and rows only to explain a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from ...engine.config import has_blocks, read_model_config, unknown_config_keys
from ...engine.errors import EngineError, TokenizerError
from ...engine.model_config.folder import look_at
from ...engine.model_config.model import ModelConfig
from ...engine.model_config.partition import partition_problem
from ...engine.text.answers.sampling_check import MAX_TOKENS, problems_with_model
from ...engine.text.chat.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from ...engine.text.chat.conversation import (
    AS_USUAL,
    RENDERING_OPTIONS,
    SPLIT_AND_CONTINUED,
    Conversation,
    RenderOptions,
    is_template_text,
    read_tools,
    read_variables,
)
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...system.untrusted import NoProcessError, read_regular, shown, shown_name
from ..cost_profile import read_profile
from ..errors import JobRequestError, StorageError
from ..input.adapter_names import columns_with_names
from ..input.column_types import columns_of_int96, times_are_zoned, type_problems
from ..input.columns import JSON_SETTINGS, asked_options, copied_names, find_roles, is_number
from ..input.conversion.converter import ColumnWishes, Converter
from ..input.file_metadata import kept_metadata, settings_of_files
from ..input.files import distinct_kinds, pack_schema, read_footers, unified_schema
from ..input.finding import endings, would_read
from ..input.partitions import with_partitions
from ..input.spark_metadata import spark_type_problems
from ..option_values import TABLE_SCHEME
from ..record import InputRecord
from ..spec import PROMPT_ROLES, SETTING_ROLES, JobSpec
from ..storage.local_copy import is_on_this_machine, is_remote, local_folder
from ..storage.location import Location
from ..storage.redaction import is_redacted, redacted_url
from ..store import JobStore, OutputContents, part_name
from .adapters import find_adapters
from .generation_config import with_generation_defaults
from .job_file import read_job_file

_T = TypeVar("_T")
_COLUMNS_SHOWN = 3
_KEYS_SHOWN = 8
_UNREAD_RECORDED = 10


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A base model on this machine whose files were checked; no weights are read yet."""

    #: Local folder of the model.
    folder: Path
    #: Its configuration.
    config: ModelConfig
    #: Its tokenizer, with the job's chat template if the job has one.
    tokenizer: Tokenizer
    #: Remarks on the folder for users, as clauses.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job whose model, adapters, input and output were found and checked."""

    #: The job as asked, with absolute paths and the text of its chat template.
    spec: JobSpec
    #: The job's output.
    store: JobStore
    #: Contents of the output at the time of the check.
    output: OutputContents
    #: The base model.
    model: CheckedModel
    #: Name -> folder or URL of each adapter; not audited yet.
    adapters: Mapping[str, str]
    #: The input's files, columns and metadata.
    input: InputRecord
    #: The conversion of input that is not Parquet. Whoever has the checked job puts its files in place, and closes it.
    converter: Converter


def requested_job(values: Mapping[str, Any], job_file: Path | None = None) -> JobSpec:
    """The job of a job file and the options beside it.

    Raises `JobRequestError` with every problem of the values, and of the files that the valid values name.
    """
    spec, problems, wrong = JobSpec.as_far_as_valid(read_job_file(job_file, values) if job_file else values)
    if problems:
        # without its options, storage would refuse what is right
        if "storage_options" not in wrong:
            _try_parts(problems, spec.with_absolute_paths(), wrong)
        raise JobRequestError(*dict.fromkeys(problems))
    return spec


def check_job(spec: JobSpec) -> CheckedJob:
    """Look at everything the spec names. Writes nothing but converted input, which the converter removes again unless
    it is put in place.

    Raises `JobRequestError` with every problem of model, adapters, input, columns and output at once.
    """
    asked = spec.with_absolute_paths()
    problems: list[str] = []
    without_template = asked.model_copy(update={"chat_template": None})
    spec = _tried(problems, lambda: _with_template_text(asked)) or without_template
    store = JobStore(spec.output, spec.storage_options)
    model = _tried(problems, lambda: _check_model(spec))
    adapters = _tried(problems, lambda: find_adapters(spec.adapters, spec.storage_options))
    output = _tried(problems, lambda: _check_output(spec, store))
    converter = Converter(store.input_place(), _wishes(spec), verify=spec.verify, may_stage=output is not None)
    with ExitStack() as stack:
        stack.callback(converter.close)
        checked = _check_with_input(spec, store, model, adapters, output, converter, problems)
        stack.pop_all()
    return checked


def _check_with_input(
    spec: JobSpec,
    store: JobStore,
    model: CheckedModel | None,
    adapters: Mapping[str, str] | None,
    output: OutputContents | None,
    converter: Converter,
    problems: list[str],
) -> CheckedJob:
    """The rest of `check_job`: the input, and how it fits the rest. `problems`: those found so far."""
    given = _tried(problems, lambda: _check_input(spec, converter))
    if spec.cost_model is not None:
        _tried(problems, lambda: read_profile(Path(spec.cost_model or "")))
    if model and spec.generation_config:
        spec = _tried(problems, partial(with_generation_defaults, spec, model.folder)) or spec
    if model and given:
        problems += _check_fit(spec, model, given)
    if adapters and given:
        problems += _check_names(spec, adapters, given)
    if problems:
        raise JobRequestError(*dict.fromkeys(problems))
    assert model is not None
    assert adapters is not None
    assert given is not None
    assert output is not None
    return CheckedJob(_with_table_urls(spec, converter), store, output, model, adapters, given, converter)


def _with_table_urls(spec: JobSpec, converter: Converter) -> JobSpec:
    """The job with URLs in place of tables of this program, by which the job knows them."""
    urls = iter(converter.table_urls)
    named = tuple(next(urls) if url.startswith(TABLE_SCHEME) else url for url in spec.inputs)
    return spec.model_copy(update={"input": named[0] if len(named) == 1 else named})


def _wishes(spec: JobSpec) -> ColumnWishes:
    """Columns whose types the job's options decide, where files have no types."""
    columns, asked = spec.columns, {*spec.row_settings, *spec.columns}
    settings = SETTING_ROLES if "all" in asked else [name for name in SETTING_ROLES if name in asked]
    numbers = [columns.get(name, name) for name in settings if is_number(name)]
    texts = [columns.get(role, role) for role in ("adapter", *PROMPT_ROLES)]
    as_json = [columns.get(name, name) for name in JSON_SETTINGS]
    return ColumnWishes(tuple(texts), tuple(numbers), tuple(as_json))


def _try_parts(problems: list[str], spec: JobSpec, wrong: Collection[str]) -> None:
    """Add the problems of the parts whose fields are not `wrong`. Nothing is fetched for a job that cannot run."""
    if "model" not in wrong and is_on_this_machine(spec.model):
        _tried(problems, lambda: _check_model(spec))
    if "adapters" not in wrong:
        _tried(problems, lambda: find_adapters(spec.adapters, spec.storage_options))
    if "input" not in wrong:
        _tried(problems, lambda: read_footers(spec.inputs, spec.storage_options))
    if "output" not in wrong:
        _tried(problems, lambda: _check_output(spec, JobStore(spec.output, spec.storage_options)))


def _tried(problems: list[str], check: Callable[[], _T]) -> _T | None:
    try:
        return check()
    except JobRequestError as error:
        problems += error.problems
    except (StorageError, EngineError, NoProcessError) as error:
        problems.append(str(error))
    return None


def _with_template_text(spec: JobSpec) -> JobSpec:
    """The job with the text of its chat template in place of the file, so that a changed file is another job."""
    given = spec.chat_template
    if given is None:
        return spec
    try:
        text = given if is_template_text(given) else _read_template(given, spec.storage_options)
        ChatTemplate(text, {})
    except (StorageError, EngineError, NoProcessError, OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise JobRequestError(
            f"chat_template={shown(redacted_url(given))}: {reason}. Name a file with a jinja2 template, or give its "
            "text."
        ) from None
    return spec.model_copy(update={"chat_template": text})


def _read_template(url: str, storage_options: Mapping[str, Any]) -> str:
    most_bytes = 4 * MAX_TEMPLATE_CHARACTERS
    if not is_remote(url):
        return read_regular(Path(url.removeprefix("file://")), most_bytes).decode()
    folder, _, name = url.rpartition("/")
    with Location(folder, storage_options).open(name) as file:
        return file.read(most_bytes + 1).decode()


def _check_model(spec: JobSpec) -> CheckedModel:
    shown_model = f"model={redacted_url(spec.model)!r}"
    is_dummy = spec.load_format == "dummy"
    try:
        folder = local_folder(spec.model, spec.storage_options)
        config = read_model_config(folder)
        if not is_dummy and not any(folder.glob("*.safetensors")):
            raise JobRequestError(
                f"{shown_model}: no *.safetensors files in {folder}. Weights in other formats are not read; convert "
                "them, or give a GGUF file."
            )
        notes, problems = look_at(folder, with_weights=not is_dummy)
        tokenizer = Tokenizer.from_folder(folder, chat_template=spec.chat_template)
    except (StorageError, EngineError, NoProcessError) as error:
        raise JobRequestError(f"{shown_model}: {error}") from None
    problem = partition_problem(config, spec.tensor_parallel, has_blocks=has_blocks(folder))
    if problem is not None:
        problems.append(problem)
    if problems:
        raise JobRequestError(*(f"{shown_model}: {problem}" for problem in problems))
    notes += [f"tokenizer_config.json: {note}" for note in tokenizer.notes]
    unknown = unknown_config_keys(folder)
    if unknown:
        source = "metadata" if spec.model.endswith(".gguf") else "config.json"
        notes.append(f"{source}: keys that nothing reads: {', '.join(map(shown_name, unknown[:_KEYS_SHOWN]))}")
    if config.says_tied:
        notes.append(
            "config.json says tie_word_embeddings, and the checkpoint has a head that differs from the embedding: it "
            "is used, as by transformers 5"
        )
    return CheckedModel(folder, config, tokenizer, tuple(notes))


def _check_input(spec: JobSpec, converter: Converter) -> InputRecord:
    closed = [url for url in spec.inputs if is_redacted(url)]
    if closed:
        raise JobRequestError(
            f"input={closed[0]!r}: what opens this URL is not recorded. Instead of resuming, run the same command as "
            "at first on the same output; it goes on where the job stopped."
        )
    footers, unread = read_footers(spec.inputs, spec.storage_options, converter.convert)
    # An adapter's name is text, whatever it looks like.
    texts = (spec.columns.get("adapter", "adapter"),)
    files, schema = with_partitions(footers, unified_schema(footers), texts)
    asked = {*spec.row_settings, *spec.columns}
    settings, problems = settings_of_files(footers, set(schema.names) if "all" in asked else asked, SETTING_ROLES)
    settings = [name for name in settings if name not in spec.columns]
    options, row_settings = asked_options(spec), (*spec.row_settings, *settings)
    roles, _ = find_roles(schema, spec.columns, options, row_settings)
    copied, of_names = copied_names(schema, roles, spec.keep, spec.drop)
    _, of_roles = find_roles(schema, spec.columns, options, row_settings, copied=copied, prefix=spec.output_prefix)
    kinds = distinct_kinds(footers)
    of_spark = spark_type_problems([(footer.file.name, footer.metadata) for footer in footers], copied)
    problems += [*of_roles, *of_names, *(of_spark | type_problems(schema, copied, kinds)).values()]
    if problems:
        raise JobRequestError(*problems)
    read = {*copied, *roles.values(), *(name.partition(".")[0] for name in roles.values())}
    metadata, left_out = kept_metadata(footers, copied)
    return InputRecord(
        files=files,
        roles=roles,
        schema_ipc=pack_schema(pa.schema([column for column in schema if column.name in read])),
        unread=unread[:_UNREAD_RECORDED],
        unread_endings=endings(unread),
        dropped=tuple(name for name in schema.names if name not in copied),
        metadata=metadata,
        metadata_left_out=tuple(left_out),
        int96=tuple(columns_of_int96(copied, kinds)),
        has_zoned_times=times_are_zoned(copied, kinds),
        has_arrow_schema=any(footer.has_arrow_schema for footer in footers),
        has_small_files_together=True,
        converted=converter.formats,
        json_columns=converter.json_columns,
    )


def _check_output(spec: JobSpec, store: JobStore) -> OutputContents:
    inputs = [url for url in spec.inputs if not url.startswith(TABLE_SCHEME)]
    around = [url for url in inputs if would_read(url, f"{spec.output}/{part_name(0)}")]
    if around:
        raise JobRequestError(
            f"output={redacted_url(spec.output)!r}: its parts would be among the files of input="
            f"{redacted_url(around[0])!r}. Name a folder elsewhere, or one whose name begins with an underscore."
        )
    try:
        store.location.check_folder()
        contents = store.contents()
    except StorageError as error:
        raise JobRequestError(f"output={redacted_url(spec.output)!r}: {error}") from None
    store.check_ownership(contents)
    return contents


def _check_fit(spec: JobSpec, model: CheckedModel, given: InputRecord) -> list[str]:
    """Problems of the model with this input, or with the job's sampling options, as sentences."""
    problems = []
    if "messages" in given.roles and not model.tokenizer.has_chat_template:
        problems.append(
            f"input column {given.roles['messages']!r} (messages): the model at {redacted_url(spec.model)!r} has "
            "no chat template. Take an instruction-tuned model, or give a prompt column."
        )
    if not spec.sampling.problems():
        # Adapters may have more tokens than the base: looked at once they are audited, and row by row.
        vocab_size = MAX_TOKENS if spec.adapters else model.config.vocab_size
        found = problems_with_model(spec.sampling, vocab_size)
        problems += [f"{problem}. Correct it, or leave out what is named." for problem in found]
    if spec.system_prompt is not None:
        problems += _system_prompt_problems(spec.system_prompt, model, given)
    problems += _rendering_problems(spec, model, given)
    if "max_tokens" not in given.roles and spec.sampling.max_tokens >= model.config.max_context_tokens:
        problems.append(
            f"max_tokens={spec.sampling.max_tokens}: leaves no room for a prompt in the model's context of "
            f"{model.config.max_context_tokens} tokens. Lower it."
        )
    return problems


def _system_prompt_problems(text: str, model: CheckedModel, given: InputRecord) -> list[str]:
    """Reasons why the job's system prompt would not reach the model, as sentences."""
    other = next((given.roles[role] for role in PROMPT_ROLES if role != "messages" and role in given.roles), None)
    if other is not None:
        return [
            f"system_prompt: the prompts of this input are in column {other!r}, where a system message has no place. "
            "Write it into the prompts, or give a messages column."
        ]
    if not model.tokenizer.has_chat_template:
        return []  # said already
    problem = _template_problem(model, [{"role": "system", "content": text}, {"role": "user", "content": "?"}])
    return [] if problem is None else [f"system_prompt: {problem}. Write it into the first message of each row."]


def _rendering_problems(spec: JobSpec, model: CheckedModel, given: InputRecord) -> list[str]:
    """Reasons why the job's rendering options would not reach the model, as sentences."""
    if spec.split_answer and spec.continue_final_message:
        return [SPLIT_AND_CONTINUED]
    options = ("chat_template", "split_answer", *RENDERING_OPTIONS)
    asked = [name for name in options if getattr(spec, name) not in (None, False)]
    if not asked:
        return []
    other = next((given.roles[role] for role in PROMPT_ROLES if role != "messages" and role in given.roles), None)
    if other is not None:
        return [
            f"{', '.join(asked)}: the prompts of this input are in column {other!r}, which no chat template renders. "
            "Leave it out, or give a messages column."
        ]
    tools = read_tools(spec.tools) if spec.tools else None
    variables = read_variables(spec.chat_template_kwargs) if spec.chat_template_kwargs else {}
    if not model.tokenizer.has_chat_template or not (tools or variables):
        return []
    problem = _template_problem(model, [{"role": "user", "content": "?"}], RenderOptions(tools, variables))
    if problem is None:
        return []
    names = [name for name in ("tools", "chat_template_kwargs") if name in asked]
    return [f"{', '.join(names)}: {problem}. Take another template with --chat-template, or leave it out."]


def _template_problem(
    model: CheckedModel, messages: list[dict[str, Any]], options: RenderOptions = AS_USUAL
) -> TokenizerError | None:
    """Why the model's chat template makes no prompt that contains the whole conversation, or None."""
    (prompt,) = model.tokenizer.render_all([Conversation(messages, options)], must_be_whole=True)
    return prompt if isinstance(prompt, TokenizerError) else None


def _check_names(spec: JobSpec, adapters: Mapping[str, str], given: InputRecord) -> list[str]:
    """Problem of a job with adapters and no adapter column: the base model would answer every row."""
    if "adapter" in given.roles or not given.num_rows:
        return []
    count = f"{len(adapters)} adapters are given" if len(adapters) > 1 else "1 adapter is given"
    found = columns_with_names(given, adapters, spec.storage_options)
    hints = [
        f"`{column}` holds {n} of the {len(adapters)} adapter names: add --column adapter={column}."
        for column, n in list(found.items())[:_COLUMNS_SHOWN]
    ] or [
        "No column holds one of their names. Name the column with --column adapter=NAME, or leave --adapters out to "
        "ask the base model."
    ]
    return [f"adapters: {count}, and no row can name one: the input has no column 'adapter'. {' '.join(hints)}"]
