"""Measures the same few numbers under each way to launch, to tile and to attend: for a second run, when the first has
shown what is slow.

A variant is a name and variables of the environment, which its process reads when kernels are first launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.device import Peaks
from lorabatch.benchmarks.gpu.engine_matrix import measure_engine
from lorabatch.benchmarks.gpu.measure import Matrix, measure_kernels
from lorabatch.benchmarks.gpu.points import Decoding, EngineMatrix, Point
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.benchmarks.gpu.warm_up import compile_all

#: Variables that configure torch's allocator, in newer versions and in older ones; engines ask for expandable segments.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VARIANTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "usual": {},
        "early-launches": {"LORABATCH_PDL": "1"},
        "one-stream": {"LORABATCH_SIDE_STREAM": "0"},
        "more-stages": {"LORABATCH_TUNING": "stages=1"},
        "fewer-stages": {"LORABATCH_TUNING": "stages=-1"},
        "more-warps": {"LORABATCH_TUNING": "warps=2"},
        "fewer-warps": {"LORABATCH_TUNING": "warps=0.5"},
        "wider-tiles": {"LORABATCH_TUNING": "block=2"},
        "narrower-tiles": {"LORABATCH_TUNING": "block=0.5"},
        "tiles-only": {"LORABATCH_TUNING": "rows=0"},
        "varlen": {"LORABATCH_PROMPT_ATTENTION": "varlen"},
        "flashinfer": {"LORABATCH_PROMPT_ATTENTION": "flashinfer"},
        "fixed-segments": dict.fromkeys(ALLOCATOR, "expandable_segments:False"),
    }
)
#: Seconds of each at most: loading the model, compiling what is compiled otherwise, and its points.
VARIANT_S = 85.0


@dataclass(frozen=True, slots=True)
class VariantSizes:
    """Sizes of the measurements under each variant: kernels alone first, then steps."""

    kernels: Matrix
    engine: EngineMatrix


def variant_sizes() -> VariantSizes:
    """Decoding with few rows and with many, one adapter and many; prompts of 2,048 and 8,000 tokens."""
    kernels = Matrix(batches=(256,), adapters=(256, 1), prompts=((4, 2048),))
    points = (
        Point(4, 0, None, "unmerged", 2048),
        Point(4, 4, 16, "unmerged", 2048),
        Point(1, 0, None, "unmerged", 8000),
    )
    decoding = (Decoding(64, 1024, (1, 16)), Decoding(256, 1024, (1, 256)))
    return VariantSizes(kernels, EngineMatrix(points, decoding, repeats=2, decode_steps=32))


def tiny_variants() -> VariantSizes:
    """Sizes for a machine without a GPU."""
    kernels = Matrix(batches=(2,), adapters=(2,), prompts=((2, 5),), context=20)
    points = (Point(2, 0, None, "unmerged", 4),)
    decoding = (Decoding(2, 20, (1,)),)
    engine = EngineMatrix(points, decoding, repeats=1, decode_steps=2, warm_steps=1, max_step_tokens=16)
    return VariantSizes(kernels, engine)


def measure_variant(
    folder: Path,
    shape: ModelShape,
    sizes: VariantSizes,
    peaks: Peaks,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int | None,
    deadline: Deadline,
    save: Callable[[Any], None],
) -> dict[str, Any]:
    """Measures kernels, then steps, under this process's environment. A GPU's kernels are compiled first."""
    found: dict[str, Any] = {}

    def saved(name: str) -> Callable[[Any], None]:
        return lambda value: save(found | {name: value})

    if device.type == "cuda":
        found["compile"] = compile_all(shape, (dtype,), device, deadline, saved("compile"), with_checks=False)
    found["kernels"] = measure_kernels(shape, sizes.kernels, peaks, device, deadline, saved("kernels"))
    return found | measure_engine(folder, sizes.engine, device, pool_bytes, deadline, lambda value: save(found | value))


def variants_table(result: Mapping[str, Any]) -> str:
    """A line for each kernel, point and variant: microseconds or milliseconds, and how many times as fast as under the
    first variant that has it."""
    lines = [f"{result['model']} on {result['machine']['device']}, {result['machine']['date']}"]
    first: dict[str, float] = {}
    for name, value in result["variants"].items():
        found = value if "failed" not in value else value.get("until_then") or {}
        lines += [f"{name} {how}: {value[how]}" for how in ("failed", "skipped") if how in value]
        for measured, seconds in _times(found).items():
            times = first.setdefault(measured, seconds) / seconds
            lines.append(f"{name:<16}{measured:<56}{seconds * 1e6:>12.1f} us{times:>7.2f} x")
        lines += [f"{name}: {row['kernel']}: {row['failed']}" for row in found.get("kernels", []) if "failed" in row]
    lines += [f"{name}, no time left for: {'; '.join(late)}" for name, late in result.get("left_out", {}).items()]
    return "\n".join(lines)


def _times(found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by what was measured."""
    times = {
        f"{row['kernel']}, {row['batch']} x {row['tokens']} tokens, {row['adapters']} adapters": row["us"] / 1e6
        for row in found.get("kernels", [])
        if "us" in row
    }
    for row in found.get("decoding", []):
        for count, ms in ((0, row["base_step_ms"]), (row["adapters"], row["step_ms"])):
            times[f"decode, {row['batch']} rows behind {row['context']}, {count} adapters"] = ms / 1e3
    for row in found.get("points", []):
        tokens = row["batch"] * row["prompt_tokens"]
        name = f"prompts, {row['batch']} x {row['prompt_tokens']} tokens, {row['adapters']} adapters"
        times[name] = tokens / row["prefill_tokens_per_s"]
    return times
