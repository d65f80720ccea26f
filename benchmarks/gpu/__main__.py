"""`python -m lorabatch.benchmarks.gpu [--model NAME] [--json FILE]`: right first, then how fast, under ten minutes.

Needs a GPU and no more than torch, triton and numpy. Exits with 1, measuring nothing, when a kernel is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from .correctness import check_all
from .device import describe, peaks_of
from .measure import Matrix, measure_kernels, measure_layer, measure_switches
from .shapes import LLAMA_3_8B, MODELS, ModelShape

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.gpu", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default=LLAMA_3_8B.name)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false. Run this where one is.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    problems = check_all(_DTYPES, device)
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    if problems:
        return 1
    result = measure_all(MODELS[options.model], device, Matrix())
    print(as_table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_all(shape: ModelShape, device: torch.device, matrix: Matrix) -> dict[str, Any]:
    """All measurements of one model as one JSON object. Raises ValueError for a device without known peaks."""
    facts = describe(device)
    peaks = peaks_of(facts["device"])
    if peaks is None:
        raise ValueError(f"device {facts['device']!r}: its peaks are not listed in benchmarks/gpu/device.py; add them")
    with torch.inference_mode():
        return {
            "benchmark": "gpu",
            "model": shape.name,
            "machine": facts,
            "kernels": measure_kernels(shape, matrix.batches[-1], matrix.adapters[-1], matrix.context, peaks, device),
            "switches": measure_switches(shape, peaks, device),
            "layer": measure_layer(shape, matrix, device),
        }


def as_table(result: dict[str, Any]) -> str:
    """The short table that ends a run."""
    lines = [
        f"{result['model']} on {result['machine']['device']}",
        "",
        "kernel                     us   floor  fraction",
    ]
    lines += [
        f"{row['kernel']:<22}{row['us']:>8.1f}{row['floor_us']:>8.1f}{row['fraction']:>9.0%}"
        for row in result["kernels"]
    ]
    lines += ["", *(f"{name:<18}{value:>8.2f}" for name, value in result["switches"].items())]
    lines += ["", f"{'batch':>5}{'adapters':>10}{'rank':>7}{'us/layer':>10}{'of base':>8}"]
    lines += [
        f"{row['batch']:>5}{row['adapters']:>10}{row['rank'] or '-':>7}{row['us']:>10.1f}{row['of_base']:>8.0%}"
        for row in result["layer"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
