"""Launches the kernels of one layer without a GPU, by a driver that only names its target; prints JSON.

    TRITON_INTERPRET=0 python tests/kernels/launch_kernels.py

`differing`: kernels that `launch` gives other arguments than Triton's own call does. `by_triton`: launches of the
second layer that went through Triton's own call; `operators`: tensor operators in it, views and allocations among them,
beside the launches. `host_us`: least CPU time of the thread for a layer, kernels not launched.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from lorabatch.engine.runner.compile_process import compile_for
from lorabatch.kernels.launch import launch, uses_pdl
from lorabatch.kernels.layouts.lora_table import DOWN, NUM_SITES, O_PROJ
from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.lora_gate_up import triton as gate_up
from lorabatch.kernels.lora_qkv import HeadFinish
from lorabatch.kernels.lora_qkv import triton as qkv
from lorabatch.kernels.lora_residual import triton as residual
from lorabatch.kernels.lora_shrink import triton as shrink
from lorabatch.kernels.paged_attention import triton as attention
from lorabatch.kernels.paged_attention.types import AttentionRule, allocate_partials
from lorabatch.kernels.paged_attention.work import Span, WorkLimits, plan_attention, tile_rows_for
from lorabatch.kernels.rms_norm import triton as rms_norm
from lorabatch.tests.kernels import compile_kernels as shapes

TILE_ROWS, NUM_ROWS, NUM_LAYERS, REPEATS = 64, 200, 32, 20

launched: list[tuple[str, tuple[Any, ...]]] = []
is_recording = True
KERNELS = (shrink, qkv, residual, gate_up, attention, rms_norm)


def main() -> None:
    """Launch two layers, compare, then time layers."""
    global is_recording
    compile_for(90)
    num_by_triton = [0]
    _stand_in(num_by_triton)
    layer = _layer()
    layer(0)
    launched.clear()
    num_by_triton[0] = 0
    with _Counted() as operators:
        layer(0)
    num_launches, by_triton = len(launched), num_by_triton[0]
    differing = _compare(layer)
    is_recording = False
    times = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        for number in range(NUM_LAYERS):
            layer(number)
        times.append((time.thread_time() - began_s) / NUM_LAYERS * 1e6)
    results = {
        "launches": num_launches,
        "differing": differing,
        "by_triton": by_triton,
        "operators": operators.names,
        "host_us": min(times),
    }
    json.dump(results, sys.stdout)


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _stand_in(num_by_triton: list[int]) -> None:
    """Have compiled kernels note their arguments instead of going to a GPU, and Triton's own calls be counted."""
    run = JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        num_by_triton[0] += 1
        return run(self, *args, **options)

    def noted(self: CompiledKernel) -> Callable[..., None]:
        def note(grid_0: int, grid_1: int, grid_2: int, stream: int, function: Any, *rest: Any) -> None:
            if is_recording:
                # after the metadata and the hooks come the arguments
                launched.append((self.name, (grid_0, grid_1, grid_2, stream, *rest[4:])))

        return note

    JITFunction.run = counted
    CompiledKernel.run = property(noted)
    CompiledKernel._init_handles = lambda self: None


def _compare(layer: Callable[[int], None]) -> list[str]:
    """Names of kernels that Triton's own call gives other arguments than `launch`, for the same tensors."""
    differing = []
    options = {"PDL": True, "launch_pdl": True} if uses_pdl() else {"PDL": False}

    def both(kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
        launched.clear()
        launch(kernel, num_programs, *args, **constants)
        kernel[num_programs,](*args, **options, **constants)
        (name, one), (_, other) = launched
        if not _same(one, other):
            differing.append(name)

    for module in KERNELS:
        module.launch = both
    layer(1)
    for module in KERNELS:
        module.launch = launch
    return differing


def _same(by_launch: tuple[Any, ...], by_triton: tuple[Any, ...]) -> bool:
    """Whether two launches have the same arguments: addresses on the one side are those of the other's tensors."""
    return len(by_launch) == len(by_triton) and all(
        a == b.data_ptr() if isinstance(b, torch.Tensor) else (type(a), a) == (type(b), b)
        for a, b in zip(by_launch, by_triton, strict=True)
    )


def _layer() -> Callable[[int], None]:
    """A function that launches the kernels of a layer of Llama-3-8B, as a decoder does."""
    layout = PageLayout(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=NUM_LAYERS, page_tokens=16)
    segments, table = shapes.make_segments(NUM_ROWS, TILE_ROWS), shapes.make_table()
    scratch = segments.allocate_scratch()
    x, active = shapes.bf16(NUM_ROWS, shapes.HIDDEN), shapes.bf16(NUM_ROWS, shapes.INTERMEDIATE)
    y_qkv, y_gate_up = shapes.bf16(NUM_ROWS, 48 * 128), shapes.bf16(NUM_ROWS, 2 * shapes.INTERMEDIATE)
    weight, angles = shapes.bf16(shapes.HIDDEN), torch.zeros(NUM_ROWS, 64)
    finish = HeadFinish(angles, angles, torch.zeros(NUM_ROWS, dtype=torch.int32))
    pool, q = shapes.bf16(4 * layout.page_elements), shapes.bf16(NUM_ROWS, 32, 128)
    spans = [Span(row, 1, 900 if row == 0 else 5, row) for row in range(NUM_ROWS)]
    limits = WorkLimits(shapes.rounded(2 * NUM_ROWS), NUM_ROWS, tile_rows_for(layout, q.dtype, is_decode=False), 512)
    work = plan_attention(spans, layout.queries_per_key_head, limits)
    partials = allocate_partials(64, 32, 128, torch.device("cpu"))
    tables = torch.zeros(NUM_ROWS, 64, dtype=torch.int32)

    def launch_all(layer: int) -> None:
        for site in range(NUM_SITES):
            shrink.shrink(active if site == DOWN else x, table, segments, scratch, layer, site)
        rms_norm.norm(x, None, weight, 1e-5, 0.0)
        qkv.qkv(y_qkv, finish, layout, table, segments, scratch, layer)
        attention.attend(q, q, pool, tables, work, partials, layout, layer, AttentionRule(0.1))
        residual.add_residual(x, x, x, None, table, segments, scratch, layer, O_PROJ)
        rms_norm.norm(x, None, weight, 1e-5, 0.0)
        gate_up.gate_up(active, y_gate_up, None, "silu", table, segments, scratch, layer)
        residual.add_residual(x, x, x, None, table, segments, scratch, layer, DOWN)

    return launch_all


if __name__ == "__main__":
    main()
