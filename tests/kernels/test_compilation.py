"""Every kernel compiles to machine code for three kinds of GPU, on any machine: the interpreter accepts what compilers
refuse. What each one takes is in a table (`benchmarks/results`); `python tests/kernels/test_compilation.py` writes it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[2] / "benchmarks/results/2026-11-25-gpu-kernels-compiled.md"
# Shared memory of a multiprocessor, for one kernel's programs, by compute capability.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
GPUS = {80: "A100", 90: "H100, H200", 100: "B200"}
REGISTERS = 65536  # of a multiprocessor
HEAD_DIMS = (64, 96, 128, 256)
LLAMA_HEAD_DIM = 128
# Compiled with Llama-3-8B's head size only, but for those that depend on it.
OPERATORS = {
    "_shrink": "lora_shrink",
    "_add_residual": "lora_residual",
    "_gate_up": "lora_gate_up",
    "_qkv": "lora_qkv",
    "_attend": "paged_attention",
    "_combine": "paged_attention",
    "_merge": "merge",
}
OF_HEADS = {"_qkv", "_attend", "_combine"}
TILED = {"_shrink", "_add_residual", "_gate_up", *OF_HEADS}  # other programs for steps with prompts
NUMBERS = ("", " in fp16", " in fp32")  # bf16 goes without saying
WITH_GELU = {"_gate_up with gelu", "_gate_up in prefill with gelu"}
WITHOUT_NORMS = {"_qkv without norms", "_qkv in prefill without norms"}
MERGES = {"_merge of fp32 pairs", "_merge of packed pairs"}
SAMPLING = {"_find_largest", "_narrow", "_copy", "_draw"}
# Of mode `exact`.
IN_ORDER = {f"{name}{steps} in order" for name in ("_attend_in_order", "_combine") for steps in ("", " in prefill")}
PRODUCTS = {f"{name} of {rows} rows" for name in ("_multiply", "_log_sum_exp") for rows in (64, 256, 8192)}
PRODUCTS |= {"_add_splits of 64 rows", "_add_splits of 256 rows"}
DELTA = {"_convolve", "_walk", "_gate_norm"}
OTHERS = {"_norm", "_quantize", "_quantize of wide rows", *SAMPLING, *MERGES, *DELTA}
# Where kernels are launched early, those that read tiles, table and B before they wait for the ones before them.
READS_EARLY = {"_gate_up", "_add_residual", "_qkv"}
# A few registers, read back from the L1 cache: of a kernel, and of the one that multiplies by the ordinary cores. The
# kernels' sizes were chosen for an H200.
MOST_STACK_BYTES = {90: (8, 32), 80: (16, 48), 100: (16, 48)}

Kernels = dict[str, dict[str, Any]]
Compiled = dict[tuple[int, int], Kernels]


def compile_kernels(head_dims: tuple[int, ...] = HEAD_DIMS, *, pdl: bool = False) -> Compiled:
    """What each kernel takes, by compute capability and head size. Other processes: this one's Triton interprets."""
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(os.cpu_count()) as pool:
        script = Path(__file__).parent / "compile_kernels.py"
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "LORABATCH_PDL": str(int(pdl))}

        def compile_for(key: tuple[int, int]) -> Kernels:
            command = [sys.executable, script, *map(str, key)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            assert done.returncode == 0, f"{key}: {done.stderr[-3000:]}"
            kernels: Kernels = json.loads(done.stdout)
            return kernels

        keys = [(capability, head_dim) for capability in GPUS for head_dim in head_dims]
        return dict(zip(keys, pool.map(compile_for, keys), strict=True))


def programs_that_fit(kernel: dict[str, Any], capability: int) -> int:
    """On one multiprocessor at once, by registers and shared memory. The system takes 1 KiB of each program's."""
    registers = -(-kernel["registers"] // 8) * 8 * 32 * kernel["num_warps"]
    return int(min(REGISTERS // registers, SHARED_BYTES[capability] // (kernel["shared_bytes"] + 1024)))


def as_table(compiled: Compiled, version: str) -> str:
    """Markdown: registers x threads, shared memory, programs that fit, by kernel, head size and GPU."""
    lines = [
        "# GPU kernels: registers and shared memory",
        "",
        "By the compiler, without a GPU: `python tests/kernels/test_compilation.py`. Registers x threads of",
        "a program, its shared memory, and the programs that fit on a multiprocessor; bytes of registers",
        "kept in memory where there are any. Numbers are in bf16 and activations are silu where a row says",
        "nothing else. A rank is cut into chunks of 16, so that the same code serves all ranks.",
        "",
        f"Triton {version}.",
        "",
        "Triton 3.6.0 compiled those of LoRA, attention and sampling too, for sm_90 with heads of 64 and",
        "128, and sampling in fp16 and fp32 as well (2026-11-27). Of registers it keeps 32 bytes in memory",
        "in `_merge` of fp32 pairs, 16 in `_draw`, and 8 in `_attend` with heads of 64.",
        "",
        f"| kernel | head size | {' | '.join(f'{gpu} (sm_{capability})' for capability, gpu in GPUS.items())} |",
        f"|---|---{'|---' * len(GPUS)}|",
    ]
    for head_dim in sorted(HEAD_DIMS, key=lambda size: size != LLAMA_HEAD_DIM):
        for name in compiled[90, head_dim]:
            cells = " | ".join(_cell(compiled[capability, head_dim][name], capability) for capability in GPUS)
            size = head_dim if name.split()[0] in {*OF_HEADS, "_attend_in_order"} else ""
            lines.append(f"| `{name.split()[0]}`{name.removeprefix(name.split()[0])} | {size} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(kernel: dict[str, Any], capability: int) -> str:
    spilled = f", {kernel['stack_bytes']} bytes spilled" if kernel["stack_bytes"] else ""
    size = f"{kernel['registers']} x {32 * kernel['num_warps']}, {kernel['shared_bytes'] / 1024:.1f} KiB"
    return f"{size}: {programs_that_fit(kernel, capability)}{spilled}"


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_kernels()


def each(compiled: Compiled) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for (capability, _), kernels in compiled.items():
        for name, kernel in kernels.items():
            yield capability, name, kernel


@pytest.mark.long
@pytest.mark.timeout(1800)  # twelve compilations of all kernels, two at once
class TestCompiled:
    def test_every_kernel_is_there(self, compiled: Compiled) -> None:
        of_heads = OF_HEADS | {f"{name} in prefill" for name in OF_HEADS}
        tiled = {f"{name}{steps}{of}" for name in TILED for steps in ("", " in prefill") for of in NUMBERS}
        of_heads |= IN_ORDER | WITHOUT_NORMS
        everything = OPERATORS.keys() | tiled | of_heads | WITH_GELU | OTHERS | PRODUCTS
        for (_, head_dim), kernels in compiled.items():
            assert kernels.keys() == (everything if head_dim == LLAMA_HEAD_DIM else of_heads)

    def test_numbers_stay_in_registers(self, compiled: Compiled) -> None:
        spilling = {
            (capability, name): kernel["stack_bytes"]
            for capability, name, kernel in each(compiled)
            if kernel["stack_bytes"] > MOST_STACK_BYTES[capability]["fp32" in name]
        }
        # mode `exact` on a B200 with heads of 256, whose sums are twice as many numbers
        assert spilling.pop((100, "_attend_in_order in prefill in order"), 0) <= 64
        # the gated delta rule on an A100: states of 128 x 128 numbers in fp32
        assert spilling.pop((80, "_walk"), 0) <= 24
        assert not spilling, f"bytes of registers kept in memory: {spilling}"

    def test_programs_for_prompts_fit_beside_each_other(self, compiled: Compiled) -> None:
        """8 warps at least: two on each of a multiprocessor's four schedulers, one computing while another loads."""
        for capability, name, kernel in each(compiled):
            if "in prefill" in name and not name.startswith("_combine"):
                programs = programs_that_fit(kernel, capability)
                assert programs * kernel["num_warps"] >= 8, f"{name}, sm_{capability}: {programs} programs fit"

    def test_one_program_serves_all_layers_sites_and_step_sizes(self, compiled: Compiled) -> None:
        """Each more would be compiled when a job first needs it. A merge has one for each number of layers' bits."""
        several = {name for _, name, kernel in each(compiled) if kernel["num_programs"] > 1}
        assert several <= {"_merge", *PRODUCTS}, "products of weights that are split and of others"
        assert {name for _, name, kernel in each(compiled) if kernel["num_sizes"] == 1} == MERGES

    def test_all_programs_of_a_persistent_grid_fit_at_once(self, compiled: Compiled) -> None:
        """On an H200 with Llama's heads, which the numbers of programs were chosen for."""
        kernels = compiled[90, LLAMA_HEAD_DIM]
        for name, operator in OPERATORS.items():
            wanted = importlib.import_module(f"lorabatch.kernels.{operator}.triton").PROGRAMS_PER_MULTIPROCESSOR
            fit = programs_that_fit(kernels[name], 90)
            assert fit >= wanted, f"{name}: {fit} of {wanted} programs fit on a multiprocessor"

    def test_products_run_on_tensor_cores_with_wide_loads(self, compiled: Compiled) -> None:
        for capability, name, kernel in each(compiled):
            of_products = {*OPERATORS, "_multiply", "_attend_in_order"} - {"_combine"}
            if name.split()[0] in of_products and name not in OTHERS:
                is_fp32 = name.endswith("fp32")
                assert kernel["has_tensor_cores"] != is_fp32, f"{name}, sm_{capability} multiplies on other cores"
                assert kernel["has_wide_loads"], f"{name}, sm_{capability} loads less than 16 bytes at a time"

    def test_kernels_that_are_launched_early_wait(self, compiled: Compiled) -> None:
        """Where the GPU can, and in no more registers or shared memory."""
        early = compile_kernels((LLAMA_HEAD_DIM,), pdl=True)
        for (capability, head_dim), kernels in early.items():
            for name, kernel in kernels.items():
                usual, operator = compiled[capability, head_dim][name], name.split()[0]
                assert usual["early_loads"] is None
                if capability < 90 or operator in ("_merge", *SAMPLING):
                    assert kernel == usual
                    continue
                assert (kernel["early_loads"] > 0) == (operator in READS_EARLY), f"{name}, sm_{capability}"
                assert kernel["shared_bytes"] == usual["shared_bytes"]
                fit = programs_that_fit(kernel, capability)
                assert fit >= programs_that_fit(usual, capability), f"{name}, sm_{capability}: {fit} programs fit"
                assert kernel["stack_bytes"] <= MOST_STACK_BYTES[capability]["fp32" in name]

    def test_the_table_is_of_these_kernels(self, compiled: Compiled) -> None:
        import triton

        table = TABLE.read_text(encoding="utf-8")
        if f"Triton {triton.__version__}." not in table:
            pytest.skip(f"the table is of another version than Triton {triton.__version__}")
        assert as_table(compiled, triton.__version__) == table, f"run {__file__}"


if __name__ == "__main__":
    import triton

    TABLE.write_text(as_table(compile_kernels(), triton.__version__), encoding="utf-8")
