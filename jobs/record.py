"""`JobRecord`: a job as frozen in `job.json`, and `differences` between two. `JobState`: the progress of a job's run.

The record names everything that determines a row's answer, by content where content can change under a name. It holds
no secrets: only the names of `storage_options` are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..engine.adapter_use import AdapterUse
from ..engine.request import FIRST_OPTIONS, SAMPLING_OPTIONS, TASKS
from ..engine.text.chat.conversation import RENDERING_OPTIONS
from ..system.untrusted import parse_json, shortened
from .errors import DamagedRecordError, naming_damage
from .options.problems import in_our_words
from .options.values import TLS_FIELDS
from .progress import AdapterCount, RowTotals, time_left
from .spec import JobSpec

RECORD_FORMAT = 1
# Older versions of pydantic may build a validator in two threads at once.
_BUILDING = threading.Lock()
# Options that identify a job: another value in one of them makes another job. Options about the cluster, the devices
# and the speed are not among them.
IDENTITY_FIELDS = (
    "input", "columns", *SAMPLING_OPTIONS, "mode", "dtype", "load_format", "rows_per_shard", "system_prompt",
    "allow_special_tokens", "chat_template", *RENDERING_OPTIONS, "policy", "placement", "base_quantization", "samples",
    "row_settings", "keep", "drop", "output_prefix", "split_answer", "prompt_template", "messages_template", "chat",
    "id_from_content", "stages", "until", "output_columns", "expected", "score_by", "shape", "allowed_adapters",
)  # fmt: skip
# Identity fields that the first version did not have. They enter an index's key only with a value that is not the
# default, so that indexes of earlier versions stay valid.
_LATER = (
    *(name for name in SAMPLING_OPTIONS if name not in FIRST_OPTIONS),
    "system_prompt", "allow_special_tokens", "chat_template", *RENDERING_OPTIONS, "policy", "placement",
    "base_quantization", "samples", "row_settings", "keep", "drop", "output_prefix", "split_answer",
    "prompt_template", "messages_template", "chat", "id_from_content", "stages", "until", "output_columns",
    "expected", "score_by", "shape", "allowed_adapters",
)  # fmt: skip
#: Options that `job.json` leaves out.
NOT_RECORDED = {"storage_options", "cluster_options", "overwrite", "update"}
_SHOWN_CHARACTERS = 300
AdapterVerdict = Literal["exact", "exact-by-merge", "refused"]


class _Frozen(BaseModel):
    # Validators are built when a record is read: most commands read none.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class ModelRecord(_Frozen):
    """The base model of a job, as it was when the job was opened."""

    #: Folder, file, hub id or URL, without passwords and signatures.
    url: str
    #: Hash of configuration, tokenizer and weights.
    sha256: str
    #: Tokens of the vocabulary.
    vocab_size: int
    #: Most tokens of prompt and answer together.
    max_context_tokens: int
    #: Sampling options in the model's `generation_config.json`.
    generation: dict[str, float] = {}
    #: Hash of configuration and tokenizer, without the weights; "" in records of earlier versions.
    tokenizer_sha256: str = ""
    #: Remarks on its folder for users, as clauses.
    notes: tuple[str, ...] = ()
    #: Header of an answer that prompts of the model's or the job's chat template lack; see `template_traits`.
    missing_header: str = ""
    #: Parts of conversations that this chat template drops by design, in words; see `template_traits`.
    template_drops: tuple[str, ...] = ()
    #: Task of its rows unless they say otherwise: `classify` where it has a head of its own, else "".
    task: str = ""
    #: Labels of its head; empty where it has none.
    labels: tuple[str, ...] = ()
    #: Kind of its head's numbers (`engine.model_config.classifier.PROBLEM_TYPES`); "" where it has none.
    problem_type: str = ""
    #: Token behind a text that classifiers pass over; None for no such token.
    pad_token_id: int | None = None


_VERSION_ID = "version-"


def version_id(facts: Any) -> str:
    """Identity of an adapter whose content no one has read yet. `facts`: JSON values that change with its content."""
    return _VERSION_ID + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[: 64 - len(_VERSION_ID)]


def is_version_id(adapter_id: str | None) -> bool:
    """Whether an identity is one of `version_id`, whose content hash the job's store may know."""
    return adapter_id is not None and adapter_id.startswith(_VERSION_ID)


