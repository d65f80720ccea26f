"""`JobSpec`: everything a job was asked to do. Every option of the command line is a field of the same name.

Frozen. Built from a job file (`from_yaml`), from options (`from_values`) or in Python. Whatever is wrong with
the values is raised at once, as one `JobRequestError`. Nothing here touches storage; `validation.py` does.

How many rows of a job may end in errors: a count, or a percentage of its rows.

The PEM files by which a client and a `tls://` cluster know each other.

The job file: a YAML mapping of a job's options, as people write it. `JobSpec` judges what is in it.

What is wrong with a job's options, in sentences: which one, its value, what is expected, where to look.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..engine.config import Mode
from ..engine.request import SamplingParams
from .errors import JobRequestError
from .storage.location import absolute
from .storage.redaction import redacted_url, scrubbed

SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "logprobs",
    "ignore_eos",
)
PROMPT_ROLES = ("prompt", "messages", "prompt_token_ids")
COLUMN_ROLES = ("id", "adapter", *PROMPT_ROLES, *SAMPLING_FIELDS)
EMBEDDED_CLUSTERS = ("local", "local-cuda")
# Something for the fields without defaults, while the others are judged.
_REQUIRED = {"model": "-", "input": "-", "output": "-"}
# Options that people write in one spelling and we keep in another.
_SPELLINGS = {"column": "columns", "adapter": "adapters"}


class JobSpec(BaseModel):
    """What a job was asked to do.

    `adapters`: a folder or URL with one PEFT folder per adapter, or a mapping name -> folder or URL.
    `input`: Parquet file, folder or glob. `columns`: role -> name of the input column that plays it.
    `storage_options`: keyword arguments for fsspec, for all URLs or one mapping per protocol; never recorded.
    `max_errors`: rows (`"25"`) or share of rows (`"10%"`) that may end in errors.
    `batch_rows`, `step_tokens`, `engine_threads`, `pool_bytes`: each engine; None is chosen for the machine.
    `cluster`: `local`; `local-cuda`, which insists on GPUs; or the address of a Dask scheduler.
    `workers`, `rows_per_shard`: None is chosen. `cost_model`: a file that `lorabatch profile` wrote.
    `migration`: idle workers take over running rows of slow ones at the job's end.

    Raises `JobRequestError` with every problem at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model: str = Field(min_length=1)
    adapters: str | dict[str, str] | None = None
    input: str = Field(min_length=1)
    output: str = Field(min_length=1)
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    columns: dict[str, str] = Field(default={}, validation_alias=AliasChoices("columns", "column"))

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    ignore_eos: bool = False

    cluster: str = Field(default="local", pattern=rf"^({'|'.join(EMBEDDED_CLUSTERS)}|\w+://.+|[^\s/]+:\d+)$")
    workers: int | None = Field(default=None, ge=1)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    mode: Mode = "auto"
    max_errors: str = "10%"
    storage_options: dict[str, Any] = Field(default={}, repr=False)
    overwrite: bool = False
    migration: bool = True
    rows_per_shard: int | None = Field(default=None, ge=1)
    cost_model: str | None = None

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="auto", min_length=1)
    tensor_parallel: int = Field(default=1, ge=1)
    load_format: Literal["auto", "dummy"] = "auto"
    batch_rows: int | None = Field(default=None, ge=1)
    step_tokens: int | None = Field(default=None, ge=16)
    engine_threads: int | None = Field(default=None, ge=1)
    pool_bytes: int | None = Field(default=None, ge=1)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Without what opens URLs: Dask logs the arguments of tasks that fail."""
        for name, value in super().__repr_args__():
            if isinstance(value, str):
                value = redacted_url(value)
            elif name == "adapters" and value:
                value = {adapter: redacted_url(url) for adapter, url in value.items()}
            yield name, value

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            problems, _ = self._take_on(values)
            if problems:
                raise JobRequestError(*problems)

    @classmethod
    def judged(cls, values: Mapping[str, Any]) -> tuple[JobSpec, list[str], frozenset[str]]:
        """The job as far as its values can be used, every problem, and the fields that have no value of their own
        for it.
        """
        job = cls.__new__(cls)
        return job, *job._take_on({name.replace("-", "_"): value for name, value in values.items()})

    def _take_on(self, values: Mapping[str, Any]) -> tuple[list[str], frozenset[str]]:
        """Set the fields whose values can be used. Returns what is wrong, and the fields that it is wrong with."""
        values = {_SPELLINGS.get(name, name): value for name, value in values.items()}
        problems, wrong = unknown_options(values, tuple(JobSpec.model_fields)), frozenset[str]()
        known = {name: value for name, value in values.items() if name in JobSpec.model_fields}
        try:
            super().__init__(**known)
        except ValidationError as error:
            problems += value_problems(error, known)
            # the other fields are judged too, beside any value for those that are wrong
            wrong = frozenset(str(found["loc"][0]) for found in error.errors() if found["loc"])
            super().__init__(**_REQUIRED | {name: value for name, value in known.items() if name not in wrong})
        problems += [*self.sampling.problems(), *self.tls_files.problems(self.cluster), *self._unserved_problems()]
        return list(map(with_next_step, problems)), wrong

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> JobSpec:
        """From option names and values; hyphens in names are fine. Raises `JobRequestError`."""
        return cls(**{name.replace("-", "_"): value for name, value in values.items()})

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> JobSpec:
        """From a job file, with `overrides` (options given beside it) taking precedence.

        Relative paths inside are relative to the working directory, as on the command line. Raises
        `JobRequestError` when the file is missing, is not a YAML mapping, or holds anything wrong.
        """
        return cls.from_values(read_job_file(path, overrides))

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of rows that do not override it."""
        return SamplingParams(**{name: getattr(self, name) for name in SAMPLING_FIELDS})

    @property
    def tls_files(self) -> TlsFiles:
        """The files that open a `tls://` cluster."""
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)

    def _unserved_problems(self) -> list[str]:
        """What may be asked of a job and is not served yet."""
        problems = []
        if self.tensor_parallel != 1:
            problems.append(
                f"tensor_parallel={self.tensor_parallel}: expected 1; engines of several devices are not served yet"
            )
        if self.mode == "exact" and self.device == "cpu" and self.dtype not in ("auto", "float32"):
            problems.append(
                f"mode={self.mode!r}, dtype={self.dtype!r}: on a CPU rows have fixed arithmetic in float32 only. Use "
                "dtype float32, or another mode."
            )
        return problems

    @property
    def is_embedded(self) -> bool:
        """Whether the job runs on a cluster of its own on this machine."""
        return self.cluster in EMBEDDED_CLUSTERS

    @property
    def error_budget(self) -> ErrorBudget:
        """`max_errors`, parsed."""
        return ErrorBudget.parse(self.max_errors)

    def with_absolute_paths(self) -> JobSpec:
        """The same job seen from any working directory. A model that is no local path may be a hub id."""
        adapters = self.adapters
        if isinstance(adapters, str):
            adapters = absolute(adapters)
        elif adapters is not None:
            adapters = {name: _absolute_if_there(url) for name, url in adapters.items()}
        return self.model_copy(
            update={
                "model": _absolute_if_there(self.model),
                "adapters": adapters,
                "input": absolute(self.input),
                "output": absolute(self.output),
                "cost_model": self.cost_model and absolute(self.cost_model),
                **{name: path and absolute(path) for name in TLS_FIELDS for path in [getattr(self, name)]},
            }
        )

    @field_validator("adapters", mode="before")
    @classmethod
    def _adapters(cls, value: Any) -> Any:
        """A list of `NAME=URL` becomes a mapping; a list of one folder becomes that folder."""
        if not isinstance(value, list | tuple):
            return value
        if len(value) == 1 and "=" not in str(value[0]):
            return str(value[0])
        return _pairs(value, "NAME=URL", "pirate=s3://bucket/adapters/pirate") or None

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        pairs = _pairs(value, "role=name", "prompt=text") if isinstance(value, list | tuple) else value
        return {} if pairs is None else pairs

    @field_validator("columns")
    @classmethod
    def _column_roles(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = [with_suggestion(f"{role!r} is not a role", role, COLUMN_ROLES) for role in value]
        wrong = [text for role, text in zip(value, unknown, strict=True) if role not in COLUMN_ROLES]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; roles are {', '.join(COLUMN_ROLES)}")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("max_errors", mode="before")
    @classmethod
    def _max_errors(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int | str) else value
        if isinstance(text, str):
            ErrorBudget.parse(text)
        return text

    @field_validator("storage_options", mode="before")
    @classmethod
    def _storage_options(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, str):
            try:
                return json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"expected a JSON object; not JSON at character {error.pos}") from None
        return value


