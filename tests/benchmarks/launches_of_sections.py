"""Runs sections of the GPU benchmark without a GPU and says which kernels they would compile; prints JSON.

    TRITON_INTERPRET=0 python tests/benchmarks/launches_of_sections.py

Nothing is compiled or launched: see `note_launches`. `sections`: kernels that sections launch beside engines, and those
`missing` that are not compiled before them. `layers`: kernels of single layers, and those `missing` that an engine of
several layers does not have.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.correctness import check_all
from lorabatch.benchmarks.gpu.device import Peaks
from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.benchmarks.gpu.measure import Matrix, measure_kernels, measure_layer, measure_switches
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.shapes import TINY, ModelShape
from lorabatch.benchmarks.gpu.warm_up import note_others
from lorabatch.engine.runner.compile_ahead import EngineKernels
from lorabatch.engine.runner.compile_process import Noted, note_kernels, note_launches

CPU, CAPABILITY = torch.device("cpu"), 90
SMALL = ModelShape("small", 256, 4, 2, 64, 512, 4, 96, settings={"max_position_embeddings": 2048})


def main() -> None:
    """Print both."""
    before = of_engine(TINY, "float32") | note_others(TINY, [torch.float32], CAPABILITY)
    of_model = of_engine(SMALL, "bfloat16")
    json.dump({"sections": compared(run_sections, before), "layers": compared(run_layers, of_model)}, sys.stdout)


def of_engine(shape: ModelShape, dtype: str) -> dict[str, Noted]:
    """Kernels that an engine of this model compiles ahead."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "model", shape)
        return note_kernels(EngineKernels(str(model), dtype, CAPABILITY))


def compared(run: Callable[[], None], expected: dict[str, Noted]) -> dict[str, list[str]]:
    """Names of what is launched, and of what is missing."""
    launched = note_launches(CAPABILITY, run).keys()
    return {"launched": sorted(launched), "missing": sorted(launched - expected.keys())}


def run_sections() -> None:
    """Checks, kernels, layers and switches, with rows as the measured batches: multiples of 16."""
    matrix = Matrix(batches=(16,), adapters=(16,), prompts=((2, 24),), ranks=(64,), context=40)
    peaks, deadline = Peaks(1.0, 1.0), Deadline.after(300.0)
    check_all([torch.float32], CPU)
    measure_kernels(TINY, matrix, peaks, CPU, deadline, lambda _: None)
    measure_layer(TINY, matrix, CPU, deadline, lambda _: None)
    measure_switches(TINY, peaks, CPU)
    assert deadline.left_out == []


def run_layers() -> None:
    """One layer where an engine has several; block tables of 1, 3 and 64 pages where an engine's is one list."""
    for context, new_tokens in ((16, 1), (40, 1), (1024, 1), (48, 48)):
        ranks = [16]
        layer = StepLayer(SMALL, 16, context, ranks, torch.bfloat16, CPU, num_programs=1, new_tokens=new_tokens)
        layer.finish = replace(layer.finish, slots=layer.finish.slots.int())
        layer.forward(torch.zeros(16 * new_tokens, SMALL.hidden, dtype=torch.bfloat16))


if __name__ == "__main__":
    main()
