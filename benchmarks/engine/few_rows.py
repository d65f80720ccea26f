"""Steps of few rows beside the speed of memory: `python -m lorabatch.benchmarks.engine.few_rows [FILE]`.

A step of one row reads every weight once and computes little. For each number format it says how many bytes of weights
a second decode steps of 1 to 8 rows of the base read, and which share that is of what the machine's memory delivers to
a sum over a large tensor, measured in turns with the steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.engine.result import FORMAT_OPTIONS
from lorabatch.benchmarks.provenance import provenance
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.kernels.packed_weight import can_multiply
from lorabatch.kernels.packed_weight.panels import StoredWeight

NUM_ROWS = (1, 2, 4, 8)
NUM_STEPS, REPEATS = 24, 3
_READ_BYTES = 1 << 29


def memory_bytes_per_s(numbers: torch.Tensor) -> float:
    """Bytes that a sum over `numbers` reads a second."""
    began = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - began)


def weight_bytes(engine: Engine) -> int:
    """Bytes of the stored numbers of all linear layers, which every step reads."""
    decoder = engine.backend.decoder
    linears = [*(linear for layer in decoder.layers for linear in layer.linears.values()), *decoder.linears.values()]
    packed = [linear.packed for linear in linears]
    return sum(weight.numbers.nbytes for weight in packed if isinstance(weight, StoredWeight))


def step_s(engine: Engine, num_rows: int) -> float:
    """The median decode step of rows of the base with short contexts."""
    sampling = SamplingParams(max_tokens=NUM_STEPS + 1, ignore_eos=True)
    engine.add([Request(str(i), (100 + i, 101, 102), None, sampling) for i in range(num_rows)])
    engine.step()
    seconds = []
    while engine.num_unfinished:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main(model: Path | None = None, result_path: Path | None = None) -> dict[str, Any]:
    """Run the benchmark, print its result, and save it if asked. `model`: None for the demo's base."""
    from lorabatch.demo.base_model import base_model_folder

    model = model or base_model_folder()
    formats = [products for products in FORMAT_OPTIONS if can_multiply(products)]
    engines = {p: Engine(model, EngineConfig(mode="unmerged", **FORMAT_OPTIONS[p])) for p in formats}
    large = torch.ones(_READ_BYTES // 4)
    steps: dict[str, dict[int, list[float]]] = {p: {n: [] for n in NUM_ROWS} for p in formats}
    memory: list[float] = []
    for _ in range(REPEATS):
        for products, engine in engines.items():
            memory.append(max(memory_bytes_per_s(large) for _ in range(3)))
            for num_rows, found in steps[products].items():
                found.append(step_s(engine, num_rows))
    reached = max(memory)
    result = provenance(["torch"]) | {
        "benchmark": "steps of few rows",
        "model": model.name,
        "memory_gb_per_s": [round(rate / 1e9, 1) for rate in memory],
        "formats": {p: _of_format(weight_bytes(engines[p]), steps[p], reached) for p in formats},
    }
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _of_format(num_bytes: int, steps: dict[int, list[float]], reached: float) -> dict[str, Any]:
    """Figures of one format by number of rows. `reached`: the most bytes a second that a sum has read."""
    fastest = {num_rows: min(found) for num_rows, found in steps.items()}
    return {
        "weight_mb": round(num_bytes / 1e6, 1),
        "step_ms": {n: round(1e3 * s, 2) for n, s in fastest.items()},
        "weights_gb_per_s": {n: round(num_bytes / s / 1e9, 1) for n, s in fastest.items()},
        "share_of_memory_speed": {n: round(num_bytes / s / reached, 3) for n, s in fastest.items()},
    }


if __name__ == "__main__":
    main(result_path=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
