"""The measurements: kernels against floors, the layer matrix, merging, loading an adapter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.device import Peaks, eager_median_s, median_s
from lorabatch.benchmarks.gpu.kernel_cases import kernel_cases
from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.benchmarks.gpu.product_cases import product_cases
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.kernels.launch import empty_pinned, num_persistent_programs
from lorabatch.kernels.lora_shrink.triton import PROGRAMS_PER_MULTIPROCESSOR
from lorabatch.kernels.merge import merge_weights

MIXED = "mixed"
# Fills of 2 GiB that keep the device busy, about half a millisecond each.
_BUSY_FILLS = 30
_MIXED_RANKS = (8, 16, 64)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Sizes over which kernels and the layer are measured, the most important first. Combinations with more adapters
    than rows are left out."""

    #: Numbers of rows that decode.
    batches: tuple[int, ...] = (256, 64, 512, 128)
    #: Numbers of adapters.
    adapters: tuple[int, ...] = (256, 1, 16, 64)
    #: (number of prompts, tokens of each) of steps with prompts, each prompt with an adapter of its own.
    prompts: tuple[tuple[int, int], ...] = ((4, 2048), (1, 8192))
    #: LoRA ranks over which the layer is measured; `MIXED`: 8, 16 and 64 in turn. Kernels have rank 16.
    ranks: tuple[int | str, ...] = (8, 16, 64, MIXED)
    #: Tokens of each row that decodes.
    context: int = 1024


def ranks_for(rank: int | str, count: int) -> list[int]:
    """Ranks of `count` adapters: all equal, or 8, 16 and 64 in turn."""
    return [_MIXED_RANKS[i % len(_MIXED_RANKS)] for i in range(count)] if rank == MIXED else [int(rank)] * count


def measure_kernels(
    shape: ModelShape,
    matrix: Matrix,
    peaks: Peaks,
    device: torch.device,
    deadline: Deadline,
    save: Callable[[Any], None],
) -> list[dict[str, Any]]:
    """One row per kernel, batch and number of adapters, of the first batch, of prompts, and of the other batches:
    seconds, floor and the fraction of the floor's speed that is reached. `tokens`: of a sequence in the step.
    """
    rows: list[dict[str, Any]] = []
    first, *others = ([(batch, count, 1) for count in matrix.adapters if count <= batch] for batch in matrix.batches)
    prompts = [(batch, batch, length) for batch, length in matrix.prompts]
    for batch, count, tokens in itertools.chain(first, prompts, *others):
        name = f"{batch} x {tokens} tokens, {count} adapters"
        if not deadline.allows(name):
            continue
        ranks, context = ranks_for(16, count), matrix.context if tokens == 1 else tokens
        layer = _layer(shape, batch, context, ranks, device, tokens)
        cases = kernel_cases(layer, ranks)
        if count in (1, batch):
            cases += product_cases(layer.weights, batch * tokens)
        for case in cases:
            if not deadline.allows(f"{name}, {case.name}"):
                continue
            found: dict[str, Any] = {"kernel": case.name, "batch": batch, "tokens": tokens, "adapters": count}
            floor_s = peaks.floor_s(case.num_bytes, case.flops)
            try:
                seconds = median_s(case.run, device)
            except TritonError as error:  # it takes more shared memory than there is, say; nothing was launched
                rows.append(found | {"failed": str(error)})
            else:
                found |= {"us": seconds * 1e6, "floor_us": floor_s * 1e6, "fraction": floor_s / seconds}
                rows.append(found)
            save(rows)
    return rows


def measure_layer(
    shape: ModelShape, matrix: Matrix, device: torch.device, deadline: Deadline, save: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Decode of one layer: unmerged beside the base alone, per batch, number of adapters and rank."""
    rows: list[dict[str, Any]] = []
    for batch in matrix.batches:
        if not deadline.allows(f"{batch} rows"):
            continue
        base_s = _decode_s(shape, batch, matrix.context, [], device)
        rows.append({"batch": batch, "adapters": 0, "rank": None, "us": base_s * 1e6, "of_base": 1.0})
        for count, rank in itertools.product(matrix.adapters, matrix.ranks):
            if count > batch:
                continue
            if not deadline.allows(f"{batch} rows, {count} adapters of rank {rank}"):
                continue
            seconds = _decode_s(shape, batch, matrix.context, ranks_for(rank, count), device)
            of_base = base_s / seconds
            rows.append({"batch": batch, "adapters": count, "rank": rank, "us": seconds * 1e6, "of_base": of_base})
            save(rows)
    return rows


def measure_switches(shape: ModelShape, peaks: Peaks, device: torch.device) -> dict[str, float]:
    """Merging a rank-16 adapter into all linear layers, taking it out, and loading it from pinned memory."""
    layer = _layer(shape, 1, 16, [16], device)
    live, jobs = layer.merge_jobs(0)
    # the same weights once per layer, in one launch: they are far larger than caches
    merges = jobs * shape.num_layers
    timer = eager_median_s if device.type == "cuda" else median_s  # its lists are made on the host: no graph
    merge_s = timer(lambda: merge_weights(merges), device)
    kernel_s = _last_kernel_s(lambda: merge_weights(merges), device)

    def restore() -> None:
        for target, weight in zip(live, layer.weights, strict=True):
            target.copy_(weight)

    # all layers of an adapter in one copy, as the engine loads it
    blob = empty_pinned(shape.adapter_numbers(16) * shape.num_layers, layer.table.pool.dtype, device)
    target = torch.empty_like(blob, device=device)
    load_s = timer(lambda: target.copy_(blob, non_blocking=True), device)
    floor_s = peaks.floor_s(2.0 * shape.layer_weights * blob.element_size(), 0.0)
    num_layers = shape.num_layers
    return {
        "merge_ms": merge_s * 1e3,  # with its lists
        "merge_kernel_ms": kernel_s * 1e3,
        "restore_ms": median_s(restore, device) * num_layers * 1e3,
        "switch_floor_ms": floor_s * num_layers * 1e3,
        "load_rank16_ms": load_s * 1e3,
        "load_gb_per_s": blob.numel() * blob.element_size() / load_s / 1e9,
    }


def _last_kernel_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device of `call` behind work that keeps the device busy while the host prepares."""
    if device.type != "cuda":
        return median_s(call, device)
    busy = torch.empty(2 << 30, dtype=torch.uint8, device=device)

    def behind(then: Callable[[], object]) -> float:
        def both() -> None:
            for _ in range(_BUSY_FILLS):
                busy.zero_()
            then()

        return eager_median_s(both, device)

    return behind(call) - behind(lambda: None)


def _layer(
    shape: ModelShape, batch: int, context: int, ranks: list[int], device: torch.device, new_tokens: int = 1
) -> StepLayer:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_programs = num_persistent_programs(device, PROGRAMS_PER_MULTIPROCESSOR)
    return StepLayer(shape, batch, context, ranks, dtype, device, num_programs, new_tokens)


def _decode_s(shape: ModelShape, batch: int, context: int, ranks: list[int], device: torch.device) -> float:
    layer = _layer(shape, batch, context, ranks, device)
    x = torch.randn(batch, shape.hidden, device=device).to(layer.table.pool.dtype)
    return median_s(lambda: layer.forward(x), device)
