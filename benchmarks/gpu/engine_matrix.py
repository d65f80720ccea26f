"""Whole engine runs: prompts and decoding, per batch, adapters, ranks and mode, beside the base model alone.

One engine serves all points; its batcher is exchanged between them. A point's rows are added, their prompts computed
(prefill), and then decode steps of the full batch are timed on the wall clock, from device idle to device idle.

What only decodes begins behind a context whose keys and values are whatever the pages hold. It is measured several
times, each beside the base of the same rows, since a device's clock drifts.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.measure import ranks_for
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.scheduler.batching import BatchView, ReplicaMode, StepPlan


@dataclass(frozen=True, slots=True)
class Point:
    """`batch` rows of `prompt_tokens`, dealt to `adapters` (0: the base alone) of `rank`, or of mixed ranks."""

    batch: int
    adapters: int
    rank: int | str | None
    mode: ReplicaMode
    prompt_tokens: int

    @property
    def name(self) -> str:
        """For the results."""
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.batch} x {self.prompt_tokens} tokens, {self.adapters} adapters{rank}, {self.mode}"


@dataclass(frozen=True, slots=True)
class Decoding:
    """`batch` rows behind `context` tokens each, dealt to each number of `adapters` of rank 16."""

    batch: int
    context: int
    adapters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineMatrix:
    """Points in the order in which they are measured: what matters most first. `warm_steps` capture graphs and are
    not timed. `decoding` comes before all points, `repeats` times each."""

    points: tuple[Point, ...]
    decoding: tuple[Decoding, ...] = ()
    repeats: int = 3
    decode_steps: int = 48
    warm_steps: int = 6
    max_step_tokens: int = 8192


def full_matrix() -> EngineMatrix:
    """Batches 64 to 512, adapters 0 to 256, ranks 8, 16, 64 and mixed, unmerged, merged and mixture; prompts of 128
    tokens where decoding counts, of 1024 where prefill does, and four of 2048 or one of 8000 where attention does."""
    short, long = 128, 1024
    points = []
    for batch in (256, 64, 512, 128):
        points.append(Point(batch, 0, None, "unmerged", short))
        points += [Point(batch, count, 16, "unmerged", short) for count in (1, 16, 64, 256) if count <= batch]
        if batch in (256, 64):
            points.append(Point(batch, 1, 16, "merged", short))
            points.append(Point(batch, 16, 16, "mixture", short))
            points += [
                Point(batch, count, rank, "unmerged", short)
                for rank in (64, 8, "mixed")
                for count in (16, 256)
                if count <= batch
            ]
        if batch == 256:
            points.append(Point(64, 0, None, "unmerged", long))
            points += [Point(64, count, 16, "unmerged", long) for count in (1, 16, 64)]
            points += [Point(4, 0, None, "unmerged", 2048), Point(4, 4, 16, "unmerged", 2048)]
            points.append(Point(1, 0, None, "unmerged", 8000))
    counts = (1, 16, 64, 256)
    return EngineMatrix(tuple(points), (Decoding(256, 1024, counts), Decoding(64, 1024, counts[:3])))


def tiny_matrix() -> EngineMatrix:
    """For a machine without a GPU, to see that all of it runs."""
    points = (
        Point(3, 0, None, "unmerged", 4),
        Point(3, 2, 8, "unmerged", 4),
        Point(3, 1, 8, "merged", 4),
        Point(3, 2, 8, "mixture", 4),
        Point(1, 1, "mixed", "unmerged", 20),
    )
    decoding = (Decoding(3, 20, (1, 2)),)
    return EngineMatrix(points, decoding, repeats=2, decode_steps=2, warm_steps=1, max_step_tokens=16)


class ExchangeableBatcher:
    """Every row that there is room for, in a mode that can be exchanged while no row is unfinished. What is merged is
    the adapter of the lowest number among the rows."""

    def __init__(self) -> None:
        self.mode: ReplicaMode = "unmerged"

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher`."""
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
) -> dict[str, Any]:
    """Points measured before the deadline, and what loading took. A point that fails says why, and the next one has a
    new engine."""
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
    batcher = ExchangeableBatcher()
    start = time.perf_counter()
    engine: Engine | None = Engine(folder, config, batcher)
    _wait(device)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "load_s": time.perf_counter() - start,
        "decoding": [],
        "points": rows,
        "failed_points": [],
    }
    for decoding in matrix.decoding:
        try:
            engine = engine or Engine(folder, config, batcher)
            _measure_decoding(engine, decoding, matrix, device, deadline, result, save)
        except Exception as error:
            engine = None
            _keep_failure(decoding, error, result, save, device)
    base_of: dict[tuple[int, int], dict[str, float]] = {}
    for point in matrix.points:
        batcher.mode = "unmerged"
        if not deadline.allows(point.name):
            continue
        try:
            engine = engine or Engine(folder, config, batcher)
            measured = measure_point(engine, batcher, point, matrix, device)
        except Exception as error:
            engine = None
            _keep_failure(point, error, result, save, device)
            continue
        if point.adapters == 0:
            base_of[point.batch, point.prompt_tokens] = measured
        base = base_of.get((point.batch, point.prompt_tokens))
        rows.append(asdict(point) | measured | (_ratios(measured, base) if base else {}))
        save(result)
    return result


