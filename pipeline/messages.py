"""Messages between client, scheduler and workers: frozen dataclasses of plain values. Prompts never pass through them.

Errors that travel from workers to the client, and names of a job's runs, are here too.

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

from ..engine.config import EngineConfig
from ..engine.telemetry import EngineTelemetry
from ..jobs.errors import JobFailedError
from ..jobs.record import JobState
from ..jobs.storage.model_proof import ModelProof
from ..scheduler.planning.bound import JobWork
from .dataset.answers import RowAnswer


class EngineFailedError(JobFailedError):
    """A worker's engine cannot be started, or keeps dying."""


class ShardAbandonedError(JobFailedError):
    """The worker stopped before the shard was done; its finished rows are kept."""


def new_run_id(job_id: str) -> str:
    """A name for one more run of the job: the job's id, and letters that no other run has."""
    return f"{job_id}-{uuid.uuid4().hex[:6]}"


def job_of_run(run_id: str) -> str:
    """The id of the job that a run belongs to."""
    return run_id.rpartition("-")[0]


def job_key(run_id: str) -> str:
    """The key of the Dask task that coordinates a run."""
    return f"lora_job-{run_id}"


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
        """The sum."""
        counts = [(part.prompt_tokens, part.reused_tokens) for part in parts]
        return cls(sum(prompt for prompt, _ in counts), sum(reused for _, reused in counts))

    @property
    def share(self) -> float | None:
        """Reused tokens of all prompt tokens, from 0 to 1; None without any."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else None


ENGINE_FACTORY = "lorabatch.engine.engine:Engine"
# Fewer tokens in a step save no memory that matters.
MIN_STEP_TOKENS = 16
ReplicaState = Literal["starting", "ready", "restarting", "failed", "left"]


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What must be equal for two runs to share an engine: the base model's content and every option."""

    model: str
    factory: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How every worker sets up its engine.

    `model_url`: local folder (or GGUF file), hub id or fsspec URL; `model_sha256`: of its content, which every engine
    process must have loaded ("": any). `factory`: `module:callable` that makes an engine of a model folder and an
    `EngineConfig`; tests put an engine without a model there. `verify`: digests of files are not remembered.
    """

    model_url: str
    config: EngineConfig
    factory: str = ENGINE_FACTORY
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    model_sha256: str = ""
    verify: bool = False

    @property
    def identity(self) -> EngineIdentity:
        """Equal for settings whose engines are the same."""
        return EngineIdentity(self.model_sha256 or self.model_url, self.factory, self.config)

    def proof_of(self, folder: Path) -> ModelProof:
        """For a process that is about to load the model from this folder."""
        with_weights = self.config.load_format != "dummy"
        return ModelProof(folder, self.model_sha256, with_weights=with_weights, use_remembered=not self.verify)

    def halved(self) -> EngineSettings | None:
        """The same, with half the rows and half the tokens in a step; None when that is one row already."""
        rows, tokens = self.config.batch_rows // 2, self.config.step_tokens // 2
        if rows < 1:
            return None
        return self.with_limits(rows, max(tokens, MIN_STEP_TOKENS))

    def with_limits(self, batch_rows: int, step_tokens: int) -> EngineSettings:
        """The same, with so many rows at once and tokens in a step."""
        return replace(self, config=replace(self.config, max_batch_rows=batch_rows, max_step_tokens=step_tokens))

    def with_threads(self, num_threads: int) -> EngineSettings:
        """The same, with so many CPU threads unless a number was chosen before."""
        if self.config.num_threads is not None:
            return self
        return replace(self, config=replace(self.config, num_threads=num_threads))


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """The adapter with this content hash in a local folder."""

    adapter_id: str
    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Rows of one adapter ("": base model) and about one length that an engine finished, and their output tokens."""

    adapter_id: str
    num_rows: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The state of one run's engine on one worker, about once a second and when a shard has all its answers.

    `worker`: its Dask address. `error`: why the engine was given up, or why its last process ended. `num_crashes`:
    engine processes lost. `open_shards`: (shard id, unfinished rows). `lent_shards`: (shard id, those among them that
    other workers' engines work on); `incoming_rows`: unfinished rows of other workers' shards. `telemetry`: the
    engine's latest; where runs share the engine, its running rows and tokens in proportion to this run's rows. Rates
    are over the time between two snapshots. `offered_place_s`: places in the batch times seconds, since the engine was
    set up; `used_place_s`: those that rows in steps had. `finished`: since the last report.
    """

    worker: str
    state: ReplicaState
    batch_rows: int
    error: str | None = None
    engine_pid: int | None = None
    num_crashes: int = 0
    open_shards: tuple[tuple[int, int], ...] = ()
    lent_shards: tuple[tuple[int, int], ...] = ()
    incoming_rows: int = 0
    telemetry: EngineTelemetry = field(default_factory=EngineTelemetry)
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    used_place_s: float = 0.0
    offered_place_s: float = 0.0
    finished: tuple[FinishedRows, ...] = ()
    #: Shards whose tasks have begun on the worker and have not ended.
    begun_shards: tuple[int, ...] = ()

    @property
    def open_rows(self) -> int:
        """Unfinished rows of all open shards."""
        return sum(rows for _, rows in self.open_shards)

    @property
    def lent_rows(self) -> int:
        """Unfinished rows that other workers' engines work on."""
        return sum(rows for _, rows in self.lent_shards)

    @property
    def running_rows(self) -> int:
        """Rows in the engine's batch."""
        return self.telemetry.num_running


@dataclass(frozen=True, slots=True)
class PublishedState:
    """A job's state, from its coordinator to all who follow it. `output`: of the job, free of secrets."""

    output: str
    state: JobState


@dataclass(frozen=True, slots=True)
class StorageWait:
    """From a worker: its address, and a sentence on the operation on storage that it waits for; "" once none does."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """To the coordinator of a run, now or later: stop, keeping what is finished."""


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """A coordinator of the run has started; coordinators before it must leave everything as it is."""

    coordinator_id: str


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """What a committed shard holds. `num_reused`: rows taken from earlier attempts instead of computed. `work`: what
    engines did for the others, adapters by content hash (None: not known).
    """

    shard_id: int
    worker: str
    num_rows: int
    num_errors: int
    num_reused: int
    prompt_tokens: int
    completion_tokens: int
    reuse: PromptReuse = field(default_factory=PromptReuse)
    work: JobWork | None = None
