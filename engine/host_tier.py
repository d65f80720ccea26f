"""Adapters that had to leave the pool, decoded in host memory: below the pool, above storage."""

from __future__ import annotations

from collections.abc import Callable

from .packed_adapter import PackedAdapter


class HostTier:
    """At most `budget_bytes` of adapters; the one needed furthest in the future makes room for others."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"host_tier_bytes={budget_bytes}: must be 0 (keep nothing) or a number of bytes")
        self._budget_bytes = budget_bytes
        self._held: dict[str, PackedAdapter] = {}
        self.num_bytes = 0

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def put(self, adapter_id: str, adapter: PackedAdapter, next_use: Callable[[str], float]) -> None:
        """Keep an adapter if there is room for it beside those needed sooner."""
        assert adapter_id not in self._held, f"adapter {adapter_id} is held already"
        if self.make_room(adapter_id, adapter.num_bytes, next_use):
            self._held[adapter_id] = adapter
            self.num_bytes += adapter.num_bytes

    def make_room(self, adapter_id: str, num_bytes: int, next_use: Callable[[str], float]) -> bool:
        """Have room for an adapter of `num_bytes`, giving up those that are not needed before it. False: it would have
        to go first itself."""
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
        """Hand an adapter out and forget it. Raises KeyError when it is not held."""
        adapter = self._held.pop(adapter_id)
        self.num_bytes -= adapter.num_bytes
        return adapter

    def check_integrity(self) -> None:
        """The sum of all sizes is what is counted and within the budget."""
        total = sum(adapter.num_bytes for adapter in self._held.values())
        assert total == self.num_bytes, f"adapters hold {total} bytes, counted {self.num_bytes}"
        assert total <= self._budget_bytes, f"adapters hold {total} bytes of {self._budget_bytes}"
