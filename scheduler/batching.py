"""One replica, one step: which mode, which rows take part, who is admitted next.

A batcher is asked before every step. It sees adapters as small integers (`BASE_MODEL` = -1 for none) and
answers with a `StepPlan`; the engine admits in the given order while its memory lasts. Real engine and
simulated replica ask the same objects.

Shapes: `[num_running]` rows that hold memory (decoding, or paused by an earlier step), `[num_waiting]` rows
not yet admitted, both in order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .free_memory import FreeMemory

ReplicaMode = Literal["unmerged", "merged", "mixture"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchView:
    """What a batcher sees before a step.

    `running_adapter`, `waiting_adapter`: int32 `[num_running]`, `[num_waiting]`. `max_batch_rows`: rows one
    step may hold. `merged_adapter`: whose weights are merged now (None: nobody's). `resident_adapter`: int32
    `[num_resident]`, adapters that need not be loaded. `paused_steps`: int64 `[num_running]`, steps that each has sat
    out so far (None: nobody counts). `memory`: what is left for waiting rows (None: enough for all).
    """

    running_adapter: NDArray[np.int32]
    waiting_adapter: NDArray[np.int32]
    max_batch_rows: int
    merged_adapter: int | None = None
    resident_adapter: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    paused_steps: NDArray[np.int64] | None = None
    memory: FreeMemory | None = None

    def of_waiting(self, rows: NDArray[np.int64]) -> BatchView:
        """The view in which only these rows wait, in this order."""
        memory = None if self.memory is None else self.memory.of_rows(rows)
        return replace(self, waiting_adapter=self.waiting_adapter[rows], memory=memory)

    def taking_part(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of a batch of positions over running then waiting rows, those that memory lets run at once. Rows outside the
        batch keep what they hold."""
        if self.memory is None:
            return batch
        num_running = len(self.running_adapter)
        waiting = batch[batch >= num_running]
        num_fitting = self.memory.num_fitting(waiting - num_running, self.waiting_adapter, self.running_adapter)
        return np.concatenate([batch[batch < num_running], waiting[:num_fitting]])


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the next step does.

    `merged_adapter`: whose weights must be merged (None exactly when `mode == "unmerged"`).
    `serve`: bool `[num_running]`, the running rows that take part; the others pause and keep their memory.
    `admit`: int64, positions among the waiting rows, in the order to admit them while memory lasts.
    In mode `merged` every served and admitted row is of the merged adapter; in `mixture` any may join.
    """

    mode: ReplicaMode
    merged_adapter: int | None
    serve: NDArray[np.bool_]
    admit: NDArray[np.int64]

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


class Batcher(Protocol):
    """Chooses each step of one replica. May keep state; one object per replica."""

    def next_step(self, view: BatchView) -> StepPlan:
        """Decide the next step. Must serve or admit something whenever a row is there."""


@dataclass(frozen=True, slots=True)
class ClusteredBatcher:
    """Unmerged, everybody running is served; free places go to adapters already in the batch first.

    Few distinct adapters at once is what makes an unmerged step fast. After them come adapters that are resident, then
    those with the most waiting rows, so that each new adapter brings as many rows as possible. `patience` bounds the
    unfairness: the oldest waiting row is admitted first once that many rows wait behind it.
    """

    patience: int = 1 << 30

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        free = max(0, view.max_batch_rows - len(view.running_adapter))
        admit = clustered_order(view.running_adapter, view.waiting_adapter, view.resident_adapter)
        if len(admit) > self.patience:
            admit = np.concatenate([[0], admit[admit != 0]])
        return StepPlan("unmerged", None, np.ones(len(view.running_adapter), bool), admit[:free])


@dataclass(frozen=True, slots=True)
class InClusters:
    """Lets `inner` choose as if rows had come adapter by adapter: those running first, then the most wanted."""

    inner: Batcher

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        order = clustered_order(view.running_adapter, view.waiting_adapter, view.resident_adapter)
        plan = self.inner.next_step(view.of_waiting(order))
        return replace(plan, admit=order[plan.admit])


def clustered_order(
    running_adapter: NDArray[np.int32],
    waiting_adapter: NDArray[np.int32],
    resident_adapter: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Positions of all waiting rows: adapters already running first, then resident ones, so that each is loaded once
    for all its rows, then the most wanted; stable inside.

    Base rows cost no adapter and come with the first.
    """
    if len(waiting_adapter) == 0:
        return np.zeros(0, np.int64)
    present, group, waiting = np.unique(waiting_adapter, return_inverse=True, return_counts=True)
    distance = np.where(np.isin(present, running_adapter) | (present < 0), 0, 2)
    if resident_adapter is not None:
        distance[(distance == 2) & np.isin(present, resident_adapter)] = 1
    return np.lexsort((np.arange(len(group)), present[group], -waiting[group], distance[group])).astype(np.int64)


def everybody_unmerged(view: BatchView, admit: NDArray[np.int64]) -> StepPlan:
    """All running rows in order of arrival, as far as a step holds them, then `admit`: possible in any state."""
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
