"""The compiled library, where one was built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lorabatch.kernels import native


def test_a_library_that_was_built_for_this_processor_is_used() -> None:
    build = torch.backends.cpu.get_cpu_capability().lower()
    if not list(Path(native.__file__).parent.glob(f"_{build}.*so")):
        pytest.skip("compiled kernels were not built on this machine")
    assert native.native_build() == build, "built from other sources: build it again"
