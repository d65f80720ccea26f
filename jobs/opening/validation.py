"""Checks everything that a job names before any work, and reports all problems at once.

Reads configuration files, Parquet footers and listings; no weights, and rows only to explain a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from ...engine.config import has_blocks, read_model_config, unknown_config_keys
from ...engine.errors import EngineError
from ...engine.model_config.folder import look_at
from ...engine.model_config.model import ModelConfig
from ...engine.model_config.partition import partition_problem
from ...engine.text.answers.sampling_check import MAX_TOKENS, problems_with_model
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...system.untrusted import NoProcessError, shown_name
from ..contents import OutputContents, part_name
from ..cost_profile import read_profile
from ..errors import JobRequestError, StorageError
from ..input.adapter_names import ALLOWED_ROLE, allowed_adapters, columns_with_names, rule_problems
from ..input.column_types import columns_of_int96, times_are_zoned, type_problems
from ..input.columns import JSON_SETTINGS, asked_options, copied_names, default_prefix, find_roles, is_number
from ..input.conversion.converter import Converter
from ..input.file_metadata import kept_metadata, settings_of_files
from ..input.files import distinct_kinds, pack_schema, read_footers, unified_schema, unpack_schema
from ..input.finding import endings, would_read
from ..input.partitions import ADAPTER_ROLE, with_partitions, with_sole_adapter
from ..input.spark_metadata import spark_type_problems
from ..options.stages import stages_of
from ..options.values import PROMPT_ROLES, SETTING_ROLES, TABLE_SCHEME
from ..record import InputRecord
from ..spec import JobSpec
from ..stages import named_stages, needs_adapter_of_rows, stage_spec
from ..storage.local_copy import is_on_this_machine, local_folder
from ..storage.redaction import is_redacted, redacted_url
from ..store import JobStore
from .adapters import find_adapters
from .generation_config import with_generation_defaults
from .job_file import read_job_file
from .prompts import prompt_problems, template_columns, with_chat, with_template_text, with_templates
from .sweeps import right_problems, right_role, swept_adapters, swept_input

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

    #: The job as asked, with absolute paths, the texts of its templates, and the values of options that follow from
    #: model and input.
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
    spec = _tried(problems, lambda: with_template_text(asked)) or without_template
    spec, templates = _tried(problems, lambda: with_templates(spec)) or (spec, ())
    store = JobStore(spec.output, spec.storage_options)
    model = _tried(problems, lambda: _check_model(spec))
    adapters = _tried(problems, lambda: find_adapters(spec.adapters, spec.storage_options))
    output = _tried(problems, lambda: _check_output(spec, store))
    texts, numbers, as_json = _typed_columns(spec)
    converter = Converter(
        store.input_place(),
        texts=texts,
        numbers=numbers,
        as_json=as_json,
        verify=spec.verify,
        may_stage=output is not None,
    )
    with ExitStack() as stack:
        stack.callback(converter.close)
        checked = _check_with_input(spec, store, model, adapters, output, converter, templates, asked.chat, problems)
        stack.pop_all()
    return checked


def _check_with_input(
    spec: JobSpec,
    store: JobStore,
    model: CheckedModel | None,
    adapters: Mapping[str, str] | None,
    output: OutputContents | None,
    converter: Converter,
    templates: Sequence[str],
    chat: bool | None,
    problems: list[str],
) -> CheckedJob:
    """The rest of `check_job`: the input, and how it fits the rest. `templates`: those that make prompts.
    `chat`: the option as it was given. `problems`: those found so far.
    """
    given = _tried(problems, lambda: _check_input(spec, templates, converter, adapters))
    if spec.cost_model is not None:
        _tried(problems, lambda: read_profile(Path(spec.cost_model or "")))
    if model and spec.generation_config:
        spec = _tried(problems, partial(with_generation_defaults, spec, model.folder)) or spec
    if given:
        spec = spec.model_copy(update={"output_prefix": _output_prefix(spec, given)})
    if model and given:
        spec = with_chat(spec, given.roles, has_chat_template=model.tokenizer.has_chat_template)
        problems += prompt_problems(spec, chat, model.tokenizer, given)
        problems += _stage_problems(spec, model.tokenizer, given)
        problems += _check_fit(spec, model, given)
    if adapters and given:
        named = _tried(problems, partial(_with_names, spec, adapters, given))
        given = named or given
    if problems:
        raise JobRequestError(*dict.fromkeys(problems))
    assert model is not None, "a model that cannot be used is a problem"
    assert adapters is not None, "adapters that cannot be used are a problem"
    assert given is not None, "an input that cannot be used is a problem"
    assert output is not None, "an output that cannot be used is a problem"
    return CheckedJob(_with_table_urls(spec, converter), store, output, model, adapters, given, converter)


def _with_table_urls(spec: JobSpec, converter: Converter) -> JobSpec:
    """The job with URLs in place of tables of this program, by which the job knows them."""
    urls = iter(converter.table_urls)
    named = tuple(next(urls) if url.startswith(TABLE_SCHEME) else url for url in spec.inputs)
    return spec.model_copy(update={"input": named[0] if len(named) == 1 else named})


def _typed_columns(spec: JobSpec) -> tuple[list[str], list[str], list[str]]:
    """Columns whose types the job's options decide, where files have no types: `texts`, `numbers` and `as_json` of
    `Converter`.
    """
    columns, asked = spec.columns, {*spec.row_settings, *spec.columns}
    settings = SETTING_ROLES if "all" in asked else [name for name in SETTING_ROLES if name in asked]
    numbers = [columns.get(name, name) for name in settings if is_number(name)]
    texts = [columns.get(role) or role for role in ("adapter", *PROMPT_ROLES)]
    as_json = [columns.get(name, name) for name in JSON_SETTINGS]
    return texts, numbers, as_json


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
    if config.wrapper:
        notes.append(f"the text model of {config.wrapper}; rows with images, sound or video are error rows")
    if config.says_tied:
        notes.append(
            "config.json says tie_word_embeddings, and the checkpoint has a head that differs from the embedding: it "
            "is used, as by transformers 5"
        )
    return CheckedModel(folder, config, tokenizer, tuple(notes))


def _check_input(
    spec: JobSpec, templates: Sequence[str], converter: Converter, adapters: Mapping[str, str] | None
) -> InputRecord:
    """Finds the files and columns of the input. `templates`: those that make prompts. `adapters`: those of the job;
    None when they are not known.
    """
    closed = [url for url in spec.inputs if is_redacted(url)]
    if closed:
        raise JobRequestError(
            f"input={closed[0]!r}: what opens this URL is not recorded. Instead of resuming, run the same command as "
            "at first on the same output; it goes on where the job stopped."
        )
    footers, unread = read_footers(spec.inputs, spec.storage_options, converter.convert)
    # An adapter's name is text, whatever it looks like.
    texts = (spec.columns.get(ADAPTER_ROLE) or ADAPTER_ROLE,)
    files, schema = with_partitions(footers, unified_schema(footers), texts)
    asked = {*spec.row_settings, *spec.columns}
    settings, problems = settings_of_files(footers, set(schema.names) if "all" in asked else asked, SETTING_ROLES)
    settings = [name for name in settings if name not in spec.columns]
    options, row_settings = asked_options(spec), (*spec.row_settings, *settings)
    find = partial(find_roles, schema, spec.columns, options, row_settings, is_made=bool(spec.template_option))
    roles, _ = find()
    roles |= right_role(spec, schema)
    if spec.allowed_adapters is not None and (column := allowed_adapters(spec.allowed_adapters)[0]) in schema.names:
        roles[ALLOWED_ROLE] = column
    copied, of_names = copied_names(schema, roles, spec.keep, spec.drop)
    _, of_roles = find(copied=copied, prefix=_prefix_for(spec, copied, roles))
    read_by_templates, of_templates = template_columns(spec, templates, schema)
    if spec.stages is not None:
        read_by_templates, of_templates = named_stages(spec, schema.names, adapters)
    kinds = distinct_kinds(footers)
    of_spark = spark_type_problems([(footer.file.name, footer.metadata) for footer in footers], copied)
    problems += [*id_problems(spec, roles), *right_problems(spec, schema)]
    problems += rule_problems(spec.allowed_adapters, schema.names, adapters or ())
    problems += [*of_roles, *of_templates, *of_names, *(of_spark | type_problems(schema, copied, kinds)).values()]
    if problems:
        raise JobRequestError(*problems)
    read = {*copied, *read_by_templates, *roles.values(), *(name.partition(".")[0] for name in roles.values())}
    metadata, left_out = kept_metadata(footers, copied)
    return InputRecord(
        files=files,
        roles=roles,
        template_columns=read_by_templates,
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


def id_problems(spec: JobSpec, roles: Mapping[str, str]) -> list[str]:
    """Problems of an update with the ids of its rows, as sentences. `roles`: role -> input column."""
    if spec.id_from_content and "id" in roles:
        return [
            f"id_from_content: the input has ids in column {roles['id']!r}. Leave the option out, or leave the column "
            "out of the input."
        ]
    if spec.update and not spec.id_from_content and "id" not in roles:
        return [
            "update: the input has no column 'id', and ids of file and row number change with the input. Name a column "
            "that tells its rows apart with --column id=NAME, or make ids of what the rows ask with --id-from-content."
        ]
    return []


def _stage_problems(spec: JobSpec, tokenizer: Tokenizer, given: InputRecord) -> list[str]:
    """Reasons why the prompts of a job's stages cannot be made as asked, as sentences."""
    asking = [stage for stage in stages_of(spec.stages) if stage.asks]
    return [
        f"stages.{stage.name}: {problem}"
        for stage in asking
        for problem in prompt_problems(stage_spec(spec, stage), None, tokenizer, given)
    ]