def measure_point(
    engine: Engine, batcher: ExchangeableBatcher, point: Point, matrix: EngineMatrix, device: torch.device
) -> dict[str, float]:
    """Tokens per second of prefill and decode, milliseconds per decode step, and the host's share of a step."""
    adapter_ids = _adapters(engine, point)
    start = time.perf_counter()
    _make_resident(engine, adapter_ids)
    resident_s = time.perf_counter() - start
    switching_s = engine.switching_s
    batcher.mode = point.mode
    # the rows computed first decode while the prompts of others are computed: no row may end before the last step
    prefill_steps = -(-point.batch * point.prompt_tokens // matrix.max_step_tokens)
    num_steps = 2 * prefill_steps + matrix.warm_steps + matrix.decode_steps
    sampling = SamplingParams(max_tokens=num_steps + 4, ignore_eos=True)
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
        # counted: where adapters fill the pool, fewer rows than the batch run at once
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


def _measure_decoding(
    engine: Engine,
    decoding: Decoding,
    matrix: EngineMatrix,
    device: torch.device,
    deadline: Deadline,
    result: dict[str, Any],
    save: Callable[[Any], None],
) -> None:
    """Decode steps of each number of adapters, each repeat right after one of the base. Saves medians, and the spread
    of the ratios.
    """
    adapters = {
        count: _adapters(engine, Point(decoding.batch, count, 16, "unmerged", 0)) for count in decoding.adapters
    }
    times: dict[int, list[tuple[float, float]]] = {}
    others = list(result["decoding"])
    for repeat in range(matrix.repeats):
        for count, adapter_ids in adapters.items():
            name = f"decoding {decoding.batch} rows behind {decoding.context} tokens, {count} adapters"
            if not deadline.allows(f"{name}, repeat {repeat + 1}"):
                continue
            _make_resident(engine, adapter_ids)
            if not repeat:  # graphs of this kind of step are captured
                _decode_s(engine, decoding, adapter_ids, matrix, device)
            pair = (
                _decode_s(engine, decoding, [], matrix, device),
                _decode_s(engine, decoding, adapter_ids, matrix, device),
            )
            times.setdefault(count, []).append(pair)
            rows = [_decoding_row(decoding, of, found, matrix.decode_steps) for of, found in times.items()]
            result["decoding"] = others + rows
            save(result)


def _decoding_row(
    decoding: Decoding, adapters: int, times: Sequence[tuple[float, float]], num_steps: int
) -> dict[str, Any]:
    ratios = [base_s / seconds for base_s, seconds in times]
    return {
        "batch": decoding.batch,
        "context": decoding.context,
        "adapters": adapters,
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
    sampling = SamplingParams(max_tokens=matrix.warm_steps + matrix.decode_steps + 8, ignore_eos=True)
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
        assert engine.telemetry().num_running == decoding.batch, "the pool does not hold all rows"
        _wait(device)
        began_s = time.perf_counter()
        for _ in range(matrix.decode_steps):
            engine.step()
        _wait(device)
        return time.perf_counter() - began_s
    finally:
        engine._batch.admit = admit  # type: ignore[method-assign]
        engine.abort([request.request_id for request in requests])
        engine.check_integrity()


def _ratios(measured: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    return {
        f"{phase}_of_base": measured[f"{phase}_tokens_per_s"] / base[f"{phase}_tokens_per_s"]
        for phase in ("prefill", "decode")
    }


def _adapters(engine: Engine, point: Point) -> list[str]:
    if point.rank is None:
        return []
    ranks = ranks_for(point.rank, point.adapters)
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


def _keep_failure(
    point: Point | Decoding, error: Exception, result: dict[str, Any], save: Callable[[Any], None], device: torch.device
) -> None:
    """Save why a point failed, and free what its engine held before the next one takes as much."""
    traceback.print_exception(error)
    result["failed_points"].append(asdict(point) | {"error": f"{type(error).__name__}: {error}"})
    save(result)
    error.__traceback__ = None  # its frames hold the engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
