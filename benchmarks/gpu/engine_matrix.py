"""Whole engine runs: prompts and decoding, per batch, adapters, ranks and mode, beside the base model alone.

One engine serves all points that its pool holds (`points.engine_parts`); its batcher is exchanged between them. A
point's rows are added, their prompts computed (prefill), and then decode steps of the full batch are timed on the wall
clock, from device idle to device idle.

What only decodes begins behind a context whose keys and values are random numbers. It is measured several
times, each beside the base of the same rows, since a device's clock drifts.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.points import (
    RANK,
    Decoding,
    EngineMatrix,
    EngineMode,
    EnginePart,
    PagesNeeded,
    Point,
    engine_parts,
)
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.limits import total_host_bytes
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.engine.runner.gpu_runner import GpuRunner
from lorabatch.scheduler.batchers.batching import BatchView, ReplicaMode, StepPlan


class ExchangeableBatcher:
    """Every row that there is room for, in a mode that can be exchanged while no row is unfinished. What is merged is
    the adapter of the lowest number among the rows."""

    def __init__(self) -> None:
        self.mode: ReplicaMode = "unmerged"

    def __call__(self, view: BatchView) -> StepPlan:
        """Serve all running rows in `mode`, and admit waiting rows as far as there is room."""
        room = max(view.max_batch_rows - len(view.running_adapter), 0)
        numbers = np.concatenate([view.running_adapter, view.waiting_adapter])
        merged = None if self.mode == "unmerged" else int(numbers[numbers >= 0].min())
        admit = np.arange(min(room, len(view.waiting_adapter)), dtype=np.int64)
        return StepPlan(self.mode, merged, np.ones(len(view.running_adapter), np.bool_), admit)


def measure_engine(
    folder: Path,
    matrix: EngineMatrix,
    device: torch.device,
    pool_bytes: int | None,
    deadline: Deadline,
    save: Callable[[Any], None],
    *,
    is_exact: bool = False,
) -> dict[str, Any]:
    """Points measured before the deadline, and the engines that measured them. A point that fails says why, and the
    next one has a new engine. `pool_bytes` None: what weights, merged copies and steps leave of the device's memory.
    `is_exact`: by engines in mode `exact`, for points without merges.
    """
    config = EngineConfig(
        max_batch_rows=max(point.batch for point in matrix.points),
        max_step_tokens=matrix.max_step_tokens,
        pool_bytes=pool_bytes,
        device=device.type,
        load_format="dummy",
        host_tier_bytes=0,  # random adapters are made again where others come from storage
        uses_prefix_cache=False,
        kernels="triton" if device.type == "cpu" else "auto",
    )
    memory_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else total_host_bytes()
    measuring = _Measuring(folder, config, matrix, device, deadline, save)
    parts = [EnginePart("exact", matrix.decoding, matrix.points)]
    for part in parts if is_exact else engine_parts(matrix, config, measuring.model, memory_bytes):
        for decoding in part.decoding:
            measuring.decode(part.mode, decoding)
        for point in part.points:
            measuring.serve(part.mode, point)
    measuring.drop_engine()
    return measuring.result


class _Measuring:
    """One engine at a time, and what it measures: `result` is saved after each measurement."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        matrix: EngineMatrix,
        device: torch.device,
        deadline: Deadline,
        save: Callable[[Any], None],
    ) -> None:
        self.model = read_model_config(folder)
        self.result: dict[str, Any] = {
            "engines": [], "decoding": [], "points": [], "failed_points": [], "too_large": []
        }  # fmt: skip
        self._folder, self._config, self._matrix, self._device = folder, config, matrix, device
        self._deadline, self._save = deadline, save
        self._needed = PagesNeeded(matrix, self.model, config.page_tokens)
        self._batcher = ExchangeableBatcher()
        self._engine: Engine | None = None
        self._adapters_of: dict[int, list[str]] = {}
        self._have_graphs: set[Decoding] = set()
        self._base_of: dict[tuple[int, int], dict[str, float]] = {}

    def decode(self, mode: EngineMode, decoding: Decoding) -> None:
        """Decode steps of each number of adapters, each repeat right after one of the base. Saves medians, and the
        spread of the ratios. Where the pool is too small, behind a shorter context; a number of adapters that fails
        is not tried again."""
        times: dict[int, list[tuple[float, float]]] = {}
        fitting: dict[int, Decoding] = {}
        ended: set[int] = set()
        others = list(self.result["decoding"])
        for repeat in range(self._matrix.repeats):
            for count in decoding.adapters:
                name = f"{decoding.name(count)}, repeat {repeat + 1}"
                if count in ended or not self._deadline.allows(name):
                    continue
                asked = replace(decoding, adapters=(count,))
                try:
                    num_pages = self._engine_of(mode).telemetry().pages_total
                    smaller = self._needed.largest_decoding(asked, count, num_pages)
                    if smaller is None:
                        ended.add(count)
                        self._keep_too_large(asked, self._needed.of_decoding(asked, count), num_pages)
                        continue
                    fitting[count] = smaller
                    pair_s = self._pair_s(self._engine_of(mode), smaller)
                except Exception as error:
                    ended.add(count)
                    self._keep_failure(asked, error)
                    continue
                times.setdefault(count, []).append(pair_s)
                rows = [
                    _decoding_row(fitting[of], decoding, found, self._matrix.decode_steps)
                    for of, found in times.items()
                ]
                self.result["decoding"] = others + rows
                self._save(self.result)

    def _pair_s(self, engine: Engine, decoding: Decoding) -> tuple[float, float]:
        """Seconds of steps of the base, and of its one number of adapters."""
        (count,) = decoding.adapters
        if count not in self._adapters_of:
            self._adapters_of[count] = _adapters(engine, [RANK] * count)
        adapter_ids = self._adapters_of[count]

        def adapters_s() -> float:
            _make_resident(engine, adapter_ids)  # another's rows may have taken their place
            return _decode_s(engine, decoding, adapter_ids, self._matrix, self._device)

        if decoding not in self._have_graphs:
            adapters_s()  # graphs of this kind of step are captured
            self._have_graphs.add(decoding)
        base_s = _decode_s(engine, decoding, [], self._matrix, self._device)
        return base_s, adapters_s()

    def serve(self, mode: EngineMode, point: Point) -> None:
        """Measure a point, with its ratio to the base of the same rows."""
        if not self._deadline.allows(point.name):
            return
        self._batcher.mode = "unmerged"
        try:
            needed, num_pages = self._needed.of_point(point), self._engine_of(mode).telemetry().pages_total
            if needed > num_pages:
                self._keep_too_large(point, needed, num_pages)
                return
            measured = measure_point(self._engine_of(mode), self._batcher, point, self._matrix, self._device)
        except Exception as error:
            self._keep_failure(point, error)
            return
        if point.adapters == 0:
            self._base_of[point.batch, point.prompt_tokens] = measured
        self.result["points"].append(asdict(point) | measured)
        for row in self.result["points"]:  # of another engine's points, the base may come later
            base = self._base_of.get((row["batch"], row["prompt_tokens"]))
            row |= _ratios(row, base) if base and row["adapters"] else {}
        self._save(self.result)

    def _engine_of(self, mode: EngineMode) -> Engine:
        """The engine, or a new one in place of another mode's."""
        if self._engine is not None and self._engine.config.mode == mode:
            return self._engine
        self.drop_engine()
        began_s = time.perf_counter()
        self._engine = engine = Engine(self._folder, replace(self._config, mode=mode), self._batcher)
        _wait(self._device)
        num_pages, load_s = engine.telemetry().pages_total, time.perf_counter() - began_s
        fill_pool(engine)
        self._warm_up(engine)
        self.result["engines"].append({"mode": mode, "load_s": load_s, "pool_pages": num_pages})
        return engine

    def _warm_up(self, engine: Engine) -> None:
        """Compute a step of prompts as large as any, twice: the first one loads libraries, and steps of a new engine
        are small until their time is known."""
        self._batcher.mode = "unmerged"
        tokens = min(engine.config.step_tokens, engine.model.max_context_tokens - 1)
        point = Point(1, 0, None, "unmerged", tokens)
        for _ in range(2):
            for result in engine.run([_request(engine, point, 0, [], SamplingParams(max_tokens=1, ignore_eos=True))]):
                assert result.error is None, result.error

    def drop_engine(self) -> None:
        """Free what the engine holds before the next one takes as much."""
        self._engine = None
        self._adapters_of.clear()
        self._have_graphs.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _keep_too_large(self, point: Point | Decoding, needed: int, num_pages: int) -> None:
        self.result["too_large"].append(asdict(point) | {"needed_pages": needed, "pool_pages": num_pages})
        self._save(self.result)

    def _keep_failure(self, point: Point | Decoding, error: Exception) -> None:
        """Save why a point failed, and drop its engine. Raises the error again where it spoils the process: where the
        device takes no more work, or the point before it failed in the same way."""
        traceback.print_exception(error)
        failed, reason = self.result["failed_points"], f"{type(error).__name__}: {error}"
        is_again = bool(failed) and failed[-1]["error"] == reason
        failed.append(asdict(point) | {"error": reason})
        self._save(self.result)
        if is_again or not _works(self._device):
            raise error
        link: BaseException | None = error
        while link is not None:  # its frames hold the engine, and so do those of what it was raised for
            link.__traceback__ = None
            link = link.__context__
        self.drop_engine()


