"""Plans a job without running it: what `lorabatch plan` prints.

Adapters are audited and rows indexed as in a real run, in a folder that is removed again; nothing is written to the
job's output and no engine is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.local_cache import temporary_folder
from ...engine.memory.limits import CpuMemory, cpu_memory
from ...jobs.opening import OpenedJob, open_job
from ...jobs.option_values import check_speeds, parse_speeds
from ...jobs.record import AdapterRecord
from ...jobs.spec import JobSpec
from ...jobs.status.notes import job_notes, messages_note, row_notes
from ...jobs.validation import requested_job
from ...scheduler.forecast import Forecast
from ...scheduler.workload import Workload
from ..cluster.connect import connected, count_workers, num_embedded_workers
from ..cluster.devices import Device, find_device, find_device_of_workers
from ..dataset.chunk import IndexJob
from ..dataset.index import IndexTotals, index_chunk, list_chunks
from ..result import KindOfError
from .plan import check_rows
from .settings import RunSettings

# Some ten seconds.
_SIMULATED_ROWS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class DryRun:
    """A job as planned. `weight_bytes`: of the base model on each worker, as stored. `bound_s`: no run takes less, if
    answers are as long as expected. `range_s`: predicted for answers of a quarter of `max_tokens` and of all of it;
    None where their lengths are known, or those of earlier jobs. `slowness`: of each worker over the cost model, where
    it was given. `notes`: on adapters, files and rows.
    """

    spec: JobSpec
    adapters: tuple[AdapterRecord, ...]
    errors: tuple[KindOfError, ...]
    workload: Workload
    num_workers: int
    weight_bytes: int
    settings: RunSettings
    forecast: Forecast
    bound_s: float
    range_s: tuple[float, float] | None
    slowness: tuple[float, ...] | None
    notes: tuple[str, ...]

    @property
    def memory(self) -> CpuMemory | None:
        """Of each engine; None on GPUs, where limits and pool follow from what a GPU has."""
        settings = self.settings
        if settings.device.kind != "cpu":
            return None
        return cpu_memory(settings.engine, settings.model, settings.limits, self.weight_bytes)


def dry_run(values: Mapping[str, Any], job_file: Path | None = None, speeds: str | None = None) -> DryRun:
    """Plan a job from its options; an output is not needed. `speeds`: of the workers, see `parse_speeds`.

    Raises what `open_job` and `check_rows` raise: a job that is refused here would be refused by `run`.
    """
    slowness = None if speeds is None else parse_speeds(speeds)
    with temporary_folder() as folder:
        # `output` in a job file is overridden too: a plan must not meet what is there.
        given = dict(values) | {"output": str(folder), "overwrite": True}
        spec = requested_job(given, job_file)
        job = open_job(spec)
        num_workers, device = _workers(spec)
        check_speeds(slowness, num_workers)
        settings = RunSettings.of(job, num_workers, device)
        indexed = _index(job)
        with check_rows(job.store, job.record, indexed) as checked:
            workload = checked.whole()
        predict = partial(settings.forecast, workload, num_workers, max_rows=_SIMULATED_ROWS, slowness=slowness)
        forecast = predict()
        range_s = None
        if settings.guesses_lengths(workload):
            range_s = (predict(length_share=0.25).predicted_s, predict(length_share=1.0).predicted_s)
        weight_bytes = sum(file.stat().st_size for file in job.model_folder.glob("*.safetensors"))
        return DryRun(
            spec,
            job.record.adapters,
            checked.kinds,
            settings.with_reuse(workload),
            num_workers,
            weight_bytes,
            settings,
            forecast,
            settings.bound(workload, num_workers, slowness).seconds,
            range_s,
            slowness,
            (
                *device.notes,
                *job_notes(job.record),
                *messages_note(job.record),
                *row_notes(job.record, indexed.rows_per_adapter, indexed.peculiar_rows),
            ),
        )


def _workers(spec: JobSpec) -> tuple[int, Device]:
    """How many there will be, and what their engines run on."""
    if spec.is_embedded:
        return num_embedded_workers(spec), find_device(spec.device, spec.tensor_parallel)
    with connected(spec) as client:
        return spec.workers or count_workers(client), find_device_of_workers(client, spec.device, spec.tensor_parallel)


def _index(job: OpenedJob) -> IndexTotals:
    """Index every row group in this process; tokenisers leave Python's lock while they work."""
    index = partial(index_chunk, job=IndexJob.from_record(job.record, job.spec), store=job.store)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return IndexTotals.of(pool.map(index, list_chunks(job.record, job.spec.inputs)))
