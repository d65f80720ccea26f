"""Compiles every kernel that the other sections launch, many at once, into the cache that all their processes share.

It is how engines compile theirs while they load (`engine.runner.compile_ahead`), in every number format.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.engine.runner.compile_ahead import CompileAhead, EngineKernels

# Without a GPU an H200's, to see that they compile.
_H200_CAPABILITY = 90


def compile_all(
    shape: ModelShape,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    deadline: Deadline,
    save: Callable[[Any], None],
) -> dict[str, Any]:
    """Seconds until those of each number format were compiled, how many, and what failed."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    found: dict[str, Any] = {"cores": os.cpu_count(), "seconds": {}, "num_kernels": {}, "not_compiled": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "model", shape)
        began_s = time.perf_counter()
        asked = {name: CompileAhead(EngineKernels(str(model), name, _capability(device))) for name in names}
        for name, ahead in asked.items():
            compiled = ahead.wait(deadline.left_s)
            found["seconds"][name] = round(time.perf_counter() - began_s, 1)
            found["num_kernels"][name] = compiled.num_kernels
            if compiled.problem or compiled.failed:
                found["not_compiled"][name] = compiled.problem or compiled.failed
            save(found)
    found["kernels"] = resources_of(Path(os.environ["TRITON_CACHE_DIR"])) if "TRITON_CACHE_DIR" in os.environ else []
    return found


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return _H200_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


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