def measure_point(
    engine: Engine, batcher: ExchangeableBatcher, point: Point, matrix: EngineMatrix, device: torch.device
) -> dict[str, float]:
    """Tokens per second of prefill and decode, milliseconds per decode step, and the host's share of a step."""
    adapter_ids = _adapters(engine, point.ranks)
    start = time.perf_counter()
    _make_resident(engine, adapter_ids)
    resident_s = time.perf_counter() - start
    switching_s = engine.switching_s
    batcher.mode = point.mode
    sampling = SamplingParams(max_tokens=matrix.answer_tokens(point), ignore_eos=True)
    requests = [_request(engine, point, index, adapter_ids, sampling) for index in range(point.batch)]
    engine.add(requests)
    before = engine.telemetry().prompt_tokens
    _wait(device)
    start = time.perf_counter()
    while engine.num_unfinished and engine.telemetry().prompt_tokens - before < point.batch * point.prompt_tokens:
        engine.step()
    _wait(device)
    prefill_s = time.perf_counter() - start
    for _ in range(matrix.warm_steps):
        engine.step()
    _wait(device)
    generated, num_running = engine.telemetry().generated_tokens, engine.telemetry().num_running
    start = time.perf_counter()
    for _ in range(matrix.decode_steps):
        engine.step()
    host_s = time.perf_counter() - start
    _wait(device)
    decode_s = time.perf_counter() - start
    result = {
        "prefill_tokens_per_s": point.batch * point.prompt_tokens / prefill_s,
        # counted: fewer rows than the batch may run at once
        "decode_tokens_per_s": (engine.telemetry().generated_tokens - generated) / decode_s,
        "num_running": num_running,
        "step_ms": decode_s / matrix.decode_steps * 1e3,
        "step_without_last_wait_ms": host_s / matrix.decode_steps * 1e3,
        "making_adapters_resident_s": resident_s,
    }
    if point.mode != "unmerged":
        result["switch_ms"] = (engine.switching_s - switching_s) * 1e3
    engine.abort([request.request_id for request in requests])
    engine.check_integrity()
    return result


