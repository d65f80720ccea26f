"""Measures engines and fits a cost model to them: `lorabatch profile`.

As many engines run at once as a job would run here: engines of one machine share its memory, caches and cores with the
workers that host them, so that an engine measured alone looks faster than it will be. Every measured step is a step of
the real engine with the model's own weights and random adapters. Steps cover a grid of loads, switches of the merged
adapter and loads of adapters. `scheduler/costs/fitting.py` fits the cost model.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal

from ...engine.config import DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS, DeviceKind, EngineConfig, products_format
from ...engine.engine import Engine
from ...engine.peft import audit_adapter
from ...engine.peft.random import write_random_adapter
from ...engine.request import Request, SamplingParams
from ...engine.runner.backend import choose_device
from ...jobs.cost_profile import CostProfile, machine, profile_path
from ...jobs.errors import JobFailedError
from ...jobs.spec import JobSpec
from ...jobs.storage.local_copy import local_folder, model_sha256
from ...scheduler.costs.cost import StepLoad
from ...scheduler.costs.fitting import StepSample, fit, fit_loads, fit_quality, meeting_total
from ...scheduler.costs.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from ...system.local_cache import make_private, temporary_folder
from ..cluster.connect import DEFAULT_WORKERS, embedded
from ..cluster.devices import device_kind
from ..supervisor.spare import TRIM_VARIABLE

#: Seconds after which no further probe begins.
MAX_SECONDS = 120.0


def profile_model(
    spec: JobSpec, max_seconds: float = MAX_SECONDS, save: Path | None = None
) -> tuple[CostProfile, Path]:
    """Measure the engines of a job on this machine, fit a cost model, and write it to `save`, by default to this
    machine's cache, in which jobs look for it. Returns the profile and its path.

    `spec`: only its model, its workers and the options of its engines count. By default as many engines are measured as
    a local cluster has workers on a CPU, and one on a GPU; each gets an equal share of this machine's cores.

    Raises `StorageError` or `EngineError` for a model that cannot be read or served.
    """
    folder = local_folder(spec.model, {})
    num_engines = spec.workers or (DEFAULT_WORKERS if device_kind("auto") == "cpu" else 1)
    threads = spec.engine_threads or max(1, len(os.sched_getaffinity(0)) // num_engines)
    config = EngineConfig(
        max_batch_rows=spec.batch_rows or DEFAULT_BATCH_ROWS,
        max_step_tokens=spec.step_tokens or DEFAULT_STEP_TOKENS,
        num_threads=threads,
        dtype=spec.dtype,
        base_quantization=spec.base_quantization,
        tensor_parallel=spec.tensor_parallel,
    )
    found = _measure(folder, config, num_engines, max_seconds)
    profile = _fitted(found, config, threads, model_sha256(folder, with_weights=True))
    cpu_threads = threads if profile.device == "cpu" else None
    path = save or profile_path(profile.model_sha256, profile.device, profile.dtype, cpu_threads, spec.tensor_parallel)
    make_private(path.parent)
    path.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    return profile, path


def _measure(folder: Path, config: EngineConfig, num_engines: int, max_seconds: float) -> list[_EngineProfile]:
    processes = multiprocessing.get_context("spawn")
    # the cluster of idle workers logs its routine at level INFO
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with embedded(num_engines), ProcessPoolExecutor(num_engines, mp_context=processes) as pool:
        # Dask's nannies leave the variable in this process's environment
        os.environ.pop(TRIM_VARIABLE, None)
        running = [pool.submit(profile_engine, folder, config, max_seconds) for _ in range(num_engines)]
        return [one.result() for one in running]


def _fitted(found: Sequence[_EngineProfile], config: EngineConfig, threads: int, sha256: str) -> CostProfile:
    device, dtype = found[0].device, found[0].dtype
    prior = CPU_SMOLLM2_135M if device == "cpu" else H200_LLAMA_3_8B
    steps = [step for profile in found for step in profile.steps]
    if not steps:
        raise JobFailedError("profile: no step was measured. Give it more time with --max-seconds.")
    samples = [sample for _, sample in steps]
    cost = fit_loads([load for profile in found for load in profile.loads], fit(samples, prior))
    if device == "cpu" and len(found) * threads > len(os.sched_getaffinity(0)):
        # Engines take turns on a core: a job will have steps such as those that the fit treats as disturbed.
        cost = meeting_total(cost, samples)
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
        num_engines=len(found),
        batch_rows=config.batch_rows,
        quality={kind: fit_quality([s for k, s in steps if k == kind], cost) for kind in kinds},
        cost=cost,
    )


StepKind = Literal["prefill", "decode", "unmerged"]
_LOAD_RANKS = (2, 8, 64)
_SWITCHES = 5
_SHORT_PROMPT_TOKENS = 24
_LONG_PROMPT_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Probe:
    """A number of equal rows that start together."""

    #: Number of rows.
    num_rows: int
    #: Prompt tokens of each row.
    prompt_tokens: int
    #: Tokens that each row generates.
    output_tokens: int
    #: Ranks of the adapters, which rows take in turn; empty for rows of the base model.
    ranks: tuple[int, ...] = ()
    #: Whether rows are drawn at temperature 1; else they are greedy.
    is_drawn: bool = False


@dataclass(frozen=True, slots=True)
class _EngineProfile:
    """The measurements of one engine."""

    #: `cpu` or `cuda`.
    device: str
    #: Number format in which linear layers multiply.
    dtype: str
    #: Kind of each measured step, and its load and seconds.
    steps: tuple[tuple[StepKind, StepSample], ...]
    #: Seconds of each switch of the merged adapter, in order.
    merge_s: tuple[float, ...]
    #: Bytes of an adapter, and seconds of its load from its folder to the device, its audit included.
    loads: tuple[tuple[int, float], ...]


def probe_grid(max_batch_rows: int, max_step_tokens: int, max_context_tokens: int) -> list[_Probe]:
    """Probes that vary rows, tokens, contexts, adapters and ranks, each while the others are fixed; cheap probes first.

    When the prompts of a probe together exceed a step, its steps mix prompts with rows that decode, as a job's do.
    """
    context = min(max_step_tokens, max_context_tokens - 16)
    prompt = min(_SHORT_PROMPT_TOKENS, context)
    mixes = ((), (8,), (16,), (64,), (8, 16, 32, 64), (16,) * 8)
    row_counts = sorted({1, max(1, max_batch_rows // 4), max(1, max_batch_rows // 2), max_batch_rows})
    probes = [_Probe(rows, prompt, 6, ranks) for rows in row_counts for ranks in mixes]
    probes += [_Probe(rows, prompt, 6, is_drawn=True) for rows in row_counts]
    probes += [_Probe(1, tokens, 2, ranks) for tokens in (context // 8, context // 2, context) for ranks in ((), (64,))]
    probes += [_Probe(4, context // 4, 8), _Probe(8, context // 2, 6), _Probe(8, context // 2, 6, (8, 16, 32, 64))]
    # Prompts of several steps show the cost of pairs of tokens.
    probes += [_Probe(1, min(_LONG_PROMPT_STEPS * max_step_tokens, max_context_tokens - 16), 2)]
    # Rows that decode behind long prompts show the cost of reading the context.
    probes += [_Probe(min(16, max_batch_rows), context // 2, 12)]
    return sorted(probes, key=lambda probe: probe.num_rows * (probe.prompt_tokens + probe.output_tokens))


def profile_engine(model_folder: Path, config: EngineConfig, max_seconds: float = MAX_SECONDS) -> _EngineProfile:
    """Measure one engine of this configuration. Probes that would begin after `max_seconds` are left out.

    Raises what `Engine` raises for a model that cannot be served.
    """
    with temporary_folder() as folder:
        began_s = time.perf_counter()
        bench = _Bench(Engine(model_folder, replace(config, mode="unmerged")), folder)
        bench.run(_Probe(min(4, config.batch_rows), _SHORT_PROMPT_TOKENS, 4, (8,)))
        loads = bench.adapter_loads()
        steps: list[tuple[StepKind, StepSample]] = []
        limits = (config.batch_rows, config.step_tokens, bench.engine.model.max_context_tokens)
        for probe in probe_grid(*limits):
            if time.perf_counter() - began_s > max_seconds and steps:
                break
            steps += bench.run(probe)
        bench.engine.close()
        del bench
        merging = _Bench(Engine(model_folder, replace(config, mode="merged")), Path(folder))
        merge_s = merging.switches()
        merging.engine.close()
        kind: DeviceKind = "cuda" if choose_device(config).type == "cuda" else "cpu"
        products = products_format(kind, config.dtype, config.base_quantization)
        return _EngineProfile(kind, products, tuple(steps), merge_s, loads)


class _Bench:
    """One engine with random adapters, and measurements of it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self._adapters: dict[str, str] = {}
        self._num_rows = 0
        # Seconds that the engine took to register its latest adapter.
        self._registered_s = 0.0

    def run(self, probe: _Probe) -> list[tuple[StepKind, StepSample]]:
        """Run a probe and return all of its steps. Adapters are resident before it starts, so that no step includes a
        load.
        """
        adapters = [self._adapter(f"r{rank}-{i}", rank) for i, rank in enumerate(probe.ranks)]
        for adapter in adapters:
            self._timed_step(adapter)
        rows = [self._row(adapters[i % len(adapters)] if adapters else None, probe) for i in range(probe.num_rows)]
        self.engine.add(rows)
        steps: list[tuple[StepKind, StepSample]] = []
        self.engine.observe_step = lambda sample, _: steps.append((_kind(sample.load), sample))
        while self.engine.num_unfinished:
            self.engine.step()
        self.engine.observe_step = None
        return steps

    def adapter_loads(self) -> tuple[tuple[int, float], ...]:
        """(bytes, seconds) of the loads of some adapters: registration and a first step, less a second step."""
        found = []
        for i, rank in enumerate(_LOAD_RANKS * 3):
            adapter = self._adapter(f"load-{i}", rank)
            first_s, second_s = self._timed_step(adapter), self._timed_step(adapter)
            weight_bytes = (self._folder / f"load-{i}" / "adapter_model.safetensors").stat().st_size
            found.append((weight_bytes, max(0.0, self._registered_s + first_s - second_s)))
        return tuple(found)

    def switches(self) -> tuple[float, ...]:
        """Seconds of switches of the merged adapter: a step that merges another adapter, less one that keeps it."""
        adapters = [self._adapter(f"r16-{i}", 16) for i in range(2)]
        found = []
        for i in range(_SWITCHES):
            first_s, second_s = self._timed_step(adapters[i % 2]), self._timed_step(adapters[i % 2])
            found.append(max(0.0, first_s - second_s))
        return tuple(found)

    def _timed_step(self, adapter_id: str | None) -> float:
        self.engine.add([self._row(adapter_id, _Probe(1, _SHORT_PROMPT_TOKENS, 1))])
        began_s = time.perf_counter()
        while self.engine.num_unfinished:
            self.engine.step()
        return time.perf_counter() - began_s

    def _row(self, adapter_id: str | None, probe: _Probe) -> Request:
        self._num_rows += 1
        # Prompts differ from their first token on, so that no prefix is shared.
        first = 3 + self._num_rows * 7919
        ids = tuple((first + 31 * i) % (self.engine.model.vocab_size - 4) + 3 for i in range(probe.prompt_tokens))
        temperature = 1.0 if probe.is_drawn else 0.0
        sampling = SamplingParams(max_tokens=probe.output_tokens, temperature=temperature, ignore_eos=True)
        return Request(f"probe-{self._num_rows}", ids, adapter_id, sampling)

    def _adapter(self, name: str, rank: int) -> str:
        if name not in self._adapters:
            folder = self._folder / name
            if not folder.exists():
                write_random_adapter(folder, self.engine.model, rank, seed=len(self._adapters))
            audit = audit_adapter(folder, self.engine.model, name)
            assert audit.identity_sha256 is not None, f"{name}: {audit.reasons}"
            began_s = time.perf_counter()
            self.engine.register_adapter(audit.identity_sha256, folder, name)
            self._registered_s = time.perf_counter() - began_s
            self._adapters[name] = audit.identity_sha256
        return self._adapters[name]


def _kind(load: StepLoad) -> StepKind:
    if load.num_adapters:
        return "unmerged"
    return "prefill" if load.prefill_tokens else "decode"
