"""The clock of a timed run, and the memory counted from its start."""

from __future__ import annotations

import sys

import pytest
import torch

from lorabatch.benchmarks import engine_systems

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the system counts peaks since the process began")
def test_memory_that_only_warmed_the_machine_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_systems, "_WARM_BYTES", 512 * MIB)
    engine_systems._start_clock()
    at_start = engine_systems._peak_bytes()
    torch.ones(256 * MIB // 4)
    assert 200 * MIB < engine_systems._peak_bytes() - at_start < 400 * MIB