def _decoding_row(
    decoding: Decoding, asked: Decoding, times: Sequence[tuple[float, float]], num_steps: int
) -> dict[str, Any]:
    """Medians of a decoding with one number of adapters, and the context that the pool had no room for."""
    ratios = [base_s / seconds for base_s, seconds in times]
    return {
        "batch": decoding.batch,
        "context": decoding.context,
        "instead_of_context": None if decoding.context == asked.context else asked.context,
        "adapters": decoding.adapters[0],
        "base_step_ms": statistics.median(base_s for base_s, _ in times) / num_steps * 1e3,
        "step_ms": statistics.median(seconds for _, seconds in times) / num_steps * 1e3,
        "of_base": statistics.median(ratios),
        "of_base_from": min(ratios),
        "of_base_to": max(ratios),
        "repeats": len(times),
    }


def _decode_s(
    engine: Engine, decoding: Decoding, adapter_ids: Sequence[str], matrix: EngineMatrix, device: torch.device
) -> float:
    """Seconds of `matrix.decode_steps` steps."""
    sampling = SamplingParams(max_tokens=matrix.decoding_tokens, ignore_eos=True)
    point = Point(decoding.batch, len(adapter_ids), None, "unmerged", decoding.context)
    requests = [_request(engine, point, index, adapter_ids, sampling) for index in range(decoding.batch)]
    engine.import_rows(ExportedRow(request, (1,)) for request in requests)
    admit = engine._batch.admit

    def admit_stored(view: BatchView, plan: StepPlan) -> Any:
        plan, served = admit(view, plan)
        for sequence in served:
            if sequence.num_stored == 0:
                sequence.num_stored = sequence.total_tokens - 1
        return plan, served

    engine._batch.admit = admit_stored  # type: ignore[method-assign]
    try:
        for _ in range(matrix.warm_steps):
            engine.step()
        num_running = engine.telemetry().num_running
        assert num_running == decoding.batch, f"{num_running} of {decoding.batch} rows run"
        _wait(device)
        began_s = time.perf_counter()
        for _ in range(matrix.decode_steps):
            engine.step()
        _wait(device)
        return time.perf_counter() - began_s
    finally:
        del engine._batch.admit  # the class's own again
        engine.abort([request.request_id for request in requests])
        engine.check_integrity()


