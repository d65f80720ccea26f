"""Batchers that choose the next step by what it costs.

`AdaptiveBatcher` goes beyond dLoRA: it takes whichever of four forms serves most rows per second: all rows unmerged;
the most wanted adapter merged and alone; merged with other rows in the free places (mixture: those rows also subtract
the merged adapter); going on as before. The price of a switch is spread over the steps that the merged adapter's rows
are expected to need. Rows that pause keep their memory, so choices are compared by the rows that can run at once, and
no row pauses for ever. `CostBatcher` is the same on a replica that learns its adapters one by one. `PromptsTogether`
lets rows wait for others where a step with prompts costs more than one without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import CostModel, lora_load
from ..estimates.lengths import LengthEstimator
from .batching import (
    Batcher,
    BatchView,
    MergeWaveBatcher,
    Ranks,
    ReplicaFacts,
    ReplicaMode,
    StepPlan,
    as_step_plan,
    in_clusters,
    no_more_rows,
)

# (adapter, or None for all rows; `num_rows` of them that would run next; `batch_rows` that run at once) -> steps for
# which a choice will hold: until these rows, and those still to arrive, are done.
StepsToCome = Callable[[int | None, int, int], float]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to run the next steps."""

    #: How the rows are served.
    mode: ReplicaMode
    #: Adapter whose weights are merged (None: no adapter's).
    merged_adapter: int | None
    #: Positions of its rows, over running then waiting rows.
    batch: NDArray[np.int64]
    #: Positions among `batch` that memory lets run at once.
    taking_part: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdaptiveBatcher:
    """Chooses by cost; keeps no state, so a replica that restarts decides as before."""

    #: Costs of steps and switches.
    cost: CostModel
    #: LoRA rank of each adapter, float64 `[num_adapters]`.
    ranks: NDArray[np.float64]
    #: Steps over which the price of a switch is spread.
    steps_to_come: StepsToCome
    #: KV slots that a row reads in a step.
    mean_context: float = 512.0
    #: Factor by which another state must be better before the weights are touched. Switches are paid for in full, so a
    #: small gain is reason enough.
    hysteresis: float = 1.005
    #: Least share of the rows in turn that an adapter must have to be merged and served alone.
    least_own_share: float = 0.8
    #: Steps that a row may sit out for a merged adapter, in all; from then on it is served in its turn until it ends.
    patience: float = 256.0
    #: Whether mixtures are considered.
    may_mix: bool = True
    #: Seconds that a switch is charged with (None: as the cost model says).
    merge_s: float | None = None
    #: Prompt tokens that are computed for each token that is generated: in the long run, what each row of a batch adds
    #: to a step beside its own token.
    prompt_share: float = 0.0

    def __call__(self, view: BatchView) -> StepPlan:
        """Plan the step of the candidate that serves most rows per second; the first one on ties."""
        types = np.concatenate([view.running_adapter, view.waiting_adapter])
        best, best_rate = None, -1.0
        for candidate in self._candidates(view, types):
            rate = self._rows_per_s(candidate, types, view)
            if best is None or rate > best_rate:
                best, best_rate = candidate, rate
        assert best is not None, f"no candidate for {len(types)} rows"
        return as_step_plan(view, best.batch, best.merged_adapter, mode=best.mode)

    def _candidates(self, view: BatchView, types: NDArray[np.int32]) -> list[_Candidate]:
        """Ways to run the next steps. Those that keep the present state come first, so that ties keep it."""
        in_turn = np.arange(min(len(types), view.max_batch_rows))
        taking_part = view.taking_part(in_turn)
        unmerged = _Candidate("unmerged", None, in_turn, taking_part)
        if len(types) == 0:
            return [unmerged]
        wanted = _most_wanted(types[taking_part])
        if _is_awaited(view, wanted):
            wanted = None
        merged = [a for a in (view.merged_adapter, wanted) if a is not None]
        found: list[_Candidate] = []
        for adapter in dict.fromkeys(merged):
            is_own = types[taking_part] == adapter
            if self.may_mix and is_own.any() and not is_own.all():
                found.append(_Candidate("mixture", adapter, in_turn, taking_part))
            alone = np.flatnonzero(types == adapter)[: view.max_batch_rows]
            if is_own.mean() >= self.least_own_share and self._patience_left(view, alone) > 0:
                found.append(_Candidate("merged", adapter, alone, view.taking_part(alone)))
        return [unmerged, *found] if view.merged_adapter is None else [*found, unmerged]

    def _patience_left(self, view: BatchView, batch: NDArray[np.int64]) -> float:
        """Steps that every running row outside the batch may sit out."""
        is_outside = np.ones(len(view.running_adapter), bool)
        is_outside[batch[batch < len(is_outside)]] = False
        if not is_outside.any():
            return np.inf
        return self.patience - (0 if view.paused_steps is None else int(view.paused_steps[is_outside].max()))

    def _rows_per_s(self, candidate: _Candidate, types: NDArray[np.int32], view: BatchView) -> float:
        """Rows per second over the steps to come, the switch included."""
        rows = types[candidate.taking_part]
        load = lora_load(
            rows,
            1.0 + self.prompt_share,
            self.ranks,
            merged_adapter=candidate.merged_adapter,
            kernel=self.cost.kernel,
            prefill_tokens=len(rows) * self.prompt_share,
            decode_rows=len(rows),
            context_tokens=len(rows) * self.mean_context,
        )
        seconds = float(self.cost.step_seconds(load))
        if candidate.merged_adapter == view.merged_adapter:
            return len(rows) / seconds * self.hysteresis
        own = rows if candidate.merged_adapter is None else rows[rows == candidate.merged_adapter]
        batch_rows = view.max_batch_rows if len(rows) == len(candidate.batch) else len(rows)
        steps = max(1.0, self.steps_to_come(candidate.merged_adapter, len(own), batch_rows))
        if candidate.mode == "merged":
            steps = min(steps, self._patience_left(view, candidate.batch))
        merge_s = self.cost.merge_s if self.merge_s is None else self.merge_s
        return len(rows) * steps / (seconds * steps + merge_s)


