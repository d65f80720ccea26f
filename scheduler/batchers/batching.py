"""Batchers: choose the next step of one replica, that is its mode, the rows that take part, and who is admitted.

A batcher is called before every step. It sees adapters as small integers (`BASE_MODEL` = -1 for none) and returns a
`StepPlan`; the engine admits in the given order while its memory lasts. Real engines and simulated replicas use the
same objects.

`MergeWaveBatcher` gives adapters that must be merged, or are worth it, the engine to themselves, and leaves the other
rows to an inner batcher. Weights are switched only when no row of the wave is left, so that no row sees two sets of
weights. Merging pays only when one adapter alone can fill the batch for a while (dLoRA, section 4.1).

`cost_batching.py` has the batchers that choose by what steps cost.

Shapes: `[num_running]` rows that hold memory (decoding, or paused by an earlier step), `[num_waiting]` rows not yet
admitted, both in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import CostModel
from ..estimates.lengths import LengthEstimator


@dataclass(frozen=True, slots=True, eq=False)
class FreeMemory:
    """Memory that is left for waiting rows, in pages or in any other unit that all sizes share."""

    #: Sizes of the contiguous free runs. Memory that no running row needs counts as free, that of adapters too.
    gaps: tuple[int, ...]
    #: Pages that each waiting row takes, all contiguous, int64 `[num_waiting]`.
    row_pages: NDArray[np.int64]
    #: Pages of each adapter that is in memory while its rows run, anywhere; adapters not named take none.
    adapter_pages: Mapping[int, int] = field(default_factory=dict)
    #: A row takes a multiple of this number of pages where a gap is long enough, else exactly its pages.
    rounded_to: int = 1
    #: Adapters that are not at hand yet, so that none of their rows can enter beside others.
    awaited: frozenset[int] = frozenset()

    def num_fitting(
        self, rows: NDArray[np.int64], waiting_adapter: NDArray[np.int32], running_adapter: NDArray[np.int32]
    ) -> int:
        """Number of these waiting rows that enter, in this order, before one finds no room.

        A replica on which nothing runs has room for any row.
        """
        gaps, held = sorted(self.gaps), set(running_adapter.tolist())
        for number, row in enumerate(rows.tolist()):
            adapter = int(waiting_adapter[row])
            exact = int(self.row_pages[row])
            has_room = _take(gaps, -(-exact // self.rounded_to) * self.rounded_to) or _take(gaps, exact)
            if has_room and adapter not in held:
                has_room = _take_anywhere(gaps, self.adapter_pages.get(adapter, 0))
                held.add(adapter)
            if not has_room:
                return max(number, int(len(running_adapter) == 0))
        return len(rows)


def _take(gaps: list[int], size: int) -> bool:
    """Shorten the smallest of the sorted gaps that is long enough, as the pool does. False: none is."""
    place = bisect_left(gaps, size)
    if place == len(gaps):
        return size == 0
    insort(gaps, gaps.pop(place) - size)
    return True


def _take_anywhere(gaps: list[int], size: int) -> bool:
    """Shorten one of the sorted gaps if one is long enough, else the smallest ones, as the pool does. False: all
    together are not."""
    if _take(gaps, size):
        return True
    if sum(gaps) < size:
        return False
    while size:
        gap = gaps.pop(0)
        if gap > size:
            insort(gaps, gap - size)
        size -= min(gap, size)
    return True


ReplicaMode = Literal["unmerged", "merged", "mixture"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchView:
    """State of one replica before a step, as its batcher sees it."""

    #: Adapter of each running row, int32 `[num_running]`.
    running_adapter: NDArray[np.int32]
    #: Adapter of each waiting row, int32 `[num_waiting]`.
    waiting_adapter: NDArray[np.int32]
    #: Rows one step may hold.
    max_batch_rows: int
    #: Adapter whose weights are merged now (None: no adapter's).
    merged_adapter: int | None = None
    #: Adapters that need not be loaded, int32 `[num_resident]`.
    resident_adapter: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    #: Steps that each running row has sat out so far, int64 `[num_running]` (None: not counted).
    paused_steps: NDArray[np.int64] | None = None
    #: Memory left for waiting rows (None: enough for all).
    memory: FreeMemory | None = None
    #: Tokens that each waiting row is expected to generate, float64 `[num_waiting]` (None: nothing is known).
    waiting_tokens: NDArray[np.float64] | None = None
    #: Whether prompts of some running rows are not computed yet.
    has_prompts: bool = False

    def of_waiting(self, rows: NDArray[np.int64]) -> BatchView:
        """The view in which only these rows wait, in this order."""
        if len(rows) == len(self.waiting_adapter) and (rows == np.arange(len(rows))).all():
            return self
        memory = None if self.memory is None else replace(self.memory, row_pages=self.memory.row_pages[rows])
        tokens = None if self.waiting_tokens is None else self.waiting_tokens[rows]
        return replace(self, waiting_adapter=self.waiting_adapter[rows], memory=memory, waiting_tokens=tokens)

    def taking_part(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of a batch that memory lets run at once, int64.

        `batch`: positions over running then waiting rows. Rows outside it keep the memory they hold.
        """
        if self.memory is None:
            return batch
        num_running = len(self.running_adapter)
        waiting = batch[batch >= num_running]
        num_fitting = self.memory.num_fitting(waiting - num_running, self.waiting_adapter, self.running_adapter)
        return np.concatenate([batch[batch < num_running], waiting[:num_fitting]])


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The next step of a replica: its mode, the running rows that it serves, and the waiting rows to admit.

    In mode `merged` every served and admitted row is of the merged adapter; in `mixture` any may join.
    """

    #: How the rows are served.
    mode: ReplicaMode
    #: Adapter whose weights must be merged (None exactly when `mode == "unmerged"`).
    merged_adapter: int | None
    #: Which running rows take part, bool `[num_running]`; the others pause and keep their memory.
    serve: NDArray[np.bool_]
    #: Positions among the waiting rows, int64, in the order to admit them while memory lasts.
    admit: NDArray[np.int64]
    #: Whether no row enters in this step, while the adapters of the rows to admit are read.
    holds_back: bool = False

    def check_integrity(self, view: BatchView) -> None:
        """Raise AssertionError when the plan breaks the rules above or overfills the batch."""
        assert (self.mode == "unmerged") == (self.merged_adapter is None), f"{self.mode}, {self.merged_adapter}"
        assert self.serve.shape == view.running_adapter.shape, f"serve {self.serve.shape}"
        assert len(np.unique(self.admit)) == len(self.admit), f"admit {self.admit} repeats a row"
        num_rows = int(self.serve.sum()) + len(self.admit)
        assert num_rows <= view.max_batch_rows, f"{num_rows} rows in a batch of {view.max_batch_rows}"
        if self.mode == "merged":
            present = {*view.running_adapter[self.serve].tolist(), *view.waiting_adapter[self.admit].tolist()}
            assert present <= {self.merged_adapter}, f"adapters {present}, merged {self.merged_adapter}"


#: Chooses each step of one replica: serves or admits something whenever a row is there. A function, or an object that
#: keeps state, one for each replica.
Batcher = Callable[[BatchView], StepPlan]


def clustered(view: BatchView) -> StepPlan:
    """Serve all running rows unmerged, and fill the free places in `admission_order`.

    Few distinct adapters at once is what makes an unmerged step fast. After them come adapters that are resident, then
    those with the most waiting rows, so that each new adapter adds as many rows as possible.
    """
    free = max(0, view.max_batch_rows - len(view.running_adapter))
    admit = admission_order(view)
    return StepPlan("unmerged", None, np.ones(len(view.running_adapter), bool), admit[:free])


def in_clusters(inner: Batcher, view: BatchView) -> StepPlan:
    """Let `inner` choose as if rows had come adapter by adapter, in `admission_order`."""
    order = admission_order(view)
    plan = inner(view.of_waiting(order))
    return replace(plan, admit=order[plan.admit])


def admission_order(view: BatchView) -> NDArray[np.int64]:
    """Positions of all waiting rows in the order of admission, int64 `[num_waiting]`.

    Rows expected to run much longer than others come first, since a long row that begins last runs alone in the end.
    Rows of about one length are in `clustered_order`.
    """
    order = clustered_order(view.running_adapter, view.waiting_adapter, view.resident_adapter)
    if view.waiting_tokens is None or len(order) < 2:
        return order
    # Octaves around the mean, so that rows as long as most are alike.
    octave = np.rint(np.log2(view.waiting_tokens / view.waiting_tokens.mean()))
    return order[np.argsort(-octave[order], kind="stable")]


def clustered_order(
    running_adapter: NDArray[np.int32],
    waiting_adapter: NDArray[np.int32],
    resident_adapter: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Positions of all waiting rows, adapter by adapter, int64 `[num_waiting]`.

    Adapters already running come first, then resident ones, so that each is loaded once for all its rows, then the
    others. In each of these classes the adapter with most rows comes first; rows of one adapter keep their order. Base
    rows cost no adapter and come with the first class.
    """
    if len(waiting_adapter) == 0:
        return np.zeros(0, np.int64)
    if (waiting_adapter == waiting_adapter[0]).all():
        return np.arange(len(waiting_adapter))
    present, group, waiting = np.unique(waiting_adapter, return_inverse=True, return_counts=True)
    running = set(running_adapter.tolist())
    resident = set() if resident_adapter is None else set(resident_adapter.tolist())
    # A few adapters: sets find them sooner than arrays are sorted.
    distance = np.array([0 if a < 0 or a in running else 1 if a in resident else 2 for a in present.tolist()])
    return np.lexsort((np.arange(len(group)), present[group], -waiting[group], distance[group])).astype(np.int64)


