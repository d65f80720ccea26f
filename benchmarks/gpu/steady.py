"""A job as users have it: more rows than places, answers of unequal lengths, prompts that come while others decode.

Says what a step is made of, and where its time goes: steps with prompts, time in which the host waits, a profiler's
tables of kernels and traces for a browser (`chrome://tracing`).
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.gpu_runner import GpuRunner
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.scheduler.costs.fitting import StepSample, fit, fit_quality
from lorabatch.scheduler.costs.machines import H200_LLAMA_3_8B

_TABLE_ROWS = 30
_RANK = 16
_MORE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One job. Prompts and answers have log-normal lengths."""

    #: Number of rows.
    num_rows: int
    #: Number of adapters of rank 16, which rows have in turn; 0: the base alone.
    adapters: int
    #: Whether tokens are drawn with top-p; else they are the likeliest.
    draws: bool
    #: Mean tokens of a prompt.
    prompt_tokens: float = 300.0
    #: Mean tokens of an answer. No answer is longer than three times the mean, so that few rows do not decode long
    #: beside empty places.
    answer_tokens: float = 150.0

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.adapters} adapters, {'drawn' if self.draws else 'greedy'}"


@dataclass(frozen=True, slots=True)
class SteadyMatrix:
    """Jobs in the order in which one engine of `batch` places serves them, and steps of each kind that a profiler
    watches, behind others in which the graph of their decode rows is captured."""

    jobs: tuple[Job, ...]
    batch: int = 256
    steps_before: int = 8
    profiled_steps: int = 3


def full_jobs() -> SteadyMatrix:
    """600 rows at 256 places: the base, 256 adapters drawn, 16 greedy; then the same numbers of adapters the other way.

    By arithmetic, for an 8B model on an H100, each of the first three takes 15 to 19 s: 9 s for prompts (180,000 tokens
    at 20,000 a second), the rest for 630 steps at four fifths of the memory's rate. Loading (8 s), first rows (2 s
    each), their graphs and adapters (15 s) and profiles (12 s) included, they end within 100 s.
    """
    kinds = ((0, False), (256, True), (16, False), (256, False), (16, True), (0, True))
    return SteadyMatrix(tuple(Job(600, count, draws) for count, draws in kinds))


def tiny_jobs() -> SteadyMatrix:
    """Small jobs for a machine without a GPU, to see that all of it runs."""
    jobs = (Job(4, count, draws, prompt_tokens=4.0, answer_tokens=2.0) for count, draws in ((0, False), (2, True)))
    return SteadyMatrix(tuple(jobs), batch=2, steps_before=0, profiled_steps=1)


def measure_steady(
    folder: Path,
    matrix: SteadyMatrix,
    device: torch.device,
    pool_bytes: int | None,
    deadline: Deadline,
    save: Callable[[Any], None],
    folder_of_traces: Path | None,
) -> dict[str, Any]:
    """One row per job; the kernels of some steps of the first with adapters; a cost model fitted to the steps of all
    jobs, as `scheduler/costs/fitting.py` takes it."""
    rows: list[dict[str, Any]] = []
    samples: list[StepSample] = []
    found: dict[str, Any] = {"jobs": rows}
    engine: Engine | None = None
    for job in matrix.jobs:
        if not deadline.allows(job.name):
            continue
        engine = engine or steady_engine(folder, matrix, device, pool_bytes)
        requests = job_requests(engine, job)
        rows.append(asdict(job) | {"batch": matrix.batch} | serve_job(engine, requests, device, samples))
        found["cost_model"] = _fitted(samples)
        save(found)
        if job.adapters and "profiles" not in found and deadline.allows("profiles"):
            profiles = _profiles(engine, requests[: matrix.batch], matrix, device, folder_of_traces)
            found["profiles"] = {"job": job.name} | profiles
            save(found)
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def steady_engine(folder: Path, matrix: SteadyMatrix, device: torch.device, pool_bytes: int | None) -> Engine:
    """The engine of all jobs. `pool_bytes` None: what weights and steps leave."""
    config = EngineConfig(
        device=device.type,
        kernels="triton" if device.type == "cpu" else "auto",
        load_format="dummy",
        mode="unmerged",
        max_batch_rows=matrix.batch,
        pool_bytes=pool_bytes,
        host_tier_bytes=0,
        uses_prefix_cache=False,
    )
    return Engine(folder, config)


