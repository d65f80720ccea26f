"""Every kernel compiles to machine code for an H200, on any machine: the interpreter accepts what compilers refuse."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REGISTERS = 65536  # of a multiprocessor of an H200, and its shared memory for one kernel's programs
SHARED_BYTES = 227 * 1024
PERSISTENT = {
    "_shrink": "lora_shrink",
    "_add_residual": "lora_residual",
    "_gate_up": "lora_gate_up",
    "_qkv": "lora_qkv",
    "_attend": "paged_attention",
    "_combine": "paged_attention",
    "_merge": "merge",
}
TILED = {"_shrink", "_add_residual", "_gate_up", "_qkv", "_attend"}  # other programs for steps with prompts
PREFILL = {f"{name} in prefill" for name in TILED | {"_combine"}}
OTHERS = {"_norm", "_sample", "_merge of fp32 pairs"}


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each kernel takes. A process of its own: this one's Triton interprets."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return kernels


def test_every_kernel_is_there_and_keeps_its_numbers_in_registers(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled.keys() == PERSISTENT.keys() | PREFILL | OTHERS
    # fp32 pairs are multiplied by the ordinary cores: up to 8 of 128 registers, read back from the L1 cache
    allowed = {name: 32 if name == "_merge of fp32 pairs" else 8 for name in compiled}
    spilling = {
        name: kernel["stack_bytes"] for name, kernel in compiled.items() if kernel["stack_bytes"] > allowed[name]
    }
    assert not spilling, f"bytes of registers kept in memory: {spilling}"


def test_programs_for_prompts_fit_beside_each_other(compiled: dict[str, dict[str, Any]]) -> None:
    """At least 8 warps on a multiprocessor: two on each of its four schedulers, one computing while another loads."""
    for name in PREFILL - {"_combine in prefill"}:
        kernel = compiled[name]
        registers = -(-kernel["registers"] // 8) * 8 * 32 * kernel["num_warps"]
        programs = min(REGISTERS // registers, SHARED_BYTES // (kernel["shared_bytes"] + 1024))
        assert programs * kernel["num_warps"] >= 8, f"{name}: {programs} programs of {kernel['num_warps']} warps fit"


def test_one_program_serves_all_layers_sites_and_step_sizes(compiled: dict[str, dict[str, Any]]) -> None:
    """Each more would be compiled when a job first needs it. A merge has one for each number of layers' bits."""
    several = {name: kernel["num_programs"] for name, kernel in compiled.items() if kernel["num_programs"] > 1}
    assert several.keys() <= {"_merge"}, several


def test_all_programs_of_a_persistent_grid_fit_at_once(compiled: dict[str, dict[str, Any]]) -> None:
    for name, operator in PERSISTENT.items():
        kernel = compiled[name]
        programs = importlib.import_module(f"lorabatch.kernels.{operator}.triton").PROGRAMS_PER_MULTIPROCESSOR
        registers = -(-kernel["registers"] // 8) * 8 * 32 * kernel["num_warps"] * programs
        assert registers <= REGISTERS, f"{name}: {programs} programs take {registers} registers"
        # every program takes 1 KiB of shared memory for the system
        shared = (kernel["shared_bytes"] + 1024) * programs
        assert shared <= SHARED_BYTES, f"{name}: {programs} programs take {shared} bytes of shared memory"


def test_products_run_on_tensor_cores_with_wide_loads(compiled: dict[str, dict[str, Any]]) -> None:
    for name in (PERSISTENT.keys() | PREFILL) - {"_combine", "_combine in prefill"}:
        assert compiled[name]["has_tensor_cores"], f"{name} multiplies on ordinary cores"
        assert compiled[name]["has_wide_loads"], f"{name} loads less than 16 bytes at a time"
