"""Memory errors and races of the kernels, by NVIDIA's compute-sanitizer where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline

_TOOLS = ("memcheck", "racecheck")
_FOUND = 9
_LINES = 40
_CHECK = (
    "import torch; from lorabatch.benchmarks.gpu.correctness import check_all;"
    "assert check_all([torch.bfloat16], torch.device('cuda')) == []"
)


def run_sanitizer(device: torch.device, deadline: Deadline, save: Callable[[Any], None]) -> dict[str, Any]:
    """What each tool says of every kernel at the smallest sizes: nothing when all is right."""
    command = shutil.which("compute-sanitizer") or str(Path("/usr/local/cuda/bin/compute-sanitizer"))
    if device.type != "cuda":
        return {"skipped": "compute-sanitizer needs a GPU"}
    if not Path(command).exists():
        return {"skipped": "compute-sanitizer is not installed"}
    found: dict[str, Any] = {}
    for tool in _TOOLS:
        if not deadline.allows(tool):
            continue
        try:
            done = subprocess.run(
                [command, "--tool", tool, "--error-exitcode", str(_FOUND), sys.executable, "-c", _CHECK],
                capture_output=True, text=True, check=False, timeout=deadline.left_s,
                env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            found[tool] = "not done in time"
            continue
        found[tool] = "" if done.returncode == 0 else "\n".join((done.stdout + done.stderr).splitlines()[:_LINES])
        save(found)
    return found
