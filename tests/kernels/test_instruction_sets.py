"""The CPU kernels on processors that have less than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
#: Of compiled kernels, of what does their work where there are none, and of engines on them.
FILES = (
    "kernels/test_blocks.py",
    "kernels/test_gated.py",
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
