"""Counts the pages of the pool by the limits of an engine, and allocates their memory."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.layouts.pages import PageLayout
from ..errors import EngineError
from .limits import EngineLimits
from .pool import PageRange


def pages_of_pool(limits: EngineLimits) -> int:
    """Pages of an engine's pool. Raises `EngineError` for a pool without one page."""
    if limits.num_pages < 1:
        raise EngineError(
            f"pool_bytes={limits.pool_bytes}: one page of this model takes {limits.page_tokens * limits.token_bytes} "
            "bytes; raise pool_bytes."
        )
    return limits.num_pages


def zeroed_memory(num_elements: int, dtype: torch.dtype) -> Tensor:
    """`[num_elements]` on the CPU, all zero, taken from the system page by page on first use: a pool of gigabytes is
    there at once and counts only for what it holds (small pages, docs/adr/0013).
    """
    # torch.zeros writes every byte; the system hands out memory that is zero already, and aligned to its pages.
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def eraser_for(pools: Tensor, layout: PageLayout) -> Callable[[PageRange], None]:
    """A function that zeroes a run in all of `pools` [num_members, numbers of a pool]."""

    def erase(run: PageRange) -> None:
        pools[:, run.start * layout.page_elements : run.end * layout.page_elements].zero_()

    return erase
