"""The same few numbers under each way to launch and to attend: for a second run, when the first has shown what is slow.

A variant is a name and variables of the environment, which its process reads when kernels are first launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.engine_matrix import Decoding, EngineMatrix, Point, measure_engine
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.benchmarks.gpu.warm_up import compile_all

#: How torch is told about its memory, in newer versions and in older ones; engines ask for expandable segments.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VARIANTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "usual": {},
        "early-launches": {"LORABATCH_PDL": "1"},
        "one-stream": {"LORABATCH_SIDE_STREAM": "0"},
        "varlen": {"LORABATCH_PROMPT_ATTENTION": "varlen"},
        "flashinfer": {"LORABATCH_PROMPT_ATTENTION": "flashinfer"},
        "fixed-segments": dict.fromkeys(ALLOCATOR, "expandable_segments:False"),
    }
)
#: Seconds of each at most: loading the model, compiling what is compiled otherwise, and its points.
VARIANT_S = 85.0


def variant_matrix() -> EngineMatrix:
    """Decoding with few rows and with many, one adapter and many; prompts of 2,048 and 8,000 tokens."""
    points = (
        Point(4, 0, None, "unmerged", 2048),
        Point(4, 4, 16, "unmerged", 2048),
        Point(1, 0, None, "unmerged", 8000),
    )
    decoding = (Decoding(64, 1024, (1, 16)), Decoding(256, 1024, (1, 256)))
    return EngineMatrix(points, decoding, repeats=2, decode_steps=32)


def tiny_variants() -> EngineMatrix:
    """For a machine without a GPU."""
    points = (Point(2, 0, None, "unmerged", 4),)
    return EngineMatrix(points, (Decoding(2, 20, (1,)),), repeats=1, decode_steps=2, warm_steps=1, max_step_tokens=16)


def measure_variant(
    folder: Path,
    shape: ModelShape,
    matrix: EngineMatrix,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int,
    deadline: Deadline,
    save: Callable[[Any], None],
) -> dict[str, Any]:
    """What the environment of this process makes of the matrix."""
    compiled: dict[str, Any] = {}
    if device.type == "cuda":
        compiled = compile_all(shape, (dtype,), device, deadline, lambda value: save({"compile": value}))
    found = measure_engine(
        folder, matrix, device, pool_bytes, deadline, lambda value: save({"compile": compiled} | value)
    )
    return {"compile": compiled} | found


def variants_table(result: Mapping[str, Any]) -> str:
    """A line for each point and variant: milliseconds, and how many times as fast as the first variant."""
    lines = [f"{result['model']} on {result['machine']['device']}, {result['machine']['date']}"]
    first: dict[tuple[Any, ...], float] = {}
    for name, value in result["variants"].items():
        found = value if "failed" not in value else value.get("until_then") or {}
        lines += [f"{name}: {value['failed']}"] if "failed" in value else []
        lines += [f"{name}: {value['skipped']}"] if "skipped" in value else []
        decoding = [
            (("decode", row["batch"], row["context"], count), ms)
            for row in found.get("decoding", [])
            for count, ms in ((0, row["base_step_ms"]), (row["adapters"], row["step_ms"]))
        ]
        prompts = [
            (
                ("prompts", row["batch"], row["prompt_tokens"], row["adapters"]),
                tokens / row["prefill_tokens_per_s"] * 1e3,
            )
            for row in found.get("points", [])
            if (tokens := row["batch"] * row["prompt_tokens"])
        ]
        for key, ms in {**dict(decoding), **dict(prompts)}.items():
            kind, rows, tokens, adapters = key
            times = first.setdefault(key, ms) / ms
            lines.append(
                f"{name:<16}{kind:<8}{rows:>5} x{tokens:>6}{adapters:>5} adapters{ms:>10.2f} ms{times:>7.2f} x"
            )
    lines += [f"{name}, no time left for: {'; '.join(late)}" for name, late in result.get("left_out", {}).items()]
    return "\n".join(lines)
