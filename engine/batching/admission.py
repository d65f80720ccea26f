"""Admits waiting rows to the running batch while memory lasts, and makes room for them.

Admission is exact: a row enters when the pages for its prompt and all of `max_tokens` are free and its adapter is
resident, so a running row is never preempted. Where rows grow, a row enters with the pages of the tokens that it is
expected to generate (docs/adr/0084).

`Room` makes room in the pool by giving up what is cheapest to restore: prefix pages that no row waits for, then
adapters that no running row uses, the one needed furthest in the future first. Prefix pages that are reserved for rows
that will be continued leave last, and for no row that could wait for another to end.
`WaitingRows` holds the rows without pages, in order of arrival; rows that were preempted and continuations come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import accumulate, chain, islice
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.layouts.pages import PageLayout
from ...scheduler.batchers.batching import FreeMemory, StepPlan
from ...scheduler.estimates.lengths import PRIOR_SHARE, tokens_to_hold
from ..memory.pool import PagePool, PageRange
from ..memory.prefix_cache import PageUse
from ..memory.registry import AdapterRegistry
from ..memory.residency import AdapterResidency, adapter_owner
from ..sequence import Sequence
from .prefix_sharing import PrefixSharing

# Adapters on their way for rows that may enter: of rank 64 for an 8B model, 16 are 5.4 GB.
MAX_AWAITED = 16

NextUse = Callable[[str], float]


def _any_adapter(adapter_id: str) -> bool:
    return True


class Room:
    """The pool with the adapters and prefix pages in it; makes room by giving up what no running row needs.

    `run_pages`: pages to a multiple of which rows' runs are rounded up where memory allows. `next_use(adapter)`: rows
    that enter before the adapter's next.
    """

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        residency: AdapterResidency,
        registry: AdapterRegistry,
        prefixes: PrefixSharing | None,
        run_pages: int,
    ) -> None:
        self.run_pages = run_pages
        self.pool = pool
        self.layout = layout
        self.residency = residency
        self.registry = registry
        self.prefixes = prefixes
        self._cache = None if prefixes is None else prefixes.cache

    def adapter_pages(self, adapter_id: str) -> int:
        """Pages that an adapter of its exact ranks takes."""
        return max(1, self.registry.num_pages[adapter_id])

    def is_available(self, adapter_id: str) -> bool:
        """Whether rows could use the adapter without waiting: it has arrived in the pool, or can be copied at once."""
        if self.residency.get(adapter_id) is not None:
            return self.residency.has_arrived(adapter_id)
        return self.residency.loader.is_ready(adapter_id) and not self.residency.copies_aside

    def make_room(
        self,
        num_pages: int,
        next_use: NextUse,
        may_go: Callable[[str], bool] = _any_adapter,
        most: PageUse = PageUse.RESERVED,
    ) -> bool:
        """Free a contiguous run of pages by giving up adapters that may go, and prefix pages of no more use than
        `most`.

        Returns False when there cannot be one; nothing is given up then.
        """

        def has_room() -> bool:
            return self.pool.largest_free_run >= num_pages

        if has_room():
            return True
        if max(self.pool.free_runs_without(self._evictable_owners(may_go, most)), default=0) < num_pages:
            return False
        return self._give_up(has_room, next_use, may_go, most)

    def make_room_anywhere(
        self,
        num_pages: int,
        next_use: Callable[[], NextUse],
        may_go: Callable[[str], bool] = _any_adapter,
        most: PageUse = PageUse.RESERVED,
    ) -> bool:
        """Free `num_pages` pages wherever they are, as `make_room` does."""

        def has_room() -> bool:
            return self.pool.num_free >= num_pages

        if has_room():
            return True
        if self.num_available(may_go, most) < num_pages:
            return False
        return self._give_up(has_room, next_use(), may_go, most)

    def _give_up(
        self, has_room: Callable[[], bool], next_use: NextUse, may_go: Callable[[str], bool], most: PageUse
    ) -> bool:
        # a prefix page that no row waits for, then what a copy restores, then what has to be computed again
        if self._cache is not None and self._cache.make_room(has_room, PageUse.NONE):
            return True
        if self.residency.make_room(has_room, next_use, may_go):
            return True
        return self._cache is not None and self._cache.make_room(has_room, most)

    def gaps(self, most: PageUse) -> list[int]:
        """Pages of each contiguous run that would be free without all adapters, and prefix pages of no more use than
        `most`, that may go."""
        return self.pool.free_runs_without(self._evictable_owners(_any_adapter, most))

    def num_available(self, may_go: Callable[[str], bool], most: PageUse) -> int:
        """Pages that would be free without adapters that may go, and prefix pages of no more use than `most`."""
        adapters = sum(self.pool.num_pages_of(adapter_owner(a)) for a in self.residency.evictable(may_go))
        return self.pool.num_free + adapters + (0 if self._cache is None else self._cache.num_evictable(most))

    def begin_copies(self, adapter_ids: Iterable[str], next_use: NextUse) -> None:
        """Begin to copy adapters that are in host memory, where copies run beside steps.

        No adapter that is needed sooner is evicted for them. Raises `AdapterUnusableError`.
        """
        for adapter_id in adapter_ids:
            if self.residency.copies_aside and self.residency.loader.is_ready(adapter_id):
                pages, later = self.adapter_pages(adapter_id), partial(_is_later, next_use, next_use(adapter_id))
                if self.make_room_anywhere(pages, lambda: next_use, later, PageUse.AWAITED):
                    self.residency.load(adapter_id)

    def make_resident(self, adapter_id: str, next_use: NextUse, most: PageUse = PageUse.RESERVED) -> bool:
        """Load an adapter into the pool; False when there is no room for it now. Raises `AdapterUnusableError`."""
        if self.residency.get(adapter_id) is not None:
            return True
        pages = self.adapter_pages(adapter_id)
        if not self.make_room_anywhere(pages, lambda: next_use, most=most):
            return False
        self.residency.load(adapter_id)
        return True

    def _evictable_owners(self, may_go: Callable[[str], bool], most: PageUse) -> list[Hashable]:
        """Owners of pages that no running row needs."""
        owners: list[Hashable] = [adapter_owner(adapter_id) for adapter_id in self.residency.evictable(may_go)]
        return owners + ([] if self._cache is None else list(self._cache.owners(most)))


def _is_later(next_use: NextUse, use: float, other_id: str) -> bool:
    return next_use(other_id) > use


class Admission:
    """Moves rows from `waiting` to `running`, with pages of the pool and a pin on their adapters.

    `may_switch`: weights may change while rows run. `rows_grow`: rows take more pages when they need them. `clean`
    erases a run before a row gets it (None: needless).
    """

    def __init__(
        self,
        waiting: WaitingRows,
        running: dict[str, Sequence],
        room: Room,
        clean: Callable[[PageRange], None] | None,
        *,
        may_switch: bool,
        rows_grow: bool,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._room = room
        self._pool, self._layout, self._run_pages = room.pool, room.layout, room.run_pages
        self._residency, self._registry = room.residency, room.registry
        self._clean = clean
        self._may_switch = may_switch
        self._rows_grow = rows_grow
        #: Rows that entered while their adapter was in the pool.
        self.num_pool_hits = 0
        #: Rows that the latest plan would have let enter, and whose adapters are not there.
        self.num_absent_rows = 0

    def admit(self, plan: StepPlan, expected: NDArray[np.float64] | None, *, is_mixture: bool) -> None:
        """Admit the plan's rows in its order until memory ends, or only read their adapters where it holds them back.

        `expected`: tokens of the answers of rows that wait (None: not known). `is_mixture`: a merged adapter is pinned
        too.
        """
        self.num_absent_rows = 0
        if len(plan.admit) == 0:
            return
        rows, next_use = list(self._waiting), self.next_use()
        wanted = [rows[position] for position in plan.admit.tolist()]
        for sequence, tokens in zip(wanted, self.tokens_to_hold(expected)[plan.admit].tolist(), strict=True):
            sequence.held_tokens = tokens
        ready = self._ready(wanted, plan)
        admitted = [] if plan.holds_back else ready
        self.num_absent_rows = len(wanted) - len(admitted)
        absent = self._absent_adapters(admitted, plan)
        pages = sum(map(self._rounded_pages, admitted)) + sum(map(self._room.adapter_pages, absent))
        if pages <= (self._pool.num_free if self._rows_grow else self._pool.largest_free_run) // 2:
            # Nothing has to make room for another: adapters first, then runs of equal size side by side.
            for adapter_id in absent:
                self._room.make_resident(adapter_id, next_use)
            admitted.sort(key=self._rounded_pages)
        for sequence in admitted:
            held = self._adapter_to_hold(sequence, plan)
            if not self._admit_row(sequence, plan, next_use, is_mixture=is_mixture):
                return
            if held in absent:
                absent.remove(held)  # loaded for this row, and there for the next
            else:
                self.num_pool_hits += held is not None
        self._room.begin_copies(self._absent_adapters(wanted, plan), next_use)

    def read_ahead(self, merged_id: str | None) -> None:
        """Prefetch the adapters that are needed next, while steps run; not the one that is merged."""
        loader = self._residency.loader
        if loader.room_ahead and self._waiting:
            absent = (a for a in self._next_uses() if self._residency.get(a) is None and a != merged_id)
            unread = (a for a in absent if not (self._registry.must_merge_id(a) or loader.has_begun(a)))
            loader.prefetch(islice(unread, loader.room_ahead))

    def tokens_to_hold(self, expected: NDArray[np.float64] | None) -> NDArray[np.int64]:
        """Tokens for which each waiting row takes memory when it enters, `[num_waiting]`."""
        return self._waiting.tokens_to_hold(expected) if self._rows_grow else self._waiting.capacity_tokens()

    def free_memory(self, expected: NDArray[np.float64] | None) -> FreeMemory:
        """Memory left for waiting rows, where weights may change while rows run."""
        pages: dict[int, int] = {}
        awaited = []
        for adapter_id in self._waiting.adapter_ids:
            if self._registry.must_merge_id(adapter_id):
                continue
            code = self._registry.code_of[adapter_id]
            if not self._residency.is_pinned(adapter_id):
                pages[code] = self._room.adapter_pages(adapter_id)
            if not self._room.is_available(adapter_id):
                awaited.append(code)
        row_pages = -(-self.tokens_to_hold(expected) // self._layout.page_tokens) + self._layout.row_pages
        most = self._most_given_up
        gaps = [self._room.num_available(_any_adapter, most)] if self._rows_grow else self._room.gaps(most)
        return FreeMemory(tuple(gaps), row_pages, pages, self._run_pages, frozenset(awaited))

    @property
    def _most_given_up(self) -> PageUse:
        """Use of the prefix pages that are given up for rows that enter: a row that can wait for others takes none that
        is reserved."""
        return PageUse.AWAITED if self._running else PageUse.RESERVED

    def next_use(self) -> NextUse:
        """A function from an adapter to the number of rows that enter before its next; infinite where none waits."""
        uses = self._next_uses()
        return lambda adapter_id: uses.get(adapter_id, inf)

    def _next_uses(self) -> dict[str, float]:
        running_ids = {s.request.adapter_id for s in self._running.values()}
        return self._waiting.next_uses(running_ids, set(self._residency.resident_ids), self._registry.code_of)

    def _absent_adapters(self, rows: list[Sequence], plan: StepPlan) -> list[str]:
        """Adapters that rows need and the pool lacks, in the rows' order."""
        ids = dict.fromkeys(self._adapter_to_hold(s, plan) for s in rows)
        return [a for a in ids if a is not None and self._residency.get(a) is None]

    def _adapter_to_hold(self, sequence: Sequence, plan: StepPlan) -> str | None:
        """The adapter that the row needs in the pool: in this step, or in one after a switch."""
        adapter_id = sequence.request.adapter_id
        if adapter_id is None or self._registry.must_merge_id(adapter_id):
            return None
        return adapter_id if self._may_switch or plan.mode == "unmerged" else None

    def _ready(self, rows: list[Sequence], plan: StepPlan) -> list[Sequence]:
        """Rows that need not wait for their adapter; those of the first adapter if there is none and nothing runs."""
        wanted = dict.fromkeys(self._adapter_to_hold(s, plan) for s in rows)
        missing = [a for a in wanted if a is not None and not self._room.is_available(a)]
        self._read([a for a in missing if self._residency.get(a) is None])
        if len(missing) == len(wanted) and not self._running:
            del missing[0]
        return [s for s in rows if self._adapter_to_hold(s, plan) not in missing]

    def _read(self, absent: list[str]) -> None:
        """Begin to read adapters that rows wait for, a few at a time: each takes host memory beside the pool."""
        loader = self._residency.loader
        unread = [a for a in absent if not loader.has_begun(a)]
        num_begun = len(absent) - len(unread)
        loader.prefetch(unread[: max(MAX_AWAITED - num_begun, 0)])

    def _rounded_pages(self, sequence: Sequence) -> int:
        exact = self._layout.pages_for_row(sequence.held_tokens)
        return -(-exact // self._run_pages) * self._run_pages

    def _admit_row(self, sequence: Sequence, plan: StepPlan, next_use: NextUse, *, is_mixture: bool) -> bool:
        """Give a waiting row its pages and its adapter; False when memory does not allow it now."""
        adapter_id = self._adapter_to_hold(sequence, plan)
        exact = self._layout.pages_for_row(sequence.held_tokens)
        if not self._take_memory(sequence, (self._rounded_pages(sequence), exact), adapter_id, next_use):
            if self._running or is_mixture:
                return False
            # an empty pool holds the row and its adapter side by side: checked when the row came
            self._room.make_room(self._pool.num_pages, next_use)
            has_memory = self._take_memory(sequence, (exact,), adapter_id, next_use)
            assert has_memory, f"row {sequence.request.request_id} does not fit into an empty pool"
        owner = row_owner(sequence)
        sequence.held_tokens = self._layout.tokens_in(self._pool.num_pages_of(owner))
        if self._clean is not None:
            self._clean(self._pool.range_of(owner))
        if adapter_id is not None:
            self._residency.pin(adapter_id)
            sequence.holds_adapter = True
        self._running[sequence.request.request_id] = self._waiting.remove(sequence.request.request_id)
        return True

    def _take_memory(
        self, sequence: Sequence, sizes: tuple[int, ...], adapter_id: str | None, next_use: NextUse
    ) -> bool:
        """Allocate the largest possible of `sizes` for the row and load its adapter; False when both do not fit."""
        owner, most = row_owner(sequence), self._most_given_up

        def may_go(other_id: str) -> bool:
            return other_id != adapter_id

        if self._rows_grow:
            if not self._room.make_room_anywhere(min(sizes), lambda: next_use, may_go, most):
                return False
            self._pool.allocate_anywhere(owner, min(sizes))
        else:
            if not self._room.make_room(min(sizes), next_use, may_go, most):
                return False
            next(size for size in sizes if self._pool.allocate(owner, size) is not None)
        is_resident = False
        try:
            is_resident = adapter_id is None or self._room.make_resident(adapter_id, next_use, most)
        finally:
            if not is_resident:
                self._pool.release(owner)
        return is_resident


def row_owner(sequence: Sequence) -> tuple[str, str]:
    """The pool's owner for a row's pages."""
    return ("sequence", sequence.request.request_id)


class _WaitingRow(NamedTuple):
    """A waiting row, with what is asked of it in every step."""

    sequence: Sequence
    #: `Sequence.capacity_tokens`.
    capacity_tokens: int
    #: `Sequence.prompt_tokens`.
    prompt_tokens: int
    #: Tokens that were generated before it waited.
    generated_tokens: int
    #: Least tokens of its answer.
    least_tokens: int

    @classmethod
    def of(cls, sequence: Sequence) -> _WaitingRow:
        sampling = sequence.request.sampling
        has_no_end = sampling.ignore_eos and not sampling.stop
        least = sampling.max_tokens if has_no_end else sampling.min_tokens
        return cls(sequence, sequence.capacity_tokens, sequence.prompt_tokens, len(sequence.token_ids), least)


class WaitingRows:
    """Keeps waiting sequences in order of arrival, to be removed from anywhere and seen as arrays. Continuations come
    before other rows, preempted rows before both.
    """

    def __init__(self) -> None:
        self._first: dict[str, _WaitingRow] = {}
        self._others: dict[str, _WaitingRow] = {}
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._first) + len(self._others)

    def __iter__(self) -> Iterator[Sequence]:
        return (row.sequence for row in self._rows())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._first or request_id in self._others

    def _rows(self) -> Iterator[_WaitingRow]:
        return chain(self._first.values(), self._others.values())

    def append(self, sequence: Sequence) -> None:
        """Add a row behind all others, or behind all continuations. Request ids are unique among unfinished rows."""
        request_id = sequence.request.request_id
        assert request_id not in self, f"row {request_id} waits already"
        rows = self._first if sequence.request.is_continuation else self._others
        rows[request_id] = _WaitingRow.of(sequence)
        self._count(sequence)

    def remove(self, request_id: str) -> Sequence:
        """Remove a row and return it. Raises KeyError when it does not wait."""
        rows = self._first if request_id in self._first else self._others
        sequence = rows.pop(request_id).sequence
        adapter_id = sequence.request.adapter_id
        if adapter_id is not None:
            self._num_of[adapter_id] -= 1
            if not self._num_of[adapter_id]:
                del self._num_of[adapter_id]
        return sequence

    def put_first(self, sequences: Items[Sequence]) -> None:
        """Add rows at the beginning."""
        self._first = {s.request.request_id: _WaitingRow.of(s) for s in sequences} | self._first
        for sequence in sequences:
            self._count(sequence)

    def _count(self, sequence: Sequence) -> None:
        if sequence.request.adapter_id is not None:
            self._num_of[sequence.request.adapter_id] += 1

    def wants(self, adapter_id: str) -> bool:
        """Whether a row of the adapter waits."""
        return adapter_id in self._num_of

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, prompt and generated."""
        return sum(row.prompt_tokens + row.generated_tokens for row in self._rows())

    def adapter_codes(self, code_of: dict[str | None, int]) -> NDArray[np.int32]:
        """Adapter of every row as an integer, [num_waiting], in the rows' order."""
        return np.fromiter((code_of[s.request.adapter_id] for s in self), np.int32, len(self))

    @property
    def adapter_ids(self) -> Collection[str]:
        """Adapters of waiting rows."""
        return self._num_of.keys()

    def capacity_tokens(self) -> NDArray[np.int64]:
        """`Sequence.capacity_tokens` of every row, [num_waiting], in the rows' order."""
        return self._column("capacity_tokens")

    def tokens_to_hold(self, expected: NDArray[np.float64] | None) -> NDArray[np.int64]:
        """Tokens for which every row takes memory when it may take more later, [num_waiting], in the rows' order."""
        prompt, capacity = self.prompt_tokens(), self.capacity_tokens()
        generated, least = self._column("generated_tokens"), self._column("least_tokens")
        max_tokens = capacity - prompt + 1
        guess = PRIOR_SHARE * max_tokens if expected is None else expected
        return tokens_to_hold(prompt, generated, max_tokens, np.maximum(guess, least))

    def prompt_tokens(self) -> NDArray[np.int64]:
        """`Sequence.prompt_tokens` of every row, [num_waiting], in the rows' order."""
        return self._column("prompt_tokens")

    def _column(self, name: str) -> NDArray[np.int64]:
        return np.fromiter(map(attrgetter(name), self._rows()), np.int64, len(self))

    def next_uses(
        self, running_ids: Collection[str | None], resident_ids: Collection[str], code_of: Mapping[str | None, int]
    ) -> dict[str, float]:
        """Rows that enter before the first of each adapter, by adapter, soonest first: the order of
        `scheduler.batchers.batching.clustered_order`, as if all rows were about as long.
        """

        def place(adapter_id: str) -> tuple[int, int, int]:
            distance = 0 if adapter_id in running_ids else 1 if adapter_id in resident_ids else 2
            return distance, -self._num_of[adapter_id], code_of[adapter_id]

        order = sorted(self._num_of, key=place)
        starts = accumulate((self._num_of[a] for a in order), initial=0)
        return {a: float(start) for a, start in zip(order, starts, strict=False)}
