"""Plans a job without running it, for `lorabatch plan`.

Adapters are audited and rows indexed as in a real run, in a folder that is removed again; nothing is written to the
job's output and no engine is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.memory.limits import CpuMemory, cpu_memory, keeps_merged_copy
from ...jobs.errors import JobRequestError
from ...jobs.opening.job_file import read_job_file
from ...jobs.opening.opened_job import OpenedJob, open_job, updating
from ...jobs.opening.validation import requested_job
from ...jobs.options.values import check_speeds, parse_speeds
from ...jobs.outcome import KindOfError
from ...jobs.progress import UpdateCounts
from ...jobs.record import AdapterRecord
from ...jobs.spec import JobSpec
from ...jobs.status.notes import job_notes, messages_note, row_notes
from ...jobs.storage.urls import absolute
from ...jobs.store import JobStore
from ...scheduler.forecast import Forecast
from ...scheduler.workload import BASE_MODEL, Workload
from ...system.local_cache import temporary_folder
from ..cluster.class_cluster import planned_workers
from ..cluster.connect import connected, count_workers, num_embedded_workers
from ..cluster.devices import Device, find_device, find_device_of_workers, least_device
from ..cluster.suitability import check_suitability, unknown_note
from ..dataset.chunk import IndexJob
from ..dataset.index import IndexTotals, example_prompt, index_chunk, list_chunks
from . import prediction
from .plan import CheckedRows, check_rows
from .settings import RunSettings

# Rows of the largest job that is played whole; of a larger one a sample is. Playing this many takes some ten seconds.
_SIMULATED_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class AdapterForecast:
    """One adapter's share of a job."""

    #: Name of the adapter; None for the base model.
    name: str | None
    #: LoRA rank; 0 for the base model.
    rank: int
    #: Rows of the adapter.
    num_rows: int
    #: Tokens of their prompts.
    prompt_tokens: int
    #: Tokens that they are expected to generate.
    predicted_output_tokens: int
    #: Seconds of one replica for these rows.
    engine_s: float


@dataclass(frozen=True, slots=True, eq=False)
class DryRun:
    """A job as planned, and its forecast."""

    #: Options of the job.
    spec: JobSpec
    #: Adapters of the job, as audited.
    adapters: tuple[AdapterRecord, ...]
    #: Error rows by kind.
    errors: tuple[KindOfError, ...]
    #: All rows, with the prompt tokens that engines reuse.
    workload: Workload
    #: Workers that the plan is made for.
    num_workers: int
    #: Bytes of the base model's weights on each worker, as stored.
    weight_bytes: int
    #: Settings of engines and scheduler.
    settings: RunSettings
    #: Predicted waves, placement and seconds.
    forecast: Forecast
    #: Share of each adapter that has rows, by name; the base model's last, with the error rows.
    shares: tuple[AdapterForecast, ...]
    #: Seconds below which no run ends, if answers are as long as expected.
    bound_s: float
    #: Seconds predicted for answers of a quarter of `max_tokens` and of all of it. None when their lengths, or those of
    #: earlier jobs, are known.
    range_s: tuple[float, float] | None
    #: Seconds of each worker's steps over those of the cost model; None unless speeds were given.
    slowness: tuple[float, ...] | None
    #: Sentences about device, adapters, files and rows.
    notes: tuple[str, ...]
    #: Place of a row (`file:row`) and its prompt as the model gets it, where templates make prompts; else None.
    example: tuple[str, str] | None = None
    #: Counts of an update's rows; None for a job that is no update.
    update: UpdateCounts | None = None
    #: Bytes of the parts from which an update reads the answers that it keeps. The forecast has no seconds for reading
    #: and writing these.
    kept_bytes: int = 0

    @property
    def memory(self) -> CpuMemory | None:
        """Memory of each engine on a CPU; None on GPUs, where limits and pool follow from the GPU's memory."""
        settings = self.settings
        if settings.device.kind != "cpu":
            return None
        memory = cpu_memory(settings.engine, settings.model, settings.limits, self.weight_bytes)
        merges = keeps_merged_copy(settings.engine) or bool(settings.merged_only)
        return memory if merges else replace(memory, merged=0)


