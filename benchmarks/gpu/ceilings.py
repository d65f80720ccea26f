"""Measures what the machine can do at best: the ceilings with which the other sections' numbers are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.device import Peaks, median_s, replay_s
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.kernels.launch import empty_pinned

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 20}
_PINNED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
_ROWS = {"cuda": (64, 128, 256, 512, 8192), "cpu": (4,)}
_NODES = 100


def measure_ceilings(
    shape: ModelShape, device: torch.device, deadline: Deadline, save: Callable[[Any], None]
) -> dict[str, Any]:
    """Bytes per second of a copy on the device and from pinned memory, operations per second of the model's products,
    and microseconds of a kernel that does nothing: launched by the host, and as one more node of a graph.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {}
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("copy_bytes_per_s", lambda: _copy_bytes_per_s(device)),
        ("pinned_bytes_per_s", lambda: _pinned_bytes_per_s(device)),
        ("launch_us", lambda: _launch_us(device)),
        ("graph_us", lambda: _graph_us(device)),
        ("graph_node_us", lambda: _graph_node_us(device)),
        ("products", lambda: _products(shape, dtype, device, deadline)),
    ]
    for name, measure in steps:
        if deadline.allows(name):
            found[name] = measure()
            save(found)
    return found


def measured_peaks(found: Any, listed: Peaks) -> Peaks:
    """Rates of `measure_ceilings`, where there are any, else those of the data sheet."""
    if not isinstance(found, dict) or "copy_bytes_per_s" not in found:
        return listed
    flops = [row["flops_per_s"] for row in found.get("products", [])]
    return Peaks(found["copy_bytes_per_s"], max(flops, default=listed.flops_per_s))


def _copy_bytes_per_s(device: torch.device) -> float:
    """Read and written bytes together, of random numbers: zeros can be faster. By a kernel that writes the opposite of
    each number: in a graph a plain copy is the work of a copy engine, which is slower."""
    source = torch.randn(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES[device.type] / median_s(lambda: torch.neg(source, out=target), device)


def _pinned_bytes_per_s(device: torch.device) -> float:
    source = empty_pinned(_PINNED_BYTES[device.type], torch.uint8, device)
    target = torch.empty_like(source, device=device)
    return source.numel() / median_s(lambda: target.copy_(source, non_blocking=True), device)


def _products(shape: ModelShape, dtype: torch.dtype, device: torch.device, deadline: Deadline) -> list[dict[str, Any]]:
    """`x W^T` of each packed linear layer and of the head by torch."""
    rows: list[dict[str, Any]] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> float:
        return median_s(lambda: torch.nn.functional.linear(x, weight), device)

    for in_features, members in (*shape.sites, (shape.hidden, (shape.vocab,))):
        weight = torch.randn(sum(members), in_features, device=device).to(dtype)
        for num_rows in _ROWS[device.type]:
            if not deadline.allows(f"product of {num_rows} rows, {in_features} x {len(weight)}"):
                continue
            x = torch.randn(num_rows, in_features, device=device).to(dtype)
            seconds = product(x, weight)
            flops = 2.0 * num_rows * weight.numel()
            num_bytes = dtype.itemsize * (weight.numel() + x.numel() + num_rows * len(weight))
            rows.append(
                {
                    "rows": num_rows,
                    "in_features": in_features,
                    "out_features": len(weight),
                    "us": seconds * 1e6,
                    "flops_per_s": flops / seconds,
                    "bytes_per_s": num_bytes / seconds,
                }
            )
    return rows


def _launch_us(device: torch.device) -> float:
    """Microseconds of the host to launch a small kernel by torch."""
    one = torch.zeros(1, device=device)
    times = []
    for _ in range(5):
        _wait(device)
        began_s = time.perf_counter()
        for _ in range(_NODES):
            one.add_(1)
        times.append((time.perf_counter() - began_s) / _NODES)
    return statistics.median(times) * 1e6


def _graph_us(device: torch.device) -> float:
    """Microseconds of a graph of one small kernel: the time of a graph beside that of its kernels."""
    one = torch.zeros(1, device=device)
    return replay_s(lambda: one.add_(1), device) * 1e6


def _graph_node_us(device: torch.device) -> float:
    """Microseconds of the device from one small kernel of a graph to the next, which depends on it."""
    one = torch.zeros(1, device=device)

    def chain(length: int) -> float:
        return replay_s(lambda: [one.add_(1) for _ in range(length)], device)

    return (chain(2 * _NODES) - chain(_NODES)) / _NODES * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
