"""dLoRA's dynamic batching (OSDI 24, section 4): Algorithm 1 chooses merged or unmerged before each
iteration, Algorithm 2 tunes its two thresholds from what either would have achieved, Algorithm 3
(`credits.py`) keeps it fair.

Rows are positions in order of arrival, running rows before waiting ones; `types` int32 `[num_rows]` names
the adapter of each (-1: base model, never merged).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .batching import BatchView, StepPlan, as_step_plan
from .credits import Credits

# Seconds of one iteration over these adapters with that adapter merged (None: nobody).
IterationTime = Callable[[NDArray[np.int32], int | None], float]


@dataclass(slots=True)
class Thresholds:
    """Switch to merged when |R_merge| / |B_fcfs| exceeds `alpha`, back when it falls below `beta`."""

    alpha: float = 1.2
    beta: float = 0.6


def dynamic_batching(
    types: NDArray[np.int32],
    max_batch_rows: int,
    merged: int | None,
    is_legal: NDArray[np.bool_],
    thresholds: Thresholds,
) -> tuple[NDArray[np.int64], int | None]:
    """Algorithm 1: the rows of the next batch and the adapter to be merged for it.

    `merged`: the replica's state (None: unmerged). `is_legal` `[num_adapters + 1]`: the set L of adapters
    that may be merged. Ties go to the adapter with the smaller number.
    """
    fcfs = np.arange(min(max_batch_rows, len(types)))
    if merged is None:
        candidate = merge_candidate(types, is_legal)
        if candidate is None:
            return fcfs, None
        of_type = np.flatnonzero(types == candidate)
        if len(of_type) / len(fcfs) > thresholds.alpha:
            return of_type[:max_batch_rows], candidate
        return fcfs, None
    of_type = np.flatnonzero(types == merged)
    if len(of_type) == 0 or not is_legal[merged] or len(of_type) / len(fcfs) < thresholds.beta:
        return fcfs, None
    return of_type[:max_batch_rows], merged


def merge_candidate(types: NDArray[np.int32], is_legal: NDArray[np.bool_]) -> int | None:
    """R_merge's type: the legal adapter with the most rows (line 7); None when there is none."""
    counts = np.bincount(types[types >= 0], minlength=len(is_legal))[: len(is_legal) - 1]
    counts = np.where(is_legal[:-1], counts, 0)
    if not counts.any():
        return None
    return int(np.argmax(counts))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Algorithm 2's constants. `switch_s`: t_M. `period`: iterations after which a break point comes anyway."""

    switch_s: float
    decrement: float = 0.05
    multiplier: float = 1.1
    period: int = 32
    least: float = 0.05
    most: float = 4.0


@dataclass(slots=True)
class Period:
    """What both choices would have achieved since the last break point."""

    num_iterations: int = 0
    merged_rows: int = 0
    merged_s: float = 0.0
    fcfs_rows: int = 0
    fcfs_s: float = 0.0

    def add(self, merged_rows: int, merged_s: float, fcfs_rows: int, fcfs_s: float) -> None:
        """Count one iteration: the merged batch B_i and the FCFS batch B'_i."""
        self.num_iterations += 1
        self.merged_rows += merged_rows
        self.merged_s += merged_s
        self.fcfs_rows += fcfs_rows
        self.fcfs_s += fcfs_s


def tune_alpha(alpha: float, period: Period, tuning: Tuning) -> float:
    """Algorithm 2 after an unmerged period: lower alpha if merging at its start would have been faster."""
    merged = period.merged_rows / (period.merged_s + tuning.switch_s)
    unmerged = period.fcfs_rows / period.fcfs_s
    tuned = alpha - tuning.decrement if merged > unmerged else alpha * tuning.multiplier
    return min(max(tuned, tuning.least), tuning.most)


def tune_beta(beta: float, period: Period, tuning: Tuning) -> float:
    """The same after a merged period: raise beta if unmerging at its start would have been faster."""
    merged = period.merged_rows / period.merged_s
    unmerged = period.fcfs_rows / (period.fcfs_s + tuning.switch_s)
    tuned = beta + tuning.decrement if unmerged > merged else beta / tuning.multiplier
    return min(max(tuned, tuning.least), tuning.most)


@dataclass(slots=True)
class DynamicBatcher:
    """dLoRA on one replica: credits decide who may, Algorithm 1 decides who does, Algorithm 2 learns when.

    Fairness needs memory for rows that pause: the batcher assumes paused rows keep theirs.
    """

    iteration_s: IterationTime
    credits: Credits
    tuning: Tuning
    thresholds: Thresholds = field(default_factory=Thresholds)
    _merged: int | None = None
    _candidate: int | None = None
    _period: Period = field(default_factory=Period)

    def next_step(self, view: BatchView) -> StepPlan:
        """See `Batcher.next_step`. Algorithm 3 around Algorithm 1, then Algorithm 2 at a break point."""
        types = np.concatenate([view.running_adapter, view.waiting_adapter])
        if len(types) == 0:
            return as_step_plan(view, np.zeros(0, np.int64), view.merged_adapter)
        self._merged = view.merged_adapter
        fcfs = np.arange(min(view.max_batch_rows, len(types)))
        starving = np.flatnonzero(self.credits.starving()[types])[: view.max_batch_rows]
        if len(starving):
            self.credits.transfer(starving, fcfs, types)
            return as_step_plan(view, starving, self._merged_for(types[starving]))
        is_legal = self.credits.eligible(fcfs, types)
        batch, merged = dynamic_batching(types, view.max_batch_rows, self._merged, is_legal, self.thresholds)
        if not np.array_equal(batch, fcfs):
            self.credits.transfer(batch, fcfs, types)
        self._learn(types, fcfs, merged, view.max_batch_rows)
        return as_step_plan(view, batch, merged)

    def _merged_for(self, types: NDArray[np.int32]) -> int | None:
        """Starving rows are served merged only if all are of the adapter already merged."""
        return self._merged if self._merged is not None and (types == self._merged).all() else None

    def _learn(
        self, types: NDArray[np.int32], fcfs: NDArray[np.int64], merged: int | None, max_batch_rows: int
    ) -> None:
        everybody = np.ones(len(self.credits.balance), dtype=bool)
        candidate = merged if merged is not None else merge_candidate(types, everybody)
        is_break = merged != self._merged or candidate != self._candidate
        if self._period.num_iterations and (is_break or self._period.num_iterations >= self.tuning.period):
            self._tune()
        self._candidate = candidate
        if candidate is None:
            return
        alone = types[types == candidate][:max_batch_rows]
        in_turn = types[fcfs]
        self._period.add(len(alone), self.iteration_s(alone, candidate), len(in_turn), self.iteration_s(in_turn, None))

    def _tune(self) -> None:
        if self._merged is None:
            self.thresholds.alpha = tune_alpha(self.thresholds.alpha, self._period, self.tuning)
            self.thresholds.alpha = max(self.thresholds.alpha, self.thresholds.beta)
        else:
            self.thresholds.beta = tune_beta(self.thresholds.beta, self._period, self.tuning)
            self.thresholds.beta = min(self.thresholds.alpha, self.thresholds.beta)
        self._period = Period()
