"""Keeps prompt beginnings in the page pool: a radix tree whose edges are pages.

A page's place in the tree is the digest of its path: the adapter's content hash, then all tokens up to the page's
end. Never a name: two adapters of one name share nothing, one adapter under two names shares all. The cache counts the
rows that will still read each page. It keeps what another row waits for, and the pages of finished rows that will be
continued, which are *reserved*. Where rows name cached pages in their block tables, those are in use and stay.

Pages leave in the order of `PageUse`: of those that no row waits for and of reserved ones the least recently used page
first, of awaited ones the one that is cheapest to recompute.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from ..config import EngineConfig
from ..model_config.model import ModelConfig
from .pool import PagePool, PageRange

_DIGEST_BYTES = 16
# Entries of the heap of pages, beyond two for each page, from which it is made anew.
_MOST_SKIPPED = 64
#: Share of the pool that may be reserved for rows that will be continued.
RESERVED_SHARE = 0.25


class PageUse(IntEnum):
    """Expected use of a cached page, least first."""

    #: No row is known that will read it.
    NONE = 0
    #: A row of the engine will read it.
    AWAITED = 1
    #: It belongs to a finished row that will be continued.
    RESERVED = 2


@dataclass(slots=True)
class _CachedPage:
    """A page that the cache holds."""

    #: Digest of the path before it; None for the first page of a prompt.
    parent: bytes | None
    #: Place in its path, from 0.
    number: int
    #: Time of its last use, in uses of the whole cache.
    used_at: int
    #: Cached pages that continue it.
    children: set[bytes] = field(default_factory=set)


# Expected use of a page, whether a row waits for it, and its value among pages that are alike in both.
_Rank = tuple[PageUse, bool, float]


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
        # Reserved pages, oldest first. A page comes after all that continue it, and all before it are reserved too.
        self._reserved: OrderedDict[bytes, None] = OrderedDict()
        self._most_reserved = int(pool.num_pages * RESERVED_SHARE)
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

    def keep(self, path: Sequence[bytes], number: int) -> PageRange | None:
        """A page of the pool for `path[number]`, for its one reader that computes it to fill. None when no other row
        waits for it, when it is there, or when memory is full of what is worth more."""
        if not self._is_wanted(path, number):
            return None
        return self._place(path, number, self._rank_if_awaited(path[number], number))

    def keep_finished(self, path: Sequence[bytes], number: int) -> PageRange | None:
        """A page of the pool for `path[number]`, for a finished row that has computed it to fill. None when it is
        there, what it continues is not, or when memory is full of pages with a use."""
        parent = path[number - 1] if number else None
        if path[number] in self._pages or (parent is not None and parent not in self._pages):
            return None
        return self._place(path, number, (PageUse.NONE, False, self._num_uses + 1))

    def _place(self, path: Sequence[bytes], number: int, rank: _Rank) -> PageRange | None:
        """A page of the pool for `path[number]`, if need be that of a page whose rank is below `rank`."""
        owner, parent = _owner(path[number]), path[number - 1] if number else None
        run = self._pool.allocate(owner, 1, from_end=True)
        if run is None and self._evict_below(rank, spare=parent):
            run = self._pool.allocate(owner, 1, from_end=True)
        if run is not None:
            self._enter(path, number)
        return run

    def adopt(self, path: Sequence[bytes], number: int, owner: Hashable) -> PageRange | None:
        """The first page of an owner's run for `path[number]`, which the owner computes and goes on using. None when
        no other row waits for it, when it is there, or when the owner has no page beside it."""
        if not self._is_wanted(path, number) or self._pool.num_pages_of(owner) < 2:
            return None
        run = self._pool.pass_first(owner, _owner(path[number]))
        self._enter(path, number)
        self.use(path[number])
        return run

    def inherit(self, path: Sequence[bytes], number: int, owner: Hashable) -> bool:
        """Take the first page of a finished row's run, `owner`, for `path[number]`; it is freed if another is there.

        Returns False when the row has no page beside it.
        """
        if self._pool.num_pages_of(owner) < 2:
            return False
        if path[number] in self._pages:
            self._pool.release_first(owner)
        else:
            self._pool.pass_first(owner, _owner(path[number]))
            self._enter(path, number)
        return True

    def touch(self, key: bytes) -> None:
        """Note that a cached page was used just now."""
        self._num_uses += 1
        self._pages[key].used_at = self._num_uses

    def make_reservable(self, num_pages: int) -> int:
        """End the oldest reservations, so that `num_pages` pages more may be reserved, or as many as may be at all.
        Returns their number."""
        num_pages = min(num_pages, self._most_reserved)
        while len(self._reserved) + num_pages > self._most_reserved:
            self._end_reservation(next(iter(self._reserved)))
        return num_pages

    def reserve(self, path: Sequence[bytes]) -> None:
        """Reserve the pages of a path that are there, from its first on: its row has finished and will be continued."""
        there = [key for key in path if key in self._pages]
        there = there[: self.make_reservable(len(there))]
        for key in reversed(there):
            self.touch(key)
            self._reserved[key] = None
            self._reserved.move_to_end(key)

    def continued(self, path: Sequence[bytes], number: int) -> None:
        """End the reservation for a row whose continuation has read pages up to `path[number]`: of these, unless other
        rows need them, and of all behind."""
        behind, at = [path[number]], 0
        while at < len(behind):
            behind += self._pages[behind[at]].children & self._reserved.keys()
            at += 1
        for key in (*reversed(behind), *reversed(path[:number])):
            if self._pages[key].children.isdisjoint(self._reserved):
                self._end_reservation(key)

    def _end_reservation(self, key: bytes) -> None:
        if key in self._reserved:
            del self._reserved[key]
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

    def owners(self, most: PageUse) -> list[tuple[str, bytes]]:
        """Owners, in the pool, of the pages that may leave, as `num_evictable` counts them."""
        kept = self._reserved if most < PageUse.RESERVED else ()
        return [_owner(key) for key in self._pages if key not in self.users and key not in kept]

    def num_evictable(self, most: PageUse) -> int:
        """Number of pages that no row uses: all of them, or where `most` is less than `RESERVED`, all others."""
        num_kept = len(self.users)
        if most < PageUse.RESERVED:
            num_kept += len(self._reserved) - len(self._reserved.keys() & self.users.keys())
        return len(self._pages) - num_kept

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
        for key, page in self._pages.items():
            run = self._pool.range_of(_owner(key))
            assert run.num_pages == 1, f"prefix page {key.hex()} holds {run}"
            assert page.parent is None or page.parent in self._pages, f"prefix page {key.hex()} has lost its parent"
            assert page.parent is None or key in self._pages[page.parent].children, f"{key.hex()} is no child"
            assert page.children <= self._pages.keys(), f"prefix page {key.hex()} has lost children"
            if page.parent is not None and self.users[key] > self.users[page.parent]:
                raise AssertionError(f"prefix page {key.hex()} has more users than what it continues")
        assert min(self._readers.values(), default=1) > 0, f"negative count of readers in {self._readers}"
        assert self.users.keys() <= self._pages.keys(), f"pages in use that are gone: {self.users.keys()}"
        places = {key: place for place, key in enumerate(self._reserved)}
        assert len(places) <= self._most_reserved, f"{len(places)} pages are reserved of {self._most_reserved}"
        for key, place in places.items():
            parent = self._pages[key].parent
            assert parent is None or places.get(parent, -1) > place, f"{key.hex()} is reserved, its beginning less"
        offered: dict[bytes, _Rank] = {}
        for rank, key in self._leaves:
            offered[key] = min(rank, offered.get(key, rank))
        for key in filter(self._is_free_leaf, self._pages):
            assert key in offered, f"prefix page {key.hex()} may leave and is not offered"
            assert offered[key] <= self._rank(key), f"prefix page {key.hex()}: {self._rank(key)}, above {offered[key]}"

    def _is_wanted(self, path: Sequence[bytes], number: int) -> bool:
        """Whether another row waits for a page that is not there, while what it continues is."""
        parent = path[number - 1] if number else None
        is_new = path[number] not in self._pages and (parent is None or parent in self._pages)
        return is_new and self._readers[path[number]] > 1

    def _enter(self, path: Sequence[bytes], number: int) -> None:
        parent = path[number - 1] if number else None
        self._num_uses += 1
        self._pages[path[number]] = _CachedPage(parent, number, self._num_uses)
        if parent is not None:
            self._pages[parent].children.add(path[number])
        self._offer(path[number])

    def _is_free_leaf(self, key: bytes) -> bool:
        page = self._pages.get(key)
        return page is not None and not page.children and key not in self.users

    def _rank(self, key: bytes) -> _Rank:
        page = self._pages[key]
        if key in self._reserved:
            return PageUse.RESERVED, key in self._readers, page.used_at
        if key in self._readers:
            return self._rank_if_awaited(key, page.number)
        return PageUse.NONE, False, page.used_at

    def _rank_if_awaited(self, key: bytes, number: int) -> _Rank:
        return PageUse.AWAITED, True, self._readers[key] * self._page_cost(number)

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
        spared: list[tuple[_Rank, bytes]] = []
        while (least := self._least()) is not None and least[1] == spare:
            spared.append(heapq.heappop(self._leaves))
        for entry in spared[:1]:
            heapq.heappush(self._leaves, entry)
        if least is None or least[0] >= rank:
            return False
        self._evict(least[1])
        return True

    def _evict(self, key: bytes) -> None:
        page = self._pages.pop(key)
        assert not page.children, f"prefix page {key.hex()} has {len(page.children)} children"
        assert key not in self.users, f"prefix page {key.hex()} is used by {self.users[key]} rows"
        self._reserved.pop(key, None)
        self._pool.release(_owner(key))
        if page.parent is not None:
            self._pages[page.parent].children.remove(key)
            self._offer(page.parent)


def shares_prefixes(config: EngineConfig, model: ModelConfig, *, is_arithmetic_fixed: bool) -> bool:
    """Whether rows of an engine share prompt beginnings.

    Not where keys depend on a row's length, or where a row keeps a recurrent state, which pages do not hold; in mode
    `exact` only where bits do not depend on how a prompt is cut.
    """
    may_share = config.mode != "exact" or is_arithmetic_fixed
    has_own_keys = model.has_length_dependent_rope or model.has_recurrent_layers
    return config.uses_prefix_cache and may_share and not has_own_keys


def _owner(key: bytes) -> tuple[str, bytes]:
    return ("prefix", key)
