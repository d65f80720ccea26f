"""Compiles every kernel that the other sections launch, many at once, into the cache that all their processes share.

Engines of the measured model do it as when they load (`engine.runner.compile_ahead`), in every number format. One more
process compiles what checks and single layers launch beside them: it runs them once on a CPU, where nothing is launched
and Triton says what it would compile.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.correctness import check_all
from lorabatch.benchmarks.gpu.engine_checks import DEEP, WIDE, one_layer
from lorabatch.benchmarks.gpu.kernel_cases import kernel_cases
from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.shapes import TINY, ModelShape
from lorabatch.engine.runner.compile_ahead import EngineKernels, result_of, start_compiler, start_compiling
from lorabatch.engine.runner.compile_process import Noted, compile_noted, note_kernels, note_launches
from lorabatch.kernels.invariant_linear import invariant_linear
from lorabatch.kernels.merge import merge_weights
from lorabatch.system.confinement import end_with

# Without a GPU an H200's, to see that they compile.
_H200_CAPABILITY = 90
# Rows of a layer and ranks: multiples of 16 as those of all measured steps, by which Triton compiles.
_ROWS, _RANKS = 16, [16]
# Rows of products in mode `exact`, whose tiles follow from the number of rows.
_PRODUCT_ROWS = (16, 64, 128, 256, 512, 8192)


def compile_all(
    shape: ModelShape,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    deadline: Deadline,
    save: Callable[[Any], None],
    *,
    with_checks: bool = True,
) -> dict[str, Any]:
    """Seconds until those of each number format were compiled, how many, and what failed; `others`: of what is launched
    beside the measured model's engines, checks only if asked. The first of `dtypes` is the measured one."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    found: dict[str, Any] = {"cores": os.cpu_count(), "seconds": {}, "num_kernels": {}, "not_compiled": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "model", shape)
        began_s, capability = time.perf_counter(), _capability(device)
        processes = {name: start_compiling(EngineKernels(str(model), name, capability)) for name in names}
        processes["others"] = start_compiler(__name__, json.dumps([asdict(shape), names, capability, with_checks]))
        for name, process in processes.items():
            num_kernels, missing = (0, "") if process is None else result_of(process, deadline.left_s)
            found["seconds"][name] = round(time.perf_counter() - began_s, 1)
            found["num_kernels"][name] = num_kernels
            if missing:
                found["not_compiled"][name] = missing
            save(found)
    found["kernels"] = resources_of(Path(os.environ["TRITON_CACHE_DIR"])) if "TRITON_CACHE_DIR" in os.environ else []
    return found


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return _H200_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def note_others(
    shape: ModelShape, dtypes: list[torch.dtype], capability: int, *, with_checks: bool = True
) -> dict[str, Noted]:
    """Kernels that sections launch beside engines of the measured model, by what they are compiled by."""
    cpu = torch.device("cpu")
    with _Unfilled():
        noted = note_launches(capability, lambda: _launch_layers(shape, dtypes[0], cpu))
    if with_checks:
        noted |= note_launches(capability, lambda: check_all(dtypes, cpu))
    return noted


class _Unfilled(TorchFunctionMode):
    """Leaves random numbers out: an 8B's layer has 218 million of them, and nothing reads them here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip `normal_`, and allocate for `randn` without filling; call every other function as it is."""
        if func is torch.Tensor.normal_:
            return args[0]
        return (torch.empty if func is torch.randn else func)(*args, **(kwargs or {}))


def _launch_layers(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
    """Each kernel alone, in decode and over prompts, and a merge into all layers."""
    for new_tokens in (1, _ROWS):
        layer = StepLayer(shape, _ROWS, _ROWS, _RANKS, dtype, device, num_programs=1, new_tokens=new_tokens)
        for case in kernel_cases(layer, _RANKS):
            case.run()
    for num_rows, weight in itertools.product(_PRODUCT_ROWS, layer.weights):
        invariant_linear(torch.empty(num_rows, weight.shape[1], dtype=dtype, device=device), weight)
    _, jobs = layer.merge_jobs(0)
    merge_weights(jobs * shape.num_layers)


def resources_of(cache: Path) -> list[dict[str, Any]]:
    """Registers, bytes of them kept in memory, shared memory and warps of every kernel in a cache of Triton's."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    rows = []
    for code in sorted(cache.glob("*/*.cubin")):
        facts = json.loads(code.with_suffix(".json").read_text(encoding="utf-8"))
        usage = subprocess.run(
            [tool, "--dump-resource-usage", code], capture_output=True, text=True, check=False
        ).stdout
        numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        rows.append(
            {
                "kernel": code.stem,
                "registers": numbers.get("REG"),
                "stack_bytes": numbers.get("STACK", 0) + numbers.get("LOCAL", 0),
                "shared_bytes": facts.get("shared"),
                "num_warps": facts.get("num_warps"),
            }
        )
    return rows


def main() -> int:
    """Entry point of the process that compiles what sections launch beside engines."""
    parent, (shape, names, capability, with_checks) = int(sys.argv[1]), json.loads(sys.argv[2])
    end_with(parent)
    model, dtypes = ModelShape(**shape), [getattr(torch, name) for name in names]
    noted = note_others(model, dtypes, capability, with_checks=with_checks)
    with tempfile.TemporaryDirectory() as folder:
        engines = checked_engines(Path(folder), model, names, capability) if with_checks else []
        for kernels in engines:
            noted |= note_kernels(kernels)
        result = compile_noted(noted)
        if not result["failed"]:
            for kernels in engines:  # each would start a process to find them compiled
                kernels.done.touch()
    print(json.dumps(result))
    return 0


def checked_engines(folder: Path, shape: ModelShape, names: list[str], capability: int) -> list[EngineKernels]:
    """Kernels of the engines that `engine_checks` starts for the measured model, in number formats of these `names`."""
    tiny, narrow = write_model_folder(folder / "tiny", TINY), write_model_folder(folder / "narrow", one_layer(shape))
    deep, wide = write_model_folder(folder / "deep", DEEP), write_model_folder(folder / "wide", WIDE)
    engines = [(tiny, name) for name in names if shape != TINY] + [(narrow, names[0]), (deep, "float32")]
    exact = [(tiny, names[0]), (wide, names[0])]
    return [
        *(EngineKernels(str(model), name, capability) for model, name in engines),
        *(EngineKernels(str(model), name, capability, is_exact=True) for model, name in exact),
    ]


if __name__ == "__main__":
    sys.exit(main())
