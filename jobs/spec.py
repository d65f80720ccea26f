"""`JobSpec`: the options of a job. Each field is declared once, with its help and its limits.

The command line, the job file, the documentation and the messages about wrong values are made from these fields; the
fields of sampling come from `engine.request.SamplingParams`. A spec is frozen and touches no storage; `validation.py`
does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from ..engine.config import BaseQuantization, Mode
from ..engine.request import SAMPLING_OPTIONS, SamplingParams
from ..engine.text.chat.conversation import is_template_text, read_line_breaks, read_message_templates
from .errors import JobRequestError
from .options.problems import conflicts, field_name, unknown_options, value_problems, with_next_step
from .options.readers import (
    JSON_READERS,
    check_input,
    check_roles,
    check_settings,
    keep_tables,
    one_or_all,
    read_adapters,
    read_columns,
    read_error_budget,
    read_input,
    read_json,
    read_json_object,
    read_names,
    read_place,
    read_sampling,
)
from .options.stages import stages_of
from .options.stopping import StoppingFields
from .options.types import JobOptions
from .options.values import (
    TEMPLATE_OPTIONS,
    TLS_FIELDS,
    ErrorBudget,
    TlsFiles,
    check_prefix,
    markers_of,
    plain_value,
    replace_forms,
    with_tables,
)
from .storage.redaction import redacted_url
from .storage.urls import absolute, absolute_if_local, is_hub_id

# Options of sampling that may be written in several ways.
_READ = tuple(name for name, o in SAMPLING_OPTIONS.items() if get_origin(o.kind) is tuple or name == "json_schema")
EMBEDDED_CLUSTERS = ("local", "local-cuda")
# Name of a Python class with its module; a class's own name begins with a capital letter.
_CLASS = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\.[A-Z]\w*"
#: Parts of the help, in the order in which it shows them.
Panel = Literal["data", "prompts", "answers", "form", "adapters", "engine", "cluster", "storage", "limits"]
PolicyName = Literal["planner", "dlora", "s-lora", "vllm-like", "merged-only", "peft-like"]
ScoreBy = Literal["exact", "contains", "regex", "json", "number", "choice"]
Shape = Literal["long", "wide"]
PlacementName = Literal["planner", "planned", "none", "loraserve", "loraserve-levelled"]
# Values for the required fields while the other fields are checked.
_PLACEHOLDERS = {"model": "-", "input": "-", "output": "-"}


def _option(
    default: Any, help: str, *, panel: Panel, short: str = "", is_common: bool = False, expected: str = "", **rules: Any
) -> Any:
    """The declaration of one option. `panel`: part of the help that shows it. `short`: its letter on the command line,
    "" for none. `is_common`: whether short help shows it; it shows every option with a letter. `expected`: expectation
    for messages about wrong values, "" for pydantic's own words. `rules`: constraints of pydantic's `Field`.
    """
    shown: dict[str, Any] = {"expected": expected, "panel": panel, "short": short}
    shown["is_common"] = is_common or bool(short)
    return Field(default, description=help, json_schema_extra=shown, **rules)


# Declarations of options, by the part of the help that shows them.
_data, _prompts, _answers, _form, _adapters, _engine, _cluster, _storage, _ = (
    partial(_option, panel=panel) for panel in get_args(Panel)
)
if TYPE_CHECKING:
    _SamplingFields = StoppingFields
else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=StoppingFields,
        **{
            name: (o.kind, _option(o.default, o.help, panel=o.panel, short=o.short))
            for name, o in SAMPLING_OPTIONS.items()
        },
    )


class JobSpec(_SamplingFields):
    """The options of one job. Its constructor raises `JobRequestError` with every problem at once.

    The options of sampling are fields too, and `sampling` has them together. `storage_options` are never recorded.
    """

    # built when the first job is read: help is shown without
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True, coerce_numbers_to_str=True
    )

    model: str = _engine(
        ...,
        "Base model: local folder, GGUF file, Hugging Face hub id or fsspec URL.",
        expected="a folder, GGUF file, hub id or URL",
        min_length=1,
        short="m",
    )
    adapters: str | dict[str, str] | None = _adapters(
        None,
        "Folder or URL of an adapter, or with one folder per adapter; a glob of them; a hub id, as ORG/NAME@REVISION; "
        "NAME=URL, repeated (in a job file a mapping). RUN/latest is the checkpoint of the largest number.",
        short="a",
    )
    input: str | tuple[str, ...] = _data(
        ...,
        "File of Parquet, CSV, JSON Lines, Arrow or ORC, folder or glob; any fsspec URL. Repeatable (in a job file a "
        "list). In Python also a table.",
        expected="a file, folder, glob or URL, or several of them",
        min_length=1,
        short="i",
    )
    output: str = _data(
        ..., "Folder or fsspec URL for the answers.", expected="a folder or URL", min_length=1, short="o"
    )
    name: str | None = _data(
        None,
        "A name for the job, the first part of its id.",
        expected="1 to 64 letters, digits, dots, hyphens or underscores, a letter or digit first",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    columns: dict[str, str] = _data(
        {},
        "role=name: an input column under another name; role= for none, so that a column of the role's name is data. "
        "Repeatable (in a job file a mapping).",
        short="C",
    )
    row_settings: tuple[str, ...] = _data(
        (),
        "Columns that are settings of their rows, such as max_tokens,seed; or all: every column with a setting's name. "
        "Without, columns of such names are data.",
    )
    keep: tuple[str, ...] = _data(
        (), "A column of the input that is copied to the output; by default all are. Repeatable (in a job file a list)."
    )
    drop: tuple[str, ...] = _data(
        (), "A column of the input that is not copied to the output. Repeatable (in a job file a list)."
    )
    output_prefix: str = _data(
        "", "Text before the names of all columns that the output adds, such as answer_: they collide with none then."
    )
    prompt_template: str | None = _prompts(
        None,
        "Jinja2 template that makes prompts of columns: a file or URL, or its text, such as "
        "'{{ context }}\\n{{ question }}', in which \\n is a line break.",
        expected="a file, a URL, or the text of a jinja2 template",
        min_length=1,
        is_common=True,
    )
    messages_template: str | None = _prompts(
        None,
        "Messages with jinja2 templates as contents, made of columns: JSON of a list of objects with role and content "
        "(in a job file a list).",
    )
    chat: bool | None = _prompts(
        None,
        "A prompt is one user message of the chat template; by default prompts of prompt_template are, where the model "
        "has a chat template, and those of a prompt column are text.",
    )
    stages: str | None = _prompts(
        None,
        "Stages in place of a prompt, each a request that reads the results of those before it, or a pick among "
        "several: JSON of a mapping by name (in a job file a mapping).",
    )
    until: str | None = _prompts(
        None,
        "Stages run again until a condition holds: JSON of stage, is and rounds, and perhaps from (in a job file a "
        "mapping).",
    )
    output_columns: tuple[str, ...] = _prompts(
        (), "Stages that the output has columns of; by default all. Repeatable (in a job file a list)."
    )
    system_prompt: str | None = _prompts(
        None,
        "System message for rows whose messages have none.",
        expected="text that is not empty",
        min_length=1,
    )
    allow_special_tokens: bool = _prompts(
        False,
        "Special tokens inside of messages and in columns of a template are control tokens; by default text.",
    )
    chat_template: str | None = _prompts(
        None,
        "Chat template to use instead of the model's and the adapters': a file or URL, or its text.",
        expected="a file, a URL, or the text of a jinja2 template",
        min_length=1,
    )
    tools: str | None = _prompts(
        None, "Tools for the chat template, in OpenAI form: JSON of a list (in a job file a list)."
    )
    chat_template_kwargs: str | None = _prompts(
        None, "Variables for the chat template, such as enable_thinking: a JSON object (in a job file a mapping)."
    )
    add_generation_prompt: bool | None = _prompts(
        None, "Prompts end where an answer begins; by default they do, unless continue_final_message."
    )
    continue_final_message: bool = _prompts(
        False, "Prompts end where the text of the last message does, and answers continue it."
    )
    split_answer: bool = _prompts(
        False, "Take a last message of the assistant out of the prompt, into the column answer_expected."
    )

    samples: Literal["rows", "lists"] = _data(
        "rows", "Completions of a row: rows of the output, or lists in one row of it."
    )
    generation_config: bool = _answers(
        False, "Take temperature, top_p, top_k, min_p and repetition_penalty, where not given, from the model's file."
    )
    response_format: str | dict[str, Any] | None = _form(
        None, "Form of completions as OpenAI writes it: a JSON object of type text, json_object or json_schema."
    )
    structured_outputs: str | dict[str, Any] | None = _form(
        None, "Form of completions as vLLM writes it: a JSON object of json, regex, choice, grammar or json_object."
    )

    cluster: str = _cluster(
        "local",
        "local, local-cuda (fails without a GPU), the address of a Dask scheduler, or the name of a cluster class such "
        "as dask_jobqueue.SLURMCluster, which is started for the job.",
        expected="local, local-cuda, an address such as tcp://10.0.0.5:8786, or a class such as "
        "dask_jobqueue.SLURMCluster",
        pattern=rf"^({'|'.join(EMBEDDED_CLUSTERS)}|\w+://.+|[^\s/]+:\d+|{_CLASS})$",
        short="c",
    )
    cluster_options: dict[str, Any] = _cluster(
        {},
        "JSON object of arguments for the cluster class (in a job file a mapping); never recorded, so given again to "
        "resume.",
        repr=False,
    )
    scheduler_file: str | None = _cluster(
        None,
        "File that `dask scheduler --scheduler-file` wrote, instead of an address.",
        expected="a file that `dask scheduler --scheduler-file` wrote",
        min_length=1,
    )
    workers: int | None = _cluster(
        None, "Workers of a cluster that is started for the job; by default one per GPU, or two.", ge=1, short="w"
    )
    tls_ca: str | None = _cluster(
        None, "PEM file of the authority that signed the cluster's certificates, for a tls:// address."
    )
    tls_cert: str | None = _cluster(None, "PEM file of this client's certificate.")
    tls_key: str | None = _cluster(None, "PEM file of this client's key.")
    for_each_adapter: tuple[str, ...] = _adapters(
        (),
        "Adapters that each answer every row: all, names, or globs of names such as 'run-17-*'. Repeatable (in a job "
        "file a list).",
    )
    allowed_adapters: str | None = _adapters(
        None,
        "Adapters that rows may name, by the value of a column; other rows are error rows: JSON of a column with a "
        "mapping of its values to names or globs, '*' for all other values (in a job file a mapping).",
    )
    include_base: bool = _adapters(False, "The base model answers every row too, beside for_each_adapter.")
    shape: Shape = _data(
        "long", "A sweep's output: a row for each adapter (long), or a struct column for each adapter (wide)."
    )
    expected: str | None = _data(
        None, "Column of right answers, each a value or a list of values that are right; adds the column score."
    )
    score_by: ScoreBy = _data("exact", "How a completion is compared with the right answer.")
    mode: Mode = _adapters("auto", "How adapters are applied; exact fixes the arithmetic of every row.", is_common=True)
    max_errors: str = _data("10%", "Error rows that are allowed, as a count or a percentage.", short="e")
    storage_options: dict[str, Any] = _storage(
        {},
        "JSON object for fsspec (keys, endpoint); never recorded, so given again to resume.",
        repr=False,
        is_common=True,
    )
    verify: bool = _data(
        False,
        "Hash the base model's weights and read the input again, also where their files look unchanged. Parts that "
        "were made of other rows are computed again.",
    )
    examples: bool = _data(
        True,
        "Keep three answers of each adapter, with the ends of their prompts, in summary.json, and show them in run, "
        "status and report.",
    )
    overwrite: bool = _data(False, "Remove the job that is in the output and start over.", is_common=True)
    update: bool = _data(
        False,
        "Keep the answers in the output whose rows are unchanged, compute new and changed rows, and let removed ones "
        "leave. Needs ids: a column, or --id-from-content.",
        is_common=True,
    )
    id_from_content: bool = _data(
        False, "Ids are hashes of what the rows ask (adapter, prompt, settings), for input without a column of ids."
    )
    migration: bool = _cluster(True, "Move rows from slow or busy workers to others.")
    policy: PolicyName = _cluster("planner", "How rows are batched, dispatched and moved: planner is this project's.")
    placement: PlacementName = _cluster(
        "planner",
        "Which shards a worker opens first: those that the plan places on it (planned), any (none), LoRAServe's (its "
        "paper's or levelled), or planned on 8 workers or more and any on fewer (planner).",
    )
    rows_per_shard: int | None = _data(None, "Rows per part file; chosen by default.", ge=1)
    cost_model: str | None = _cluster(
        None, "File that `lorabatch profile` wrote, to plan with; by default this machine's, else a guess."
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _engine(
        "auto", "Number format of the base model.", is_common=True
    )
    base_quantization: BaseQuantization = _engine(
        "none",
        "Multiply the base model's linear layers in 8 bits: int8 on CPUs with AVX512_VNNI or AVX_VNNI, fp8 on GPUs of "
        "compute capability 8.9 and later. Faster, and less exact.",
    )
    device: str = _engine("auto", "Device of the engines: auto, cpu or cuda.", min_length=1)
    tensor_parallel: int = _engine(
        1,
        "Processes of an engine, each with its part of the model, for models that do not fit into one. On GPUs each "
        "takes one.",
        ge=1,
    )
    load_format: Literal["auto", "dummy"] = _engine("auto", "How weights are read; dummy makes random ones.")
    batch_rows: int | None = _engine(
        None, "Rows that an engine decodes together; by default 64, on a GPU by its memory.", ge=1
    )
    step_tokens: int | None = _engine(
        None, "Most tokens of one forward pass; by default 512, on a GPU by its memory.", ge=16
    )
    engine_threads: int | None = _engine(None, "CPU threads of an engine; by default its share of all.", ge=1)
    adapter_disk_bytes: int | None = _cluster(
        None,
        "Most bytes of local copies of adapters that are in a store, on each host; by default half of the free space.",
        ge=1,
    )
    pool_bytes: int | None = _engine(None, "Memory of an engine's page pool; chosen by default.", ge=1)
    host_tier_bytes: int | None = _engine(
        None,
        "Host memory of an engine for adapters that left its pool; by default half of what the engine's share of the "
        "host leaves.",
        ge=0,
    )

    def __init__(self, **values: Unpack[JobOptions]) -> None:
        problems, _ = self._set_fields(values)
        if problems:
            raise JobRequestError(*problems)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields for `repr` that are not the defaults, without passwords and signatures in URLs: Dask logs the
        arguments of failed tasks.
        """
        for name, value in super().__repr_args__():
            if name in JobSpec.model_fields and value == JobSpec.model_fields[name].default:
                continue
            if isinstance(value, str):
                value = redacted_url(value)
            elif name == "input":
                value = tuple(map(redacted_url, value))
            elif name == "adapters" and value:
                value = {adapter: redacted_url(url) for adapter, url in value.items()}
            yield name, value

    def __dir__(self) -> list[str]:
        """The options, and what this class adds to those of pydantic: notebooks offer these names."""
        return sorted(
            {*JobSpec.model_fields, *(name for name in vars(JobSpec) if not name.startswith(("_", "model_")))}
        )

    @classmethod
    def as_far_as_valid(cls, values: Mapping[str, Any]) -> tuple[JobSpec, list[str], frozenset[str]]:
        """The job as far as its values can be used, every problem, and the fields that hold a placeholder."""
        job = cls.__new__(cls)
        return job, *job._set_fields(values)

    @classmethod
    def recorded(cls, values: Mapping[str, Any]) -> JobSpec:
        """The job that `values` of a `JobRecord` give. Its files, and options that exclude each other, are not checked:
        the job was opened elsewhere, or by another version. Raises `ValidationError`.
        """
        job = cls.__new__(cls)
        BaseModel.__init__(job, **values)
        return job

    def _set_fields(self, values: Mapping[str, Any]) -> tuple[list[str], frozenset[str]]:
        """Sets the fields whose values can be used. Returns every problem, and the fields with wrong values."""
        values = {field_name(name): value for name, value in values.items()}
        if "input" in values:
            values["input"] = with_tables(values["input"])
        values = {name: plain_value(value) for name, value in values.items()}
        known = {name: value for name, value in values.items() if name in JobSpec.model_fields}
        # pydantic takes True for the number 1; YAML reads `yes` as True.
        known |= {n: str(v) for n, v in known.items() if isinstance(v, bool) and _is_number(n)}
        problems, wrong = unknown_options(values, JobSpec.model_fields), frozenset[str]()
        problems += replace_forms(known)
        try:
            super().__init__(**known)
        except ValidationError as error:
            problems += value_problems(error, known, JobSpec.model_fields)
            # the other fields are checked too, beside any value for those that are wrong
            wrong = frozenset(str(found["loc"][0]) for found in error.errors() if found["loc"])
            super().__init__(**_PLACEHOLDERS | {name: value for name, value in known.items() if name not in wrong})
        problems += [
            *self.sampling.problems(),
            *self.tls_files.problems("tls://" if self.scheduler_file else self.cluster),
            *conflicts(self, wrong),
        ]
        return list(map(with_next_step, problems)), wrong

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of rows that do not override it."""
        return SamplingParams(**{name: getattr(self, name) for name in SAMPLING_OPTIONS})

    @property
    def templates(self) -> tuple[tuple[str, str], ...]:
        """Role and template of each message that is made of columns; one message of the user for `prompt_template`."""
        if self.messages_template is not None:
            messages = read_message_templates(self.messages_template)
            return tuple((message["role"], read_line_breaks(message["content"])) for message in messages)
        return () if self.prompt_template is None else (("user", read_line_breaks(self.prompt_template)),)

    @property
    def template_option(self) -> str:
        """Name of the option that gives `templates`; "" for none."""
        return next((name for name in (*TEMPLATE_OPTIONS, "stages") if getattr(self, name) is not None), "")

    def renders_messages(self, roles: Collection[str]) -> bool:
        """Whether a chat template renders the prompts. `roles`: those that columns of the input have."""
        of_stages = any(stage.messages for stage in stages_of(self.stages))
        return "messages" in roles or self.messages_template is not None or bool(self.chat) or of_stages

    @property
    def inputs(self) -> tuple[str, ...]:
        """The files, folders and globs of the input, in the order in which they were given."""
        return (self.input,) if isinstance(self.input, str) else self.input

    @property
    def places(self) -> tuple[str, ...]:
        """The URLs below which a run of this job reads rows: the inputs, and the output, which has converted ones."""
        return (*self.inputs, self.output)

    @property
    def tls_files(self) -> TlsFiles:
        """The files that open a `tls://` cluster."""
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)

    @property
    def is_embedded(self) -> bool:
        """Whether the job runs on a cluster of its own on this machine."""
        return self.cluster in EMBEDDED_CLUSTERS and self.scheduler_file is None

    @property
    def is_cluster_class(self) -> bool:
        """Whether `cluster` names a class, of which the job starts a cluster."""
        return re.fullmatch(_CLASS, self.cluster) is not None

    @property
    def error_budget(self) -> ErrorBudget:
        """`max_errors`, parsed."""
        return ErrorBudget.parse(self.max_errors)

    def with_absolute_paths(self) -> JobSpec:
        """The job with absolute paths, so that it does not depend on the working directory. A model or adapter that is
        no local path stays as it is: it may be a hub id.
        """
        adapters = self.adapters
        if isinstance(adapters, str):
            adapters = adapters if is_hub_id(adapters) else absolute(adapters)
        elif adapters is not None:
            adapters = {name: absolute_if_local(url) for name, url in adapters.items()}
        return self.model_copy(
            update={
                "model": absolute_if_local(self.model),
                "adapters": adapters,
                "input": one_or_all([absolute(url) for url in self.inputs]),
                "output": absolute(self.output),
                "cost_model": self.cost_model and absolute(self.cost_model),
                "scheduler_file": self.scheduler_file and absolute(self.scheduler_file),
                **{name: _template_place(getattr(self, name)) for name in ("chat_template", "prompt_template")},
                **{name: path and absolute(path) for name in TLS_FIELDS for path in [getattr(self, name)]},
            }
        )

    def without_secrets(self) -> JobSpec:
        """The job as it is recorded: no storage options, no passwords or signatures in URLs, and no `overwrite`."""
        adapters = self.adapters
        if isinstance(adapters, str):
            adapters = redacted_url(adapters)
        elif adapters is not None:
            adapters = {name: redacted_url(url) for name, url in adapters.items()}
        return self.model_copy(
            update={
                "model": redacted_url(self.model),
                "adapters": adapters,
                "input": one_or_all([redacted_url(url) for url in self.inputs]),
                "output": redacted_url(self.output),
                "storage_options": {},
                "cluster_options": {},
                "overwrite": False,
            }
        )

    _read_places = field_validator("model", "input", "output", mode="before")(read_place)
    _read_adapters = field_validator("adapters", mode="before")(read_adapters)
    _read_input = field_validator("input", mode="before")(read_input)
    _check_input = field_validator("input")(check_input)
    _keep_tables = field_validator("input", mode="wrap")(keep_tables)
    _read_columns = field_validator("columns", mode="before")(read_columns)
    _check_roles = field_validator("columns")(check_roles)
    _read_names = field_validator("row_settings", "keep", "drop", "output_columns", "for_each_adapter", mode="before")(
        read_names
    )
    _check_settings = field_validator("row_settings")(check_settings)
    _check_prefix = field_validator("output_prefix")(check_prefix)
    _read_json = field_validator(*JSON_READERS, mode="before")(read_json)
    _read_markers = field_validator("reasoning_markers", mode="before")(markers_of)
    _read_sampling = field_validator(*_READ, mode="before")(read_sampling)
    _read_error_budget = field_validator("max_errors", mode="before")(read_error_budget)
    _read_json_objects = field_validator("storage_options", "cluster_options", mode="before")(read_json_object)


def _template_place(template: str | None) -> str | None:
    """A template's file as an absolute path; a template that is given as text stays as it is."""
    return template if template is None or is_template_text(template) else absolute(template)


def _is_number(name: str) -> bool:
    """Whether an option is a number, and no switch."""
    annotation = JobSpec.model_fields[name].annotation
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {int, float}) and bool not in kinds
