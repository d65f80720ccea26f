"""Batchers of other systems behind the same interface, so that comparisons differ in the policy only.

`FcfsBatcher`: vLLM-like, first come first served, at most `max_resident` distinct adapters in a batch.
`UnmergedBatcher`: S-LoRA-like, the same without that limit. `MergedBatcher`: one adapter at a time, merged,
switching when its rows run out or a batch's worth of others has waited. `OneAtATimeBatcher`: PEFT-like, one adapter's
rows as a closed batch, which no row joins before all of it is done.

The functions make them for an engine, where adapters that are exact only when merged have waves of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..batching import Batcher, BatchView, MergeWaveBatcher, ReplicaFacts, StepPlan, as_step_plan
from ..workload import BASE_MODEL


@dataclass(frozen=True, slots=True)
class UnmergedBatcher:
    """All rows in order of arrival, unmerged (S-LoRA)."""

    def next_step(self, view: BatchView) -> StepPlan:
        """Serve all running rows, then waiting rows in order of arrival while there is room."""
        return _in_turn(view, np.arange(len(view.waiting_adapter)))


@dataclass(frozen=True, slots=True)
class FcfsBatcher:
    """Rows in order of arrival, unmerged, but of at most `max_resident` adapters at once (vLLM's `max_loras`).

    A row of one adapter too many is passed over; rows behind it whose adapter is present may go.
    """

    max_resident: int

    def next_step(self, view: BatchView) -> StepPlan:
        """Serve all running rows, then waiting rows in order of arrival whose adapter is within the limit."""
        present = set(view.running_adapter.tolist()) - {BASE_MODEL}
        free = max(0, view.max_batch_rows - len(view.running_adapter))
        allowed: list[int] = []
        for position, adapter in enumerate(view.waiting_adapter.tolist()):
            if len(allowed) == free:
                break
            if adapter == BASE_MODEL or adapter in present or len(present) < self.max_resident:
                present |= {adapter} - {BASE_MODEL}
                allowed.append(position)
        return _in_turn(view, np.asarray(allowed, dtype=np.int64))


@dataclass(slots=True)
class MergedBatcher:
    """Always merged; the base model counts as an adapter of its own. The next adapter is that of the oldest other row.

    Rows of the merged adapter that arrive meanwhile join, until other rows have been passed over for `patience` steps.
    """

    patience: int = 256
    _steps: int = 0

    def next_step(self, view: BatchView) -> StepPlan:
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


@dataclass(frozen=True, slots=True)
class OneAtATimeBatcher:
    """A closed batch of one adapter, merged; the next is formed when the last row of this one is done (PEFT)."""

    def next_step(self, view: BatchView) -> StepPlan:
        """Serve the rows of the closed batch; without any, form a batch of the oldest waiting row's adapter."""
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
    """`UnmergedBatcher` of an engine."""
    return MergeWaveBatcher(UnmergedBatcher(), facts.must_merge, None)


def vllm_like(facts: ReplicaFacts) -> Batcher:
    """`FcfsBatcher` of an engine, with eight adapters at once."""
    return MergeWaveBatcher(FcfsBatcher(_MAX_LORAS), facts.must_merge, None)


def merged_only(facts: ReplicaFacts) -> Batcher:
    """`MergedBatcher` of an engine."""
    return MergeWaveBatcher(MergedBatcher(), facts.must_merge, None)


def peft_like(facts: ReplicaFacts) -> Batcher:
    """`OneAtATimeBatcher` of an engine."""
    return MergeWaveBatcher(OneAtATimeBatcher(), facts.must_merge, None)


def _in_turn(view: BatchView, allowed: NDArray[np.int64]) -> StepPlan:
    """Plan an unmerged step of all running rows, then of the allowed waiting rows while there is room."""
    free = max(0, view.max_batch_rows - len(view.running_adapter))
    return StepPlan("unmerged", None, np.ones(len(view.running_adapter), bool), allowed[:free])