def all_unmerged(view: BatchView, admit: NDArray[np.int64]) -> StepPlan:
    """Plan a step of all running rows, then of `admit`, as far as a batch holds them: possible in any state."""
    serve = np.arange(len(view.running_adapter)) < view.max_batch_rows
    return StepPlan("unmerged", None, serve, admit[: view.max_batch_rows - int(serve.sum())])


def without_vain_merge(plan: StepPlan, merged_now: int | None, taking_part: NDArray[np.int32]) -> StepPlan:
    """The plan once it is known whose rows take part: weights are not switched to an adapter that has none of them."""
    if plan.merged_adapter is None or plan.merged_adapter == merged_now or plan.merged_adapter in taking_part:
        return plan
    return replace(plan, mode="unmerged", merged_adapter=None)


def as_step_plan(
    view: BatchView, batch: NDArray[np.int64], merged_adapter: int | None, *, mode: ReplicaMode | None = None
) -> StepPlan:
    """A batch of positions over running then waiting rows, as the rows to serve and the rows to admit.

    `mode` is only needed for `mixture`; without it the merged adapter decides between the other two.
    """
    num_running = len(view.running_adapter)
    serve = np.zeros(num_running, dtype=bool)
    serve[batch[batch < num_running]] = True
    admit = (batch[batch >= num_running] - num_running).astype(np.int64)
    return StepPlan(mode or ("unmerged" if merged_adapter is None else "merged"), merged_adapter, serve, admit)


