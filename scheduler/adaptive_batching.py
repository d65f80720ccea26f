"""Beyond dLoRA: every step in whichever of four forms serves most rows per second, mixture included.

Candidates: everybody unmerged; the most wanted adapter merged and alone; merged with other rows filling the free
places (mixture: those rows also subtract the merged adapter); and going on as before. The price of a switch is spread
over the steps the merged adapter's rows are expected to need, which offline is known: the planner's backlog counts
rows that have not even reached this replica.

Rows are taken in order of arrival, which is the planner's: adapters together, and long rows first, so that no long
row is left for the end. Facts the costs bring out by themselves: merging pays only if one adapter can fill the batch;
few distinct adapters make unmerged cheap; a merged wave's draining tail is worth filling with other rows.

Memory limits a step as `max_batch_rows` does: choices are made and compared by the rows that can run at once. A row
that pauses keeps its memory, so pausing it for a merged adapter costs the rows that would have run in its place; and
no row pauses for ever.
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

    def __call__(self, adapter: int | None, num_rows: int, batch_rows: int) -> float:
        """Steps until these rows of that adapter, and those still to arrive, are done, `batch_rows` at once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the next steps. `batch`: positions over running then waiting rows; `taking_part`: those of them
    that memory lets run at once."""

    mode: ReplicaMode
    merged_adapter: int | None
    batch: NDArray[np.int64]
    taking_part: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdaptiveBatcher:
    """Chooses by cost; keeps no state, so a replica that restarts decides as before.

    `ranks` float64 `[num_adapters]`. `mean_context`: KV slots a row reads in a step. `hysteresis`: how much
    better another state must be before the weights are touched. `patience`: steps that a row may sit out for a merged
    adapter, in all; from then on it is served in its turn until it ends. `may_mix`, `may_merge`: what the engine and
    the job allow.
    """

    cost: CostModel
    ranks: NDArray[np.float64]
    steps_to_come: StepsToCome
    mean_context: float = 512.0
    hysteresis: float = 1.02
    least_own_share: float = 0.8
    patience: float = 256.0
    may_mix: bool = True
    may_merge: bool = True

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        types = np.concatenate([view.running_adapter, view.waiting_adapter])
        best, best_rate = None, -1.0
        for candidate in self._candidates(view, types):
            rate = self._rows_per_s(candidate, types, view)
            if best is None or rate > best_rate:
                best, best_rate = candidate, rate
        assert best is not None
        return as_step_plan(view, best.batch, best.merged_adapter, mode=best.mode)

    def _candidates(self, view: BatchView, types: NDArray[np.int32]) -> list[Candidate]:
        """The present state's own continuations first: ties keep it."""
        in_turn = np.arange(min(len(types), view.max_batch_rows))
        taking_part = view.taking_part(in_turn)
        unmerged = Candidate("unmerged", None, in_turn, taking_part)
        if len(types) == 0:
            return [unmerged]
        wanted = _most_wanted(types[taking_part]) if self.may_merge else None
        if _is_awaited(view, wanted):
            wanted = None
        merged = [a for a in (view.merged_adapter, wanted) if a is not None]
        found: list[Candidate] = []
        for adapter in dict.fromkeys(merged):
            is_own = types[taking_part] == adapter
            if self.may_mix and is_own.any() and not is_own.all():
                found.append(Candidate("mixture", adapter, in_turn, taking_part))
            alone = np.flatnonzero(types == adapter)[: view.max_batch_rows]
            if is_own.mean() >= self.least_own_share and self._patience_left(view, alone) > 0:
                found.append(Candidate("merged", adapter, alone, view.taking_part(alone)))
        return [unmerged, *found] if view.merged_adapter is None else [*found, unmerged]

    def _patience_left(self, view: BatchView, batch: NDArray[np.int64]) -> float:
        """Steps that every running row outside the batch may sit out."""
        is_outside = np.ones(len(view.running_adapter), bool)
        is_outside[batch[batch < len(is_outside)]] = False
        if not is_outside.any():
            return np.inf
        return self.patience - (0 if view.paused_steps is None else int(view.paused_steps[is_outside].max()))

    def _rows_per_s(self, candidate: Candidate, types: NDArray[np.int32], view: BatchView) -> float:
        """Rows per second over the steps to come, the switch included."""
        rows = types[candidate.taking_part]
        load = lora_load(rows, 1.0, self.ranks, merged_adapter=candidate.merged_adapter, kernel=self.cost.kernel)
        step = replace(load, decode_rows=len(rows), context_tokens=len(rows) * self.mean_context)
        seconds = float(self.cost.step_seconds(step))
        if candidate.merged_adapter == view.merged_adapter:
            return len(rows) / seconds * self.hysteresis
        own = rows if candidate.merged_adapter is None else rows[rows == candidate.merged_adapter]
        batch_rows = view.max_batch_rows if len(rows) == len(candidate.batch) else len(rows)
        steps = max(1.0, self.steps_to_come(candidate.merged_adapter, len(own), batch_rows))
        if candidate.mode == "merged":
            steps = min(steps, self._patience_left(view, candidate.batch))
        return len(rows) * steps / (seconds * steps + self.cost.merge_s)


def _is_awaited(view: BatchView, adapter: int | None) -> bool:
    """Whether none of the adapter's rows can run yet, while others do: merged, it would serve nobody."""
    return view.memory is not None and len(view.running_adapter) > 0 and adapter in view.memory.awaited


def _most_wanted(types: NDArray[np.int32]) -> int | None:
    counts = np.bincount(types[types >= 0]) if (types >= 0).any() else np.zeros(0, np.int64)
    return int(np.argmax(counts)) if len(counts) else None