def _is_awaited(view: BatchView, adapter: int | None) -> bool:
    """Whether none of the adapter's rows can run yet, while others do: merged, it would serve no row."""
    return view.memory is not None and len(view.running_adapter) > 0 and adapter in view.memory.awaited


def _most_wanted(types: NDArray[np.int32]) -> int | None:
    counts = np.bincount(types[types >= 0]) if (types >= 0).any() else np.zeros(0, np.int64)
    return int(np.argmax(counts)) if len(counts) else None


@dataclass(slots=True)
class CostBatcher:
    """`AdaptiveBatcher` whose steps to come are those of the rows at hand and announced.

    Half of a mean answer counts as steps to come, for a batch is rarely as full as at its start; prompts count while
    rows wait. A merge is charged with the way back: the weights that are merged now were paid for, so that leaving them
    is decided by the steps alone. The first merge is also charged with the second copy of the weights. No row sits out
    more steps than a row is expected to take.
    """

    #: Costs of steps and merges.
    cost: CostModel
    #: Returns the LoRA ranks of the adapters so far, float64 `[num_adapters]`.
    ranks: Ranks
    #: Mean lengths of this replica's rows, as known now.
    lengths: LengthEstimator
    #: Rows of an adapter that a plan will still bring here.
    rows_to_come: Callable[[int], int] = no_more_rows
    #: Whether the replica has merged before: all the state that is kept.
    _has_merged: bool = False

    def __call__(self, view: BatchView) -> StepPlan:
        """Plan the next step by an `AdaptiveBatcher` with the lengths, ranks and prices of now."""
        output_tokens = self.lengths.mean()

        def steps_to_come(adapter: int | None, num_rows: int, batch_rows: int) -> float:
            queues = (view.running_adapter, view.waiting_adapter)
            rows = sum(int((queue == adapter).sum()) if adapter is not None else len(queue) for queue in queues)
            rows += 0 if adapter is None else self.rows_to_come(adapter)
            return output_tokens / 2 * max(1.0, rows / batch_rows)

        num_running, num_waiting = len(view.running_adapter), len(view.waiting_adapter)
        merge_s = self.cost.merge_s * (2.0 if view.merged_adapter is None else 1.0)
        self._has_merged |= view.merged_adapter is not None
        if not self._has_merged:
            merge_s += self.cost.first_merge_s
        patience = max(1.0, output_tokens)
        batcher = AdaptiveBatcher(
            self.cost,
            self.ranks(),
            steps_to_come,
            patience=patience,
            merge_s=merge_s,
            # Prompts of rows that run are computed.
            prompt_share=self.lengths.mean_prompt / patience * num_waiting / max(1.0, num_waiting + num_running / 2),
        )
        return batcher(view)


def choosing_by_cost(facts: ReplicaFacts) -> Batcher:
    """Make the batcher that chooses each step by cost, mixture included."""
    inner = CostBatcher(facts.cost, facts.ranks, facts.lengths, facts.rows_to_come)
    return MergeWaveBatcher(partial(in_clusters, inner), facts.must_merge, None)


@dataclass(slots=True)
class PromptsTogether:
    """Has the prompts of several rows share a step, where prompts cost the rows that decode beside them `mixed_step_s`.

    Rows that could enter are held back until waiting has wasted as much as a mixed step costs. Each step wastes their
    share of the seconds that a step takes with any number of rows. Where `B` rows of `n` tokens end evenly,
    `B * sqrt(2 * mixed_step_s / (n * seconds))` enter together, which wastes least. Rows enter at once when no others
    would wait then, when prompts are computed anyway, and when other rows pause or weights are switched.
    """

    inner: Batcher
    cost: CostModel
    ranks: Ranks
    _wasted_s: float = 0.0

    def __call__(self, view: BatchView) -> StepPlan:
        """Take the plan of `inner`; hold its entering rows back while waiting costs less than a mixed step."""
        plan = self.inner(view)
        num_running, num_entering = len(view.running_adapter), _num_entering(view, plan)
        if not num_entering:
            return plan
        goes_on = plan.merged_adapter == view.merged_adapter and bool(plan.serve.all())
        others_wait = num_entering < len(view.waiting_adapter)
        if num_running and others_wait and goes_on and not view.has_prompts:
            merged = plan.merged_adapter
            fixed = lora_load(view.running_adapter, 0.0, self.ranks(), merged_adapter=merged, kernel=self.cost.kernel)
            share = num_entering / (num_running + num_entering)
            self._wasted_s += float(self.cost.step_seconds(fixed)) * share
            if self._wasted_s < self.cost.mixed_step_s:
                return replace(plan, holds_back=True)
        self._wasted_s = 0.0
        return plan


def _num_entering(view: BatchView, plan: StepPlan) -> int:
    """Rows of a plan that would enter now."""
    memory = view.memory
    if memory is None or not len(plan.admit):
        return len(plan.admit)
    rows = plan.admit
    if memory.awaited:
        rows = rows[~np.isin(view.waiting_adapter[rows], list(memory.awaited))]
    return memory.num_fitting(rows, view.waiting_adapter, view.running_adapter)