def _output_prefix(spec: JobSpec, given: InputRecord) -> str:
    """The `output_prefix` that holds for a checked input."""
    schema = unpack_schema(given.schema_ipc)
    return _prefix_for(spec, [name for name in schema.names if name not in given.dropped], given.roles)


def _prefix_for(spec: JobSpec, copied: Sequence[str], roles: Mapping[str, str]) -> str:
    is_given = "output_prefix" in spec.model_fields_set
    return spec.output_prefix if is_given else default_prefix(copied, roles, asked_options(spec))


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
    if not spec.sampling.problems():
        # Adapters may have more tokens than the base: looked at once they are audited, and row by row.
        vocab_size = MAX_TOKENS if spec.adapters else model.config.vocab_size
        found = problems_with_model(spec.sampling, vocab_size)
        problems += [f"{problem}. Correct it, or leave out what is named." for problem in found]
    if "max_tokens" not in given.roles and spec.sampling.max_tokens >= model.config.max_context_tokens:
        problems.append(
            f"max_tokens={spec.sampling.max_tokens}: leaves no room for a prompt in the model's context of "
            f"{model.config.max_context_tokens} tokens. Lower it."
        )
    return problems


def _with_names(spec: JobSpec, adapters: Mapping[str, str], given: InputRecord) -> InputRecord:
    """The input with names of adapters: of its own column, else that of the only adapter in all rows.

    Raises `JobRequestError` for a job with adapters that no row can name: the base model would answer every row.
    """
    if spec.for_each_adapter:
        swept_adapters(spec, adapters)
        return swept_input(spec, given)
    if ADAPTER_ROLE in given.roles or not given.num_rows or not needs_adapter_of_rows(spec):
        return given
    # "": the user has said that no column names adapters
    is_said = spec.columns.get(ADAPTER_ROLE) == ""
    found = {} if is_said else columns_with_names(given, adapters, spec.storage_options)
    if len(adapters) == 1 and not found:
        return with_sole_adapter(given, next(iter(adapters)), spec.output_prefix)
    count = f"{len(adapters)} adapters are given" if len(adapters) > 1 else "1 adapter is given"
    hints = [
        f"`{column}` holds {n} of the {len(adapters)} adapter names: add --column adapter={column}."
        for column, n in list(found.items())[:_COLUMNS_SHOWN]
    ] or [
        "No column holds one of their names. Name the column with --column adapter=NAME, give one adapter alone to "
        "have it answer every row (--adapters NAME=URL), or leave --adapters out to ask the base model."
    ]
    problem = f"adapters: {count}, and no row can name one: the input has no column 'adapter'. {' '.join(hints)}"
    raise JobRequestError(problem)