def _absolute_if_there(url: str) -> str:
    path = absolute(url)
    return path if Path(path).exists() else url


def _pairs(value: list[Any] | tuple[Any, ...], shape: str, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in value:
        name, equals, target = str(item).partition("=")
        if not (name and equals and target):
            raise ValueError(f"{item!r}: expected {shape}, for example {example}")
        if name in pairs:
            raise ValueError(f"{name!r} is given twice: {pairs[name]!r} and {target!r}; keep one")
        pairs[name] = target
    return pairs


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """Exactly one of `count` and `percent` is set."""

    count: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorBudget:
        """From `"25"` (rows) or `"10%"`. Raises ValueError with the expectation."""
        text = text.strip()
        expected = f"{text!r}: expected a count of rows such as 25, or a share of them such as 10%"
        try:
            budget = cls(percent=float(text[:-1])) if text.endswith("%") else cls(count=int(text))
        except ValueError:
            raise ValueError(expected) from None
        if budget.percent is not None and not 0.0 <= budget.percent <= 100.0:
            raise ValueError(expected)
        if budget.count is not None and budget.count < 0:
            raise ValueError(expected)
        return budget

    def limit(self, num_rows: int) -> int:
        """The most error rows allowed among `num_rows`."""
        if self.count is not None:
            return self.count
        assert self.percent is not None
        return int(num_rows * self.percent / 100.0)

    def allows(self, num_errors: int, num_rows: int) -> bool:
        """Whether a job of `num_rows` may go on with `num_errors` of them wrong."""
        return num_errors <= self.limit(num_rows)

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent is not None else f"{self.count} rows"


TLS_FIELDS = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths on this machine; all three or none. `tls_ca`: of the authority that signed the cluster's certificates."""

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def problems(self, cluster: str) -> list[str]:
        """What is wrong with them for this cluster's address, as plain sentences."""
        given = {name: value for name in TLS_FIELDS if (value := getattr(self, name)) is not None}
        problems = [
            f"{name}={path!r}: no such file. Name a PEM file on this machine with --{name.replace('_', '-')}."
            for name, path in given.items()
            if not Path(path).is_file()
        ]
        missing = [name for name in TLS_FIELDS if given and name not in given]
        if missing:
            problems.append(f"{', '.join(missing)}: required beside {', '.join(given)}. Give all three PEM files.")
        if given and not cluster.startswith("tls://"):
            problems.append(f"cluster={cluster!r}: TLS files are for an address such as tls://10.0.0.5:8786.")
        return problems


def read_job_file(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values in a job file, with `overrides` taking precedence. Raises `JobRequestError`."""
    values = {name.replace("-", "_"): value for name, value in _read_yaml(Path(path)).items()}
    return values | dict(overrides or {})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobRequestError(f"job file {path}: not found. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobRequestError(f"job file {path}: cannot be read ({error}).") from None
    except yaml.YAMLError as error:
        raise JobRequestError(f"job file {path}: not valid YAML ({error}).") from None
    if not isinstance(value, dict):
        raise JobRequestError(f"job file {path}: expected a mapping such as `model: …`, found {type(value).__name__}.")
    return {str(name): item for name, item in value.items()}


# Where pydantic's own words would say little.
_EXPECTED = {
    "name": "expected 1 to 64 letters, digits, dots, hyphens or underscores, a letter or digit first",
    "model": "expected a folder, GGUF file, hub id or URL",
    "input": "expected a Parquet file, folder, glob or URL",
    "output": "expected a folder or URL",
    "cluster": "expected local, local-cuda, or an address such as tcp://10.0.0.5:8786",
}


def unknown_options(values: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """One finding for each key that is not an option's name."""
    return [with_suggestion(f"{name}: not an option", name, names) for name in values if name not in names]


def with_suggestion(text: str, word: str, choices: tuple[str, ...]) -> str:
    """`text`, and which of the choices may have been meant."""
    close = difflib.get_close_matches(word, choices, n=2, cutoff=0.6)
    return f"{text}; did you mean {' or '.join(map(repr, close))}?" if close else text


def with_next_step(problem: str) -> str:
    """A finding about an option as a whole sentence that says where to look."""
    return problem if problem.endswith((".", "?")) else f"{problem}. See `lorabatch run --help`."


def value_problems(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """pydantic's findings in our form: `field=value: expectation`; storage options without their values."""
    sentences = []
    for found in error.errors(include_url=False):
        field = ".".join(str(part) for part in found["loc"][:1])
        expectation = _EXPECTED.get(field) or found["msg"].removeprefix("Value error, ")
        expectation = expectation.replace("Input should be", "expected").replace("greater than or equal to", "at least")
        if found["type"] == "missing":
            option = f"--{field.replace('_', '-')}"
            sentences.append(f"{field}: required and not given. Add {option}, or the key {field} in the job file.")
        elif field == "storage_options":
            sentences.append(f"{field}: {expectation}")
        else:
            sentences.append(f"{field}={values.get(field)!r}: {expectation}")
    # values may be URLs
    return [scrubbed(sentence, {}) for sentence in dict.fromkeys(sentences)]