@dataclass(frozen=True, slots=True)
class MergeWaveBatcher:
    """Chooses between a merged wave and the rest, which is left to `inner`."""

    #: Chooses the steps of all other rows.
    inner: Batcher
    #: Whether an adapter is exact only when merged.
    must_merge: Callable[[int], bool]
    #: Waiting rows from which any adapter gets a merged wave. None: an adapter gets one only if it must, and `inner`
    #: may merge and mix the others as it likes.
    min_rows: int | None

    def __call__(self, view: BatchView) -> StepPlan:
        """Plan the next step.

        A merged wave goes on while it has rows; else `inner` serves the rows outside of waves; without any, a wave
        begins.
        """
        is_running = np.ones(len(view.running_adapter), bool)
        merged = view.merged_adapter
        is_wave = merged is not None and (self.min_rows is not None or self.must_merge(merged))
        if is_wave:
            own = np.flatnonzero(view.waiting_adapter == merged)
            if len(is_running) or len(own):
                free = max(0, view.max_batch_rows - len(is_running))
                return StepPlan("merged", merged, is_running, own[:free])
        deserving = self._deserving(view.waiting_adapter)
        shared = np.arange(len(view.waiting_adapter))
        if len(deserving):
            shared = np.flatnonzero(~np.isin(view.waiting_adapter, deserving))
        if len(shared) or len(is_running):
            return self._shared(view, shared, None if is_wave else merged)
        first = int(view.waiting_adapter[0])
        own = np.flatnonzero(view.waiting_adapter == first)
        return StepPlan("merged", first, is_running, own[: view.max_batch_rows])

    def _deserving(self, waiting: NDArray[np.int32]) -> NDArray[np.int32]:
        """Adapters whose waiting rows are to be served merged."""
        adapters, counts = np.unique(waiting[waiting >= 0], return_counts=True)
        enough = counts >= self.min_rows if self.min_rows is not None else np.zeros(len(adapters), bool)
        forced = np.array([self.must_merge(int(a)) for a in adapters], bool)
        deserving: NDArray[np.int32] = adapters[enough | forced]
        return deserving

    def _shared(self, view: BatchView, shared: NDArray[np.int64], merged: int | None) -> StepPlan:
        shown = view.of_waiting(shared)
        plan = self.inner(shown if merged == view.merged_adapter else replace(shown, merged_adapter=merged))
        return replace(plan, admit=shared[plan.admit])


