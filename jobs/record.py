"""`JobRecord`: a job as frozen in `job.json`, and `differences` between two. `JobState`: where a running job stands.

The record names everything that determines a row's answer, by content where content can change under a name. It holds
no secrets: of `storage_options` only the names are kept.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from unicodedata import normalize

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ..engine.request import FIRST_OPTIONS, SAMPLING_OPTIONS, SamplingParams
from ..engine.text.conversation import RENDERING_OPTIONS
from ..engine.untrusted import parse_json, shortened
from .errors import DamagedRecordError, naming_damage
from .option_values import TLS_FIELDS
from .progress import RowTotals, time_left
from .spec import JobSpec
from .storage.redaction import redacted_url

RECORD_FORMAT = 1
# Older versions of pydantic may build a validator in two threads at once.
_BUILDING = threading.Lock()
_NAMES_SHOWN = 8
# A job with another value in one of these is another job. Where it runs, and how fast, is not part of it.
IDENTITY_FIELDS = (
    "input", "columns", *SAMPLING_OPTIONS, "mode", "dtype", "load_format", "rows_per_shard", "system_prompt",
    "allow_special_tokens", "chat_template", *RENDERING_OPTIONS, "policy", "placement", "base_quantization", "samples",
    "row_settings", "keep", "drop", "output_prefix", "split_answer",
)  # fmt: skip
# Of these, options that the first version did not have: part of an index's key where they are given.
_LATER = (
    *(name for name in SAMPLING_OPTIONS if name not in FIRST_OPTIONS),
    "system_prompt", "allow_special_tokens", "chat_template", *RENDERING_OPTIONS, "policy", "placement",
    "base_quantization", "samples", "row_settings", "keep", "drop", "output_prefix", "split_answer",
)  # fmt: skip
_SHOWN_CHARACTERS = 300
AdapterVerdict = Literal["exact", "exact-by-merge", "refused"]


class _Frozen(BaseModel):
    # Validators are built when a record is read: most commands read none.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class ModelRecord(_Frozen):
    """The base model. `sha256` covers configuration, tokenizer and weights, `tokenizer_sha256` all but the weights.
    `generation`: what it says of sampling. `notes`: what people should know of its folder, as clauses.
    """

    url: str
    sha256: str
    vocab_size: int
    max_context_tokens: int
    generation: dict[str, float] = {}
    tokenizer_sha256: str = ""
    notes: tuple[str, ...] = ()
    #: What prompts of the model's or the job's chat template lack, and what it drops by design; see `TemplateTraits`.
    missing_header: str = ""
    template_drops: tuple[str, ...] = ()


class AdapterRecord(_Frozen):
    """One adapter. `sha256` is its identity (empty when the folder could not be read)."""

    name: str
    url: str
    verdict: AdapterVerdict
    reasons: tuple[str, ...] = ()
    sha256: str = ""
    rank: int = 0
    weight_bytes: int = 0
    #: What prompts of its chat template lack; see `TemplateTraits`.
    missing_header: str = ""
    # Of an adapter that ships a tokenizer or chat template: their hash. Its rows are tokenised with them.
    tokenizer_sha256: str = ""
    # Token ids its rows may hold, when it resized the vocabulary; 0: those of the base.
    vocab_size: int = 0

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
    """What a store says of one file. `tag`: changes with the content; "" where there is none. `modified_s`: by the
    store's clock, in seconds since the epoch; 0 where it says nothing. `seen_s`: when that was asked, by the client's.
    """

    tag: str = ""
    modified_s: float = 0.0
    seen_s: float = 0.0


class InputFile(_Frozen):
    """One Parquet file. `footer_sha256` covers its schema, sizes, offsets and statistics. `version`: which of several
    that have one footer; None in records of earlier versions.
    """

    url: str
    name: str
    size_bytes: int
    footer_sha256: str
    row_group_rows: tuple[int, ...]
    partition: PartitionValues = {}
    version: FileVersion | None = None


class InputRecord(_Frozen):
    """The input."""

    files: tuple[InputFile, ...]
    #: Role -> column; a field of the struct column `sampling_params` as `sampling_params.max_tokens`.
    roles: dict[str, str]
    #: The Arrow schema of the columns that are read, serialised, base64.
    schema_ipc: str
    #: Some names of files in the same folders that are not read; `unread_endings` says how many there are of which.
    unread: tuple[str, ...] = ()
    unread_endings: str = ""
    #: Columns that the output lacks. Those with a role are read all the same.
    dropped: tuple[str, ...] = ()
    #: What files say beside their columns and parts say too, key -> text; and keys that parts leave out.
    metadata: dict[str, str] = {}
    metadata_left_out: tuple[str, ...] = ()
    #: Copied columns with timestamps that files store as INT96. Parts store them as INT64.
    int96: tuple[str, ...] = ()
    #: Whether times of day are written as times in UTC.
    has_zoned_times: bool = False
    #: Whether parts say which Arrow types they were made of. Some readers show others then, so only where a file does.
    has_arrow_schema: bool = True
    #: Whether small files that follow each other are indexed together; not in jobs of earlier versions.
    has_small_files_together: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of all files together."""
        return sum(sum(file.row_group_rows) for file in self.files)


