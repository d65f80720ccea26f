"""The job's tail: nothing is queued, some replicas are idle, one still decodes. Is it worth sharing its rows?

Moving a row costs a hop and a second prefill of its prompt and what it has generated; it pays when steps of the
smaller batch are so much faster that the rest is done sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost import CostModel, StepLoad


@dataclass(frozen=True, slots=True)
class TailRows:
    """Rows still decoding on one replica: how many, their mean context and the longest one's predicted rest."""

    num_rows: int
    context_tokens: float
    remaining_tokens: float


def rows_to_lend(rows: TailRows, num_helpers: int, cost: CostModel, *, hop_s: float, least_gain: float = 0.05) -> int:
    """Rows each of `num_helpers` idle replicas should take; 0 when it does not pay.

    Even shares are tried, from all helpers' full share down to one row each; the soonest end wins, fewer rows on
    ties.
    """
    stay_s = _decode_s(rows.num_rows, rows, cost)
    best_s, best = stay_s * (1 - least_gain), 0
    for lent in range(1, rows.num_rows // (num_helpers + 1) + 1):
        prefill_s = cost.step_s + cost.prefill_token_s * lent * rows.context_tokens
        helper_s = hop_s + prefill_s + _decode_s(lent, rows, cost)
        owner_s = hop_s + _decode_s(rows.num_rows - lent * num_helpers, rows, cost)
        if max(helper_s, owner_s) < best_s:
            best_s, best = max(helper_s, owner_s), lent
    return best


def _decode_s(num_rows: int, rows: TailRows, cost: CostModel) -> float:
    context = rows.context_tokens + rows.remaining_tokens / 2
    step = cost.step_seconds(StepLoad(decode_rows=num_rows, context_tokens=num_rows * context))
    return float(step) * rows.remaining_tokens