Ranks = Callable[[], NDArray[np.float64]]


def no_more_rows(adapter: int) -> int:
    """Default of `ReplicaFacts.rows_to_come`: all rows are at hand."""
    return 0


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts about a replica from which a policy makes its batcher."""

    #: Costs of its steps and merges.
    cost: CostModel
    #: Returns the LoRA ranks of its adapters so far, float64 `[num_adapters]`.
    ranks: Ranks
    #: Whether an adapter is exact only when merged.
    must_merge: Callable[[int], bool]
    #: Rows one step may hold.
    max_batch_rows: int
    #: Mean lengths of its rows, as known now.
    lengths: LengthEstimator
    #: Rows of an adapter that the plan will still bring to the replica.
    rows_to_come: Callable[[int], int] = no_more_rows


#: Batchers of an engine: name -> `module:function` below `scheduler`, which makes it. Those of papers are imported only
#: when they are asked for.
BATCHERS: Mapping[str, str] = {
    "cost": "batchers.cost_batching:choosing_by_cost",
    "dlora": "baselines.dlora_batching:with_credits",
    "s-lora": "baselines.batchers:s_lora",
    "vllm-like": "baselines.batchers:vllm_like",
    "merged-only": "baselines.batchers:merged_only",
    "peft-like": "baselines.batchers:peft_like",
}


def batcher_of(name: str, facts: ReplicaFacts) -> Batcher:
    """A batcher by its name. Raises ValueError that lists the known names."""
    if name not in BATCHERS:
        raise ValueError(f"batcher={name!r}: expected one of {', '.join(BATCHERS)}.")
    module, _, function = BATCHERS[name].partition(":")
    make: Callable[[ReplicaFacts], Batcher] = getattr(import_module(f"..{module}", __package__), function)
    return make(facts)
