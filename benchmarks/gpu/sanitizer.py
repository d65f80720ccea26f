"""Memory errors and races of the kernels, by NVIDIA's compute-sanitizer where it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
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
    """Runs every kernel at the smallest sizes under each tool. Returns tool -> its output, empty when all is right."""
    command = shutil.which("compute-sanitizer") or str(Path("/usr/local/cuda/bin/compute-sanitizer"))
    if device.type != "cuda":
        return {"skipped": "compute-sanitizer needs a GPU"}
    if not Path(command).exists():
        return {"skipped": "compute-sanitizer is not installed"}
    found: dict[str, Any] = {}
    for tool in _TOOLS:
        if not deadline.allows(tool):
            continue
        checked = [command, "--tool", tool, "--error-exitcode", str(_FOUND), sys.executable, "-c", _CHECK]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        found[tool] = output_of_failure(checked, deadline.left_s, environment)
        save(found)
    return found


def output_of_failure(command: list[str], timeout_s: float, environment: Mapping[str, str]) -> str:
    """The first lines that a command has printed, where it failed or took too long: it is then ended with all processes
    that it has started. Nothing where it succeeded."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "not done in time"
    return "" if process.returncode == 0 else "\n".join(output.splitlines()[:_LINES])
