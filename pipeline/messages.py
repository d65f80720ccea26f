"""Messages between client, scheduler and workers: frozen dataclasses of plain values. Prompts never pass through them.

The module also has errors that travel from workers to the client, and functions for ids of a job's runs.

    JobFailedError (of jobs)
    ├── EngineFailedError       a worker's engine cannot be started, or keeps dying
    └── ShardAbandonedError     the worker gave the shard up, since it stops; other workers go on with it
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from ..engine.adapter_use import AdapterUse
from ..engine.config import EngineConfig
from ..engine.telemetry import EngineTelemetry
from ..jobs.errors import JobFailedError
from ..jobs.progress import AdapterCount
from ..jobs.record import JobState
from ..jobs.storage.model_proof import ModelProof
from ..scheduler.messages import FinishedRows, UnfinishedRows
from ..scheduler.planning.bound import JobWork
from .dataset.answers import RowAnswer


class EngineFailedError(JobFailedError):
    """A worker's engine cannot be started, or keeps dying."""


class ShardAbandonedError(JobFailedError):
    """The worker stopped before the shard was done; its finished rows are kept."""


def new_run_id(job_id: str) -> str:
    """An id for a new run of the job: the job's id, and letters that no other run has."""
    return f"{job_id}-{uuid.uuid4().hex[:6]}"


def job_of_run(run_id: str) -> str:
    """The id of the job that a run belongs to."""
    return run_id.rpartition("-")[0]


#: Prefix of the keys of the Dask tasks that coordinate runs.
JOB_PREFIX = "lora_job-"
#: Seconds within which a worker begins a task that it was sent; the task then goes to another worker.
BEGIN_LIMIT_S = 30.0


def job_key(run_id: str) -> str:
    """The key of the Dask task that coordinates a run."""
    return f"{JOB_PREFIX}{run_id}"


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Prompt tokens of some rows, and those among them that were reused from rows with the same beginning."""

    prompt_tokens: int = 0
    reused_tokens: int = 0

    @classmethod
    def of_answers(cls, answers: Iterable[RowAnswer]) -> Self:
        """The sum over answers whose engine has counted reused tokens."""
        counted = (cls(a.prompt_tokens, a.reused_prompt_tokens) for a in answers if a.reused_prompt_tokens is not None)
        return cls.total(counted)

    @classmethod
    def total(cls, parts: Iterable[PromptReuse]) -> Self:
        """The sum of several counts."""
        counts = [(part.prompt_tokens, part.reused_tokens) for part in parts]
        return cls(sum(prompt for prompt, _ in counts), sum(reused for _, reused in counts))

    @property
    def share(self) -> float | None:
        """Reused tokens of all prompt tokens, from 0 to 1; None without any."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else None


ENGINE_FACTORY = "lorabatch.engine.engine:Engine"
# Least tokens in a step: fewer save no memory that matters.
MIN_STEP_TOKENS = 16
ReplicaState = Literal["starting", "ready", "restarting", "failed", "left"]


