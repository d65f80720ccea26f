"""Adds up and joins tensors of the members of a group, in memory that they share.

Each member writes its numbers to a buffer of its own, waits until all have, and reads those of all: one meeting for a
sum, and nothing is sent. Two sets of buffers take turns, so that no member overwrites what another still reads: a
member reaches the meeting after next only when all have left the last. Sums are in the order of the members, so that
every member gets the same bits, whatever else is in the step.

Members wait on event counters of the kernel, one for each pair. (To look at the other's place in memory for a while
before has gained nothing; `torch.distributed` with gloo takes 4 to 60 times as long, see docs/adr/0091.) Memory and
counters have no names: whatever kills the processes, nothing of them stays.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Numbers (int64) that each member has in the first part of the memory: a cache line of its own.
_LINE_NUMBERS = 8
_BEAT, _WIDTH, _COPIED = range(3)
_HEAD_BYTES = 4096
_SETS = 2
# Most numbers of a buffer; larger tensors are added up in pieces.
_MOST_NUMBERS = 1 << 22
_LEAST_NUMBERS = 1 << 16


def shared_memory(name: str, num_bytes: int) -> int:
    """A descriptor of zeroed memory that processes can map. `name`: in listings of the system; it need not be unique.

    The system counts what is written to."""
    descriptor = os.memfd_create(f"lorabatch-{name}")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int, first_byte: int = 0) -> mmap.mmap:
    """Bytes of shared memory, from a multiple of `mmap.ALLOCATIONGRANULARITY`."""
    return mmap.mmap(descriptor, num_bytes, offset=first_byte)


def buffer_numbers(step_numbers: int) -> int:
    """Numbers of a buffer for a group whose steps add up `step_numbers` at once."""
    return min(max(step_numbers, _LEAST_NUMBERS), _MOST_NUMBERS)


def shared_memory_bytes(num_members: int, num_numbers: int) -> int:
    """Bytes of the shared memory of a group with buffers of `num_numbers`."""
    return _HEAD_BYTES + _SETS * num_members * num_numbers * torch.float32.itemsize


def event_counters(num_members: int) -> tuple[int, ...]:
    """Descriptors of new event counters, one for each ordered pair of members: by number `giver * num_members + taker`,
    `giver` signals to `taker` that it has reached a meeting.
    """
    flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
    return tuple(os.eventfd(0, flags) for _ in range(num_members * num_members))


class Collectives:
    """One member's side of the exchange with its group. All members call the same methods in the same order.

    `memory`, `counters`: descriptors of the group's shared memory and of its `event_counters`. `num_sums`, `num_joins`:
    calls so far.
    """

    def __init__(self, member: int, num_members: int, memory: int, num_numbers: int, counters: Sequence[int]) -> None:
        mapping = mapped(memory, shared_memory_bytes(num_members, num_numbers))
        self._head = memoryview(mapping)[:_HEAD_BYTES].cast("q")
        count = _SETS * num_members * num_numbers
        numbers = torch.frombuffer(mapping, dtype=torch.float32, count=count, offset=_HEAD_BYTES)
        self._buffers = numbers.view(_SETS, num_members, num_numbers)
        self._member, self._num_members = member, num_members
        self._others = [other for other in range(num_members) if other != member]
        self._given = [counters[member * num_members + other] for other in self._others]
        self._taken = [counters[other * num_members + member] for other in self._others]
        self._round = 0
        self._lost: Exception | None = None
        self.num_sums = 0
        self.num_joins = 0

    def beat(self, now_ns: int) -> None:
        """Note a sign of life of this member."""
        self._head[self._member * _LINE_NUMBERS + _BEAT] = now_ns

    def last_beat_ns(self, member: int) -> int:
        """Time of a member's last sign of life; 0 for none yet."""
        return self._head[member * _LINE_NUMBERS + _BEAT]

    def note_copied(self, num_copies: int) -> None:
        """Note how many copies of adapters this member has made."""
        self._head[self._member * _LINE_NUMBERS + _COPIED] = num_copies

    def least_copied(self) -> int:
        """Smallest number of copies that another member has noted. Any thread may ask."""
        return min(self._head[other * _LINE_NUMBERS + _COPIED] for other in self._others)

    def any_of(self, is_so: bool) -> bool:
        """Whether something is so on any member."""
        return bool(self.add_up(torch.tensor([float(is_so)])).item())

    def lose(self, error: Exception) -> None:
        """Make this member raise an error instead of waiting for others, for good. Any thread may call."""
        if self._lost is None:
            self._lost = error
            for descriptor in self._taken:
                os.eventfd_write(descriptor, 1)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all members' `x`, the same bits on each. `x` holds it afterwards, if it is contiguous."""
        assert x.dtype == torch.float32, f"sums are in float32, not {x.dtype}"
        x = x.contiguous()
        self.num_sums += 1
        for part in self._parts(x.view(-1)):
            given = self._meet(part)
            torch.add(given[0], given[1], out=part)
            for other in range(2, self._num_members):
                part += given[other]
        return x

    def join_columns(self, x: Tensor) -> Tensor | None:
        """Columns of all members side by side, in their order, on the leader. `x`: [rows, this member's columns]."""
        assert x.dtype == torch.float32, f"columns are in float32, not {x.dtype}"
        self.num_joins += 1
        self._head[self._member * _LINE_NUMBERS + _WIDTH] = x.shape[1]
        self._meet(x.view(-1)[:0])
        widths = [self._head[member * _LINE_NUMBERS + _WIDTH] for member in range(self._num_members)]
        columns_at_once = min(max(widths), self._buffers.shape[2])
        rows_at_once = self._buffers.shape[2] // columns_at_once
        joined = torch.empty(len(x), sum(widths)) if self._member == 0 else None
        for row in range(0, len(x), rows_at_once):
            for column in range(0, max(widths), columns_at_once):
                given = self._meet(
                    x[row : row + rows_at_once, column : column + columns_at_once].reshape(-1),
                    longest=rows_at_once * columns_at_once,
                )
                if joined is not None:
                    _place(given, joined[row : row + rows_at_once], widths, column, columns_at_once)
        return joined

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        size = self._buffers.shape[2]
        return (flat[start : start + size] for start in range(0, len(flat), size))

    def _meet(self, given: Tensor, longest: int | None = None) -> Tensor:
        """Give numbers and wait for those of all members, [num_members, longest]. These stay until the meeting after
        next.
        """
        buffers = self._buffers[self._round % _SETS]
        buffers[self._member, : len(given)] = given
        self._round += 1
        for descriptor in self._given:
            os.eventfd_write(descriptor, 1)
        for descriptor in self._taken:
            os.eventfd_read(descriptor)
            if self._lost is not None:
                raise self._lost
        return buffers[:, : len(given) if longest is None else longest]


def _place(given: Tensor, joined: Tensor, widths: Sequence[int], column: int, columns_at_once: int) -> None:
    """Put what members gave of their columns, from `column` on, into their places in rows of `joined`."""
    start = 0
    for member, width in enumerate(widths):
        count = min(max(width - column, 0), columns_at_once)
        block = given[member, : len(joined) * count].view(len(joined), count)
        joined[:, start + column : start + column + count] = block
        start += width
