"""The device that is measured: what it is, what it can do at best, and how long a call takes on it."""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lorabatch.benchmarks.provenance import commit, installed_versions
from lorabatch.kernels.native import native_build

# Word of a name -> bytes per second of memory, dense bf16 operations per second, from the makers' data sheets (where a
# GPU has several forms, of the SXM one).
_PEAKS = {
    "B200": (8e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.04e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
}
_FLUSH_BYTES = 256 << 20  # several times an L2 cache
_CALLS = 8  # in one graph
_PACKAGES = ("torch", "triton", "transformers", "peft", "vllm", "numpy")


@dataclass(frozen=True, slots=True)
class Peaks:
    """Highest rates of a device, from which floors are computed."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """No kernel that moves `num_bytes` and computes `flops` can be faster."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def peaks_of(name: str) -> Peaks | None:
    """The data sheet's numbers for a device name, None for a device that is not listed: "GH200" is no "H200"."""
    words = re.split(r"[\s-]+", name)
    return next((Peaks(*numbers) for word, numbers in _PEAKS.items() if word in words), None)


def describe(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, commit and build of the CPU kernels, for the result file."""
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} (no GPU)",
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": installed_versions(_PACKAGES),
        "compiled_kernels": native_build(),
    }
    return facts


def warnings_about(device: torch.device, facts: Mapping[str, Any]) -> list[str]:
    """Warnings for readers of the results, as sentences: the device has no listed peaks, the CPU kernels are missing.
    `facts`: from `describe`."""
    warnings = []
    if device.type == "cuda" and peaks_of(facts["device"]) is None:
        warnings.append(
            f"device {facts['device']!r} is not in benchmarks/gpu/device.py: floors of kernels follow from the rates "
            "that section 'ceilings' measures, and from an H200's where there are none"
        )
    if facts["compiled_kernels"] is None:
        warnings.append(
            "the compiled CPU kernels are missing: adapters are read by slower copies of torch. "
            "docs/internals/kernels.md says how to build them in place"
        )
    return warnings


def median_s(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `call` as a part of a graph, as the engine runs it, without the launch of the graph.

    On a GPU some calls are captured in one graph, the L2 cache overwritten before each, so that weights come from
    memory as they do between other layers; a graph that overwrites the cache as often is subtracted.
    """
    if device.type != "cuda":
        return replay_s(call, device)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def flushed_s(then: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(_CALLS):
                flush.zero_()
                then()

        return replay_s(calls, device, repeats=8)

    return (flushed_s(call) - flushed_s(lambda: None)) / _CALLS


def replay_s(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of a graph in which `call` is captured once. Without a GPU of one call, which mean nothing."""
    if device.type != "cuda":
        return _wall_s(call)
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return eager_median_s(graph.replay, device, repeats)


def eager_median_s(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds on the GPU between two events around `call`, after two calls that are not counted."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(repeats + 2):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(times[2:])


def _wall_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.split("\n")[0].strip() or None
