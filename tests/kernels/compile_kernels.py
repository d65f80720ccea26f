"""Compiles every kernel to H200 machine code on a machine without a GPU; prints what each one takes, as JSON.

Run with TRITON_INTERPRET=0. The compiler is real; a driver that only names its target stands in for the GPU's, and
kernels are reached through their own wrappers, with Llama-3-8B's shapes in bf16, but are not launched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lorabatch.kernels.kv_write import triton as kv_write
from lorabatch.kernels.lora_gate_up import triton as gate_up
from lorabatch.kernels.lora_qkv import HeadFinish, HeadLayout
from lorabatch.kernels.lora_qkv import triton as qkv
from lorabatch.kernels.lora_residual import triton as residual
from lorabatch.kernels.lora_shrink import triton as shrink
from lorabatch.kernels.lora_table import O_PROJ, QKV, LoraTable
from lorabatch.kernels.merge import MergeJob, MergePair
from lorabatch.kernels.merge import triton as merge
from lorabatch.kernels.paged_attention import triton as attention
from lorabatch.kernels.paged_attention.gpu import AttentionRule, Partials
from lorabatch.kernels.paged_attention.work import Span, WorkLimits, plan_attention
from lorabatch.kernels.rms_norm import triton as rms_norm
from lorabatch.kernels.sampling import SamplingRows
from lorabatch.kernels.sampling import triton as sampling
from lorabatch.kernels.segments import SegmentLimits, Segments, plan_segments, rows_of

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LAYOUT = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=1, page_tokens=16)
HIDDEN, INTERMEDIATE = 4096, 14336


class _TargetOnly:
    """The part of a driver that compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def main() -> None:
    """Compile all, print `{kernel: {registers, stack_bytes, shared_bytes, has_tensor_cores, has_wide_loads}}`."""
    triton.runtime.driver.set_active(_TargetOnly())
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled[self.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    _reach_linear_kernels()
    _reach_other_kernels()
    json.dump({name: _describe(kernel) for name, kernel in compiled.items()}, sys.stdout)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _segments() -> Segments:
    counts = np.ones((2, 4), np.int32)
    limits = SegmentLimits(max_rows=16, max_items=64, scratch_rows=256)
    return plan_segments(rows_of([0, 1]), rows_of([-1, -1]), counts, limits, num_programs=1)


def _reach_linear_kernels() -> None:
    table = LoraTable.allocate(_bf16(1 << 16), num_residents=2, num_layers=1, num_chunks=8, alignment=8)
    segments = _segments()
    scratch = segments.allocate_scratch()
    x, weight = _bf16(2, HIDDEN), _bf16(128)
    shrink.shrink(x, table, segments, scratch, 0, QKV)
    residual.add_residual(x, _bf16(2, HIDDEN), x, None, table, segments, scratch, 0, O_PROJ)
    y = _bf16(2, 2 * INTERMEDIATE)
    gate_up.gate_up(_bf16(2, INTERMEDIATE), y, None, "silu", table, segments, scratch, 0)
    angles, slots = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int32)
    finish = HeadFinish(angles, angles, slots, bias=_bf16(48 * 128), q_norm=weight, k_norm=weight)
    qkv.qkv(_bf16(2, 48 * 128), finish, LAYOUT, table, segments, scratch, 0)


def _reach_other_kernels() -> None:
    pool, q = _bf16(4 * LAYOUT.page_elements), _bf16(2, 32, 128)
    keys, slots = _bf16(2, 8, 128), torch.zeros(2, dtype=torch.int32)
    kv_write.write(keys, keys, slots, pool, LAYOUT, 0)
    work = plan_attention([Span(0, 1, 900, 0), Span(1, 1, 5, 1)], 4, WorkLimits(64, 16, 16, 512))
    partials = Partials.allocate(64, 32, 128, torch.device("cpu"))
    tables = torch.zeros(2, 64, dtype=torch.int32)
    attention.attend(q, q, pool, tables, work, partials, LAYOUT, 0, AttentionRule(0.1, window=512, softcap=50.0))
    x = _bf16(2, HIDDEN)
    rms_norm.norm(x, x, _bf16(HIDDEN), 1e-5, 0.0)
    job = MergeJob(_bf16(256, 256), _bf16(256, 256), (MergePair(_bf16(16, 256), _bf16(256, 16), 1.0),))
    merge.merge([job], torch.bfloat16, torch.zeros(1, dtype=torch.int32))
    ints = torch.zeros(2, dtype=torch.int64)
    rows = SamplingRows(torch.ones(2), ints.int(), torch.ones(2, dtype=torch.float64), ints, ints, ints)
    sampling.sample(ints, _bf16(2, 4096), rows)


def _describe(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    return {
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "has_tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
        "has_wide_loads": bool(re.search(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10|ld\.global\S*\.v4\.b32", ptx)),
    }


if __name__ == "__main__":
    main()