def job_requests(engine: Engine, job: Job) -> list[Request]:
    """Its rows, the same ones on every call; their adapters are registered."""
    adapters = [engine.register_dummy_adapter(f"{i}", _RANK) for i in range(job.adapters)]
    draw = np.random.default_rng(0)
    spread = 0.6
    lengths = draw.lognormal(-(spread**2) / 2, spread, (2, job.num_rows))
    prompts = np.maximum(lengths[0] * job.prompt_tokens, 1).astype(int)
    answers = np.clip(lengths[1] * job.answer_tokens, 1, 3 * job.answer_tokens).astype(int)
    chosen: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if job.draws else {}
    rows = []
    for i, (prompt, answer) in enumerate(zip(prompts.tolist(), answers.tolist(), strict=True)):
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, **chosen)
        ids = tuple((7919 * i + 31 * place) % (engine.model.vocab_size - 1) + 1 for place in range(prompt))
        rows.append(Request(f"{i}", ids, adapters[i % len(adapters)] if adapters else None, sampling, i))
    return rows


def serve_job(
    engine: Engine, requests: list[Request], device: torch.device, samples: list[StepSample]
) -> dict[str, float | None]:
    """Tokens per second of the whole job, and what its steps were. Adds each step to `samples`."""
    # the first rows compile, load adapters and capture graphs
    for _ in engine.run(_shortened(requests[: engine.config.batch_rows])):
        pass
    watch = _Watch(engine)
    engine.observe_step = lambda sample, _: samples.append(sample)
    before = engine.telemetry()
    _wait(device)
    began_s = time.perf_counter()
    engine.add(requests)
    while engine.num_unfinished:
        for result in engine.step():
            assert result.error is None, result.error
    _wait(device)
    seconds, after = time.perf_counter() - began_s, engine.telemetry()
    engine.observe_step = None
    watch.end()
    return {
        "seconds": seconds,
        "output_tokens_per_s": (after.generated_tokens - before.generated_tokens) / seconds,
        "prompt_tokens_per_s": (after.prompt_tokens - before.prompt_tokens) / seconds,
        "num_steps": watch.num_steps,
        "steps_with_prompts": 1 - watch.steps["decode"] / max(watch.num_steps, 1),
        "decode_steps_by_graph": watch.share_by_graph("decode"),
        "mixed_steps_by_graph": watch.share_by_graph("mixed"),
        "steps_without_graph": watch.num_without_graph,
        "mean_rows": watch.num_rows / max(watch.num_steps, 1),
        "host_waits_s": watch.waited_s,
        "adapter_stall_s": after.adapters.stall_s - before.adapters.stall_s,
    }


