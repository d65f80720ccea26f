"""A job's plan and its seconds, from the cost model of its engines: the same for `lorabatch plan` and a real run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..engine.batcher import choose_batcher
from ..engine.config import DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS, EngineConfig, ModelConfig, read_model_config
from ..engine.prefix_cache import shares_prefixes
from ..jobs.opening import OpenedJob
from ..jobs.record import AdapterRecord
from ..jobs.spec import JobSpec
from ..scheduler.batching import Batcher
from ..scheduler.cost import CostModel
from ..scheduler.demand import LengthModel
from ..scheduler.forecast import CutRows, Forecast, WaveMode, cut_job, forecast_job, place_job
from ..scheduler.simulated_replica import ReplicaSettings
from ..scheduler.waves import Shard, shard_rows
from ..scheduler.workload import AdapterInfo, Workload
from .cluster import threads_per_engine
from .cost_models import ChosenCost, choose_cost

_FP32_BYTES = 4
# Playing a plan takes half a second per thousand rows: a run does not wait longer than its engines take to start.
_SIMULATED_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Plans and predicts a job's rows. Made where the job is opened, used where it is planned."""

    spec: JobSpec
    adapters: tuple[AdapterRecord, ...]
    cost: ChosenCost
    settings: ReplicaSettings
    shares_prefixes: bool

    @classmethod
    def of(cls, job: OpenedJob, num_workers: int) -> Forecaster:
        """For a job on so many workers. Raises `JobRequestError` for a cost model that cannot be read."""
        model = read_model_config(job.model_folder)
        cost = choose_cost(job.spec, job.record.model.sha256, model, threads_per_engine(job.spec, num_workers))
        # whether workers have compiled kernels is seen when their engines start
        is_fixed = job.spec.device in ("auto", "cpu") and job.spec.dtype in ("auto", "float32")
        shares = shares_prefixes(EngineConfig(mode=job.spec.mode), model, is_arithmetic_fixed=is_fixed)
        return cls(job.spec, job.record.adapters, cost, replica_settings(job.spec, model), shares)

    def __call__(
        self,
        workload: Workload,
        num_workers: int,
        *,
        max_simulated_rows: int = _SIMULATED_ROWS,
        length_share: float | None = None,
    ) -> Forecast:
        """Waves, their modes, placement and seconds; those of a larger job are its placement's.

        `length_share`: of `max_tokens` that answers take; by default what is expected.
        """
        return forecast_job(
            self.with_reuse(workload),
            self.cost.cost,
            self.settings,
            num_workers,
            lengths=self._lengths(workload, length_share),
            rows_per_shard=self.spec.rows_per_shard,
            mode=self._wave_mode,
            make_batcher=partial(job_batcher, self.spec, workload, self.adapters, self.cost.cost),
            max_simulated_rows=max_simulated_rows,
        )

    def cut(self, block: Workload, num_workers: int, job_rows: int) -> CutRows:
        """Shards of a block of a job's rows, as large as those of the whole job."""
        rows_per_shard = self.spec.rows_per_shard or shard_rows(job_rows, self.settings.max_batch_rows, num_workers)
        return cut_job(
            self.with_reuse(block),
            self.cost.cost,
            self.settings,
            num_workers,
            lengths=self._lengths(block),
            rows_per_shard=rows_per_shard,
            mode=self._wave_mode,
        )

    def seconds(
        self, adapters: Sequence[AdapterInfo], shards: Sequence[Shard], shard_s: NDArray[np.float64], num_workers: int
    ) -> float:
        """What shards that were cut block by block take together: their placement's makespan."""
        return place_job(adapters, shards, shard_s, self.cost.cost, num_workers).makespan_s

    @property
    def _wave_mode(self) -> WaveMode:
        return "unmerged" if self.spec.mode == "exact" else self.spec.mode

    def _lengths(self, workload: Workload, length_share: float | None = None) -> LengthModel:
        share = expected_share(self.spec) if length_share is None else length_share
        return LengthModel([adapter.name for adapter in workload.adapters], prior_share=share)

    def with_reuse(self, workload: Workload) -> Workload:
        """What of the prompts an engine of this job copies instead of computing it: whole pages, never the last token,
        nothing where it shares no beginnings."""
        if workload.shared_tokens is None or not self.shares_prefixes:
            return replace(workload, shared_tokens=None)
        page_tokens = EngineConfig().page_tokens
        shared = np.minimum(workload.shared_tokens, np.maximum(workload.prompt_tokens - 1, 0))
        return replace(workload, shared_tokens=(shared // page_tokens * page_tokens).astype(np.int32))


def replica_settings(spec: JobSpec, model: ModelConfig) -> ReplicaSettings:
    """A simulated replica with the limits of the job's engines."""
    token_bytes = 2 * model.num_layers * model.kv_size * _FP32_BYTES
    return ReplicaSettings(
        max_batch_rows=spec.batch_rows or DEFAULT_BATCH_ROWS,
        max_step_tokens=spec.step_tokens or DEFAULT_STEP_TOKENS,
        kv_tokens=spec.pool_bytes // token_bytes if spec.pool_bytes else None,
        adapter_source="storage",
        leap_steps=8,
    )


def expected_share(spec: JobSpec) -> float:
    """How long answers are expected to be: half of `max_tokens`, or all of it when the stop token is ignored."""
    return 1.0 if spec.ignore_eos else 0.5


def job_batcher(spec: JobSpec, workload: Workload, adapters: tuple[AdapterRecord, ...], cost: CostModel) -> Batcher:
    """The batcher that the job's engines use, over the workload's adapter numbers."""
    verdicts = {adapter.name: adapter.verdict for adapter in adapters}
    config = EngineConfig(max_batch_rows=spec.batch_rows, max_step_tokens=spec.step_tokens, mode=spec.mode)
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
    mean_output_tokens = float(workload.max_tokens.mean()) / 2 if workload.num_rows else 1.0
    return choose_batcher(
        config,
        lambda number: verdicts[workload.adapters[number].name] == "exact-by-merge",
        cost,
        lambda: ranks,
        lambda: mean_output_tokens,
    )