def _ratios(measured: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    return {
        f"{phase}_of_base": measured[f"{phase}_tokens_per_s"] / base[f"{phase}_tokens_per_s"]
        for phase in ("prefill", "decode")
    }


def _adapters(engine: Engine, ranks: Iterable[int]) -> list[str]:
    return [engine.register_dummy_adapter(f"{rank}-{index}", rank) for index, rank in enumerate(ranks)]


def _make_resident(engine: Engine, adapter_ids: Sequence[str]) -> None:
    """Serve one short row by each adapter, so that no load falls into a measurement."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    for _ in engine.run(Request(f"load-{a}", (1, 2), a, sampling) for a in adapter_ids):
        pass


def _request(engine: Engine, point: Point, index: int, adapter_ids: Sequence[str], sampling: SamplingParams) -> Request:
    """Prompts differ from row to row and from point to point, so that no prefix is shared."""
    vocab_size, first = engine.model.vocab_size, 7919 * index + 131 * engine.telemetry().num_steps
    prompt = tuple((first + place * 31) % (vocab_size - 1) + 1 for place in range(point.prompt_tokens))
    adapter_id = adapter_ids[index % len(adapter_ids)] if adapter_ids else None
    return Request(f"{point.mode}-{index}", prompt, adapter_id, sampling, index)


def fill_pool(engine: Engine) -> None:
    """Fill the pool with random numbers: rows behind a context that is not computed would read zeros, which can be
    faster than data."""
    assert isinstance(engine._runner, GpuRunner)
    engine._runner._memory.table.pool.normal_(0, 0.5)


def _works(device: torch.device) -> bool:
    """Whether the device still takes work: after an illegal access it does not in the same process."""
    try:
        torch.ones(1, device=device).add_(1)
        _wait(device)
    except RuntimeError:
        return False
    return True


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