def _shortened(requests: list[Request]) -> list[Request]:
    """The requests with the first quarter of their prompts and a quarter of `max_tokens`: a batch that drains visits
    most buckets."""
    return [
        replace(
            request,
            prompt_token_ids=request.prompt_token_ids[: -(-len(request.prompt_token_ids) // 4)],
            sampling=replace(request.sampling, max_tokens=-(-request.sampling.max_tokens // 4)),
        )
        for request in requests
    ]


class _Watch:
    """Counts an engine's steps by what is in them, and the time that its host waits for their tokens.

    `steps`: by kind, `decode` rows alone, `prompts` alone or `mixed`. `steps_by_graph`: those with a part that a graph
    serves, which is their decode rows. `prompt_tokens` and `decode_rows`: of the step that was launched last.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine._runner, GpuRunner)
        self._runner, self._executor = engine._runner, engine._runner._executor
        self._launch, self._run = self._runner.launch, self._executor.run
        self.num_steps = self.num_rows = 0
        self.steps: Counter[str] = Counter()
        self.steps_by_graph: Counter[str] = Counter()
        self.waited_s = 0.0
        self.prompt_tokens = self.decode_rows = 0
        self._kind = ""
        self._runner.launch = self._launched  # type: ignore[method-assign]
        self._executor.run = self._by_graph  # type: ignore[method-assign]

    def share_by_graph(self, kind: str) -> float | None:
        """Share of the steps of a kind that a graph serves; None without any of the kind."""
        return self.steps_by_graph[kind] / self.steps[kind] if self.steps[kind] else None

    @property
    def num_without_graph(self) -> int:
        """Steps whose decode rows no bucket has room for: they are launched kernel by kernel."""
        return sum(self.steps[kind] - self.steps_by_graph[kind] for kind in ("decode", "mixed"))

    def _by_graph(self, key: Any, work: Any) -> None:
        """The executor runs what has a bucket, at most one part of a step."""
        self.steps_by_graph[self._kind] += 1
        self._run(key, work)

    def _launched(self, entries: Any) -> LaunchedStep:
        self.num_steps += 1
        self.prompt_tokens = sum(entry.num_tokens for entry in entries if not entry.is_decode)
        self.decode_rows = sum(entry.is_decode for entry in entries)
        self._kind = "decode" if not self.prompt_tokens else "mixed" if self.decode_rows else "prompts"
        self.steps[self._kind] += 1
        self.num_rows += len(entries)
        step = self._launch(entries)

        def read() -> Any:
            began_s = time.perf_counter()
            tokens = step.read()
            self.waited_s += time.perf_counter() - began_s
            return tokens

        return replace(step, read=read)

    def end(self) -> None:
        """Leave the engine as it was. Steps in flight hold this object, so it lets go of the engine's parts."""
        del self._runner.launch, self._executor.run  # the classes' own again
        del self._runner, self._executor, self._launch, self._run


def _fitted(samples: list[StepSample]) -> dict[str, Any]:
    """Cost model fitted to the steps, with its median error; empty without steps. Adapters have one rank, so the fit
    cannot tell costs per adapter from costs per rank, and gives them to ranks."""
    if not samples:
        return {}
    cost = fit(samples, H200_LLAMA_3_8B)
    return cost.to_json() | {"num_steps": len(samples), "median_error": fit_quality(samples, cost).median_error}


def _profiles(
    engine: Engine, requests: list[Request], matrix: SteadyMatrix, device: torch.device, folder: Path | None
) -> dict[str, Any]:
    """Profiles steps in which rows decode, and as many steps that begin with the prompts of a sixteenth of all rows
    beside the others. Returns both kinds of steps with a table of their kernels, and writes a trace of each to
    `folder`."""
    num_prompts = max(1, len(requests) // 16)
    # none ends before the last step that is watched
    rows = [replace(r, sampling=replace(r.sampling, max_tokens=r.sampling.max_tokens + _MORE_TOKENS)) for r in requests]
    watch = _Watch(engine)
    found: dict[str, Any] = {}
    engine.add(rows[num_prompts:])
    while engine._batch.num_waiting or not watch.num_steps or watch.prompt_tokens:
        engine.step()
    for _ in range(matrix.steps_before):
        engine.step()
    found["decode"] = _profiled(engine, watch, matrix.profiled_steps, device, folder and folder / "trace-decode.json")
    engine.add(rows[:num_prompts])  # no others wait: they enter at once
    found["mixed"] = _profiled(engine, watch, matrix.profiled_steps, device, folder and folder / "trace-mixed.json")
    watch.end()
    engine.abort([row.request_id for row in rows])
    return found


def _profiled(
    engine: Engine, watch: _Watch, num_steps: int, device: torch.device, trace: Path | None
) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    steps = []
    _wait(device)
    with profile(activities=kinds) as watched:
        for _ in range(num_steps):
            steps_before = watch.num_steps
            engine.step()
            if watch.num_steps > steps_before:
                steps.append({"prompt_tokens": watch.prompt_tokens, "decode_rows": watch.decode_rows})
        _wait(device)
    if trace is not None:
        watched.export_chrome_trace(str(trace))
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return {"steps": steps, "kernels": str(watched.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS))}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
