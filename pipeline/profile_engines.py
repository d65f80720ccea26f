"""`lorabatch profile`: measure as many engines at once as a job would run here, fit a cost model, save it.

Engines of one machine share its memory, its caches and its cores with the workers that host them, so one that is
measured alone looks faster than it will be. The workers stand by idle while engines are measured.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from ..engine.config import EngineConfig
from ..engine.profiling import EngineProfile, profile_engine
from ..jobs.cost_profile import CostProfile, profile_path
from ..jobs.errors import JobFailedError
from ..jobs.local_copy import local_folder
from ..jobs.model_content import model_sha256
from ..scheduler.cost import CostModel
from ..scheduler.fitting import fit, fit_loads, fit_quality
from ..scheduler.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from .cluster import DEFAULT_WORKERS, embedded
from .cost_models import device_kind
from .engine_child import TRIM_VARIABLE


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to measure. `num_engines`: at once; None is as many as a job has workers, or one on a GPU. `engine_threads`:
    of each engine; None shares this machine's cores out."""

    model: str
    num_engines: int | None = None
    engine_threads: int | None = None
    batch_rows: int = 64
    step_tokens: int = 512
    dtype: str = "auto"
    device: str = "auto"
    max_seconds: float = 120.0

    @property
    def engines(self) -> int:
        """How many are measured."""
        return self.num_engines or (DEFAULT_WORKERS if device_kind(self.device) == "cpu" else 1)


def profile_model(request: ProfileRequest, save: Path | None = None) -> tuple[CostProfile, Path]:
    """Measure, fit and save; without `save` to this machine's cache, where jobs find it.

    Raises `StorageError` or `EngineError` for a model that cannot be had or served.
    """
    folder = local_folder(request.model, {})
    threads = request.engine_threads or max(1, len(os.sched_getaffinity(0)) // request.engines)
    config = EngineConfig(
        max_batch_rows=request.batch_rows,
        max_step_tokens=request.step_tokens,
        num_threads=threads,
        dtype=request.dtype,
        device=request.device,
    )
    profile = _fitted(_measure(folder, config, request), request, threads, model_sha256(folder, with_weights=True))
    cpu_threads = threads if profile.device == "cpu" else None
    path = save or profile_path(profile.model_sha256, profile.device, profile.dtype, cpu_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    return profile, path


def _measure(folder: Path, config: EngineConfig, request: ProfileRequest) -> list[EngineProfile]:
    processes = multiprocessing.get_context("spawn")
    # the idle workers' cluster tells what it does
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with embedded(request.engines), ProcessPoolExecutor(request.engines, mp_context=processes) as pool:
        # Dask's nannies leave it in this process's environment
        os.environ.pop(TRIM_VARIABLE, None)
        running = [pool.submit(profile_engine, folder, config, request.max_seconds) for _ in range(request.engines)]
        return [one.result() for one in running]


def _fitted(found: Sequence[EngineProfile], request: ProfileRequest, threads: int, sha256: str) -> CostProfile:
    device, dtype = found[0].device, found[0].dtype
    prior = CPU_SMOLLM2_135M if device == "cpu" else H200_LLAMA_3_8B
    steps = [step for profile in found for step in profile.steps]
    if not steps:
        raise JobFailedError("profile: no step was measured. Give it more time with --max-seconds.")
    cost = fit_loads([load for profile in found for load in profile.loads], fit([s for _, s in steps], prior))
    merge_s = median(s for profile in found for s in profile.merge_s[1:])
    first_s = median(profile.merge_s[0] for profile in found)
    cost = replace(cost, merge_s=float(merge_s), first_merge_s=max(0.0, float(first_s - merge_s)))
    kinds = sorted({kind for kind, _ in steps})
    return CostProfile(
        model_sha256=sha256,
        machine=machine(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        dtype=dtype,
        engine_threads=threads if device == "cpu" else None,
        num_engines=request.engines,
        batch_rows=request.batch_rows,
        quality={kind: fit_quality([s for k, s in steps if k == kind], cost) for kind in kinds},
        cost=cost,
    )


def machine() -> str:
    """The processor and its cores, as the system tells them."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def print_profile(profile: CostProfile, path: Path, console: Console | None = None) -> None:
    """What was found and how well it fits."""
    console = console or Console()
    fit_table = Table("steps", "measured", "R²", "median error")
    for kind, quality in profile.quality.items():
        fit_table.add_row(kind, str(quality.num_steps), f"{quality.r_squared:.3f}", f"{quality.median_error:.1%}")
    console.print(fit_table)
    table = Table("coefficient", "value")
    for field in fields(CostModel):
        value = getattr(profile.cost, field.name)
        table.add_row(field.name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    what = f"{profile.num_engines} engines at once on {profile.device} ({profile.dtype})"
    console.print(f"{what}: {path}", soft_wrap=True, highlight=False)
