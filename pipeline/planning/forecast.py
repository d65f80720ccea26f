"""Chooses a job's cost model, and plans and predicts its rows with it, alike for `lorabatch plan` and a real run.

The cost model comes from a file, from what `lorabatch profile` has measured on this machine, or from a preset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...engine.batching.policy import choose_batcher
from ...engine.config import DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS, EngineConfig, read_model_config
from ...engine.memory.prefix_cache import shares_prefixes
from ...engine.model_config.model import ModelConfig
from ...jobs.cost_profile import profile_path, read_profile
from ...jobs.opening import OpenedJob
from ...jobs.record import AdapterRecord
from ...jobs.spec import JobSpec
from ...scheduler.batching import Batcher, ReplicaFacts
from ...scheduler.cost import CPU_SMOLLM2_135M, H200_LLAMA_3_8B, CostModel
from ...scheduler.forecast import CutRows, Forecast, WaveMode, cut_job, forecast_job, place_job
from ...scheduler.lengths import PRIOR_SHARE, LengthEstimator
from ...scheduler.simulation.replica import ReplicaSettings
from ...scheduler.waves import Shard, shard_rows
from ...scheduler.workload import AdapterInfo, Workload
from ..cluster.connect import threads_per_engine

# Parameters and threads per engine that the presets stand for.
_CPU_PRESET_PARAMETERS, _CPU_PRESET_THREADS = 134.5e6, 1
_GPU_PRESET_PARAMETERS = 8.0e9
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class ChosenCost:
    """A cost model and where it comes from, as a phrase for people."""

    cost: CostModel
    origin: str


def choose_cost(spec: JobSpec, model_sha256: str, model: ModelConfig, threads: int | None) -> ChosenCost:
    """The cost model for a job's engines. Raises `JobRequestError` for a `cost_model` that cannot be used."""
    if spec.cost_model is not None:
        return ChosenCost(read_profile(Path(spec.cost_model)).cost, f"measured, {spec.cost_model}")
    device = device_kind(spec.device)
    dtype = spec.dtype if spec.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    path = profile_path(model_sha256, device, dtype, threads if device == "cpu" else None)
    if path.exists():
        return ChosenCost(read_profile(path).cost, f"measured on this machine, {path}")
    return _preset(model, device, threads)


def device_kind(device: str) -> str:
    """`cpu` or `cuda`, as engines of this machine would choose."""
    if device != "auto":
        return device.partition(":")[0]
    return "cuda" if _NVIDIA_DRIVER.exists() else "cpu"


def _preset(model: ModelConfig, device: str, threads: int | None) -> ChosenCost:
    parameters = sum(rows * columns for rows, columns in model.linear_shapes().values())
    advice = "`lorabatch profile --model …` measures this machine"
    if device == "cpu":
        factor = parameters / _CPU_PRESET_PARAMETERS * _CPU_PRESET_THREADS / (threads or _CPU_PRESET_THREADS)
        return ChosenCost(CPU_SMOLLM2_135M.scaled(factor), f"a guess from a 135M model, one core each; {advice}")
    factor = parameters / _GPU_PRESET_PARAMETERS
    return ChosenCost(H200_LLAMA_3_8B.scaled(factor), f"a guess from an 8B model on an H200; {advice}")


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
            length_share=expected_share(self.spec) if length_share is None else length_share,
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
            length_share=expected_share(self.spec),
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
    """Share of `max_tokens` that answers are expected to have: all of it when the stop token is ignored."""
    return 1.0 if spec.sampling.ignore_eos else PRIOR_SHARE


def job_batcher(spec: JobSpec, workload: Workload, adapters: tuple[AdapterRecord, ...], cost: CostModel) -> Batcher:
    """The batcher that the job's engines use, over the workload's adapter numbers."""
    verdicts = {adapter.name: adapter.verdict for adapter in adapters}
    config = EngineConfig(max_batch_rows=spec.batch_rows, mode=spec.mode)
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
    facts = ReplicaFacts(
        cost=cost,
        ranks=lambda: ranks,
        must_merge=lambda number: verdicts[workload.adapters[number].name] == "exact-by-merge",
        max_batch_rows=config.batch_rows,
        mean_output_tokens=LengthEstimator.of_rows(workload.max_tokens).mean,
    )
    return choose_batcher(config, facts)