class AdapterRecord(_Frozen):
    """One adapter of a job, as its audit found it."""

    #: Name by which rows ask for it.
    name: str
    #: Folder or URL, without passwords and signatures.
    url: str
    #: Result of the audit.
    verdict: AdapterVerdict
    #: Reasons against the verdict `exact`, one sentence each.
    reasons: tuple[str, ...] = ()
    #: Its identity: its content hash or, where only headers were read when the job was opened, `version_id`; "" for a
    #: folder that could not be read.
    sha256: str = ""
    #: Largest LoRA rank of its matrices.
    rank: int = 0
    #: Stored bytes of its tensors.
    weight_bytes: int = 0
    #: Header of an answer that prompts of its chat template lack; see `template_traits`.
    missing_header: str = ""
    #: Hash of the tokenizer or chat template that it ships, with which its rows are tokenised; "" for the base's.
    tokenizer_sha256: str = ""
    #: Size of its vocabulary, when it differs from the base's; else 0.
    vocab_size: int = 0
    #: Task of its rows, unless they say otherwise: `classify`, `embed`, or "" for text.
    task: str = ""
    #: Labels of its head; empty where it has none.
    labels: tuple[str, ...] = ()
    #: Kind of its head's numbers; "" where it has none.
    problem_type: str = ""
    #: Tensors of the vision tower beside a text model, which are not used.
    num_tower_tensors: int = 0
    #: Name of each of its files that are read -> version in the store; empty where all of it was read when the job was
    #: opened.
    files: dict[str, str] = {}

    @property
    def is_prepared_apart(self) -> bool:
        """Whether its rows are checked or tokenised otherwise than the base's."""
        return bool(self.tokenizer_sha256 or self.vocab_size) and not self.is_refused

    @property
    def is_refused(self) -> bool:
        """Whether rows that ask for it become error rows."""
        return self.verdict == "refused"


# Column -> its value in all rows of a file, from the names of the file's folders.
PartitionValues = dict[str, int | str | None]


class FileVersion(_Frozen):
    """The version of one file, as its store reported it."""

    #: Tag that changes with the content; "" from a store without tags.
    tag: str = ""
    #: Time of the last change by the store's clock, in seconds since the epoch; 0 when the store names none.
    modified_s: float = 0.0
    #: Time at which the store was asked, by this machine's clock, in seconds since the epoch.
    seen_s: float = 0.0


class InputFile(_Frozen):
    """One Parquet file of the input."""

    #: Path or URL, without passwords and signatures.
    url: str
    #: Short name, unique in the job.
    name: str
    #: Size of the file.
    size_bytes: int
    #: Hash of the footer, which has the schema, sizes, offsets and statistics.
    footer_sha256: str
    #: Rows of each row group.
    row_group_rows: tuple[int, ...]
    #: Column -> its value in all rows, from the names of the file's folders.
    partition: PartitionValues = {}
    #: Version of the file, which distinguishes files with equal footers; None in records of earlier versions.
    version: FileVersion | None = None


