"""The clock of a timed run, and the memory counted from its start."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from lorabatch.benchmarks.engine.systems import peak_bytes, start_clock

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the system counts peaks since the process began")
def test_memory_that_only_warmed_the_machine_is_not_counted() -> None:
    gc.collect()  # engines of other tests would be freed between the two
    start_clock(warm_bytes=512 * MIB)
    at_start = peak_bytes()
    torch.ones(256 * MIB // 4)
    assert 200 * MIB < peak_bytes() - at_start < 400 * MIB
