"""Keeps prompt beginnings in the page pool: a radix tree whose edges are pages.

A page's place in the tree is the digest of its path: the adapter's content hash, then all tokens up to the page's
end. Never a name: two adapters of one name share nothing, one adapter under two names shares all. The cache counts the
rows that will still read each page. It keeps what another row waits for, and the pages of finished rows that will be
continued. Where rows name cached pages in their block tables, those are in use and stay.

Pages leave in the order of `PageUse`; of two that no row waits for the least recently used one, of two awaited ones the
one that is cheaper to recompute.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..config import EngineConfig
from ..model_config.model import ModelConfig
from .pool import PagePool, PageRange

_DIGEST_BYTES = 16
# Entries of the heap of pages, beyond two for each page, from which it is made anew.
_MOST_SKIPPED = 64


class PageUse(IntEnum):
    """Expected use of a cached page, least first."""

    #: No row is known that will read it.
    NONE = 0
    #: It belongs to a finished row that will be continued.
    CONTINUED = 1
    #: A row of the engine will read it.
    AWAITED = 2


@dataclass(slots=True)
class _CachedPage:
    """A page that the cache holds."""

    #: Digest of the path before it; None for the first page of a prompt.
    parent: bytes | None
    #: Place in its path, from 0.
    number: int
    #: Cached pages that continue it.
    num_children: int = 0
    #: Whether it belongs to a finished row that will be continued and has not been.
    is_continued: bool = False
    #: Time of its last use, in uses of the whole cache.
    used_at: int = 0


# Expected use of a page, then its value among pages of the same use.
_Rank = tuple[PageUse, float]


class PrefixCache:
    """Pure bookkeeping over one-page runs of `pool`. `page_cost(number)`: what recomputing page `number` of a path
    costs, in any unit."""

    def __init__(self, pool: PagePool, page_tokens: int, page_cost: Callable[[int], float]) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._page_cost = page_cost
        self._pages: dict[bytes, _CachedPage] = {}
        self._readers: Counter[bytes] = Counter()
        self._num_uses = 0
        # Heap of pages that may be evicted. Each of them has an entry whose rank is at most its present one; entries of
        # other pages are skipped.
        self._leaves: list[tuple[_Rank, bytes]] = []
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
            self._offer(key)

    @property
    def readers(self) -> Counter[bytes]:
        """Rows that will read each page, or compute it."""
        return self._readers

    def find(self, key: bytes) -> PageRange | None:
        """The page, if it is in the pool."""
        return self._pool.range_of(_owner(key)) if key in self._pages else None

    def keep(
        self, path: Sequence[bytes], number: int, *, num_own: int = 1, is_continued: bool = False
    ) -> PageRange | None:
        """A page of the pool for `path[number]`, for the row that computes it, or has computed it, to fill. None when
        it is not wanted, when it is there, or when memory is full of what is worth more.

        A page is wanted when another row waits for it, or `is_continued`: it belongs to a finished row that will be
        continued. `num_own`: how often the row that fills it is counted among the readers.
        """
        if not self._is_wanted(path, number, num_own, is_continued):
            return None
        key, parent = path[number], path[number - 1] if number else None
        run = self._pool.allocate(_owner(key), 1, from_end=True)
        if run is None and self._evict_below(self._rank_if(key, number, is_continued), spare=parent):
            run = self._pool.allocate(_owner(key), 1, from_end=True)
        if run is not None:
            self._enter(path, number, is_continued)
        return run

    def adopt(self, path: Sequence[bytes], number: int, owner: Hashable) -> PageRange | None:
        """The first page of an owner's run for `path[number]`, which the owner computes and goes on using. None when
        no other row waits for it, when it is there, or when the owner has no page beside it."""
        if not self._is_wanted(path, number, 1) or self._pool.num_pages_of(owner) < 2:
            return None
        run = self._pool.pass_first(owner, _owner(path[number]))
        self._enter(path, number)
        self.use(path[number])
        return run

    def inherit(self, path: Sequence[bytes], number: int, owner: Hashable, *, is_continued: bool) -> bool:
        """Take the first page of a finished row's run, `owner`, for `path[number]`; it is freed if another is there.

        Returns False when the page is not wanted, as in `keep`, or when the row has no page beside it.
        """
        is_there = path[number] in self._pages
        is_wanted = is_there or self._is_wanted(path, number, 0, is_continued)
        if not is_wanted or self._pool.num_pages_of(owner) < 2:
            return False
        if is_there:
            self._pool.release_first(owner)
        else:
            self._pool.pass_first(owner, _owner(path[number]))
            self._enter(path, number, is_continued)
        return True

    def touch(self, key: bytes, is_continued: bool | None = None) -> None:
        """Note that a cached page was used just now. `is_continued`: whether the row that it belongs to will be
        continued from now on (None: as before)."""
        page = self._pages[key]
        self._num_uses += 1
        page.used_at = self._num_uses
        if is_continued is not None and is_continued != page.is_continued:
            page.is_continued = is_continued
            self._offer(key)

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
                self._offer(key)

    @property
    def num_unused(self) -> int:
        """Pages that no row's block table names."""
        return len(self._pages) - len(self.users)

    def owners(self) -> list[tuple[str, bytes]]:
        """Owners, in the pool, of the pages that no row uses."""
        return [_owner(key) for key in self._pages if key not in self.users]

    def make_room(self, has_room: Callable[[], bool], most: PageUse) -> bool:
        """Evict pages until `has_room()`, those of least use first and none of more use than `most`. Returns whether
        there is room."""
        while not has_room():
            least = self._least()
            if least is None or least[0][0] > most:
                return False
            self._evict(least[1])
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
        offered: dict[bytes, _Rank] = {}
        for rank, key in self._leaves:
            offered[key] = min(rank, offered.get(key, rank))
        for key in filter(self._is_free_leaf, self._pages):
            assert key in offered, f"prefix page {key.hex()} may leave and is not offered"
            assert offered[key] <= self._rank(key), f"prefix page {key.hex()}: {self._rank(key)}, above {offered[key]}"

    def _is_wanted(self, path: Sequence[bytes], number: int, num_own: int, is_continued: bool = False) -> bool:
        """Whether a page that is not there, while what it continues is, will be read, see `keep`."""
        parent = path[number - 1] if number else None
        is_new = path[number] not in self._pages and (parent is None or parent in self._pages)
        return is_new and (is_continued or self._readers[path[number]] > num_own)

    def _enter(self, path: Sequence[bytes], number: int, is_continued: bool = False) -> None:
        parent = path[number - 1] if number else None
        self._num_uses += 1
        self._pages[path[number]] = _CachedPage(parent, number, is_continued=is_continued, used_at=self._num_uses)
        if parent is not None:
            self._pages[parent].num_children += 1
        self._offer(path[number])

    def _is_free_leaf(self, key: bytes) -> bool:
        page = self._pages.get(key)
        return page is not None and not page.num_children and key not in self.users

    def _rank(self, key: bytes) -> _Rank:
        page = self._pages[key]
        if key in self._readers:
            return self._rank_if(key, page.number, page.is_continued)
        return PageUse.CONTINUED if page.is_continued else PageUse.NONE, page.used_at

    def _rank_if(self, key: bytes, number: int, is_continued: bool) -> _Rank:
        """Rank that a page has, or would have if it were used now."""
        if key in self._readers:
            return PageUse.AWAITED, self._readers[key] * self._page_cost(number)
        return PageUse.CONTINUED if is_continued else PageUse.NONE, self._num_uses

    def _offer(self, key: bytes) -> None:
        """Note that a page may leave, or that it may leave sooner than before."""
        if not self._is_free_leaf(key):
            return
        heapq.heappush(self._leaves, (self._rank(key), key))
        if len(self._leaves) > 2 * len(self._pages) + _MOST_SKIPPED:
            self._leaves = [(self._rank(key), key) for key in filter(self._is_free_leaf, self._pages)]
            heapq.heapify(self._leaves)

    def _least(self) -> tuple[_Rank, bytes] | None:
        """The page that leaves next, at the head of the heap, and its rank."""
        while self._leaves:
            rank, key = self._leaves[0]
            if not self._is_free_leaf(key):
                heapq.heappop(self._leaves)
            elif (present := self._rank(key)) != rank:
                heapq.heapreplace(self._leaves, (present, key))
            else:
                return rank, key
        return None

    def _evict_below(self, rank: _Rank, spare: bytes | None) -> bool:
        """Evict the least page if its rank is below `rank`, and it is not `spare`."""
        least = self._least()
        if least is not None and least[1] == spare:
            heapq.heappop(self._leaves)
            spared, least = least, self._least()
            heapq.heappush(self._leaves, spared)
        if least is None or least[0] >= rank:
            return False
        self._evict(least[1])
        return True

    def _evict(self, key: bytes) -> None:
        page = self._pages.pop(key)
        assert not page.num_children, f"prefix page {key.hex()} has {page.num_children} children"
        assert key not in self.users, f"prefix page {key.hex()} is used by {self.users[key]} rows"
        self._pool.release(_owner(key))
        if page.parent is not None:
            self._pages[page.parent].num_children -= 1
            self._offer(page.parent)


def shares_prefixes(config: EngineConfig, model: ModelConfig, *, is_arithmetic_fixed: bool) -> bool:
    """Whether rows of an engine share prompt beginnings.

    Not where keys depend on a row's length; in mode `exact` only where bits do not depend on how a prompt is cut.
    """
    may_share = config.mode != "exact" or is_arithmetic_fixed
    return config.uses_prefix_cache and may_share and not model.has_length_dependent_rope


def _owner(key: bytes) -> tuple[str, bytes]:
    return ("prefix", key)
