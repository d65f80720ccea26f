"""Lets waiting rows in while memory lasts.

Admission is exact: a row enters when the pages for its prompt and all of `max_tokens` are free and its adapter
is resident, so a running row is never pushed out again. Adapters that no running row uses make room, the one
needed furthest in the future first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import inf

from ..scheduler.batching import StepPlan
from ..scheduler.free_memory import FreeMemory
from .adapter_loader import MAX_AHEAD
from .adapter_registry import AdapterRegistry
from .pool import PagePool, PageRun
from .residency import AdapterResidency
from .room import NextUse, Room
from .sequence import Sequence
from .step_batch import PageLayout
from .waiting_rows import WaitingRows

# Where memory allows, runs are rounded up to this many pages: sequences of equal runs share attention calls.
# (64 rows with answers of 16 to 72 tokens: 33 calls a layer with exact runs, 9 with runs of 4 pages.)
_RUN_PAGES = 4
# Adapters on their way for rows that may enter: of rank 64 for an 8B model, 16 are 5.4 GB.
_MAX_AWAITED = 16


class Admission:
    """Moves rows from `waiting` to `running`, with pages of the pool and a pin on their adapters.

    `may_switch`: weights may change while rows run. `clean` erases a run before a row gets it (None: needless).
    """

    def __init__(
        self,
        waiting: WaitingRows,
        running: dict[str, Sequence],
        pool: PagePool,
        layout: PageLayout,
        residency: AdapterResidency,
        registry: AdapterRegistry,
        room: Room,
        clean: Callable[[PageRun], None] | None,
        *,
        may_switch: bool,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._pool = pool
        self._layout = layout
        self._residency = residency
        self._registry = registry
        self._room = room
        self._clean = clean
        self._may_switch = may_switch

    def admit(self, plan: StepPlan, *, is_mixture: bool) -> None:
        """Let in what the plan wants, in its order, until memory ends. `is_mixture`: a merged adapter is pinned too."""
        if len(plan.admit) == 0:
            return
        rows, next_use = list(self._waiting), self.next_use()
        wanted = [rows[position] for position in plan.admit.tolist()]
        admitted = self._ready(wanted, plan)
        absent = self._absent_adapters(admitted, plan)
        pages = sum(map(self._rounded_pages, admitted)) + sum(map(self._room.adapter_pages, absent))
        if pages <= self._pool.largest_free_run // 2:
            # Nothing has to make room for another: adapters first, then runs of equal size side by side.
            for adapter_id in absent:
                self._room.make_resident(adapter_id, next_use)
            admitted.sort(key=self._rounded_pages)
        for sequence in admitted:
            if not self._admit_row(sequence, plan, next_use, is_mixture=is_mixture):
                return
        self._room.begin_copies(self._absent_adapters(wanted, plan), next_use)

    def read_ahead(self) -> None:
        """Have the adapters read that are needed next, while steps run."""
        loader = self._residency.loader
        if loader.has_time and self._waiting:
            absent = (a for a in self._next_uses() if self._residency.get(a) is None)
            loader.prefetch(islice((a for a in absent if not self._registry.must_merge_id(a)), MAX_AHEAD))

    def free_memory(self) -> FreeMemory:
        """What is left for waiting rows where weights may change while rows run."""
        pages: dict[int, int] = {}
        awaited = []
        for adapter_id in self._waiting.adapter_ids:
            if self._registry.must_merge_id(adapter_id):
                continue
            code = self._registry.code_of[adapter_id]
            if not self._residency.is_pinned(adapter_id):
                pages[code] = self._room.adapter_pages(adapter_id)
            if not self._room.has_at_hand(adapter_id):
                awaited.append(code)
        row_pages = -(-self._waiting.capacity_tokens() // self._layout.page_tokens)
        return FreeMemory(tuple(self._room.gaps()), row_pages, pages, self._rounded_to, frozenset(awaited))

    def next_use(self) -> NextUse:
        """How many rows enter before an adapter's next; infinite where none waits."""
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
        """Rows whose adapter need not be waited for. If there is none and nothing runs, those of the first adapter."""
        wanted = dict.fromkeys(self._adapter_to_hold(s, plan) for s in rows)
        missing = [a for a in wanted if a is not None and not self._room.has_at_hand(a)]
        self._read([a for a in missing if self._residency.get(a) is None])
        if len(missing) == len(wanted) and not self._running:
            del missing[0]
        return [s for s in rows if self._adapter_to_hold(s, plan) not in missing]

    def _read(self, absent: list[str]) -> None:
        """Begin to read adapters that rows wait for, not all at once: each waits in memory beside the pool."""
        loader = self._residency.loader
        unread = [a for a in absent if not loader.has_begun(a)]
        num_begun = len(absent) - len(unread)
        loader.prefetch(unread[: max(_MAX_AWAITED - num_begun, 0)])

    def _rounded_pages(self, sequence: Sequence) -> int:
        exact = self._layout.pages_for_tokens(sequence.capacity_tokens)
        return -(-exact // self._rounded_to) * self._rounded_to

    @property
    def _rounded_to(self) -> int:
        # kernels that follow block tables serve runs of any size
        return 1 if self._layout.is_page_wise else _RUN_PAGES

    def _admit_row(self, sequence: Sequence, plan: StepPlan, next_use: NextUse, *, is_mixture: bool) -> bool:
        """Give a waiting row its pages and its adapter; False when memory does not allow it now."""
        adapter_id = self._adapter_to_hold(sequence, plan)
        exact = self._layout.pages_for_tokens(sequence.capacity_tokens)
        if not self._take_memory(sequence, (self._rounded_pages(sequence), exact), adapter_id, next_use):
            if self._running or is_mixture:
                return False
            # an empty pool holds the row and its adapter side by side: checked when the row came
            self._room.make(self._pool.num_pages, next_use)
            has_memory = self._take_memory(sequence, (exact,), adapter_id, next_use)
            assert has_memory, f"row {sequence.request.request_id} does not fit into an empty pool"
        if self._clean is not None:
            self._clean(self._pool.run_of(row_owner(sequence)))
        if adapter_id is not None:
            self._residency.pin(adapter_id)
            sequence.holds_adapter = True
        self._running[sequence.request.request_id] = self._waiting.remove(sequence.request.request_id)
        return True

    def _take_memory(
        self, sequence: Sequence, sizes: tuple[int, ...], adapter_id: str | None, next_use: NextUse
    ) -> bool:
        """The largest possible of `sizes` for the row, and its adapter in the pool; or neither, and False."""
        owner = row_owner(sequence)
        if not self._room.make(min(sizes), next_use, lambda other: other != adapter_id):
            return False
        next(size for size in sizes if self._pool.allocate(owner, size) is not None)
        is_resident = False
        try:
            is_resident = adapter_id is None or self._room.make_resident(adapter_id, next_use)
        finally:
            if not is_resident:
                self._pool.release(owner)
        return is_resident


def row_owner(sequence: Sequence) -> tuple[str, str]:
    """Under which a row holds its pages."""
    return ("sequence", sequence.request.request_id)
