"""Beyond dLoRA: every step in whichever of four forms serves most rows per second, mixture included.

Candidates: everybody unmerged; the most wanted adapter merged and alone; merged with other rows filling the free
places (mixture: those rows also subtract the merged adapter); and going on as before. The price of a switch is spread
over the steps the merged adapter's rows are expected to need, which offline is known: the planner's backlog counts
rows that have not even reached this replica.

Rows are taken in order of arrival, which is the planner's: adapters together, and long rows first, so that no long
row is left for the end. Facts the costs bring out by themselves: merging pays only if one adapter can fill the batch;
few distinct adapters make unmerged cheap; a merged wave's draining tail is worth filling with other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .batching import BatchView, ReplicaMode, StepPlan, as_step_plan
from .cost import CostModel, lora_load


class StepsToCome(Protocol):
    """How long a choice will hold."""

    def __call__(self, adapter: int | None, num_rows: int) -> float:
        """Steps until these rows of that adapter, and those still to arrive, are done."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the next steps. `batch`: positions over running then waiting rows."""

    mode: ReplicaMode
    merged_adapter: int | None
    batch: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdaptiveBatcher:
    """Chooses by cost; keeps no state, so a replica that restarts decides as before.

    `ranks` float64 `[num_adapters]`. `mean_context`: KV slots a row reads in a step. `hysteresis`: how much
    better another state must be before the weights are touched. `may_mix`, `may_merge`: what the engine and
    the job allow.
    """

    cost: CostModel
    ranks: NDArray[np.float64]
    steps_to_come: StepsToCome
    mean_context: float = 512.0
    hysteresis: float = 1.02
    least_own_share: float = 0.8
    may_mix: bool = True
    may_merge: bool = True

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        types = np.concatenate([view.running_adapter, view.waiting_adapter])
        best, best_rate = None, -1.0
        for candidate in self._candidates(view, types):
            rate = self._rows_per_s(candidate, types, view.merged_adapter)
            if best is None or rate > best_rate:
                best, best_rate = candidate, rate
        assert best is not None
        return as_step_plan(view, best.batch, best.merged_adapter, mode=best.mode)

    def _candidates(self, view: BatchView, types: NDArray[np.int32]) -> list[Candidate]:
        """The present state's own continuations first: ties keep it."""
        in_turn = np.arange(min(len(types), view.max_batch_rows))
        unmerged = Candidate("unmerged", None, in_turn)
        if len(types) == 0:
            return [unmerged]
        wanted = _most_wanted(types[in_turn]) if self.may_merge else None
        merged = [a for a in (view.merged_adapter, wanted) if a is not None]
        found: list[Candidate] = []
        for adapter in dict.fromkeys(merged):
            is_own = types[in_turn] == adapter
            if self.may_mix and is_own.any() and not is_own.all():
                found.append(Candidate("mixture", adapter, in_turn))
            if is_own.mean() >= self.least_own_share:
                found.append(Candidate("merged", adapter, np.flatnonzero(types == adapter)[: view.max_batch_rows]))
        return [unmerged, *found] if view.merged_adapter is None else [*found, unmerged]

    def _rows_per_s(self, candidate: Candidate, types: NDArray[np.int32], merged_now: int | None) -> float:
        """Rows per second over the steps to come, the switch included."""
        rows = types[candidate.batch]
        load = lora_load(rows, 1.0, self.ranks, merged_adapter=candidate.merged_adapter, kernel=self.cost.kernel)
        step = replace(load, decode_rows=len(rows), context_tokens=len(rows) * self.mean_context)
        seconds = float(self.cost.step_seconds(step))
        if candidate.merged_adapter == merged_now:
            return len(rows) / seconds * self.hysteresis
        own = rows if candidate.merged_adapter is None else rows[rows == candidate.merged_adapter]
        steps = max(1.0, self.steps_to_come(candidate.merged_adapter, len(own)))
        return len(rows) * steps / (seconds * steps + self.cost.merge_s)


def _most_wanted(types: NDArray[np.int32]) -> int | None:
    counts = np.bincount(types[types >= 0]) if (types >= 0).any() else np.zeros(0, np.int64)
    return int(np.argmax(counts)) if len(counts) else None
