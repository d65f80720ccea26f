"""Room in the pool for rows and adapters, made by giving up what is cheapest to have again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

from .adapter_registry import AdapterRegistry
from .pool import PagePool
from .prefix_sharing import PrefixSharing
from .residency import AdapterResidency, adapter_owner
from .step_batch import PageLayout

NextUse = Callable[[str], float]


class Room:
    """Knows everything in the pool that no running row needs. `next_use(adapter)`: rows that enter before its next."""

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        residency: AdapterResidency,
        registry: AdapterRegistry,
        prefixes: PrefixSharing | None,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._residency = residency
        self._registry = registry
        self._cache = None if prefixes is None else prefixes.cache

    def adapter_pages(self, adapter_id: str) -> int:
        """Pages an adapter takes, for its exact ranks."""
        return max(1, self._layout.pages_for_elements(self._registry.num_elements(adapter_id)))

    def has_at_hand(self, adapter_id: str) -> bool:
        """Whether nobody would have to wait for the adapter: it has come to the pool, or a copy at once will do."""
        if self._residency.get(adapter_id) is not None:
            return self._residency.has_arrived(adapter_id)
        return self._residency.loader.is_ready(adapter_id) and not self._residency.copies_aside

    def make(self, num_pages: int, next_use: NextUse, may_go: Callable[[str], bool] = lambda adapter_id: True) -> bool:
        """Have a contiguous run of free pages, giving up prefix pages and adapters that may go. False: it cannot be
        had, and nothing was given up."""

        def has_room() -> bool:
            return self._pool.largest_free_run >= num_pages

        if has_room():
            return True
        if max(self._pool.free_runs_without(self._needless(may_go)), default=0) < num_pages:
            return False
        # a prefix page that nobody waits for, then what costs a copy to bring back, then what has to be computed
        if self._cache is not None and self._cache.make_room(has_room, spare_awaited=True):
            return True
        if self._residency.make_room(has_room, next_use, may_go):
            return True
        return self._cache is not None and self._cache.make_room(has_room, spare_awaited=False)

    def gaps(self) -> list[int]:
        """Pages of each contiguous run that a row could be given if everything that may go went."""
        return self._pool.free_runs_without(self._needless(lambda adapter_id: True))

    def begin_copies(self, adapter_ids: Iterable[str], next_use: NextUse) -> None:
        """Where copies run aside, begin those of adapters that are in host memory, at the cost of none that is needed
        sooner. Raises `AdapterUnusableError`."""
        for adapter_id in adapter_ids:
            if self._residency.copies_aside and self._residency.loader.is_ready(adapter_id):
                pages, later = self.adapter_pages(adapter_id), partial(_is_later, next_use, next_use(adapter_id))
                if self.make(pages, next_use, later):
                    self._residency.load(adapter_id, pages)

    def make_resident(self, adapter_id: str, next_use: NextUse) -> bool:
        """Have an adapter in the pool; False when there is no room for it now. Raises `AdapterUnusableError`."""
        if self._residency.get(adapter_id) is not None:
            return True
        pages = self.adapter_pages(adapter_id)
        if not self.make(pages, next_use):
            return False
        self._residency.load(adapter_id, pages)
        return True

    def _needless(self, may_go: Callable[[str], bool]) -> list[Hashable]:
        """Who holds pages that no running row needs."""
        owners: list[Hashable] = [adapter_owner(adapter_id) for adapter_id in self._residency.evictable(may_go)]
        return owners + ([] if self._cache is None else list(self._cache.owners()))


def _is_later(next_use: NextUse, use: float, other_id: str) -> bool:
    return next_use(other_id) > use
