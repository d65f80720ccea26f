"""`lorabatch plan`: everything that happens to a job before its first row runs, and what would happen then.

Adapters are audited and rows indexed as in a real run, in a folder that is removed again; nothing is written to the
job's output and no engine is started.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.batcher import choose_batcher
from ..engine.config import EngineConfig, ModelConfig, read_model_config
from ..jobs.opening import OpenedJob, open_job
from ..jobs.record import AdapterRecord
from ..jobs.spec import JobSpec
from ..scheduler.batching import Batcher
from ..scheduler.cost import CostModel
from ..scheduler.demand import LengthModel
from ..scheduler.forecast import Forecast, forecast_job
from ..scheduler.simulated_replica import ReplicaSettings
from ..scheduler.workload import Workload
from .cluster import DEFAULT_WORKERS, connected, count_workers, threads_per_engine
from .cost_models import ChosenCost, choose_cost
from .index import ChunkSummary, index_chunk, list_chunks
from .index_job import IndexJob
from .planning import KindOfError, check_rows

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class DryRun:
    """A job as planned. `weight_bytes`: of the base model on each worker, as it is stored."""

    spec: JobSpec
    adapters: tuple[AdapterRecord, ...]
    errors: tuple[KindOfError, ...]
    workload: Workload
    num_workers: int
    weight_bytes: int
    cost: ChosenCost
    forecast: Forecast


def dry_run(values: Mapping[str, Any], job_file: Path | None = None) -> DryRun:
    """Plan a job from its options; an output is not needed.

    Raises what `open_job` and `check_rows` raise: a job that is refused here would be refused by `run`.
    """
    with tempfile.TemporaryDirectory(prefix="lorabatch-plan-") as folder:
        # `output` in a job file is overridden too: a plan must not meet what is there.
        given = dict(values) | {"output": folder, "overwrite": True}
        spec = JobSpec.from_yaml(job_file, given) if job_file else JobSpec.from_values(given)
        job = open_job(spec)
        num_workers = _num_workers(spec)
        checked = check_rows(job.store, job.record, _index(job))
        threads = threads_per_engine(spec, num_workers)
        model = read_model_config(job.model_folder)
        cost = choose_cost(job.spec, job.record.model.sha256, model, threads)
        forecast = forecast_job(
            checked.workload,
            cost.cost,
            replica_settings(spec, model),
            num_workers,
            lengths=expected_lengths(spec, checked.workload),
            rows_per_shard=spec.rows_per_shard,
            make_batcher=partial(job_batcher, spec, checked.workload, job.record.adapters, cost.cost),
        )
        weight_bytes = sum(file.stat().st_size for file in job.model_folder.glob("*.safetensors"))
        return DryRun(
            spec,
            job.record.adapters,
            checked.errors,
            checked.workload,
            num_workers,
            weight_bytes,
            cost,
            forecast,
        )


def _num_workers(spec: JobSpec) -> int:
    if spec.workers is not None:
        return spec.workers
    if spec.cluster == "local":
        return DEFAULT_WORKERS
    with connected(spec) as client:
        return count_workers(client)


def _index(job: OpenedJob) -> list[ChunkSummary]:
    """Index every row group in this process; tokenisers leave Python's lock while they work."""
    index = partial(index_chunk, job=IndexJob.from_record(job.record, job.spec), store=job.store)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(index, list_chunks(job.record)))


def replica_settings(spec: JobSpec, model: ModelConfig) -> ReplicaSettings:
    """A simulated replica with the limits of the job's engines."""
    token_bytes = 2 * model.num_layers * model.kv_size * _FP32_BYTES
    return ReplicaSettings(
        max_batch_rows=spec.batch_rows,
        max_step_tokens=spec.step_tokens,
        kv_tokens=spec.pool_bytes // token_bytes if spec.pool_bytes else None,
        adapter_source="storage",
        leap_steps=8,
    )


def expected_lengths(spec: JobSpec, workload: Workload) -> LengthModel:
    """How long answers are expected to be: half of `max_tokens`, or all of it when the stop token is ignored."""
    share = 1.0 if spec.ignore_eos else 0.5
    return LengthModel([adapter.name for adapter in workload.adapters], prior_share=share)


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