#: Key by which two runs share an engine: the base model's content hash, or its URL without one; the engine's factory;
#: every option.
EngineIdentity = tuple[str, str, EngineConfig]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings with which every worker of a run sets up its engine."""

    #: Base model: a local folder or GGUF file, a hub id or an fsspec URL.
    model_url: str
    #: Options of the engine.
    config: EngineConfig
    #: `module:callable` that makes an engine of a model folder and an `EngineConfig`; tests name an engine without a
    #: model.
    factory: str = ENGINE_FACTORY
    #: Options of stores of model and adapters, with secrets.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: Content hash of the model that every engine process must have loaded; "" for any.
    model_sha256: str = ""
    #: Whether files are hashed again instead of using remembered digests.
    verify: bool = False

    @property
    def identity(self) -> EngineIdentity:
        """The key of the engine that these settings ask for."""
        return self.model_sha256 or self.model_url, self.factory, self.config

    def proof_of(self, folder: Path) -> ModelProof:
        """The proof for a process that is about to load the model from `folder`."""
        with_weights = self.config.load_format != "dummy"
        return ModelProof(folder, self.model_sha256, with_weights=with_weights, use_remembered=not self.verify)

    def halved(self) -> EngineSettings | None:
        """These settings with half the rows and half the tokens in a step; None when a step has one row already."""
        rows, tokens = self.config.batch_rows // 2, self.config.step_tokens // 2
        if rows < 1:
            return None
        return self.with_limits(rows, max(tokens, MIN_STEP_TOKENS))

    def with_limits(self, batch_rows: int, step_tokens: int) -> EngineSettings:
        """These settings with at most `batch_rows` rows at once and `step_tokens` tokens in a step."""
        return replace(self, config=replace(self.config, max_batch_rows=batch_rows, max_step_tokens=step_tokens))

    def with_threads(self, num_threads: int) -> EngineSettings:
        """These settings with `num_threads` CPU threads, unless they have a number of threads already."""
        if self.config.num_threads is not None:
            return self
        return replace(self, config=replace(self.config, num_threads=num_threads))


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The state of one run's engine on one worker, sent about once a second and when a shard has all its answers."""

    #: Dask address of the worker.
    worker: str
    #: State of the engine.
    state: ReplicaState
    #: Most rows that the engine runs at once.
    batch_rows: int
    #: Why the engine was given up, or why its last process ended; None before any has ended.
    error: str | None = None
    #: Process id of the engine; None while it has no process that is ready.
    engine_pid: int | None = None
    #: Engine processes lost.
    num_crashes: int = 0
    #: Unfinished rows of each open shard.
    open_shards: tuple[UnfinishedRows, ...] = ()
    #: Unfinished rows of each open shard that other workers' engines work on, where there are some.
    lent_shards: tuple[UnfinishedRows, ...] = ()
    #: Unfinished rows of other workers' shards.
    incoming_rows: int = 0
    #: Latest telemetry of the engine. If runs share the engine, its running rows and tokens are in proportion to this
    #: run's rows.
    telemetry: EngineTelemetry = field(default_factory=EngineTelemetry)
    #: Counts of the adapters that the worker has fetched, beside those of the engine in `telemetry.adapters`.
    fetches: AdapterUse = field(default_factory=AdapterUse)
    #: Tokens generated per second, over the last half second or more.
    tokens_per_s: float = 0.0
    #: Prompt tokens per second, over the last half second or more.
    prompt_tokens_per_s: float = 0.0
    #: Seconds of steps since the engine was set up, each step counted by the share to which it was full.
    filled_s: float = 0.0
    #: Seconds since the engine was set up.
    elapsed_s: float = 0.0
    #: Rows finished since the last report.
    finished: tuple[FinishedRows, ...] = ()
    #: Shards whose tasks have begun on the worker and have not ended.
    begun_shards: tuple[int, ...] = ()
    #: Bytes of all local copies of adapters on the worker's host; 0 before it has fetched any.
    adapter_copies_bytes: int = 0

    @property
    def open_rows(self) -> int:
        """Unfinished rows of all open shards."""
        return sum(rows.num_rows for rows in self.open_shards)

    @property
    def lent_rows(self) -> int:
        """Unfinished rows that other workers' engines work on."""
        return sum(rows.num_rows for rows in self.lent_shards)

    @property
    def running_rows(self) -> int:
        """Rows in the engine's batch."""
        return self.telemetry.num_running


@dataclass(frozen=True, slots=True)
class PublishedState:
    """A job's state, from its coordinator to all followers of the job. `output`: URL of its output, without secrets."""

    output: str
    state: JobState


@dataclass(frozen=True, slots=True)
class StorageWait:
    """A worker's address, and a sentence on the operation on storage that it waits for; "" when it waits no longer."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """Asks the coordinator of a run, now or later, to stop and keep finished rows."""


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """Says that a coordinator of the run has started; earlier coordinators must leave everything as it is."""

    coordinator_id: str


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """Counts of a committed shard, from the worker that committed it."""

    #: Number of the shard.
    shard_id: int
    #: Dask address of the worker.
    worker: str
    #: Rows of the shard.
    num_rows: int
    #: Error rows of the shard.
    num_errors: int
    #: Rows with answers that earlier runs computed.
    num_reused: int
    #: Prompt tokens of the rows that engines have finished.
    prompt_tokens: int
    #: Tokens of the completions of these rows.
    completion_tokens: int
    #: Prompt tokens whose reuse engines have counted, and those that were reused.
    reuse: PromptReuse = field(default_factory=PromptReuse)
    #: Work that engines did for rows that this attempt computed, adapters by content hash; None when it is not known.
    work: JobWork | None = None
    #: Counts of its rows by adapter, as rows name them.
    adapters: tuple[AdapterCount, ...] = ()
