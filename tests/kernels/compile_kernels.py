"""Compiles every kernel to a GPU's machine code on a machine without a GPU; prints what each one takes, as JSON.

    TRITON_INTERPRET=0 python tests/kernels/compile_kernels.py CAPABILITY HEAD_DIM

CAPABILITY is 80 (A100), 90 (H100, H200) or 100 (B200). The compiler is real; a driver that only names its target
stands in for the GPU's, and kernels are reached through their own wrappers, but are not launched. Shapes are those of
Llama-3-8B but for HEAD_DIM, numbers are in bf16. With another one than its 128, only kernels that depend on it are
compiled; with 128 LoRA and attention in fp16 and fp32 too, and the activation of Gemma.
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
from triton.runtime.jit import JITFunction

from lorabatch.engine.runner.compile_process import compile_for
from lorabatch.engine.runner.gpu_plan import DECODE_TILE_ROWS, PREFILL_TILE_ROWS, rounded
from lorabatch.kernels import launch as kernel_launch
from lorabatch.kernels.gated_delta import DeltaParameters, DeltaRows, DeltaSizes
from lorabatch.kernels.gated_delta import triton as gated_delta
from lorabatch.kernels.invariant_linear import triton as invariant_linear
from lorabatch.kernels.layouts.lora_table import DOWN, NUM_SITES, O_PROJ, LoraTable
from lorabatch.kernels.layouts.pages import PageLayout
from lorabatch.kernels.layouts.segments import SegmentLimits, Segments, plan_segments
from lorabatch.kernels.log_sum_exp import triton as log_sum_exp
from lorabatch.kernels.lora_gate_up import triton as gate_up
from lorabatch.kernels.lora_qkv import HeadFinish
from lorabatch.kernels.lora_qkv import triton as qkv
from lorabatch.kernels.lora_residual import triton as residual
from lorabatch.kernels.lora_shrink import triton as shrink
from lorabatch.kernels.merge import LoraPair, MergeJob
from lorabatch.kernels.merge import triton as merge
from lorabatch.kernels.packed_weight import triton as fp8
from lorabatch.kernels.paged_attention import invariant as invariant_attention
from lorabatch.kernels.paged_attention import triton as attention
from lorabatch.kernels.paged_attention.types import AttentionRule, allocate_partials
from lorabatch.kernels.paged_attention.work import SEGMENT_KEYS, Span, WorkLimits, plan_attention, tile_rows_for
from lorabatch.kernels.rms_norm import triton as rms_norm
from lorabatch.kernels.sampling import SamplingRows
from lorabatch.kernels.sampling import triton as sampling

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HIDDEN, INTERMEDIATE = 4096, 14336
LLAMA_HEAD_DIM = 128
NUMBERS = {torch.bfloat16: "", torch.float16: " in fp16", torch.float32: " in fp32"}
PARTS = [(4096, 1024, 1024), (HIDDEN,), (INTERMEDIATE, INTERMEDIATE), (HIDDEN,)]


def main() -> None:
    """Compile all, print `{kernel: {registers, stack_bytes, shared_bytes, has_tensor_cores, early_loads, …}}`."""
    capability, head_dim = map(int, sys.argv[1:])
    compile_for(capability)
    layout = PageLayout(num_heads=32, num_kv_heads=8, head_dim=head_dim, num_layers=1, page_tokens=16)
    compile_all = head_dim == LLAMA_HEAD_DIM
    compiled: dict[str, Any] = {}
    reached: dict[str, set[tuple[int, int]]] = {}  # programs and the steps' sizes, by kernel
    run = JITFunction.run
    kind, num_rows = "", 0

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[self.__name__ + kind] = kernel
        reached.setdefault(self.__name__ + kind, set()).add((id(kernel), num_rows))
        kernel_launch._LAUNCHES.clear()  # so that Triton is asked each time whether it would compile anew

    JITFunction.run = compile_only
    # As a model's layers and steps of several sizes would. Triton compiles anew for numbers that are 1, or multiples of
    # 16 where others were not; 255 more rows of scratch make other multiples of 16 than the rows are.
    for tile_rows, of_steps, steps in (
        (DECODE_TILE_ROWS, "", ((0, 2), (1, 3), (2, 40), (16, 16), (5, 1), (3, 17))),
        (PREFILL_TILE_ROWS, " in prefill", ((0, 200), (1, 97), (16, 256), (2, 37))),
    ):
        for dtype, of_numbers in NUMBERS.items() if compile_all else [(torch.bfloat16, "")]:
            kind = of_steps + of_numbers
            for layer, num_rows in steps:
                _reach_kernels_of_heads(layout, layer, num_rows, tile_rows, dtype)
                if compile_all:
                    _reach_tiled_kernels(layer, num_rows, tile_rows, dtype)
        kind = of_steps + " with gelu"
        for layer, num_rows in steps if compile_all else ():
            _reach_gate_up(layer, num_rows, tile_rows, torch.bfloat16, "gelu_tanh")
        kind = of_steps + " without norms"
        for layer, num_rows in steps:
            _reach_qkv(layout, layer, num_rows, tile_rows, torch.bfloat16)
        kind = of_steps + " in order"
        for layer, num_rows in steps:
            _reach_attention_in_order(layout, layer, num_rows, is_decode=tile_rows < PREFILL_TILE_ROWS)
    if compile_all:
        for most_rows in (64, 256, 8192):
            kind = f" of {most_rows} rows"
            for num_rows in (most_rows - 8, most_rows):
                _reach_products(num_rows)
        kind = ""
        for num_rows in (2, 3, 40, 16, 1, 17):
            _reach_other_kernels(num_rows)
            _reach_gated_delta(num_rows)
        kind = " of wide rows"
        for num_rows in (1, 3, 64):
            fp8.quantize(bf16(num_rows, INTERMEDIATE))
        kind = " of fp32 pairs"
        _reach_merge(1, torch.float32)
        kind = " of packed pairs"
        _reach_merge(1, torch.bfloat16, is_packed=True)
    json.dump({name: _describe(kernel) | _counts(reached[name]) for name, kernel in compiled.items()}, sys.stdout)


def bf16(*shape: int) -> torch.Tensor:
    """Zeros, [*shape]."""
    return zeros(torch.bfloat16, *shape)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """[*shape]"""
    return torch.zeros(shape, dtype=dtype)


def make_segments(num_rows: int, tile_rows: int) -> Segments:
    """Rows of two adapters in turn, one chunk each at every site."""
    counts = np.ones((2, 4), np.int32)
    # as a runner's scratch grows
    limits = SegmentLimits(rounded(num_rows), rounded(2 * num_rows), scratch_rows=255 + num_rows, tile_rows=tile_rows)
    plus, minus = np.arange(num_rows, dtype=np.int32) % 2, np.full(num_rows, -1, np.int32)
    return plan_segments(plus, minus, counts, limits, num_programs=1)


def make_table(dtype: torch.dtype = torch.bfloat16) -> LoraTable:
    """An empty table of Llama-3-8B's 32 layers."""
    return LoraTable.allocate(
        zeros(dtype, 1 << 16), num_residents=2, num_layers=32, num_chunks=8, parts=PARTS, alignment=8
    )


