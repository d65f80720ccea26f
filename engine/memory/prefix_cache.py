"""Keeps prompt beginnings in the page pool: a radix tree whose edges are pages.

A page's place in the tree is the digest of its path: the adapter's content hash, then all tokens up to the page's
end. Never a name: two adapters of one name share nothing, one adapter under two names shares all. The cache counts the
rows that will still read each page, keeps only what another row waits for, and gives up what is cheapest to
recompute first. Where rows name cached pages in their block tables, those are in use and stay.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig
from ..model_config.model import ModelConfig
from .pool import PagePool, PageRange

_DIGEST_BYTES = 16


@dataclass(slots=True)
class _CachedPage:
    """A page that the cache holds. `number`: its place in its path, from 0. `num_children`: cached pages that continue
    it.
    """

    parent: bytes | None
    number: int
    num_children: int = 0


class PrefixCache:
    """Pure bookkeeping over one-page runs of `pool`. `page_cost(number)`: what recomputing page `number` of a path
    costs, in any unit."""

    def __init__(self, pool: PagePool, page_tokens: int, page_cost: Callable[[int], float]) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._page_cost = page_cost
        self._pages: dict[bytes, _CachedPage] = {}
        self._readers: Counter[bytes] = Counter()
        #: Rows that name each page in use.
        self.users: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Pages held."""
        return len(self._pages)

    def path(self, adapter_id: str | None, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Digest of each whole page of a prompt."""
        digest = hashlib.blake2b((adapter_id or "").encode(), digest_size=_DIGEST_BYTES)
        size = self._page_tokens * 8
        data = np.asarray(token_ids, "<i8").tobytes()
        path = []
        for start in range(0, len(data) - size + 1, size):
            digest.update(data[start : start + size])
            path.append(digest.digest())
        return tuple(path)

    def expect(self, path: Sequence[bytes]) -> None:
        """Count one more row that will read these pages, or compute them if they are not there."""
        self._readers.update(path)

    def release(self, path: Sequence[bytes]) -> None:
        """Count one row less that will read these pages: it has them, or it is gone."""
        for key in path:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    @property
    def readers(self) -> Counter[bytes]:
        """Rows that will read each page, or compute it."""
        return self._readers

    def find(self, key: bytes) -> PageRange | None:
        """The page, if it is in the pool."""
        return self._pool.range_of(_owner(key)) if key in self._pages else None

    def keep(self, path: Sequence[bytes], number: int) -> PageRange | None:
        """A page of the pool for `path[number]`, for its one reader that computes it to fill. None when no other row
        waits for it, when it is there, or when memory is full of what is worth more."""
        if not self._is_wanted(path, number):
            return None
        key, parent = path[number], path[number - 1] if number else None
        run = self._pool.allocate(_owner(key), 1, from_end=True)
        if run is None and self._evict_below(self._value(key, number), spare=parent):
            run = self._pool.allocate(_owner(key), 1, from_end=True)
        if run is not None:
            self._enter(path, number)
        return run

    def adopt(self, path: Sequence[bytes], number: int, owner: Hashable) -> PageRange | None:
        """The first page of an owner's run for `path[number]`, which the owner computes and goes on using. None when
        no other row waits for it, when it is there, or when the owner has no page beside it."""
        if not self._is_wanted(path, number) or self._pool.range_of(owner).num_pages < 2:
            return None
        run = self._pool.pass_first(owner, _owner(path[number]))
        self._enter(path, number)
        self.use(path[number])
        return run

    def use(self, key: bytes) -> None:
        """Count one more row whose block table names a cached page and all before it."""
        assert key in self._pages, f"prefix page {key.hex()} is not there"
        self.users[key] += 1

    def leave(self, path: Sequence[bytes]) -> None:
        """Count one row less that uses these pages."""
        for key in path:
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]

    def owners(self) -> list[tuple[str, bytes]]:
        """Owners, in the pool, of the pages that no row uses."""
        return [_owner(key) for key in self._pages if key not in self.users]

    def make_room(self, has_room: Callable[[], bool], *, spare_awaited: bool) -> bool:
        """Give pages up until `has_room()`, the cheapest to recompute first. `spare_awaited`: only those that no
        waiting row reads. Says whether there is room."""
        leaves = [(self._value(k, p.number), k) for k, p in self._pages.items() if self._is_free_leaf(k)]
        heapq.heapify(leaves)
        while not has_room():
            if not leaves or (spare_awaited and leaves[0][1] in self._readers):
                return False
            parent = self._evict(heapq.heappop(leaves)[1])
            if parent is not None and self._is_free_leaf(parent):
                heapq.heappush(leaves, (self._value(parent, self._pages[parent].number), parent))
        return True

    def check_integrity(self) -> None:
        """Assert that every page holds one page of the pool, its path is whole, and children are counted right."""
        children = Counter(page.parent for page in self._pages.values() if page.parent is not None)
        for key, page in self._pages.items():
            run = self._pool.range_of(_owner(key))
            assert run.num_pages == 1, f"prefix page {key.hex()} holds {run}"
            assert page.parent is None or page.parent in self._pages, f"prefix page {key.hex()} has lost its parent"
            found = children[key]
            assert page.num_children == found, f"prefix page {key.hex()}: {page.num_children} children, found {found}"
            if page.parent is not None and self.users[key] > self.users[page.parent]:
                raise AssertionError(f"prefix page {key.hex()} has more users than what it continues")
        assert min(self._readers.values(), default=1) > 0, f"negative count of readers in {self._readers}"
        assert self.users.keys() <= self._pages.keys(), f"pages in use that are gone: {self.users.keys()}"

    def _is_wanted(self, path: Sequence[bytes], number: int) -> bool:
        """Whether another row waits for a page that is not there, while what it continues is."""
        parent = path[number - 1] if number else None
        is_new = path[number] not in self._pages and (parent is None or parent in self._pages)
        return is_new and self._readers[path[number]] > 1

    def _enter(self, path: Sequence[bytes], number: int) -> None:
        parent = path[number - 1] if number else None
        self._pages[path[number]] = _CachedPage(parent, number)
        if parent is not None:
            self._pages[parent].num_children += 1

    def _is_free_leaf(self, key: bytes) -> bool:
        return not self._pages[key].num_children and key not in self.users

    def _value(self, key: bytes, number: int) -> tuple[float, float]:
        """Cost to recompute, once for every row that will read the page; pages no row awaits are worth least."""
        cost = self._page_cost(number)
        return self._readers[key] * cost if key in self._readers else 0.0, cost

    def _evict_below(self, value: tuple[float, float], spare: bytes | None) -> bool:
        """Give the least valuable page up if it is worth less than `value`."""
        leaves = ((self._value(k, p.number), k) for k, p in self._pages.items() if k != spare and self._is_free_leaf(k))
        worth, key = min(leaves, default=(value, b""))
        if worth >= value:
            return False
        self._evict(key)
        return True

    def _evict(self, key: bytes) -> bytes | None:
        """Evict a page; returns its parent."""
        page = self._pages.pop(key)
        assert not page.num_children, f"prefix page {key.hex()} has {page.num_children} children"
        assert key not in self.users, f"prefix page {key.hex()} is used by {self.users[key]} rows"
        self._pool.release(_owner(key))
        if page.parent is not None:
            self._pages[page.parent].num_children -= 1
        return page.parent


def shares_prefixes(config: EngineConfig, model: ModelConfig, *, is_arithmetic_fixed: bool) -> bool:
    """Whether rows of an engine share prompt beginnings.

    Not where keys depend on a row's length; in mode `exact` only where bits do not depend on how a prompt is cut.
    """
    may_share = config.mode != "exact" or is_arithmetic_fixed
    return config.uses_prefix_cache and may_share and not model.has_length_dependent_rope


def _owner(key: bytes) -> tuple[str, bytes]:
    return ("prefix", key)
