"""Batchers of other systems behind the same interface, so that comparisons differ in the policy only.

`unmerged`: S-LoRA-like, first come first served; vLLM-like with at most `max_resident` distinct adapters in a batch.
`MergedBatcher`: one adapter at a time, merged, switching when its rows run out or a batch's worth of others has waited.
`one_at_a_time`: PEFT-like, one adapter's rows as a closed batch, which no row joins before all of it is done: the
baseline of S-LoRA's article. dLoRA's section 7 gives PEFT selective batching, which is `MergedBatcher`.

The functions at the end make them for an engine, where adapters that are exact only when merged have waves of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..batchers.batching import Batcher, BatchView, MergeWaveBatcher, ReplicaFacts, StepPlan, as_step_plan
from ..workload import BASE_MODEL


def unmerged(view: BatchView, *, max_resident: int | None = None) -> StepPlan:
    """Serve all running rows unmerged, then waiting rows in order of arrival while there is room (S-LoRA).

    `max_resident`: most adapters at once (vLLM's `max_loras`; None: any number). A row of one adapter too many is
    passed over; rows behind it whose adapter is present may go.
    """
    free = max(0, view.max_batch_rows - len(view.running_adapter))
    admit = np.arange(len(view.waiting_adapter)) if max_resident is None else _within(view, max_resident, free)
    return StepPlan("unmerged", None, np.ones(len(view.running_adapter), bool), admit[:free])


def _within(view: BatchView, max_resident: int, free: int) -> NDArray[np.int64]:
    """Positions of the first `free` waiting rows with which a batch has at most `max_resident` adapters."""
    present = set(view.running_adapter.tolist()) - {BASE_MODEL}
    allowed: list[int] = []
    for position, adapter in enumerate(view.waiting_adapter.tolist()):
        if len(allowed) == free:
            break
        if adapter == BASE_MODEL or adapter in present or len(present) < max_resident:
            present |= {adapter} - {BASE_MODEL}
            allowed.append(position)
    return np.asarray(allowed, dtype=np.int64)


@dataclass(slots=True)
class MergedBatcher:
    """Always merged; the base model counts as an adapter of its own. The next adapter is that of the oldest other row.

    Rows of the merged adapter that arrive meanwhile join, until other rows have been passed over for `patience` steps.
    """

    patience: int = 256
    _steps: int = 0

    def __call__(self, view: BatchView) -> StepPlan:
        """Serve the merged adapter's rows; switch first if none is left or others have waited long enough."""
        types = np.concatenate([view.running_adapter, view.waiting_adapter])
        current = BASE_MODEL if view.merged_adapter is None else view.merged_adapter
        if len(types) and (current not in types or self._steps >= self.patience):
            others = types[types != current]
            current = int(others[0]) if len(others) else current
            self._steps = 0
        self._steps = self._steps + 1 if (types != current).any() else 0
        batch = np.flatnonzero(types == current)[: view.max_batch_rows]
        return as_step_plan(view, batch, None if current == BASE_MODEL else current)


def one_at_a_time(view: BatchView) -> StepPlan:
    """Serve a closed batch of one adapter, merged; when its last row is done, form one of the oldest waiting row's
    adapter (PEFT).
    """
    waiting = view.waiting_adapter
    if len(view.running_adapter):
        admit = np.zeros(0, np.int64)
        adapter = int(view.running_adapter[0])
    elif len(waiting):
        adapter = int(waiting[0])
        admit = np.flatnonzero(waiting == adapter)[: view.max_batch_rows]
    else:
        return as_step_plan(view, np.zeros(0, np.int64), view.merged_adapter)
    batch = np.concatenate([np.arange(len(view.running_adapter)), len(view.running_adapter) + admit])
    return as_step_plan(view, batch, None if adapter == BASE_MODEL else adapter)


# vLLM's `max_loras`, at a usual value.
_MAX_LORAS = 8


def s_lora(facts: ReplicaFacts) -> Batcher:
    """`unmerged` for an engine."""
    return MergeWaveBatcher(unmerged, facts.must_merge, None)


def vllm_like(facts: ReplicaFacts) -> Batcher:
    """`unmerged` for an engine, with eight adapters at once."""
    return MergeWaveBatcher(partial(unmerged, max_resident=_MAX_LORAS), facts.must_merge, None)


def merged_only(facts: ReplicaFacts) -> Batcher:
    """`MergedBatcher` for an engine."""
    return MergeWaveBatcher(MergedBatcher(), facts.must_merge, None)


def peft_like(facts: ReplicaFacts) -> Batcher:
    """`one_at_a_time` for an engine."""
    return MergeWaveBatcher(one_at_a_time, facts.must_merge, None)
