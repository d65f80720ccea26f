"""Copies adapters between host memory and the pool: at once on a CPU, on a stream of their own on a GPU.

    copy stream      | waits for n | pinned numbers -> pages |            an adapter for rows that wait
    compute stream   step n        | step n+1, other rows    | step n+2 with those rows

An adapter is one flat tensor on the host and pages anywhere in the pool, so moving it is a copy for each run of pages.
Of rank 16 for an 8B model it is 84 MB in 40 pages: 1.7 ms at PCIe 5's 50 GB/s, a third of a decode step, which other
rows use. Only where nothing else could run does a step
wait for a copy, on the device; the host never does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...kernels.launch import empty_pinned
from .pool import PageRange

#: Parts of an adapter, one behind the other: the place of the first number in the pool, and how many follow it.
Parts = tuple[tuple[int, int], ...]


def parts_in(runs: Iterable[PageRange], page_elements: int, size: int) -> Parts:
    """Parts of an adapter of `size` numbers in runs of pages of the pool."""
    parts = []
    for run in runs:
        count = min(run.num_pages * page_elements, size)
        parts.append((run.start * page_elements, count))
        size -= count
    assert not size, f"{size} numbers have no page"
    return tuple(parts)


class Arrival:
    """A copy to the pool, which was done when it began; subclasses are copies in flight."""

    def is_done(self) -> bool:
        """Whether the copy is done. Asking waits for nothing."""
        return True

    def join(self) -> None:
        """Make all work launched from now on run after the copy."""


class AdapterCopies:
    """Copies adapters between host and pool, in the order of the calls: here at once, so that a copy is done when the
    call returns.
    """

    #: Whether copies run beside steps, so that rows should wait for an arrival rather than steps.
    are_aside = False
    #: Whether pages cannot be copied back to the host: numbers that came from there are to stay.
    keeps_sources = False

    def to_pool(self, numbers: Tensor, memory: Tensor, parts: Parts) -> Arrival:
        """Copy `numbers` to `parts` of the pool's `memory` (flat), in pages that no step launched from now on reads
        before it has joined."""
        for target, part in _pieces(numbers, memory, parts):
            target.copy_(part)
        return Arrival()

    def to_host(self, memory: Tensor, parts: Parts) -> Tensor:
        """A copy of pages on the host, complete for `to_pool`; later writes to the pages run after it."""
        numbers = torch.empty(*memory.shape[:-1], sum(count for _, count in parts), dtype=memory.dtype)
        for source, part in _pieces(numbers, memory, parts):
            part.copy_(source)
        return numbers


class CopyStream(AdapterCopies):
    """Copies on a CUDA stream beside the one that computes (the current one, when a method is called)."""

    are_aside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_pool(self, numbers: Tensor, memory: Tensor, parts: Parts) -> Arrival:
        """Launch the copies of `numbers` to their pages. They wait for the steps launched before, which may still read
        these.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, part in _pieces(numbers, memory, parts):
                target.copy_(part, non_blocking=True)
        return _OnStream(self._stream.record_event(), numbers)

    def to_host(self, memory: Tensor, parts: Parts) -> Tensor:
        """Launch the copies of pages to pinned memory. Later steps wait for them on the device; the host does not."""
        numbers = empty_pinned(sum(count for _, count in parts), memory.dtype, memory.device)
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for source, part in _pieces(numbers, memory, parts):
                part.copy_(source, non_blocking=True)
        compute.wait_stream(self._stream)
        return numbers


def _pieces(numbers: Tensor, memory: Tensor, parts: Parts) -> Iterable[tuple[Tensor, Tensor]]:
    """Views of each part: in memory, and of an adapter's `numbers`."""
    first = 0
    for start, count in parts:
        yield memory[..., start : start + count], numbers[..., first : first + count]
        first += count


class _OnStream(Arrival):
    """A copy on a stream. Its `numbers` live until the copy was seen to be done."""

    def __init__(self, event: torch.cuda.Event, numbers: Tensor) -> None:
        self._event = event
        self._numbers: Tensor | None = numbers

    def is_done(self) -> bool:
        is_done = bool(self._event.query())  # type: ignore[no-untyped-call]
        if is_done:
            self._numbers = None
        return is_done

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
