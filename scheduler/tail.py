"""The job's tail: nothing is queued, some replicas are idle, one still decodes. Is it worth sharing its rows?

Moving a row costs a hop and a second prefill of its prompt and what it has generated; it pays when steps of the
smaller batch are so much faster that the rest is done sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .commands import MigrateRows
from .cost import CostModel, StepLoad
from .events import Progress
from .waves import Shard


@dataclass(frozen=True, slots=True)
class TailRows:
    """Rows still decoding on one replica: how many, their mean context and the longest one's predicted rest."""

    num_rows: int
    context_tokens: float
    remaining_tokens: float


@dataclass(frozen=True, slots=True)
class TailSettings:
    """`hop_s`: from the decision until a moved row runs again, its second prefill not counted."""

    cost: CostModel
    hop_s: float = 0.1
    least_gain: float = 0.05


def lend(
    progress: Progress,
    open_shards: Sequence[Shard],
    rows_left: Mapping[int, int],
    helpers: Sequence[str],
    settings: TailSettings,
) -> tuple[MigrateRows, ...]:
    """Rows of one shard of the reporting replica that idle `helpers` should take; empty when it does not pay.

    The shard is the one of at most one adapter with most unfinished rows. Half of what its rows were predicted to
    generate is taken to be left.
    """
    candidates = [shard for shard in open_shards if shard.has_engine_work and len(shard.adapters) <= 1]
    if not helpers or not candidates:
        return ()
    shard = max(candidates, key=lambda s: (rows_left[s.shard_id], -s.shard_id))
    running = min(progress.running_rows, rows_left[shard.shard_id])
    output = shard.predicted_output_tokens / shard.num_rows
    rows = TailRows(running, shard.prompt_tokens / shard.num_rows + output / 2, output / 2)
    lent = rows_to_lend(rows, len(helpers), settings.cost, hop_s=settings.hop_s, least_gain=settings.least_gain)
    adapter = shard.adapters[0] if shard.adapters else ""
    return tuple(MigrateRows(shard.shard_id, progress.replica_id, helper, adapter, lent) for helper in helpers if lent)


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
