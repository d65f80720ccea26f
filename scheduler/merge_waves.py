"""Waves on one replica: adapters worth merging get the engine to themselves, all others share it as `inner` says.

A wave ends when no row of its kind is left, running or waiting; only then are weights switched, so that no row of a
wave ever sees two sets of weights. Merging pays only when one adapter alone can fill the batch for a
while (dLoRA, section 4.1); adapters that are exact only when merged always get a wave of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .batching import Batcher, BatchView, StepPlan


@dataclass(frozen=True, slots=True)
class MergeWaveBatcher:
    """Chooses between a merged wave and the rest, which is left to `inner`.

    `must_merge(adapter)`: exact only when merged. `min_rows`: waiting rows from which any adapter gets a
    merged wave; None: never unless it must, and `inner` may merge and mix the others as it likes.
    """

    inner: Batcher
    must_merge: Callable[[int], bool]
    min_rows: int | None

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        everybody = np.ones(len(view.running_adapter), bool)
        merged = view.merged_adapter
        is_wave = merged is not None and (self.min_rows is not None or self.must_merge(merged))
        if is_wave:
            own = np.flatnonzero(view.waiting_adapter == merged)
            if len(everybody) or len(own):
                free = max(0, view.max_batch_rows - len(everybody))
                return StepPlan("merged", merged, everybody, own[:free])
        shared = np.flatnonzero(~np.isin(view.waiting_adapter, self._deserving(view.waiting_adapter)))
        if len(shared) or len(everybody):
            return self._shared(view, shared, None if is_wave else merged)
        first = int(view.waiting_adapter[0])
        own = np.flatnonzero(view.waiting_adapter == first)
        return StepPlan("merged", first, everybody, own[: view.max_batch_rows])

    def _deserving(self, waiting: NDArray[np.int32]) -> NDArray[np.int32]:
        """Adapters whose waiting rows are to be served merged."""
        adapters, counts = np.unique(waiting[waiting >= 0], return_counts=True)
        enough = counts >= self.min_rows if self.min_rows is not None else np.zeros(len(adapters), bool)
        forced = np.array([self.must_merge(int(a)) for a in adapters], bool)
        deserving: NDArray[np.int32] = adapters[enough | forced]
        return deserving

    def _shared(self, view: BatchView, shared: NDArray[np.int64], merged: int | None) -> StepPlan:
        plan = self.inner.next_step(replace(view.of_waiting(shared), merged_adapter=merged))
        return replace(plan, admit=shared[plan.admit])
