"""Reads adapters from storage in threads while steps run, and keeps those that left the pool in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from .packed import PackedAdapter

# Adapters read before any row may enter with them, or one for each thread if that is more; each waits in host memory
# beside those that are kept.
MAX_AHEAD = 4


class AdapterLoader:
    """Reads adapters in `num_threads` threads, in the order of the calls, and keeps at most `host_bytes` of those that
    left the pool; the one needed furthest in the future makes room for others.

    `num_reads`: adapters asked of storage so far. `num_host_loads`: adapters taken from those that were kept. `read`
    raises `AdapterUnusableError`; `take` passes the error on.
    """

    def __init__(self, read: Callable[[str], PackedAdapter], host_bytes: int, num_threads: int = 1) -> None:
        if host_bytes < 0:
            raise ValueError(f"host_tier_bytes={host_bytes}: must be 0 (keep nothing) or a number of bytes")
        self._read = read
        self._host_bytes = host_bytes
        self._kept: dict[str, PackedAdapter] = {}
        self._coming: dict[str, Future[PackedAdapter]] = {}
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")
        self.max_ahead = max(MAX_AHEAD, num_threads)
        self.num_reads = self.num_host_loads = 0
        #: Bytes of the adapters that are kept.
        self.kept_bytes = 0
        # Adapters in the pool whose numbers stay on the host too, and their bytes.
        self._held: dict[str, PackedAdapter] = {}
        self._held_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Host memory for adapters that left the pool."""
        return self._host_bytes

    def hold(self, adapter_id: str, adapter: PackedAdapter) -> None:
        """Let the numbers of an adapter that is in the pool stay on the host, while nothing that is kept needs the
        room."""
        if self.kept_bytes + self._held_bytes + adapter.num_bytes <= self._host_bytes:
            self._held[adapter_id] = adapter
            self._held_bytes += adapter.num_bytes

    def keep_held(self, adapter_id: str, next_use: Callable[[str], float]) -> None:
        """Keep an adapter that leaves the pool, if its numbers have stayed."""
        adapter = self._held.pop(adapter_id, None)
        if adapter is not None:
            self._held_bytes -= adapter.num_bytes
            self.keep(adapter_id, adapter.num_bytes, lambda: adapter, next_use)

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
        return adapter_id in self._kept or adapter_id in self._coming

    def is_ready(self, adapter_id: str) -> bool:
        """Whether `take` would return at once (or raise at once what went wrong)."""
        return adapter_id in self._kept or (adapter_id in self._coming and self._coming[adapter_id].done())

    def take(self, adapter_id: str) -> PackedAdapter:
        """Return the adapter, waiting for it if need be.

        Raises `AdapterUnusableError`; another `take` then reads again.
        """
        if adapter_id in self._kept:
            self.num_host_loads += 1
            return self._drop(adapter_id)
        self.prefetch([adapter_id])
        return self._coming.pop(adapter_id).result()

    def keep(
        self, adapter_id: str, num_bytes: int, copy: Callable[[], PackedAdapter], next_use: Callable[[str], float]
    ) -> None:
        """Keep an adapter of `num_bytes` that leaves the pool, if host memory has room for it beside those needed
        sooner; only then it is copied.
        """
        assert adapter_id not in self._kept, f"adapter {adapter_id} is kept already"
        if self._make_room(adapter_id, num_bytes, next_use):
            self._kept[adapter_id] = copy()
            self.kept_bytes += self._kept[adapter_id].num_bytes

    def drop_unwanted(self, wanted: Callable[[str], bool]) -> None:
        """Forget what was read ahead for rows that are gone."""
        for adapter_id in [a for a, coming in self._coming.items() if coming.done() and not wanted(a)]:
            del self._coming[adapter_id]

    def check_integrity(self, resident_ids: Iterable[str]) -> None:
        """Assert that the sum of the kept adapters' sizes is what is counted and within the limit, and that no adapter
        is in two places.
        """
        held = sum(adapter.num_bytes for adapter in self._held.values())
        assert held == self._held_bytes, f"adapters of the pool hold {held} bytes, counted {self._held_bytes}"
        total = sum(adapter.num_bytes for adapter in self._kept.values())
        assert total == self.kept_bytes, f"adapters hold {total} bytes, counted {self.kept_bytes}"
        assert total + held <= self._host_bytes, f"adapters hold {total + held} bytes of {self._host_bytes}"
        twice = [a for a in resident_ids if self.has_begun(a)]
        assert not twice, f"adapters in the pool and also before it: {twice}"
        twice = [a for a in self._coming if a in self._kept]
        assert not twice, f"adapters in host memory and also on their way: {twice}"

    def _make_room(self, adapter_id: str, num_bytes: int, next_use: Callable[[str], float]) -> bool:
        """Make room for an adapter by dropping those that are not needed before it; False when it would have to go
        first itself.
        """
        if num_bytes > self._host_bytes:
            return False
        while self._held and self.kept_bytes + self._held_bytes + num_bytes > self._host_bytes:
            # an adapter in the pool is needed from the host last
            self._held_bytes -= self._held.pop(next(iter(self._held))).num_bytes
        while self.kept_bytes + num_bytes > self._host_bytes:
            # the first of equals: of adapters that no row waits for, the one that came longest ago
            last = max(self._kept, key=next_use)
            if next_use(last) < next_use(adapter_id):
                return False
            self._drop(last)
        return True

    def _drop(self, adapter_id: str) -> PackedAdapter:
        adapter = self._kept.pop(adapter_id)
        self.kept_bytes -= adapter.num_bytes
        return adapter
