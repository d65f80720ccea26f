"""Copies adapters between host memory and the pool: at once on a CPU, on a stream of their own on a GPU.

    copy stream      | waits for n | pinned numbers -> pages |            an adapter for rows that wait
    compute stream   step n        | step n+1, other rows    | step n+2 with those rows

An adapter is one flat tensor on both sides, so moving it is one copy. Of rank 16 for an 8B model it is 84 MB: 1.7 ms
at PCIe 5's 50 GB/s, a third of a decode step, which other rows use. Only where nothing else could run does a step
wait for a copy, on the device; the host never does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.launch import empty_pinned


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

    def to_pool(self, numbers: Tensor, target: Tensor) -> Arrival:
        """Copy `numbers` to `target`, pages that no step launched from now on reads before it has joined."""
        target.copy_(numbers)
        return Arrival()

    def to_host(self, source: Tensor) -> Tensor:
        """A copy of pages on the host, complete for `to_pool`; later writes to the pages run after it."""
        return source.to("cpu", copy=True)


class CopyStream(AdapterCopies):
    """Copies on a CUDA stream beside the one that computes (the current one, when a method is called)."""

    are_aside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_pool(self, numbers: Tensor, target: Tensor) -> Arrival:
        """Launch the copy of `numbers` to `target`. It waits for the steps launched before, which may still read these
        pages.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(numbers, non_blocking=True)
        return _OnStream(self._stream.record_event(), numbers)

    def to_host(self, source: Tensor) -> Tensor:
        """Launch the copy of pages to pinned memory. Later steps wait for it on the device; the host does not."""
        numbers = empty_pinned(source.numel(), source.dtype, source.device)
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            numbers.copy_(source, non_blocking=True)
        compute.wait_stream(self._stream)
        return numbers


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
