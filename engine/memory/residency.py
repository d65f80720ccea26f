"""Loads adapters into the page pool, and evicts those used furthest in the future to make room.

The engine knows its waiting rows, hence each adapter's next use: the one needed furthest in the future leaves
first (Belady 1966), to host memory while that lasts. Adapters of running sequences are pinned. Where copies run aside,
an adapter is on its way for a while: its pages are taken, and a step that uses it joins its arrival first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.segment_lora import AdapterSites
from .adapter_layout import AdapterLayout, Sites
from .copies import AdapterCopies, Arrival, Parts, parts_in
from .loader import AdapterLoader
from .packed import PackedAdapter
from .pool import PagePool


@dataclass(frozen=True, eq=False)
class ResidentAdapter:
    """An adapter in the pool."""

    #: Content hash of the adapter.
    adapter_id: str
    #: Number by arrival; steps sort their tokens by it.
    order: int
    #: Flat memory of the pool.
    memory: Tensor
    #: Pages of the pool that hold it, in order, int64 [num_pages].
    pages: NDArray[np.int64]
    #: Places of the matrices in these pages.
    layout: AdapterLayout
    #: Bytes that are kept of it when it leaves, those of the other members of a group included.
    num_bytes: int = 0

    @cached_property
    def sites(self) -> Sites:
        """Its matrices as views, made when kernels that read views ask for them."""
        return self.layout.sites(self.memory, self.pages)

    @cached_property
    def all_sites(self) -> AdapterSites:
        """Its matrices for kernels that read addresses, see `AdapterLayout.all_sites`."""
        return self.layout.all_sites(self.memory, self.pages)

    @cached_property
    def negative(self) -> ResidentAdapter:
        """The adapter with negative scaling, the same object each time: added to weights that it is merged into, it
        leaves those of the base model.
        """
        return replace(self, layout=self.layout.negated())


class AdapterResidency:
    """Loads adapters into pages of `memory` (flat), wherever these are free, and evicts them by next use.

    `num_loads`: adapters copied into the pool. `stall_s`: seconds that the host spent on it, and on keeping those that
    had to leave, waiting for storage included.
    """

    def __init__(
        self, pool: PagePool, memory: Tensor, page_elements: int, loader: AdapterLoader, copies: AdapterCopies
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._page_elements = page_elements
        self.loader = loader
        self._copies = copies
        self._arriving: dict[str, Arrival] = {}
        self._residents: dict[str, ResidentAdapter] = {}
        self._pins: dict[str, int] = {}
        self.num_loads = 0
        self.stall_s = 0.0
        #: Pages that adapters hold.
        self.num_pages = 0

    @property
    def resident_ids(self) -> tuple[str, ...]:
        """Adapters in the pool, oldest first."""
        return tuple(self._residents)

    def get(self, adapter_id: str) -> ResidentAdapter | None:
        """The adapter if it is resident."""
        return self._residents.get(adapter_id)

    @property
    def copies_aside(self) -> bool:
        """Whether adapters arrive while steps run."""
        return self._copies.are_aside

    def has_arrived(self, adapter_id: str) -> bool:
        """Whether a resident adapter's copy is done."""
        if adapter_id in self._arriving and self._arriving[adapter_id].is_done():
            del self._arriving[adapter_id]
        return adapter_id not in self._arriving

    def settle(self) -> None:
        """Release the sources of copies that are done."""
        for adapter_id in list(self._arriving):
            self.has_arrived(adapter_id)

    def join(self, adapter_id: str) -> None:
        """Make steps launched from now on see the whole adapter."""
        if adapter_id in self._arriving:
            self._arriving[adapter_id].join()

    def pin(self, adapter_id: str) -> None:
        """Count one more running sequence that uses the adapter."""
        self._pins[adapter_id] = self._pins.get(adapter_id, 0) + 1

    def unpin(self, adapter_id: str) -> None:
        """Count one running sequence less that uses the adapter."""
        self._pins[adapter_id] -= 1
        if not self._pins[adapter_id]:
            del self._pins[adapter_id]

    def is_pinned(self, adapter_id: str) -> bool:
        """Whether a running sequence uses the adapter."""
        return adapter_id in self._pins

    def evictable(self, may_go: Callable[[str], bool]) -> list[str]:
        """Adapters that no running sequence uses and that may go."""
        return [a for a in self._residents if a not in self._pins and may_go(a)]

    def make_room(
        self, has_room: Callable[[], bool], next_use: Callable[[str], float], may_go: Callable[[str], bool]
    ) -> bool:
        """Evict unpinned adapters that may go, the one used furthest in the future first, until `has_room()`."""
        while not has_room():
            evictable = self.evictable(may_go)
            if not evictable:
                return False
            self.evict(max(evictable, key=next_use), next_use)
        return True

    def evict(self, adapter_id: str, next_use: Callable[[str], float]) -> None:
        """Give the adapter's pages back and its numbers to the host. It must not be pinned."""
        assert adapter_id not in self._pins, f"adapter {adapter_id} is used by {self._pins[adapter_id]} sequences"
        # pages that a copy still fills may not be another's before it is done
        self.join(adapter_id)
        self._arriving.pop(adapter_id, None)
        parts, resident = self._parts(adapter_id), self._residents.pop(adapter_id)
        with self._stalling():
            if self._copies.keeps_sources:
                self.loader.keep_held(adapter_id, next_use)
            else:
                self.loader.keep(
                    adapter_id,
                    resident.num_bytes,
                    lambda: PackedAdapter(self._copies.to_host(self._memory, parts), resident.layout),
                    next_use,
                )
        self._pool.release(adapter_owner(adapter_id))
        self.num_pages -= len(resident.pages)

    def load(self, adapter_id: str) -> ResidentAdapter:
        """Begin to copy an adapter into the pool, which must have as many free pages. Raises `AdapterUnusableError`."""
        with self._stalling():
            adapter = self.loader.take(adapter_id)
            layout = adapter.layout
            runs = self._pool.allocate_anywhere(adapter_owner(adapter_id), max(1, layout.num_pages))
            parts = parts_in(runs, self._page_elements, layout.size)
            self._arriving[adapter_id] = self._copies.to_pool(adapter.numbers, self._memory, parts)
            if self._copies.keeps_sources:
                self.loader.hold(adapter_id, adapter)
        pages = np.concatenate([np.arange(run.start, run.end) for run in runs])
        self._residents[adapter_id] = ResidentAdapter(
            adapter_id, self.num_loads, self._memory, pages, layout, adapter.num_bytes
        )
        self.num_loads += 1
        self.num_pages += len(pages)
        return self._residents[adapter_id]

    def packed(self, adapter_id: str, next_use: Callable[[str], float]) -> ResidentAdapter:
        """An adapter on the pool's device, for work that is launched at once: the one in the pool, or a copy of the one
        on the host, which stays there if there is room. Raises `AdapterUnusableError`."""
        resident = self._residents.get(adapter_id)
        if resident is not None:
            self.join(adapter_id)
            return resident
        with self._stalling():
            adapter = self.loader.take(adapter_id)
            numbers = adapter.numbers.to(self._memory.device, non_blocking=True)
            self.loader.keep(adapter_id, adapter.num_bytes, lambda: adapter, next_use)
        return ResidentAdapter(adapter_id, self.num_loads, numbers, np.arange(adapter.layout.num_pages), adapter.layout)

    def _parts(self, adapter_id: str) -> Parts:
        """Parts of an adapter in the pool."""
        runs = self._pool.runs_of(adapter_owner(adapter_id))
        return parts_in(runs, self._page_elements, self._residents[adapter_id].layout.size)

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        """Count the seconds of the block as time that steps wait."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - began_s

    def check_integrity(self, running_adapter_ids: Iterable[str]) -> None:
        """Assert that pins equal the running sequences' adapters, and every resident holds the pages that it is read
        from and stands nowhere else.
        """
        counts: dict[str, int] = {}
        for adapter_id in running_adapter_ids:
            counts[adapter_id] = counts.get(adapter_id, 0) + 1
        assert counts == self._pins, f"pins {self._pins}, running sequences use {counts}"
        for adapter_id, resident in self._residents.items():
            held = [page for run in self._pool.runs_of(adapter_owner(adapter_id)) for page in range(run.start, run.end)]
            assert held == resident.pages.tolist(), f"{adapter_id} holds pages {held}, is read from {resident.pages}"
        num_pages = sum(len(resident.pages) for resident in self._residents.values())
        assert num_pages == self.num_pages, f"adapters hold {num_pages} pages, counted {self.num_pages}"
        self.loader.check_integrity(self._residents)
        assert self._arriving.keys() <= self._residents.keys(), f"arriving and not resident: {self._arriving.keys()}"
        missing = self._pins.keys() - self._residents.keys()
        assert not missing, f"pinned but not resident: {missing}"


def adapter_owner(adapter_id: str) -> tuple[str, str]:
    """The pool's owner of an adapter's pages."""
    return ("adapter", adapter_id)
