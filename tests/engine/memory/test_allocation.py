"""Memory that an engine asks of the system."""

from pathlib import Path

import pytest
import torch

from lorabatch.engine.memory.allocation import zeroed_memory

_STATUS = Path("/proc/self/status")
_MIB = 1 << 20


def test_memory_is_zero_aligned_and_writable() -> None:
    memory = zeroed_memory(1000, torch.bfloat16)
    assert memory.shape == (1000,)
    assert memory.dtype == torch.bfloat16
    assert not memory.any()
    assert memory.data_ptr() % 64 == 0
    memory += 1
    assert memory.sum() == 1000


@pytest.mark.skipif(not _STATUS.exists(), reason="no /proc")
def test_writes_far_apart_take_only_the_pages_they_fall_on() -> None:
    memory = zeroed_memory(256 * _MIB, torch.uint8)
    before = _held_bytes()
    memory[::_MIB] = 1
    assert _held_bytes() - before < 32 * _MIB


def _held_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
