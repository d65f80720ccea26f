"""Reads adapters from storage in threads while steps run, and keeps those that left the pool in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from .packed import PackedAdapter

# Adapters read before any row may enter with them, or one for each thread if that is more; each waits in host memory
# beside the tier.
MAX_AHEAD = 4


class AdapterLoader:
    """Reads adapters in `num_threads` threads, in the order of the calls.

    `num_reads`: adapters asked of storage so far. `read` raises `AdapterUnusableError`; `take` passes the error on.
    """

    def __init__(self, read: Callable[[str], PackedAdapter], tier: HostTier, num_threads: int = 1) -> None:
        self._read = read
        self._tier = tier
        self._coming: dict[str, Future[PackedAdapter]] = {}
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")
        self.max_ahead = max(MAX_AHEAD, num_threads)
        self.num_reads = 0

    @property
    def room_ahead(self) -> int:
        """Adapters that may be read ahead now: `max_ahead` less those in flight or waiting to be taken."""
        return max(self.max_ahead - len(self._coming), 0)

    def prefetch(self, adapter_ids: Iterable[str]) -> None:
        """Start reading adapters that are neither in host memory nor in flight."""
        for adapter_id in adapter_ids:
            if not self.has_begun(adapter_id):
                self._coming[adapter_id] = self._threads.submit(self._read, adapter_id)
                self.num_reads += 1

    def has_begun(self, adapter_id: str) -> bool:
        """Whether the adapter is in host memory or in flight."""
        return adapter_id in self._tier or adapter_id in self._coming

    def is_ready(self, adapter_id: str) -> bool:
        """Whether `take` would return at once (or raise at once what went wrong)."""
        return adapter_id in self._tier or (adapter_id in self._coming and self._coming[adapter_id].done())

    def take(self, adapter_id: str) -> PackedAdapter:
        """Return the adapter, waiting for it if need be.

        Raises `AdapterUnusableError`; another `take` then reads again.
        """
        if adapter_id in self._tier:
            return self._tier.take(adapter_id)
        self.prefetch([adapter_id])
        return self._coming.pop(adapter_id).result()

    def keep(
        self, adapter_id: str, num_bytes: int, copy: Callable[[], PackedAdapter], next_use: Callable[[str], float]
    ) -> None:
        """Keep an adapter that leaves the pool, if host memory has room for it; only then it is copied."""
        if self._tier.make_room(adapter_id, num_bytes, next_use):
            self._tier.put(adapter_id, copy(), next_use)

    def drop_unwanted(self, wanted: Callable[[str], bool]) -> None:
        """Forget what was read ahead for rows that are gone."""
        for adapter_id in [a for a, coming in self._coming.items() if coming.done() and not wanted(a)]:
            del self._coming[adapter_id]

    def check_integrity(self, resident_ids: Iterable[str]) -> None:
        """Assert that the tier's sums hold and no adapter is in two places."""
        self._tier.check_integrity()
        twice = [a for a in resident_ids if a in self._tier or a in self._coming]
        assert not twice, f"adapters in the pool and also before it: {twice}"
        twice = [a for a in self._coming if a in self._tier]
        assert not twice, f"adapters in host memory and also on their way: {twice}"


class HostTier:
    """Keeps at most `budget_bytes` of adapters; the one needed furthest in the future makes room for others."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"host_tier_bytes={budget_bytes}: must be 0 (keep nothing) or a number of bytes")
        self._budget_bytes = budget_bytes
        self._held: dict[str, PackedAdapter] = {}
        self.num_bytes = 0

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._held

    def put(self, adapter_id: str, adapter: PackedAdapter, next_use: Callable[[str], float]) -> None:
        """Keep an adapter if there is room for it beside those needed sooner."""
        assert adapter_id not in self._held, f"adapter {adapter_id} is held already"
        if self.make_room(adapter_id, adapter.num_bytes, next_use):
            self._held[adapter_id] = adapter
            self.num_bytes += adapter.num_bytes

    def make_room(self, adapter_id: str, num_bytes: int, next_use: Callable[[str], float]) -> bool:
        """Make room for an adapter of `num_bytes` by dropping those that are not needed before it.

        Returns False when it would have to go first itself.
        """
        if num_bytes > self._budget_bytes:
            return False
        while self.num_bytes + num_bytes > self._budget_bytes:
            # the first of equals: of adapters that no row waits for, the one that came longest ago
            last = max(self._held, key=next_use)
            if next_use(last) < next_use(adapter_id):
                return False
            self.take(last)
        return True

    def take(self, adapter_id: str) -> PackedAdapter:
        """Remove an adapter and return it. Raises KeyError when it is not held."""
        adapter = self._held.pop(adapter_id)
        self.num_bytes -= adapter.num_bytes
        return adapter

    def check_integrity(self) -> None:
        """Assert that the sum of all sizes is what is counted and within the budget."""
        total = sum(adapter.num_bytes for adapter in self._held.values())
        assert total == self.num_bytes, f"adapters hold {total} bytes, counted {self.num_bytes}"
        assert total <= self._budget_bytes, f"adapters hold {total} bytes of {self._budget_bytes}"
