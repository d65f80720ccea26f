"""The sections of the benchmark, in order, each with its share of the time."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .budget import Deadline
from .correctness import check_all
from .device import Peaks, describe, peaks_of
from .engine_checks import check_engine, check_launches
from .engine_matrix import EngineMatrix, full_matrix, measure_engine, tiny_matrix
from .measure import Matrix, measure_kernels, measure_layer, measure_switches
from .model_folder import write_model_folder
from .peers import measure_peft
from .shapes import TINY, ModelShape

# Of a free H200 (149 GB) the pool gets 101 GB: 256 adapters of rank 64 for an 8B model (86 GB) and their rows fit, and
# so do the weights (16 GB), their merged copies (14 GB) and the largest step beside it.
_POOL_SHARE = 0.68


@dataclass(frozen=True, slots=True)
class Scale:
    """What is measured, and how much of it. Seconds are what a section may take at most."""

    shape: ModelShape
    dtypes: tuple[torch.dtype, ...]
    kernels: Matrix
    engine: EngineMatrix
    peer_batch: int
    peer_adapters: int
    peer_tokens: int
    check_tokens: int
    kernel_seconds: float = 60.0
    engine_seconds: float = 270.0
    peer_seconds: float = 80.0
    layer_seconds: float = 60.0


def full_scale(shape: ModelShape) -> Scale:
    """For a GPU."""
    return Scale(
        shape, (torch.float32, torch.float16, torch.bfloat16), Matrix(), full_matrix(), 64, 8, 32, 12
    )  # fmt: skip


def tiny_scale() -> Scale:
    """For a CPU and Triton's interpreter, whose numbers mean nothing."""
    kernels = Matrix(batches=(2,), adapters=(1, 2), ranks=(8,), context=20)
    return Scale(TINY, (torch.float32,), kernels, tiny_matrix(), 2, 2, 3, 2)


def run_sections(
    scale: Scale, device: torch.device, seconds: float, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All sections as one JSON object, written whenever one has ended. Nothing is measured if anything is wrong."""
    start, deadline = time.monotonic(), Deadline.after(seconds)
    facts = describe(device)
    peaks = peaks_of(facts["device"]) or Peaks(4.8e12, 989e12)  # on a CPU: an H200's, to have a table
    result: dict[str, Any] = {"benchmark": "gpu", "model": scale.shape.name, "machine": facts, "seconds": {}}

    def section(name: str, measure: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            result[name] = measure()
        except Exception as error:  # what the other sections measure stays worth having
            result[name] = {"failed": f"{type(error).__name__}: {error}"}
        result["seconds"][name] = round(time.monotonic() - began, 1)
        result["total_seconds"] = round(time.monotonic() - start, 1)
        write(result)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    result["problems"] = (
        check_all(list(scale.dtypes), device) + check_engine(device, scale.check_tokens) + check_launches(device)
    )
    result["seconds"]["correctness"] = round(time.monotonic() - start, 1)
    write(result)
    if result["problems"]:
        return result
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = write_model_folder(Path(name) / "model", scale.shape)
        matrix = scale.kernels
        section("kernels", lambda: measure_kernels(
            scale.shape, matrix.batches[-1], matrix.adapters[-1], matrix.context, peaks, device,
            deadline.within(scale.kernel_seconds)))  # fmt: skip
        section("switches", lambda: measure_switches(scale.shape, peaks, device))
        section("engine", lambda: measure_engine(
            folder, scale.engine, device, _pool_bytes(device), deadline.within(scale.engine_seconds)))  # fmt: skip
        section("peft", lambda: measure_peft(
            folder, scale.peer_batch, scale.peer_adapters, 16, scale.peer_tokens, device,
            deadline.within(scale.peer_seconds)))  # fmt: skip
        section("layer", lambda: measure_layer(scale.shape, matrix, device, deadline.within(scale.layer_seconds)))
    return result


def _pool_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 8 << 20
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _POOL_SHARE)
