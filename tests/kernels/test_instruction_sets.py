"""The CPU kernels on processors that have less than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorabatch.kernels import cpu_instructions
from lorabatch.kernels.packed_weight import can_multiply

TESTS = Path(__file__).parents[1]
#: Of compiled kernels, of what does their work where there are none, and of engines on them.
FILES = (
    "kernels/test_blocks.py",
    "kernels/test_gated.py",
    "kernels/test_gated_delta.py",
    "kernels/test_native.py",
    "kernels/test_packed_weight.py",
    "kernels/test_paged_attention_cpu.py",
    "kernels/test_rms_norm.py",
    "kernels/test_rotary.py",
    "kernels/test_sampling_cpu.py",
    "kernels/test_segment_lora.py",
    "engine/memory/test_packed.py",
    "engine/models",
    "engine/runner/test_backend.py",
    "engine/runner/test_sampler.py",
    "engine/test_engine.py",
    "engine/test_exact_mode.py",
    "engine/test_number_formats.py",
)


@pytest.mark.long
@pytest.mark.parametrize("instructions", ["avx2", "default"])
def test_kernels_and_engines_are_right_with_fewer_instructions(instructions: str) -> None:
    if instructions == torch.backends.cpu.get_cpu_capability().lower():
        pytest.skip("all tests run with these")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in FILES)],
        cwd=TESTS.parent,
        env=os.environ | {"ATEN_CPU_CAPABILITY": instructions},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# Depths that fill no group and several, columns that fill no panel and several; rows of one block and of more.
PRODUCTS_IN_8_BITS = """
import hashlib, torch
from lorabatch.kernels.packed_weight import pack
found = hashlib.sha256()
for columns, depth, num_rows in ((7, 5, 3), (37, 33, 13), (96, 576, 40)):
    generator = torch.Generator().manual_seed(columns)
    weight, x = (torch.randn(n, depth, generator=generator) for n in (columns, num_rows))
    found.update(pack(weight, "int8").multiply(x, weight[:, 0].contiguous()).numpy().tobytes())
print(found.hexdigest())
"""


@pytest.mark.skipif(
    not {"AVX512_VNNI", "AVX_VNNI"} <= {*cpu_instructions()} or not can_multiply("int8"),
    reason="this processor has not both kinds of instructions for 8 bits",
)
def test_products_in_8_bits_have_the_same_bits_with_vectors_of_either_width() -> None:
    found = {
        instructions: subprocess.check_output(
            [sys.executable, "-c", PRODUCTS_IN_8_BITS],
            cwd=TESTS.parent,
            env=os.environ | {"ATEN_CPU_CAPABILITY": instructions},
            text=True,
        )
        for instructions in ("avx512", "avx2")
    }
    assert found["avx512"] == found["avx2"]
