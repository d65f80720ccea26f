"""Brings adapters to the pools of members on their own devices, through slots of memory that the leader shares.

    leader   to_pool ── its part: a copy of its own ──────────────────────────────────────────▶ arrived
             a thread: parts of the others into a slot, say so, into the next …              ▲
    member                                     copy from the slot to the pool, count it ───────┘

The thread waits for slots and copies, so that steps do not. What it says comes behind the steps launched so far, and
`join` lets no later step be launched before all is said. Members (`member_steps`) copy as an engine alone does
(`memory.copies`).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from ..memory.copies import AdapterCopies, Arrival, Parts
from .collectives import mapped
from .members import GroupMembers
from .messages import CopySlot, JoinCopies

SLOTS = 4
#: Bytes of one member in one slot: a multiple of the size of any number.
SLOT_BYTES = 8 << 20
_LOOK_S = 0.0005
_WAIT_S = 0.5


def slots_bytes(num_members: int) -> int:
    """Bytes of the memory of all slots."""
    return SLOTS * (num_members - 1) * SLOT_BYTES


def slots_in(descriptor: int, num_members: int, dtype: torch.dtype) -> Tensor:
    """The slots' memory, which a descriptor names: [slots, members but the leader, numbers of one]."""
    num_bytes = os.fstat(descriptor).st_size
    numbers = torch.frombuffer(mapped(descriptor, num_bytes), dtype=dtype, count=num_bytes // dtype.itemsize)
    return numbers.view(SLOTS, num_members - 1, -1)


def pin(memory: Tensor) -> None:
    """Pin memory, so that copies to a GPU run beside the host. (They are right without it, too.)"""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]


class CopiesToMembers(AdapterCopies):
    """Copies adapters, [num_members, numbers of each], to the same place in the pools of all members. `own`: copies to
    the leader's pool.
    """

    are_aside = True
    keeps_sources = True

    def __init__(self, own: AdapterCopies, slots: Tensor, members: GroupMembers) -> None:
        self._own = own
        self._slots = slots
        self._members = members
        self._num_sent = 0
        self._coming: queue.SimpleQueue[_ToMembers | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        threading.Thread(target=self._feed, name="adapters-to-members", daemon=True).start()

    def to_pool(self, numbers: Tensor, memory: Tensor, parts: Parts) -> Arrival:
        """Begin the copy to the leader's pool; a thread feeds the other members' numbers through the slots."""
        arrival = _ToMembers(self._own.to_pool(numbers[0], memory, parts), numbers[1:], parts, self._members)
        self._coming.put(arrival)
        return arrival

    def to_host(self, memory: Tensor, parts: Parts) -> Tensor:
        """Not called: members would have to send their parts back, so numbers from the host stay there."""
        raise AssertionError("numbers of a group's adapters stay on the host")

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._coming.put(None)

    def _feed(self) -> None:
        while (arrival := self._coming.get()) is not None:
            try:
                self._send(arrival)
            except Exception as error:
                arrival.error = error
            finally:
                arrival.is_sent.set()

    def _send(self, arrival: _ToMembers) -> None:
        for first, start, count in arrival.pieces(self._slots.shape[2]):
            part = arrival.numbers[:, first : first + count]
            while self._num_sent - self._members.collectives.least_copied() >= SLOTS:
                self._members.check()
                if self._is_closed.is_set():
                    return
                time.sleep(_LOOK_S)
            slot = self._num_sent % SLOTS
            self._slots[slot, :, :count].copy_(part)
            self._members.send(CopySlot(slot, start, count))
            self._num_sent += 1
        arrival.last_copy = self._num_sent


class _ToMembers(Arrival):
    """A copy to the pools of all members in flight. `last_copy`: number of copies that every member has made when it is
    done.
    """

    def __init__(self, own: Arrival, numbers: Tensor, parts: Parts, members: GroupMembers) -> None:
        self._own = own
        self.numbers = numbers
        self._parts = parts
        self._members = members
        self.is_sent = threading.Event()
        self.last_copy = 0
        self.error: Exception | None = None

    def pieces(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Pieces of at most `size` numbers: the first of the adapter, its place in the pools, and how many they are."""
        number = 0
        for start, count in self._parts:
            for first in range(0, count, size):
                yield number + first, start + first, min(size, count - first)
            number += count

    def is_done(self) -> bool:
        """Whether all members have the adapter. Raises the error of the thread that sends it."""
        if self.error is not None:
            raise self.error
        is_copied = self.is_sent.is_set() and self._members.collectives.least_copied() >= self.last_copy
        return is_copied and self._own.is_done()

    def join(self) -> None:
        """Make later steps run after the copy on all members. Waits until all slots of the adapter are sent."""
        self._own.join()
        while not self.is_sent.wait(_WAIT_S):
            self._members.check()
        if self.error is not None:
            raise self.error
        self._members.send(JoinCopies())