class JobRecord(_Frozen):
    """What `job.json` holds. `created_at`: ISO 8601, UTC. `with_logprobs`: parts have the token columns."""

    format: int = RECORD_FORMAT
    job_id: str
    created_at: str
    #: The client's time of day when the job was started, ISO 8601 with its offset, which chat templates see
    #: (`strftime_now`), and the name of its zone. Empty in records of earlier versions, where they saw `created_at`.
    local_time: str = ""
    time_zone: str = ""
    versions: dict[str, str]
    spec: dict[str, Any]
    storage_option_names: tuple[str, ...] = ()
    model: ModelRecord
    adapters: tuple[AdapterRecord, ...]
    input: InputRecord
    with_logprobs: bool

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of rows that do not override it."""
        return SamplingParams.from_plain({name: self.spec[name] for name in SAMPLING_OPTIONS if name in self.spec})

    @property
    def has_lists(self) -> bool:
        """Whether the completions of a row are lists in one row of the output."""
        return self.spec.get("samples") == "lists"

    def to_json(self) -> bytes:
        """As stored."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()

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
                cls.model_rebuild()
            return cls.model_validate(raw)
        except (ValueError, AttributeError, ValidationError) as error:
            raise DamagedRecordError(f"job.json: cannot be read back ({error}).") from None

    def job_spec(self, storage_options: dict[str, Any] | None = None, **overrides: Any) -> JobSpec:
        """The spec again, with fresh storage options; what `resume` starts from. `overrides`: None is as recorded."""
        given = {name: value for name, value in overrides.items() if value is not None}
        recorded = dict(self.spec)
        with naming_damage("job.json spec"):
            if not (recorded | given)["cluster"].startswith("tls://"):
                # Those of the cluster it ran on before.
                recorded |= dict.fromkeys(TLS_FIELDS)
            return JobSpec(**recorded | {"storage_options": storage_options or {}} | given)


def public_spec(spec: JobSpec) -> dict[str, Any]:
    """The spec as it may be written down: no storage options, no passwords or signatures in URLs."""
    values = spec.model_dump(mode="json", exclude={"storage_options", "overwrite"})
    for name in ("model", "output"):
        values[name] = redacted_url(values[name])
    urls = [redacted_url(url) for url in spec.inputs]
    values["input"] = urls if len(urls) > 1 else urls[0]
    if isinstance(values["adapters"], str):
        values["adapters"] = redacted_url(values["adapters"])
    elif values["adapters"]:
        values["adapters"] = {name: redacted_url(url) for name, url in values["adapters"].items()}
    return values


def differences(old: JobRecord, new: JobRecord) -> list[str]:
    """Why `new` is another job than `old`, one line per reason; empty when it is the same job.

    Adapters may change: their rows are recomputed. The base model, the input and what is asked may not.
    """
    before, now = _asked(old), _asked(new)
    lines = [
        f"{name}: was {_shown(before[name])}, now {_shown(now[name])}"
        for name in IDENTITY_FIELDS
        if before[name] != now[name]
    ]
    if old.model.sha256 != new.model.sha256:
        lines.append(f"model: the content of {old.model.url} is not the content of {new.model.url}")
    if _content(old.input) != _content(new.input) and not any(line.startswith("input:") for line in lines):
        lines.append("input: its files or columns have changed since the job was started")
    return lines


def _shown(value: Any) -> str:
    return shortened(repr(value), _SHOWN_CHARACTERS)


