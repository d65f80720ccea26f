"""Checks what the other sections take for granted of torch and the device: one answer each, in seconds."""

from __future__ import annotations

import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.kernels.launch import empty_pinned

_POOL_BYTES = 62 << 30  # as the pool of an engine on a card of 80 GB
_CAPTURES = 10


def measure_probe(device: torch.device, deadline: Deadline, save: Callable[[Any], None]) -> dict[str, str]:
    """Step -> its result, or the error that it raised, which begins with `failed: `."""
    found: dict[str, str] = {}
    if device.type != "cuda":
        return {"device": "no GPU"}
    steps: list[tuple[str, Callable[[], str]]] = [
        ("allocator", lambda: os.environ.get("PYTORCH_ALLOC_CONF", "as torch has it")),
        ("one pool", lambda: _one_pool(device)),
        ("pinned memory", lambda: _pinned(device)),
        ("captures beside loads", lambda: _captures_beside_loads(device)),
        ("varlen attention", _varlen),
    ]
    for name, step in steps:
        if not deadline.allows(name):
            continue
        try:
            found[name] = step()
        except Exception as error:
            traceback.print_exc()
            found[name] = f"failed: {type(error).__name__}: {error}"
        save(found)
    return found


def _one_pool(device: torch.device) -> str:
    """Memory as large as a pool, in one piece."""
    num_bytes = min(_POOL_BYTES, torch.cuda.mem_get_info(device)[0] * 3 // 4)
    pool = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    del pool
    torch.cuda.empty_cache()
    return f"{num_bytes >> 30} GiB"


def _pinned(device: torch.device) -> str:
    source = empty_pinned(256 << 20, torch.uint8, device)
    target = torch.empty_like(source, device=device)
    for _ in range(2):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    return f"{source.numel() / (time.perf_counter() - began_s) / 1e9:.1f} GB/s"


def _captures_beside_loads(device: torch.device) -> str:
    """Graphs with a second stream inside, captured while a thread makes adapters and pins memory. Raises AssertionError
    where a replay says something else than the same work launched kernel by kernel."""
    weight, x = (torch.randn(rows, 4096, device=device, dtype=torch.bfloat16) for rows in (4096, 64))
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ends, errors, num_loads = threading.Event(), [], 0

    def load() -> None:
        nonlocal num_loads
        try:
            while not ends.is_set():
                generator = torch.Generator(device=device).manual_seed(num_loads)
                numbers = torch.empty(16, 1 << 18, device=device, dtype=torch.bfloat16)
                numbers.normal_(0, 0.02, generator=generator).t().contiguous()
                empty_pinned(1 << 20, torch.uint8, device)
                num_loads += 1
        except Exception as error:
            errors.append(error)

    def work() -> tuple[Tensor, Tensor]:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            largest = x.float().amax(-1)
        y = torch.nn.functional.linear(x, weight)
        main.wait_stream(side)
        return y.argmax(-1), largest

    thread, pool, times = threading.Thread(target=load), torch.cuda.graph_pool_handle(), []
    graphs = []  # a pool that lost its last graph takes no other
    thread.start()
    try:
        for _ in range(_CAPTURES):
            work()
            graph, began_s = torch.cuda.CUDAGraph(), time.perf_counter()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                found = work()
            times.append(time.perf_counter() - began_s)
            graphs.append(graph)
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, work())), "a graph and the same work without it differ"
    finally:
        ends.set()
        thread.join()
    if errors:
        raise errors[0]
    return f"{num_loads} adapters meanwhile, a capture takes {sorted(times)[len(times) // 2] * 1e3:.1f} ms"


def _varlen() -> str:
    from torch.nn.attention.varlen import varlen_attn

    return f"parameters {', '.join(inspect.signature(varlen_attn).parameters)}"
