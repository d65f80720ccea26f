"""The memory of a simulated replica: the pages that rows and adapters take, and which adapters are in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import AdapterSource, CostModel
from ..costs.machines import fetch_core_seconds
from ..workload import AdapterInfo, Workload


class SimulatedPages:
    """Pages that rows and adapters take of a replica's pool. The parameters are those of `ReplicaSettings`.

    `num_pages`: pages of the pool (None: endless). `of_adapter`: pages of each adapter, by number; empty when adapters
    take none.
    """

    def __init__(
        self,
        workload: Workload,
        kv_tokens: int | None,
        page_tokens: int,
        run_pages: int,
        token_bytes: int,
        row_pages: int = 0,
    ) -> None:
        self.num_pages = None if kv_tokens is None else kv_tokens // page_tokens
        self._workload = workload
        page_bytes = page_tokens * token_bytes
        sizes = {i: adapter.weight_bytes for i, adapter in enumerate(workload.adapters)} if page_bytes else {}
        self.of_adapter = {i: max(1, -(-size // page_bytes)) for i, size in sizes.items()}
        self._page_tokens, self._run_pages, self._row_pages = page_tokens, run_pages, row_pages

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that hold the prompt and all but the last token of each of these rows."""
        # Computed for these rows only: an array of ten million rows in each of a thousand replicas would take 80 GB.
        prompt, limit = self._workload.prompt_tokens[rows], self._workload.max_tokens[rows]
        return self.of_tokens(np.maximum(1, prompt.astype(np.int64) + limit - 1))

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages of rows that hold `tokens` tokens."""
        return -(-tokens // self._page_tokens) + self._row_pages

    def rounded(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that rows take where memory is ample: `pages`, rounded up to multiples of `run_pages`."""
        return -(-pages // self._run_pages) * self._run_pages

    def taken(self, exact: NDArray[np.int64], held: int) -> NDArray[np.int64]:
        """Pages that rows take when they enter in this order.

        `exact`: pages that each row needs. `held`: pages that other rows hold. Rows take rounded numbers of pages while
        the pool has room, else exactly what they need.
        """
        rounded = self.rounded(exact)
        if self.num_pages is None or held + int(rounded.sum()) <= self.num_pages:
            return rounded
        for i, pages in enumerate(rounded.tolist()):
            rounded[i] = pages if held + pages <= self.num_pages else exact[i]
            held += int(rounded[i])
        return rounded

    def left_for_adapters(self, held: int) -> int | None:
        """Pages that are left beside the `held` pages of rows; None: endless, or adapters take none."""
        return None if self.num_pages is None or not self.of_adapter else self.num_pages - held


class SimulatedMemory:
    """The adapters of a simulated replica.

    `source`: where adapters that were not fetched ahead are loaded from. `slots`: most adapters at once, the least
    recently used leaves first (None: endless). `is_beside`: whether loads cost steps nothing. `host_tier_bytes`: host
    memory for adapters that had to leave (None: endless); those that left longest ago make room for others, and are
    loaded from `source` again. `fetch_cores`: cores that steps share with the fetching of adapters, once each, from a
    store (None: it costs steps nothing).
    """

    def __init__(
        self,
        adapters: Sequence[AdapterInfo],
        cost: CostModel,
        source: AdapterSource,
        slots: int | None,
        is_beside: bool = True,
        host_tier_bytes: int | None = None,
        fetch_cores: float | None = None,
    ) -> None:
        self._fetch_cores = fetch_cores
        self._to_fetch = {number for number, adapter in enumerate(adapters) if adapter.is_fetched}
        self._host_tier_bytes = host_tier_bytes
        self._adapters, self._cost, self._source, self._slots = adapters, cost, source, slots
        self._is_beside = is_beside
        # Least recently used first.
        self._resident: dict[int, None] = {}
        # Whether each adapter is resident, by number; the last is the base model, which always is.
        self._is_there = np.append(np.zeros(len(adapters), bool), True)
        self._resident_array: NDArray[np.int32] | None = None
        # Adapters that are being read, or are read and not used yet -> seconds at which each is ready. One is read at a
        # time.
        self._arriving: dict[int, float] = {}
        self._link_free_s = 0.0
        # Adapters in host memory, those that left longest ago first, and their bytes.
        self._left: dict[int, None] = {}
        self._left_bytes = 0
        #: Adapters that became resident, again where they had been evicted.
        self.num_loads = 0

    @property
    def resident(self) -> list[int]:
        """Resident adapters, least recently used first."""
        return list(self._resident)

    @property
    def resident_array(self) -> NDArray[np.int32]:
        """Resident adapters as int32 `[num_resident]`, in no order."""
        if self._resident_array is None:
            self._resident_array = np.fromiter(self._resident, np.int32, len(self._resident))
        return self._resident_array

    @property
    def num_coming(self) -> int:
        """Adapters that are being read, or are read and not used yet."""
        return len(self._arriving)

    @property
    def has_all(self) -> bool:
        """Whether every adapter is resident."""
        return len(self._resident) == len(self._adapters)

    def has(self, adapter: int) -> bool:
        """Whether rows have used the adapter, so that it is in the pool; the base model is always there."""
        return adapter < 0 or adapter in self._resident

    def absent(self, adapters: NDArray[np.int32], now_s: float) -> frozenset[int]:
        """The adapters among these for which rows would have to wait."""
        missing = adapters[~self._is_there[adapters]]
        if not len(missing):
            return frozenset()
        return frozenset(a for a in set(missing.tolist()) if self._arriving.get(a, np.inf) > now_s)

    def fetch(self, adapter: int, now_s: float, source: AdapterSource) -> None:
        """Begin to load an adapter beside the work."""
        if adapter not in self._resident and adapter not in self._arriving:
            self._link_free_s = max(now_s, self._link_free_s) + self._load_s(adapter, source)
            self._arriving[adapter] = self._link_free_s

    def clear(self) -> None:
        """Lose all adapters."""
        self._resident, self._arriving, self._link_free_s = {}, {}, 0.0
        self._left, self._left_bytes = {}, 0
        self._is_there[:-1] = False
        self._resident_array = None

    def wait_s(self, needed: Sequence[int], now_s: float) -> float:
        """Seconds by which these adapters delay a step.

        Afterwards they are resident, and others may have been evicted for them.
        """
        seconds = 0.0
        for adapter in needed:
            if adapter in self._resident:
                del self._resident[adapter]
            else:
                self._resident_array, self._is_there[adapter] = None, True
                self.num_loads += 1
                load_s = self._load_s(adapter, self._source)
                if adapter in self._arriving:
                    wait_s = max(0.0, self._arriving.pop(adapter) - now_s - seconds)
                    seconds += wait_s if self._is_beside else max(wait_s, load_s)
                else:
                    seconds += load_s
                seconds += self._fetch_s(adapter)
                self._forget(adapter)
            self._resident[adapter] = None
        while self._slots is not None and len(self._resident) > max(self._slots, len(needed)):
            self._evict(next(iter(self._resident)))
        return seconds

    def shrink(self, num_pages: int | None, pages_of: Mapping[int, int], pinned: Collection[int]) -> None:
        """Evict adapters that no row uses, least recently used first, until the rest takes `num_pages` at most."""
        if num_pages is None:
            return
        surplus = sum(map(pages_of.__getitem__, self._resident)) - num_pages
        for adapter in [a for a in self._resident if a not in pinned]:
            if surplus <= 0:
                return
            surplus -= pages_of[adapter]
            self._evict(adapter)

    def _evict(self, adapter: int) -> None:
        del self._resident[adapter]
        self._resident_array, self._is_there[adapter] = None, False
        self._keep(adapter)

    def _keep(self, adapter: int) -> None:
        """Keep an adapter in host memory, if that can hold it."""
        size = self._adapters[adapter].weight_bytes
        self._forget(adapter)
        if self._host_tier_bytes is None or size <= self._host_tier_bytes:
            self._left[adapter] = None
            self._left_bytes += size
        while self._host_tier_bytes is not None and self._left_bytes > self._host_tier_bytes:
            self._forget(next(iter(self._left)))

    def _forget(self, adapter: int) -> None:
        if adapter in self._left:
            del self._left[adapter]
            self._left_bytes -= self._adapters[adapter].weight_bytes

    def _fetch_s(self, adapter: int) -> float:
        """Seconds by which the fetching of an adapter delays steps, when it is used first."""
        if self._fetch_cores is None or adapter not in self._to_fetch:
            return 0.0
        self._to_fetch.discard(adapter)
        return fetch_core_seconds(self._adapters[adapter].weight_bytes) / self._fetch_cores

    def _load_s(self, adapter: int, source: AdapterSource) -> float:
        source = "host" if adapter in self._left else source
        return self._cost.load_seconds(self._adapters[adapter].weight_bytes, source)