def dry_run(values: Mapping[str, Any], job_file: Path | None = None, speeds: str | None = None) -> DryRun:
    """Plan a job from its options; an output is not needed. `speeds`: speed of each worker, as `parse_speeds` reads it.

    Raises what `open_job` and `check_rows` raise: a job that is refused here would be refused by `run`.
    """
    slowness = None if speeds is None else parse_speeds(speeds)
    with temporary_folder() as folder:
        # `output` in a job file is overridden too: a plan must not change the job's output.
        given = dict(values) | {"output": str(folder), "overwrite": False}
        spec = requested_job(given, job_file)
        sources = _sources(spec, values, job_file) if spec.update else []
        check_suitability(spec, connected, is_plan=True)
        job = open_job(spec)
        if sources:
            job = replace(job, record=updating(job.record, sources))
        num_workers, device = _workers(spec)
        check_speeds(slowness, num_workers)
        settings = RunSettings.of(job, num_workers, device)
        indexed = _index(job)
        with check_rows(job.store, job.record, indexed, sources) as checked:
            names = checked.names
            rows, workload = checked.whole()
            name_number = np.where(workload.adapter_index == BASE_MODEL, BASE_MODEL, rows["adapter"])
            is_computed = rows["source"] < 0
            kept_bytes = _kept_bytes(checked, sources)
        predict = partial(
            prediction.forecast, settings, workload, num_workers, max_rows=_SIMULATED_ROWS, slowness=slowness
        )
        forecast = predict()
        range_s = None
        if prediction.guesses_lengths(settings, workload):
            range_s = (predict(length_share=0.25).predicted_s, predict(length_share=1.0).predicted_s)
        weight_bytes = sum(file.stat().st_size for file in job.model_folder.glob("*.safetensors"))
        return DryRun(
            spec,
            job.record.adapters,
            checked.kinds,
            prediction.with_reuse(settings, workload),
            num_workers,
            weight_bytes,
            settings,
            forecast,
            adapter_forecasts(names, name_number, workload, forecast, is_computed),
            prediction.bound(settings, workload, num_workers, slowness).seconds,
            range_s,
            slowness,
            (
                *device.notes,
                *unknown_note(spec, device),
                *job_notes(job.record, indexed.rows_per_adapter.keys()),
                *messages_note(job.record),
                *row_notes(job.record, indexed.rows_per_adapter, indexed.peculiar_rows),
            ),
            example_prompt(job.record, job.spec) if job.record.makes_prompts else None,
            _counts(checked, spec),
            kept_bytes,
        )


def _sources(spec: JobSpec, values: Mapping[str, Any], job_file: Path | None) -> list[JobStore]:
    """Stores of the jobs whose answers an update would keep; none where the output is empty. Raises `JobRequestError`
    for an update without an output.
    """
    output = (read_job_file(job_file, values) if job_file else values).get("output")
    if not output:
        raise JobRequestError("update: needs the output whose answers are kept. Name it with --output.")
    store = JobStore(absolute(str(output)), spec.storage_options)
    return [store, *store.updates()] if store.contents().has_job else []


def _counts(checked: CheckedRows, spec: JobSpec) -> UpdateCounts | None:
    if checked.earlier is not None:
        return checked.earlier.counts
    return UpdateCounts(0, checked.rows.num_rows, 0, 0, 0) if spec.update else None


def _kept_bytes(checked: CheckedRows, sources: Sequence[JobStore]) -> int:
    """Bytes of the parts that have answers which an update keeps."""
    if checked.earlier is None:
        return 0
    kept = zip(checked.earlier.places, checked.earlier.rows_per_source, strict=True)
    parts_of = [store.committed_parts() for store in sources]
    places = [divmod(place, 1 << 32) for place, num_rows in kept if num_rows]
    return sum(parts_of[job].get(shard_id, 0) for job, shard_id in places)


def _workers(spec: JobSpec) -> tuple[int, Device]:
    """Number of workers that a run would have, and the device of their engines."""
    if spec.is_embedded:
        return num_embedded_workers(spec), find_device(spec.device, spec.tensor_parallel)
    if spec.is_cluster_class:
        reason = f"cluster={spec.cluster!r} is not started for a plan"
        return planned_workers(spec), least_device((), spec.device, reason)
    with connected(spec) as client:
        return spec.workers or count_workers(client), find_device_of_workers(client, spec.device, spec.tensor_parallel)


def _index(job: OpenedJob) -> IndexTotals:
    """Index every row group in this process; tokenisers leave Python's lock while they work."""
    index = partial(index_chunk, job=IndexJob.from_record(job.record, job.spec), store=job.store)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return IndexTotals.of(pool.map(index, list_chunks(job.record, job.spec.places)))


def adapter_forecasts(
    names: Sequence[str],
    name_number: NDArray[np.int32],
    workload: Workload,
    forecast: Forecast,
    is_counted: NDArray[np.bool_] | None = None,
) -> tuple[AdapterForecast, ...]:
    """Share of each adapter that has rows, the base model's last. Two names of the same content have a share each.

    `name_number` int32 `[num_rows]`: index of the name of each row's adapter in `names`, -1 for the base model.
    `is_counted` bool `[num_rows]`: rows of the shares; None for all.
    """
    rows = np.arange(len(name_number)) if is_counted is None else np.flatnonzero(is_counted)
    number = name_number[rows] % (len(names) + 1)
    columns = (workload.prompt_tokens[rows], forecast.predicted[rows], forecast.row_s[rows])
    prompt, output, seconds = (np.bincount(number, weights=column, minlength=len(names) + 1) for column in columns)
    shares = []
    for i, first, num_rows in zip(*np.unique(number, return_index=True, return_counts=True), strict=True):
        index = int(workload.adapter_index[rows[first]])
        shares.append(
            AdapterForecast(
                name=None if index == BASE_MODEL else names[i],
                rank=0 if index == BASE_MODEL else workload.adapters[index].rank,
                num_rows=int(num_rows),
                prompt_tokens=int(prompt[i]),
                predicted_output_tokens=round(float(output[i])),
                engine_s=float(seconds[i]),
            )
        )
    return tuple(shares)