def _reach_qkv(
    layout: PageLayout, layer: int, num_rows: int, tile_rows: int, dtype: torch.dtype, norm: torch.Tensor | None = None
) -> None:
    columns = (layout.num_heads + 2 * layout.num_kv_heads) * layout.head_dim
    segments = make_segments(num_rows, tile_rows)
    angles, slots = torch.zeros(num_rows, layout.head_dim // 2), torch.zeros(num_rows, dtype=torch.int32)
    finish = HeadFinish(angles, angles, slots, bias=zeros(dtype, columns), q_norm=norm, k_norm=norm)
    y = zeros(dtype, num_rows, columns)
    qkv.qkv(y, finish, layout, make_table(dtype), segments, segments.allocate_scratch(), layer)


def _reach_kernels_of_heads(layout: PageLayout, layer: int, num_rows: int, tile_rows: int, dtype: torch.dtype) -> None:
    head_dim, is_decode = layout.head_dim, tile_rows < 64
    _reach_qkv(layout, layer, num_rows, tile_rows, dtype, norm=zeros(dtype, head_dim))
    pool, q = zeros(dtype, 4 * layout.page_elements), zeros(dtype, num_rows, layout.num_heads, head_dim)
    spans = [Span(row, 1, 900 if row == 0 else 5, row) for row in range(num_rows)]
    limits = WorkLimits(rounded(2 * num_rows), num_rows, tile_rows_for(layout, q.dtype, is_decode), 512)
    work = plan_attention(spans, layout.queries_per_key_head, limits)
    partials = allocate_partials(64, layout.num_heads, head_dim, torch.device("cpu"))
    tables = torch.zeros(num_rows, 64, dtype=torch.int32)
    if head_dim == LLAMA_HEAD_DIM:
        rule, sinks = AttentionRule(0.1), None
    else:
        rule, sinks = AttentionRule(0.1, window=512, softcap=50.0), zeros(dtype, layout.num_heads)
    attention.attend(q, q, pool, tables, work, partials, layout, layer, rule, sinks)


def _reach_attention_in_order(layout: PageLayout, layer: int, num_rows: int, *, is_decode: bool) -> None:
    """Of mode `exact`."""
    pool, q = bf16(4 * layout.page_elements), bf16(num_rows, layout.num_heads, layout.head_dim)
    spans = [Span(row, 1, 2 * SEGMENT_KEYS if row == 0 else 5, row) for row in range(num_rows)]
    tile_rows = tile_rows_for(layout, q.dtype, is_decode, is_exact=True)
    limits = WorkLimits(rounded(3 * num_rows), num_rows, tile_rows, SEGMENT_KEYS, SEGMENT_KEYS)
    work = plan_attention(spans, layout.queries_per_key_head, limits)
    partials = allocate_partials(64, layout.num_heads, layout.head_dim, torch.device("cpu"))
    tables = torch.zeros(num_rows, 64, dtype=torch.int32)
    sinks = None if layout.head_dim == LLAMA_HEAD_DIM else bf16(layout.num_heads)
    invariant_attention.attend(q, q, pool, tables, work, partials, layout, layer, AttentionRule(0.1), sinks)


def _reach_products(num_rows: int) -> None:
    """Of mode `exact`: of a weight whose products are not split, and of one whose are."""
    for in_features, out_features in ((HIDDEN, sum(PARTS[0])), (INTERMEDIATE, HIDDEN)):
        invariant_linear.multiply_rows(
            bf16(num_rows, out_features), bf16(num_rows, in_features), bf16(out_features, in_features), None
        )
    log_sum_exp.sum_rows(torch.zeros(num_rows), bf16(num_rows, HIDDEN))


def _reach_tiled_kernels(layer: int, num_rows: int, tile_rows: int, dtype: torch.dtype) -> None:
    table, segments = make_table(dtype), make_segments(num_rows, tile_rows)
    scratch = segments.allocate_scratch()
    x = zeros(dtype, num_rows, HIDDEN)
    for site in range(NUM_SITES):
        shrink.shrink(x, table, segments, scratch, layer, site)
    for site in (O_PROJ, DOWN):
        residual.add_residual(x, zeros(dtype, num_rows, HIDDEN), x, None, table, segments, scratch, layer, site)
    _reach_gate_up(layer, num_rows, tile_rows, dtype, "silu")


def _reach_gate_up(layer: int, num_rows: int, tile_rows: int, dtype: torch.dtype, activation: str) -> None:
    segments = make_segments(num_rows, tile_rows)
    y, active = zeros(dtype, num_rows, 2 * INTERMEDIATE), zeros(dtype, num_rows, INTERMEDIATE)
    scratch = segments.allocate_scratch()
    gate_up.gate_up(active, y, None, activation, make_table(dtype), segments, scratch, layer)


def _reach_other_kernels(num_rows: int) -> None:
    x = bf16(num_rows, HIDDEN)
    rms_norm.norm(x, x, bf16(HIDDEN), 1e-5, 0.0)
    fp8.quantize(x)
    _reach_merge(min(num_rows, 7), torch.bfloat16)
    ints = torch.zeros(num_rows, dtype=torch.int64)
    ones = torch.ones(num_rows)
    rows = SamplingRows(ones, ints.int(), ones.double(), ints, ints, ints)
    sampling.sample(ints, bf16(num_rows, 4096), rows)


def _reach_gated_delta(num_rows: int) -> None:
    """Of the sizes of Qwen3.5's layers."""
    sizes = DeltaSizes(key_heads=16, value_heads=32, key_size=128, value_size=128, taps=4)
    conv, heads = zeros(torch.float32, sizes.taps, sizes.channels), torch.zeros(sizes.value_heads)
    parameters = DeltaParameters(conv, heads, heads, torch.zeros(sizes.value_size), 1e-6)
    places = torch.zeros(num_rows, dtype=torch.int64)
    rows = DeltaRows(torch.arange(num_rows + 1), places, torch.ones(num_rows, dtype=torch.bool))
    gated_delta.walk_by_triton(bf16(num_rows, sizes.projected), sizes, parameters, torch.zeros(16), rows)


def _reach_merge(num_layers: int, dtype: torch.dtype, *, is_packed: bool = False) -> None:
    """Pairs of the type they were stored in, often fp32; or as they lie in the pool, with B transposed."""
    a, b = torch.zeros(16, 256, dtype=dtype), torch.zeros(256, 16, dtype=dtype)
    if is_packed:
        b = b.t().contiguous().t()
    jobs = [MergeJob(bf16(256, 256), bf16(256, 256), (LoraPair(a, b, 1.0),))] * num_layers
    merge.merge(jobs, dtype, torch.zeros(1, dtype=torch.int32))


def _counts(reached: set[tuple[int, int]]) -> dict[str, int]:
    programs, sizes = map(set, zip(*reached, strict=True))
    return {"num_programs": len(programs), "num_sizes": len(sizes)}


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
        "has_tensor_cores": any(name in ptx for name in ("mma.sync", "wgmma", "tcgen05.mma")),
        "early_loads": _early_loads(kernel),
        "has_wide_loads": bool(re.search(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10|ld\.global\S*\.v4\.b32", ptx)),
    }


def _early_loads(kernel: Any) -> int | None:
    """Loads before the kernel waits for the one before it; None where it is launched when that has ended."""
    ptx = kernel.asm["ptx"]
    has_both = all(f"griddepcontrol.{name}" in ptx for name in ("wait", "launch_dependents"))
    assert kernel.metadata.launch_pdl == has_both == ("griddepcontrol" in ptx)
    return ptx[: ptx.index("griddepcontrol.wait")].count("ld.global") if has_both else None


if __name__ == "__main__":
    main()
