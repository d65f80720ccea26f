"""What launches share."""

from __future__ import annotations

import pytest
import torch

from lorabatch.kernels.launch import empty_pinned


@pytest.mark.parametrize("number", [torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_host_memory_has_the_length_asked_for_even_none(length: int, number: torch.dtype) -> None:
    memory = empty_pinned(length, number, torch.device("cpu"))
    assert (memory.shape, memory.dtype) == ((length,), number)
