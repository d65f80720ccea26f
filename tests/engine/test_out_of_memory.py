"""Deaths of memory are told from other deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lorabatch.engine.out_of_memory import is_out_of_memory, kernel_kills


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory of what was said"), False),
    ],
)
def test_what_allocators_raise_is_recognised(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_torch_itself_raises_what_is_recognised() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_kernels_count_is_read_where_there_is_one(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert kernel_kills(vmstat) == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 7\npgfault 3\n")
    assert kernel_kills(vmstat) == 7
    vmstat.write_text("nr_free_pages 12\n")
    assert kernel_kills(vmstat) == 0
