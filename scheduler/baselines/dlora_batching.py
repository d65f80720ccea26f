"""dLoRA's dynamic batching (OSDI 24, section 4 and appendix A.1).

Algorithm 1 chooses merged or unmerged before each iteration. Algorithm 2 tunes its two thresholds from what either
would have achieved. Algorithm 3 keeps it fair with credits: every adapter starts with the same, and one that is served
out of turn pays those that were passed over, row by row. An adapter above `starve_above` is served first until it has
fallen below `normal_below`. The sum of all credits never changes.

Rows are positions in order of arrival, running rows before waiting ones; `types` int32 `[num_rows]` names the adapter
of each (-1: base model, never merged).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..batchers.batching import Batcher, BatchView, MergeWaveBatcher, Ranks, ReplicaFacts, StepPlan, as_step_plan
from ..costs.cost import CostModel, lora_load

# dLoRA's credits per adapter, in batches: what it may serve out of turn before it must have waited.
_CREDIT_BATCHES = 200.0
#: Number by which Algorithm 2 lowers alpha, or raises beta, when the other choice would have been faster.
DECREMENT = 0.05
#: Factor by which Algorithm 2 raises alpha, or lowers beta, when the other choice would not have been faster.
MULTIPLIER = 1.1
#: Iterations after which a break point comes anyway.
PERIOD = 32
#: Least and largest value of alpha and beta.
LEAST_THRESHOLD, _MOST_THRESHOLD = 0.05, 4.0


def dlora_batcher(cost: CostModel, ranks: Ranks, max_batch_rows: int, mean_context: float = 512.0) -> DynamicBatcher:
    """Make the batcher of a replica, with iteration times of the cost model."""
    initial = _CREDIT_BATCHES * max_batch_rows
    credits = Credits(0, initial=initial, starve_above=1.5 * initial, normal_below=1.2 * initial)

    def iteration_s(types: NDArray[np.int32], merged: int | None) -> float:
        lora = lora_load(types, 1.0, ranks(), merged_adapter=merged, kernel=cost.kernel)
        load = replace(lora, decode_rows=len(types), context_tokens=len(types) * mean_context)
        return float(cost.step_seconds(load))

    return DynamicBatcher(iteration_s, credits, cost.merge_s, alpha=0.9, beta=0.5)


def with_credits(facts: ReplicaFacts) -> Batcher:
    """Make the batcher of an engine: adapters that are exact only when merged have waves of their own."""
    inner = dlora_batcher(facts.cost, facts.ranks, facts.max_batch_rows)
    return MergeWaveBatcher(inner, facts.must_merge, None)


class Credits:
    """One account per adapter; rows of the base model have the last.

    `initial`: rows an adapter may serve out of turn before it must have waited. `starve_above` and
    `normal_below` are T_starve and T_normal of the paper; their distance damps oscillation.
    """

    def __init__(self, num_adapters: int, *, initial: float, starve_above: float, normal_below: float) -> None:
        assert normal_below <= starve_above, f"T_normal={normal_below} above T_starve={starve_above}"
        assert initial <= starve_above, f"initial={initial}: every adapter would start starving"
        self.balance: NDArray[np.float64] = np.full(num_adapters + 1, float(initial))
        self._is_starving = np.zeros(num_adapters + 1, dtype=bool)
        self._initial = float(initial)
        self._starve_above = starve_above
        self._normal_below = normal_below

    def extend(self, num_adapters: int) -> None:
        """Open accounts for adapters that became known since; the base model's stays the last."""
        num_new = num_adapters + 1 - len(self.balance)
        if num_new > 0:
            self.balance = np.insert(self.balance, -1, np.full(num_new, self._initial))
            self._is_starving = np.insert(self._is_starving, -1, np.zeros(num_new, dtype=bool))

    def starving(self) -> NDArray[np.bool_]:
        """Which adapters must be served first, bool `[num_adapters + 1]`; updates the two states (lines 6-11)."""
        has_recovered = self._is_starving & (self.balance < self._normal_below)
        is_poorly_served = ~self._is_starving & (self.balance > self._starve_above)
        self._is_starving = (self._is_starving & ~has_recovered) | is_poorly_served
        return self._is_starving

    def transfer(self, served: NDArray[np.int64], fcfs: NDArray[np.int64], types: NDArray[np.int32]) -> None:
        """Rows of `served` that jumped the queue pay the rows of `fcfs` that were passed over (lines 14, 20).

        `served`, `fcfs`: row positions; `types` `[num_rows]`: adapter of each. When the served rows were all in turn
        and only fewer than could be, all of them share the bill.
        """
        passed = types[np.setdiff1d(fcfs, served)]
        jumped = types[np.setdiff1d(served, fcfs)]
        payers = jumped if len(jumped) else types[served]
        if len(passed) == 0 or len(payers) == 0:
            return
        np.add.at(self.balance, payers, -len(passed) / len(payers))
        np.add.at(self.balance, passed, 1.0)

    def eligible(self, fcfs: NDArray[np.int64], types: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which adapters could pay for being served alone instead of `fcfs`, bool `[num_adapters + 1]` (line 17)."""
        in_turn = np.bincount(types[fcfs] % len(self.balance), minlength=len(self.balance))
        price = len(fcfs) - in_turn
        return np.asarray(self.balance >= price)

    def check_integrity(self, expected_sum: float) -> None:
        """Raise AssertionError when credit was made or lost."""
        total = float(self.balance.sum())
        assert abs(total - expected_sum) <= 1e-6 * max(1.0, abs(expected_sum)), f"{total} != {expected_sum}"


# (adapter of each row, merged adapter or None) -> seconds of one iteration over these rows.
IterationTime = Callable[[NDArray[np.int32], int | None], float]


def dynamic_batching(
    types: NDArray[np.int32],
    max_batch_rows: int,
    merged: int | None,
    is_legal: NDArray[np.bool_],
    alpha: float,
    beta: float,
) -> tuple[NDArray[np.int64], int | None]:
    """Algorithm 1: the rows of the next batch and the adapter to be merged for it.

    `merged`: the replica's state (None: unmerged). `is_legal` `[num_adapters + 1]`: the set L of adapters
    that may be merged. The replica switches to merged when |R_merge| / |B_fcfs| exceeds `alpha`, back when it falls
    below `beta`. Ties go to the adapter with the smaller number.
    """
    fcfs = np.arange(min(max_batch_rows, len(types)))
    if merged is None:
        candidate = merge_candidate(types, is_legal)
        if candidate is None:
            return fcfs, None
        of_type = np.flatnonzero(types == candidate)
        if len(of_type) / len(fcfs) > alpha:
            return of_type[:max_batch_rows], candidate
        return fcfs, None
    of_type = np.flatnonzero(types == merged)
    if len(of_type) == 0 or not is_legal[merged] or len(of_type) / len(fcfs) < beta:
        return fcfs, None
    return of_type[:max_batch_rows], merged


def merge_candidate(types: NDArray[np.int32], is_legal: NDArray[np.bool_]) -> int | None:
    """R_merge's type: the legal adapter with the most rows (line 7); None when there is none."""
    counts = np.bincount(types[types >= 0], minlength=len(is_legal))[: len(is_legal) - 1]
    counts = np.where(is_legal[:-1], counts, 0)
    if not counts.any():
        return None
    return int(np.argmax(counts))


@dataclass(slots=True)
class Period:
    """Rows and seconds that either choice would have had since the last break point."""

    #: Iterations since the last break point.
    num_iterations: int = 0
    #: Rows of the merged batches B_i.
    merged_rows: int = 0
    #: Seconds of these batches, merged.
    merged_s: float = 0.0
    #: Rows of the FCFS batches B'_i.
    fcfs_rows: int = 0
    #: Seconds of these batches, unmerged.
    fcfs_s: float = 0.0

    def add(self, merged_rows: int, merged_s: float, fcfs_rows: int, fcfs_s: float) -> None:
        """Count one iteration: the merged batch B_i and the FCFS batch B'_i."""
        self.num_iterations += 1
        self.merged_rows += merged_rows
        self.merged_s += merged_s
        self.fcfs_rows += fcfs_rows
        self.fcfs_s += fcfs_s


def tune_alpha(alpha: float, period: Period, switch_s: float) -> float:
    """Algorithm 2 after an unmerged period: lower alpha if merging at its start would have been faster.

    `switch_s`: seconds of a switch, t_M.
    """
    merged = period.merged_rows / (period.merged_s + switch_s)
    unmerged = period.fcfs_rows / period.fcfs_s
    tuned = alpha - DECREMENT if merged > unmerged else alpha * MULTIPLIER
    return min(max(tuned, LEAST_THRESHOLD), _MOST_THRESHOLD)


def tune_beta(beta: float, period: Period, switch_s: float) -> float:
    """Algorithm 2 after a merged period: raise beta if unmerging at its start would have been faster.

    `switch_s`: seconds of a switch, t_M.
    """
    merged = period.merged_rows / period.merged_s
    unmerged = period.fcfs_rows / (period.fcfs_s + switch_s)
    tuned = beta + DECREMENT if unmerged > merged else beta / MULTIPLIER
    return min(max(tuned, LEAST_THRESHOLD), _MOST_THRESHOLD)


@dataclass(slots=True)
class DynamicBatcher:
    """dLoRA on one replica: credits decide who may, Algorithm 1 decides who does, Algorithm 2 learns when.

    Fairness needs memory for rows that pause: the batcher assumes paused rows keep theirs.
    """

    #: Predicts the seconds of an iteration.
    iteration_s: IterationTime
    #: Accounts of the adapters.
    credits: Credits
    #: Seconds of a switch of the merged adapter.
    switch_s: float
    #: Threshold of Algorithm 1 above which it merges; Algorithm 2 changes it.
    alpha: float = 1.2
    #: Threshold of Algorithm 1 below which it unmerges; Algorithm 2 changes it.
    beta: float = 0.6
    #: Adapter that is merged in `_period` (None: unmerged).
    _merged: int | None = None
    #: Adapter of the merged batches in `_period` (None: no adapter).
    _candidate: int | None = None
    #: Outcome of both choices since the last break point.
    _period: Period = field(default_factory=Period)

    def __call__(self, view: BatchView) -> StepPlan:
        """Plan the next step: Algorithm 3 around Algorithm 1, then Algorithm 2 at a break point."""
        types = np.concatenate([view.running_adapter, view.waiting_adapter])
        if len(types) == 0:
            return as_step_plan(view, np.zeros(0, np.int64), view.merged_adapter)
        self.credits.extend(int(types.max()) + 1)
        fcfs = np.arange(min(view.max_batch_rows, len(types)))
        # Algorithm 3, lines 6 to 17: starving adapters first, then Algorithm 1 among those that can pay.
        is_starving = self.credits.starving()
        is_legal = self.credits.eligible(fcfs, types)
        batch = np.flatnonzero(is_starving[types])[: view.max_batch_rows]
        if len(batch):
            merged = _merged_for(types[batch], view.merged_adapter)
        else:
            batch, merged = dynamic_batching(
                types, view.max_batch_rows, view.merged_adapter, is_legal, self.alpha, self.beta
            )
        if not np.array_equal(batch, fcfs):
            self.credits.transfer(batch, fcfs, types)
        self._learn(types, fcfs, merged, is_legal, view.max_batch_rows)
        return as_step_plan(view, batch, merged)

    def _learn(
        self,
        types: NDArray[np.int32],
        fcfs: NDArray[np.int64],
        merged: int | None,
        is_legal: NDArray[np.bool_],
        max_batch_rows: int,
    ) -> None:
        """Count an iteration, whoever decided it; tune first at a break point (section 4.2).

        Break points: the replica switches, also for starving adapters; R_merge changes; `PERIOD` iterations are over.
        """
        candidate = merged if merged is not None else merge_candidate(types, is_legal)
        is_break = (merged, candidate) != (self._merged, self._candidate)
        if self._period.num_iterations and (is_break or self._period.num_iterations >= PERIOD):
            self._tune()
        self._merged, self._candidate = merged, candidate
        if candidate is None:
            return
        alone = types[types == candidate][:max_batch_rows]
        in_turn = types[fcfs]
        self._period.add(len(alone), self.iteration_s(alone, candidate), len(in_turn), self.iteration_s(in_turn, None))

    def _tune(self) -> None:
        """Algorithm 2 for the threshold that decided the period; the other one is left alone."""
        if self._merged is None:
            self.alpha = tune_alpha(self.alpha, self._period, self.switch_s)
        else:
            self.beta = tune_beta(self.beta, self._period, self.switch_s)
        self._period = Period()


def _merged_for(types: NDArray[np.int32], merged: int | None) -> int | None:
    """Adapter that stays merged for starving rows: the one that is, if all of them are its own."""
    return merged if merged is not None and (types == merged).all() else None