class InputRecord(_Frozen):
    """The input of a job: its files, and which of their columns the job reads and copies."""

    #: The files, in the order of the inputs, and by name within each input.
    files: tuple[InputFile, ...]
    #: Role -> column; a field of the struct column `sampling_params` as `sampling_params.max_tokens`.
    roles: dict[str, str]
    #: The Arrow schema of the columns that are read, serialised, base64.
    schema_ipc: str
    #: Names of the first few files in the same folders that are not read.
    unread: tuple[str, ...] = ()
    #: Columns that the job's prompt template reads. Dropped ones are read all the same.
    template_columns: tuple[str, ...] = ()
    #: The only adapter of the job, which answers all rows where no column names one; "" where a column does.
    sole_adapter: str = ""
    #: Number of unread files by their ending, in words.
    unread_endings: str = ""
    #: Columns that the output lacks. Dropped columns with a role are read all the same.
    dropped: tuple[str, ...] = ()
    #: Metadata of the files' footers that parts have too, key -> text.
    metadata: dict[str, str] = {}
    #: Keys of the files' metadata that parts leave out.
    metadata_left_out: tuple[str, ...] = ()
    #: Copied columns with timestamps that files store as INT96. Parts store them as INT64.
    int96: tuple[str, ...] = ()
    #: Whether times of day are written as times in UTC.
    has_zoned_times: bool = False
    #: Whether parts store their Arrow schema. Some readers show other types then, so parts do only when a file does.
    has_arrow_schema: bool = True
    #: Whether small files that follow each other are indexed together; not in jobs of earlier versions.
    has_small_files_together: bool = False
    #: Formats other than Parquet, in words, from which files were converted.
    converted: tuple[str, ...] = ()
    #: Columns of converted files that hold the JSON of values without a common type.
    json_columns: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all files together."""
        return sum(sum(file.row_group_rows) for file in self.files)


class JobRecord(_Frozen):
    """A job as frozen in `job.json`: its options, and content hashes of everything that they name."""

    #: Version of this record's format.
    format: int = RECORD_FORMAT
    #: Id of the job; begins with its name.
    job_id: str
    #: Time at which the job was opened first, ISO 8601, UTC.
    created_at: str
    #: `created_at` in the client's local time, ISO 8601 with offset, as chat templates see it (`strftime_now`); "" in
    #: records of earlier versions, whose templates saw `created_at`.
    local_time: str = ""
    #: Name of the client's time zone; "" in records of earlier versions.
    time_zone: str = ""
    #: Package -> its version on the client.
    versions: dict[str, str]
    #: Options of the job, without secrets; see `JobSpec.without_secrets`.
    spec: JobSpec
    #: Options in `job.json` that this version does not have, which another version wrote.
    unknown_options: dict[str, Any] = Field(default={}, exclude=True)
    #: Names of the storage options that were given.
    storage_option_names: tuple[str, ...] = ()
    #: The base model.
    model: ModelRecord
    #: Every adapter of the job.
    adapters: tuple[AdapterRecord, ...]
    #: The input.
    input: InputRecord
    #: Whether parts have the columns of tokens and their log-probabilities.
    with_logprobs: bool
    #: Folders, below the records of OUTPUT, of the jobs whose answers an update keeps, oldest first; "" for the job in
    #: OUTPUT itself. Empty for a job that is no update.
    sources: tuple[str, ...] = ()
    #: Adapters that each answer every row (None: the base model); empty for a job that is no sweep.
    swept: tuple[str | None, ...] = ()

    @property
    def adapter_groups(self) -> dict[str | None, tuple[str | None, ...]]:
        """The adapters of a sweep by the adapter for whose tokenizer, vocabulary and task their rows are prepared, None
        for the base's; empty for other jobs.
        """
        traits = {
            each.name: (each.tokenizer_sha256, each.vocab_size, each.task)
            for each in self.adapters
            if not each.is_refused
        }
        of_base: list[str | None] = []
        others: dict[tuple[str, int, str], list[str | None]] = {}
        for name in self.swept:
            own = traits.get(name or "", ("", 0, ""))
            (others.setdefault(own, []) if any(own) else of_base).append(name)
        groups = {None: tuple(of_base)} | {members[0]: tuple(members) for members in others.values()}
        return groups if self.swept else {}

    @property
    def is_wide(self) -> bool:
        """Whether the output has a row for each row of the input, and a struct column for each adapter."""
        return self.spec.shape == "wide"

    @property
    def num_asked(self) -> int:
        """Rows of the input, in a sweep once for each adapter."""
        return self.input.num_rows * max(len(self.swept), 1)

    @property
    def has_own_ids(self) -> bool:
        """Whether a row's id stays with the row when the input changes."""
        return "id" in self.input.roles or self.spec.id_from_content

    @property
    def renders_messages(self) -> bool:
        """Whether a chat template renders the job's prompts."""
        return self.spec.renders_messages(self.input.roles)

    @property
    def makes_prompts(self) -> bool:
        """Whether templates make the job's prompts: its own, or a chat template."""
        return bool(self.spec.template_option) or self.renders_messages

    @property
    def tasks(self) -> frozenset[str]:
        """Tasks, beside the generation of text, that rows of the job may ask."""
        if "task" in self.input.roles:
            return frozenset(TASKS[1:])
        own = [self.model.task, *(adapter.task for adapter in self.adapters if not adapter.is_refused)]
        return frozenset([self.spec.sampling.task, self.model.task] if self.spec.sampling.task else own) - {
            "",
            TASKS[0],
        }

    @property
    def has_lists(self) -> bool:
        """Whether the completions of a row are lists in one row of the output."""
        return self.spec.samples == "lists"

    def to_json(self) -> bytes:
        """The record as JSON, the content of `job.json`."""
        values = self.model_dump(mode="json", exclude={"spec": NOT_RECORDED})
        return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> JobRecord:
        """The record that `to_json` wrote. Raises `DamagedRecordError`."""
        try:
            raw = parse_json(data)
            if raw.get("format") != RECORD_FORMAT:
                raise DamagedRecordError(
                    f"job.json format={raw.get('format')!r}: this version reads {RECORD_FORMAT}. "
                    f"Resume with the lorabatch that started the job ({raw.get('versions')})."
                )
            with _BUILDING:
                JobSpec.model_rebuild()
                cls.model_rebuild()
            spec, unknown = _read_spec(raw.get("spec"))
            return cls.model_validate(raw | {"spec": spec, "unknown_options": unknown})
        except (ValueError, AttributeError, ValidationError) as error:
            raise DamagedRecordError(f"job.json: cannot be read back ({error}).") from None

    def job_spec(self, storage_options: dict[str, Any] | None = None, **overrides: Any) -> JobSpec:
        """The recorded spec with fresh storage options, from which `resume` starts. An override of None is ignored.

        Raises `JobRequestError` with every problem, among them options that this version does not have.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        recorded = self.spec.model_dump() | self.unknown_options
        if "cluster" in given:
            recorded["scheduler_file"] = None
        if "scheduler_file" in given:
            recorded["cluster"] = "local"
        if not (recorded["scheduler_file"] or (recorded | given)["cluster"].startswith("tls://")):
            # The recorded TLS files are for the cluster of an earlier run.
            recorded |= dict.fromkeys(TLS_FIELDS)
        return JobSpec(**recorded | {"storage_options": storage_options or {}} | given)


def _read_spec(values: Any) -> tuple[JobSpec, dict[str, Any]]:
    """The options in `job.json`, and those that this version does not have. Raises `DamagedRecordError`."""
    with naming_damage("job.json spec"):
        unknown = {name: value for name, value in values.items() if name not in JobSpec.model_fields}
        try:
            return JobSpec.recorded({name: value for name, value in values.items() if name not in unknown}), unknown
        except ValidationError as error:
            found = (f"{wrong['loc'][0]}: {in_our_words(wrong['msg'])}" for wrong in error.errors(include_url=False))
            raise DamagedRecordError(f"job.json spec: cannot be read back ({'; '.join(found)}).") from None


def differences(old: JobRecord, new: JobRecord) -> list[str]:
    """Why `new` is another job than `old`, one line per reason; empty when it is the same job.

    Adapters may change: their rows are recomputed. The base model, the input and the identity fields may not.
    """
    before, now = _asked(old), _asked(new)
    lines = [
        f"{name}: was {_shown(before[name])}, now {_shown(now[name])}"
        for name in IDENTITY_FIELDS
        if before[name] != now[name]
    ]
    if old.tasks != new.tasks and not lines:
        before_tasks, now_tasks = (", ".join(sorted(record.tasks)) or "none" for record in (old, new))
        lines.append(f"adapters: tasks beside text were {before_tasks}, now {now_tasks}: the output has other columns")
    if old.model.sha256 != new.model.sha256:
        lines.append(f"model: the content of {old.model.url} is not the content of {new.model.url}")
    if _content(old.input) != _content(new.input) and not any(line.startswith("input:") for line in lines):
        lines.append("input: its files or columns have changed since the job was started")
    if old.swept != new.swept:
        lines.append(f"for_each_adapter: was {_shown(_names(old.swept))}, now {_shown(_names(new.swept))}")
    elif old.adapter_groups != new.adapter_groups:
        # the plan has the places of rows that were prepared for the adapters together
        lines.append("for_each_adapter: other adapters than before have a tokenizer or vocabulary in common")
    return lines


def _names(swept: tuple[str | None, ...]) -> list[str]:
    return [name or "(base model)" for name in swept]


def _shown(value: Any) -> str:
    return shortened(repr(value), _SHOWN_CHARACTERS)


def changed_adapters(old: JobRecord, new: JobRecord) -> frozenset[str]:
    """Names of adapters with other answers in `new`: another content, another verdict, added or gone."""
    before = {adapter.name: (adapter.sha256, adapter.verdict) for adapter in old.adapters}
    after = {adapter.name: (adapter.sha256, adapter.verdict) for adapter in new.adapters}
    return frozenset(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _asked(record: JobRecord) -> dict[str, Any]:
    """The values of `IDENTITY_FIELDS`, as `job.json` has them; an option newer than the record has its default."""
    return record.spec.model_dump(mode="json", include=set(IDENTITY_FIELDS))


def _enters_key(name: str, spec: JobSpec) -> bool:
    """Whether an identity field is part of an index's key."""
    return name not in _LATER or getattr(spec, name) not in (None, JobSpec.model_fields[name].default)


