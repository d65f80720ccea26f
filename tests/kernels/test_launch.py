"""What launches share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorabatch.kernels.launch import empty_pinned


@pytest.mark.parametrize("number", [torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_host_memory_has_the_length_asked_for_even_none(length: int, number: torch.dtype) -> None:
    memory = empty_pinned(length, number, torch.device("cpu"))
    assert (memory.shape, memory.dtype) == ((length,), number)


@pytest.mark.long
def test_compiled_kernels_get_what_triton_s_own_call_gives_them() -> None:
    """On a machine without a GPU: both calls end at the launcher, which notes its arguments here."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "launch_kernels.py"],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert results["launches"] == 12
    assert results["differing"] == []
    assert results["by_triton"] == 0, "kernels that were compiled went through Triton's own call again"
