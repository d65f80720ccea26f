"""Measures what the steps of a running job cost, from the totals that its engines report.

The cost model is linear, so that the steps between two reports are one equation: what they did, added up, costs the
seconds that they took. All of them together, and the model that the job was planned with, give the model as measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import STEP_COEFFICIENTS, CostModel
from ..costs.fitting import nonnegative_least_squares
from ..messages import StepTotals

# Most equations that are kept; later ones are added to the last.
_MAX_SPANS = 512
# Least seconds of an equation; shorter spans wait for the next report.
_LEAST_SPAN_S = 0.2
# Weight of the assumed model. A coefficient that is wrong by half, beside the factor by which all are wrong, is as
# likely as a second of steps that is missed by a tenth: 0.5 ** 2 * 0.04 == 0.1 ** 2.
_TRUST_S = 0.04
# Seconds of steps from which the measured model is better than what was assumed.
_LEAST_S = 1.0


@dataclass(slots=True)
class _Replica:
    """Reported steps of one replica; arrays are in the order of `StepTotals`."""

    #: Totals of its engine in the last report that was counted, float64 `[13]`.
    totals: NDArray[np.float64]
    #: Seconds of the steps in `totals`.
    seconds: float
    #: Work of all of its engines since the first report, float64 `[13]`.
    all_totals: NDArray[np.float64]
    #: Seconds of the steps in `all_totals`.
    all_s: float = 0.0


class StepCosts:
    """Work and seconds of the steps of each replica, as reported. `assumed`: the cost model of the plan."""

    def __init__(self, assumed: CostModel) -> None:
        self._assumed = assumed
        self._replicas: dict[str, _Replica] = {}
        self._spans: list[NDArray[np.float64]] = []
        self._span_s: list[float] = []

    def reported(self, replica_id: str, totals: StepTotals, seconds: float) -> None:
        """Take in a report. `seconds`: time in the steps of `totals`, without merges and waits for adapters.

        Steps before an engine's first report were for others and do not count. Totals that have become smaller are
        those of an engine that was started again.
        """
        now = np.array(totals.values, dtype=np.float64)
        nothing = np.zeros_like(now)
        known = self._replicas.setdefault(replica_id, _Replica(now, seconds, nothing))
        if now[0] < known.totals[0]:
            known.totals, known.seconds = nothing, 0.0
        did, took_s = now - known.totals, seconds - known.seconds
        if did[0] <= 0 or took_s < _LEAST_SPAN_S:
            return
        known.totals, known.seconds = now, seconds
        known.all_totals = known.all_totals + did
        known.all_s += took_s
        if len(self._spans) < _MAX_SPANS:
            self._spans.append(did)
            self._span_s.append(took_s)
        else:
            self._spans[-1] = self._spans[-1] + did
            self._span_s[-1] += took_s

    @property
    def seconds(self) -> float:
        """Seconds of all steps that were reported."""
        return sum(replica.all_s for replica in self._replicas.values())

    @property
    def num_replicas(self) -> int:
        """Replicas that have reported steps of this run."""
        return sum(replica.all_s > 0 for replica in self._replicas.values())

    @property
    def is_known(self) -> bool:
        """Whether enough steps were reported for `measured` to say more than the assumed model."""
        return self.seconds >= _LEAST_S

    def measured(self) -> CostModel:
        """The assumed model, corrected by what the steps took.

        One factor corrects all coefficients and, as far as the equations tell them apart, one each of them. Bayesian
        linear regression with non-negative coefficients.
        """
        if not self.is_known:
            return self._assumed
        did, took_s = _paid(np.array(self._spans)), np.array(self._span_s)
        assumed = coefficients(self._assumed)
        # One unknown per coefficient: its factor. What the model takes for free stays free.
        is_paid = assumed > 0
        costs = (did * assumed)[:, is_paid]
        factor = float(took_s.sum() / costs.sum())
        weights = 1.0 / np.sqrt(took_s)
        trust = np.sqrt(_TRUST_S) * np.eye(costs.shape[1])
        matrix = np.vstack([factor * costs * weights[:, None], trust])
        target = np.concatenate([took_s * weights, trust.sum(axis=1)])
        factors = np.zeros(len(assumed))
        factors[is_paid] = factor * nonnegative_least_squares(matrix, target)
        named = dict(zip(STEP_COEFFICIENTS, (factors * assumed).tolist(), strict=True))
        return replace(self._assumed, **named, fit_r_squared=None)

    def slowness(self, cost: CostModel) -> dict[str, float]:
        """Seconds that each replica's steps took over those that `cost` says, by replica that has worked."""
        prices = coefficients(cost)
        return {
            name: replica.all_s / float(prices @ _paid(replica.all_totals))
            for name, replica in self._replicas.items()
            if replica.all_s > 0
        }

    def total(self) -> StepTotals:
        """Totals of all replicas together."""
        counts = sum((replica.all_totals for replica in self._replicas.values()), np.zeros(len(fields(StepTotals))))
        return StepTotals(*counts.tolist())


def coefficients(cost: CostModel) -> NDArray[np.float64]:
    """Seconds per unit of each field of `StepTotals` but the last, float64 `[12]`."""
    return np.array([getattr(cost, name) for name in STEP_COEFFICIENTS], dtype=np.float64)


def prices(cost: CostModel) -> tuple[float, ...]:
    """Seconds per unit of each field of `StepTotals`. A scored token costs what a decoding row does, logits included,
    instead of a prompt's token (`CostModel.scored_token_s`).
    """
    return (*coefficients(cost).tolist(), cost.decode_row_s - cost.prefill_token_s)


def _paid(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Units of each coefficient, `[…, 12]`, in `StepTotals` `[…, 13]`, scored tokens among them."""
    found, scored_tokens = totals[..., :-1].copy(), totals[..., -1]
    found[..., STEP_COEFFICIENTS.index("prefill_token_s")] -= scored_tokens
    found[..., STEP_COEFFICIENTS.index("decode_row_s")] += scored_tokens
    return found