def _content(recorded: InputRecord) -> tuple[Any, ...]:
    # Files without partitions have the same tuple as in earlier versions, so that jobs of these versions go on.
    files = tuple(
        (file.name, file.size_bytes, file.footer_sha256, *([file.partition] if file.partition else []))
        for file in recorded.files
    )
    return files, recorded.roles, recorded.schema_ipc


def index_key(record: JobRecord) -> str:
    """Hash of all that the index of a job depends on; prepared rows under another key are stale."""
    basis = {
        "format": RECORD_FORMAT,
        "spec": {name: value for name, value in _asked(record).items() if _enters_key(name, record.spec)},
        "model": record.model.sha256,
        "input": _content(record.input),
        "created_at": record.created_at,
        "tokenizers": [(a.name, a.tokenizer_sha256, a.vocab_size) for a in record.adapters if a.is_prepared_apart],
        **({"swept": record.swept} if record.swept else {}),
    }
    # rows are checked and prepared for their tasks; indexes of jobs without others than text stay valid
    own = [(a.name, a.task, bool(a.labels)) for a in record.adapters if a.task and not a.is_refused]
    if own or record.tasks:
        basis["tasks"] = [own, record.model.task, record.model.pad_token_id]
    return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()


# Stages of a run. "canary": rows of the canary are left. "confirming": they are answered, and a person is asked whether
# the job goes on. "starting" is the command's first phase and the coordinator's. "queued": the cluster has the job and
# no worker has begun it. "checking" was written up to version 0.1.
Phase = Literal[
    "checking", "queued", "starting", "indexing", "planning", "loading engines", "canary", "confirming", "running",
    "finishing", "done", "failed", "cancelled", "interrupted",
]  # fmt: skip
# Phases of a run before it works on rows.
BEGINNING_PHASES: tuple[Phase, ...] = ("queued", "starting", "indexing", "planning")
#: Phases of a run in which engines answer rows.
ANSWERING_PHASES: tuple[Phase, ...] = ("canary", "running")
#: Seconds without progress after which a running job shows no time left, since its prediction has no basis any more.
STILL_AFTER_S = 30.0
FINAL_PHASES: tuple[Phase, ...] = ("done", "failed", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker of a run at the time of its latest report."""

    #: Name of the worker, such as `w0 10.0.0.5`; see `WorkerNames`.
    name: str
    #: Tokens that its engine generates per second.
    tokens_per_s: float = 0.0
    #: Unfinished rows of its open shards.
    open_rows: int = 0
    #: Rows in its engine's batch.
    running_rows: int = 0
    #: Mode in which the latest step served its rows; the engine's state while the engine is not ready.
    mode: str = ""
    #: Names of the job's adapters in its engine's memory.
    resident_adapters: tuple[str, ...] = ()
    #: Rows among `open_rows` that other workers' engines work on.
    lent_rows: int = 0
    #: Rows of other workers' shards that its engine works on.
    incoming_rows: int = 0
    #: Share of prompt tokens that were copied instead of computed, 0 to 1.
    prefix_hit_rate: float = 0.0
    #: Costs of adapters since its engine started.
    adapters: AdapterUse = field(default_factory=AdapterUse)
    #: Pages of its engine's pool.
    pages: int = 0
    #: Pages among `pages` that are not free.
    used_pages: int = 0
    #: Pages among `used_pages` that hold adapters.
    adapter_pages: int = 0
    #: Pages among `used_pages` that hold beginnings of prompts for other rows.
    prefix_pages: int = 0
    #: Host memory for adapters that left its engine's pool.
    host_tier_bytes: int = 0
    #: Host memory that such adapters take.
    host_tier_used_bytes: int = 0
    #: Bytes of all local copies of adapters on its host; 0 before it has fetched any.
    adapter_copies_bytes: int = 0
    #: Its Dask address.
    address: str = ""


@dataclass(frozen=True, slots=True)
class JobState:
    """One moment of a run, as written to `state.json`: its phase, counters and workers."""

    #: Stage that the run is in.
    phase: Phase
    #: Time of writing, in seconds since the epoch.
    updated_at_s: float
    #: Rows of the job.
    rows: int = 0
    #: Rows that this run has indexed.
    rows_indexed: int = 0
    #: Rows that are done: answered, or ended in an error.
    rows_done: int = 0
    #: Rows among `rows_done` that ended in an error.
    rows_error: int = 0
    #: Rows among `rows_done` that earlier runs had done; an estimate until the end.
    rows_reused: int = 0
    #: Shards of the plan.
    shards: int = 0
    #: Shards whose part is written.
    shards_done: int = 0
    #: Prompt tokens of the finished shards.
    prompt_tokens: int = 0
    #: Generated tokens of the finished shards.
    completion_tokens: int = 0
    #: Tokens that all workers together generate per second.
    tokens_per_s: float = 0.0
    #: Predicted seconds until the job is done; None while unknown.
    eta_s: float | None = None
    #: Rough lower and upper bound of `eta_s`; None while unknown.
    eta_range_s: tuple[float, float] | None = None
    #: Share of the engines' batches in use while shards were queued, 0 to 1; None when none ever was.
    batch_fill: float | None = None
    #: Share of the prompt tokens of the run's finished shards that were reused, 0 to 1; None before the first shard.
    prefix_hit_rate: float | None = None
    #: Costs of adapters on all workers while the run had them.
    adapter_use: AdapterUse = field(default_factory=AdapterUse)
    #: Every worker that reports, `w0` first.
    workers: tuple[WorkerState, ...] = ()
    #: Why the job stopped and what to do, in one sentence; "" while it runs.
    message: str = ""
    #: Class name of the exception that ended the run; "" without one.
    error: str = ""
    #: Remarks on the job for users; see `status/notes.py`.
    notes: tuple[str, ...] = ()
    #: Whether the job may go on as it is.
    can_resume: bool = True
    #: Id of the run; "" before its coordinator reports.
    run_id: str = ""
    #: Dask addresses of all workers that the run has seen, in the order of their names.
    worker_addresses: tuple[str, ...] = ()
    #: Seconds since a row finished or an engine computed a token, while shards run.
    still_s: float = 0.0
    #: Rows of each adapter ("": base model), in order of names, of the adapters with the most rows.
    adapter_rows: dict[str, int] = field(default_factory=dict)
    #: Rows of the canary; 0 for a job without one.
    canary_rows: int = 0
    #: Rows of the canary without an answer.
    canary_left: int = 0
    #: Whether the canary was counted, so that `canary.json` has its account.
    is_canary_counted: bool = False
    #: Seconds that workers had the job, added up over all workers and all runs so far.
    worker_s: float = 0.0
    #: Done rows of each adapter in `adapter_rows`. Errors and tokens are of finished shards.
    adapters: tuple[AdapterCount, ...] = ()

    @property
    def totals(self) -> RowTotals:
        """The job's rows by outcome, as everything shows them."""
        errors = min(self.rows_error, self.rows_done)
        return RowTotals(self.rows, self.rows_done - errors, errors, min(self.rows_reused, self.rows_done))

    @property
    def time_left(self) -> str:
        """The time left in words; "" when it is not known, the run has ended, or nothing moves."""
        if self.is_final or self.still_s >= STILL_AFTER_S:
            return ""
        return time_left(self.eta_s, self.eta_range_s, is_loading=self.phase == "loading engines")

    @property
    def is_final(self) -> bool:
        """Whether the run that wrote this has ended."""
        return self.phase in FINAL_PHASES

    @property
    def is_of_command(self) -> bool:
        """Whether a command wrote this before any coordinator of its run reported."""
        return self.phase == "starting" and not self.run_id

    def to_json(self) -> bytes:
        """The state as JSON, the content of `state.json`."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> JobState:
        """The state that `to_json` wrote; keys of newer versions are dropped. Raises `DamagedRecordError`."""
        try:
            state = _states().validate_json(data)
            json.dumps(dataclasses.asdict(state), allow_nan=False)
            return state
        except (ValidationError, ValueError) as error:
            raise DamagedRecordError(f"state.json: cannot be read back ({error}).") from None


@cache
def _states() -> TypeAdapter[JobState]:
    return TypeAdapter(JobState)