def changed_adapters(old: JobRecord, new: JobRecord) -> frozenset[str]:
    """Names whose rows are answered differently now: another content, another verdict, added or gone."""
    before = {adapter.name: (adapter.sha256, adapter.verdict) for adapter in old.adapters}
    after = {adapter.name: (adapter.sha256, adapter.verdict) for adapter in new.adapters}
    return frozenset(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def adapter_problem(name: str | None, adapters: Mapping[str, AdapterRecord]) -> str | None:
    """Why rows of this adapter cannot be answered, or None. None as a name asks the base model."""
    if name is None:
        return None
    if name in adapters:
        adapter = adapters[name]
        reasons = (reason.removeprefix(f"adapter {name!r}: ") for reason in adapter.reasons)
        why = " ".join(reasons) or "its folder could not be read."
        return f"adapter={name!r}: refused. {why}" if adapter.is_refused else None
    close = difflib.get_close_matches(name, adapters, n=1)
    known = ", ".join(sorted(adapters)[:_NAMES_SHOWN]) + (", …" if len(adapters) > _NAMES_SHOWN else ".")
    if twin := next((other for other in adapters if normalize("NFC", other) == normalize("NFC", name)), None):
        return (
            f"adapter={name!a}: not among this job's adapters; {twin!a} looks the same, written with other characters. "
            "Write both alike."
        )
    hint = f"did you mean {close[0]!r}?" if close else f"known: {known if adapters else 'none.'}"
    return f"adapter={name!r}: not among this job's adapters; {hint}"


def _asked(record: JobRecord) -> dict[str, Any]:
    """The values of `IDENTITY_FIELDS`; an option that is newer than the record has its default."""
    return {name: record.spec.get(name, _default(name)) for name in IDENTITY_FIELDS}


def _default(name: str) -> Any:
    """The default of an option as a record has it."""
    value = JobSpec.model_fields[name].default
    return list(value) if isinstance(value, tuple) else value


def _content(recorded: InputRecord) -> tuple[Any, ...]:
    # Without partitions as an earlier version had it, so that its jobs go on.
    files = tuple(
        (file.name, file.size_bytes, file.footer_sha256, *([file.partition] if file.partition else []))
        for file in recorded.files
    )
    return files, recorded.roles, recorded.schema_ipc


def index_key(record: JobRecord) -> str:
    """Hash of all that the index of a job depends on; prepared rows under another key are stale."""
    basis = {
        "format": RECORD_FORMAT,
        "spec": {
            name: record.spec.get(name)
            for name in IDENTITY_FIELDS
            if name not in _LATER or record.spec.get(name) not in (None, _default(name))
        },
        "model": record.model.sha256,
        "input": _content(record.input),
        "created_at": record.created_at,
        "tokenizers": [(a.name, a.tokenizer_sha256, a.vocab_size) for a in record.adapters if a.is_prepared_apart],
    }
    return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()


# "starting": of the command, then of the coordinator. "queued": handed to a cluster, on which no worker has begun it.
# "checking" was written up to version 0.1.
Phase = Literal[
    "checking", "queued", "starting", "indexing", "planning", "loading engines", "running", "finishing", "done",
    "failed", "cancelled", "interrupted",
]  # fmt: skip
# Of a run that has not begun with its rows.
BEGINNING_PHASES: tuple[Phase, ...] = ("queued", "starting", "indexing", "planning")
#: From when on a job that runs counts as one in which nothing moves: its prediction rests on nothing then.
STILL_AFTER_S = 30.0
FINAL_PHASES: tuple[Phase, ...] = ("done", "failed", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, as last heard of. `name`: see `WorkerNames`. `mode`: how its latest step served its rows.
    `lent_rows`: of its open rows, those that other workers' engines work on; `incoming_rows`: rows of others that its
    engine works on. `prefix_hit_rate`: share of prompt tokens copied instead of computed; `adapter_stall_s`: seconds
    its steps waited for adapters.
    """

    name: str
    tokens_per_s: float = 0.0
    open_rows: int = 0
    running_rows: int = 0
    mode: str = ""
    resident_adapters: tuple[str, ...] = ()
    lent_rows: int = 0
    incoming_rows: int = 0
    prefix_hit_rate: float = 0.0
    adapter_loads: int = 0
    adapter_stall_s: float = 0.0
    address: str = ""


@dataclass(frozen=True, slots=True)
class JobState:
    """Phase and counters. `updated_at_s`: seconds since the epoch. `rows_indexed`: by this run. `rows_done`: answers
    and `rows_error`; `rows_reused`: those among them that earlier runs had done, an estimate until the end. `eta_s`:
    None while unknown; `eta_range_s`: a rough range of it. `batch_fill`: how full the engines' batches were while
    shards were queued, from 0 to 1; None when there was no such time.
    `prefix_hit_rate`: share of the prompt tokens of the run's finished shards that were reused; None before the first.

    `message` says in one sentence why a job stopped, and what to do; `error` names the exception. `notes`: see
    `status/notes.py`. `can_resume`: the job may go on as it is. `worker_addresses`: of all workers that the run has
    seen, in the order of their names.
    """

    phase: Phase
    updated_at_s: float
    rows: int = 0
    rows_indexed: int = 0
    rows_done: int = 0
    rows_error: int = 0
    rows_reused: int = 0
    shards: int = 0
    shards_done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_per_s: float = 0.0
    eta_s: float | None = None
    eta_range_s: tuple[float, float] | None = None
    batch_fill: float | None = None
    prefix_hit_rate: float | None = None
    workers: tuple[WorkerState, ...] = ()
    message: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()
    can_resume: bool = True
    run_id: str = ""
    worker_addresses: tuple[str, ...] = ()
    #: Seconds since a row finished or an engine computed a token, while shards run.
    still_s: float = 0.0

    @property
    def totals(self) -> RowTotals:
        """Its rows, as they are shown everywhere."""
        errors = min(self.rows_error, self.rows_done)
        return RowTotals(self.rows, self.rows_done - errors, errors, min(self.rows_reused, self.rows_done))

    @property
    def time_left(self) -> str:
        """In words, as it is shown everywhere; "" where it is not known, also because nothing moves."""
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
        """As stored."""
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
