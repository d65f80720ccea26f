"""The batchers that choose by cost, on a replica that learns its adapters one by one and sees its own queue only.

`CostBatcher`: the adaptive one, mixture included. `DloraBatcher`: dLoRA's Algorithms 1 to 3. Both take their
iteration times from the cost model and the adapters' ranks from the replica, float64 `[num_adapters]` at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .adaptive_batching import AdaptiveBatcher
from .batching import BatchView, StepPlan
from .cost import CostModel, lora_load
from .credits import Credits
from .dynamic_batching import DynamicBatcher, Thresholds, Tuning

Ranks = Callable[[], NDArray[np.float64]]


def no_more_rows(adapter: int) -> int:
    """All rows are at hand."""
    return 0


# dLoRA's credits per adapter, in batches: what it may serve out of turn before it must have waited.
_CREDIT_BATCHES = 200.0
# Switches are paid for in full, so a small gain is reason enough.
_HYSTERESIS = 1.005


@dataclass(frozen=True, slots=True)
class CostBatcher:
    """`AdaptiveBatcher` whose steps to come are those of the rows at hand and announced. Keeps no state.

    `mean_output_tokens`: of a row, as known now; half of it counts, for a batch is rarely as full as at its start. A
    merge is charged with the way back: the weights that are merged
    now were paid for, so that leaving them is decided by the steps alone. `rows_to_come`: of an adapter, rows that a
    plan will still bring here. No row sits out more steps than a row is expected to take.
    """

    cost: CostModel
    ranks: Ranks
    mean_output_tokens: Callable[[], float]
    rows_to_come: Callable[[int], int] = no_more_rows
    may_mix: bool = True

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        output_tokens = self.mean_output_tokens()

        def steps_to_come(adapter: int | None, num_rows: int, batch_rows: int) -> float:
            queues = (view.running_adapter, view.waiting_adapter)
            rows = sum(int((queue == adapter).sum()) if adapter is not None else len(queue) for queue in queues)
            rows += 0 if adapter is None else self.rows_to_come(adapter)
            return output_tokens / 2 * max(1.0, rows / batch_rows)

        merge_s = self.cost.merge_s * (2.0 if view.merged_adapter is None else 1.0)
        cost = replace(self.cost, merge_s=merge_s)
        ranks = self.ranks()
        patience = max(1.0, output_tokens)
        batcher = AdaptiveBatcher(
            cost, ranks, steps_to_come, hysteresis=_HYSTERESIS, may_mix=self.may_mix, patience=patience
        )
        return batcher.next_step(view)


class DloraBatcher:
    """`DynamicBatcher` with an account for every adapter as it becomes known."""

    def __init__(self, cost: CostModel, ranks: Ranks, max_batch_rows: int, mean_context: float = 512.0) -> None:
        initial = _CREDIT_BATCHES * max_batch_rows
        credits = Credits(0, initial=initial, starve_above=1.5 * initial, normal_below=1.2 * initial)
        self._cost, self._ranks, self._mean_context = cost, ranks, mean_context
        thresholds = Thresholds(alpha=0.9, beta=0.5)
        self.inner = DynamicBatcher(self._iteration_s, credits, Tuning(switch_s=cost.merge_s), thresholds)

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`."""
        self.inner.credits.extend(len(self._ranks()))
        return self.inner.next_step(view)

    def _iteration_s(self, types: NDArray[np.int32], merged: int | None) -> float:
        lora = lora_load(types, 1.0, self._ranks(), merged_adapter=merged, kernel=self._cost.kernel)
        load = replace(lora, decode_rows=len(types), context_tokens=len(types) * self._mean_context)
        return float(self._cost.step_seconds(load))
