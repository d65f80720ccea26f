"""The job's tail: nothing is queued, some replicas are idle, one still works. Is it worth sharing its rows?

Moving a row costs a hop and a second prefill of its prompt and what it has generated. It pays when steps of the
smaller batch are faster, when the helper is faster, or when the owner has more rows than it decodes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .commands import MigrateRows
from .cost import CostModel, StepLoad
from .events import Progress
from .waves import Shard

# Splits that are tried, at most.
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class TailRows:
    """Unfinished rows of one replica: how many, their mean context and mean predicted rest."""

    num_rows: int
    context_tokens: float
    remaining_tokens: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How a replica works off rows: so many together, in steps that take `slowness` times what the model says."""

    batch_rows: int
    slowness: float = 1.0


@dataclass(frozen=True, slots=True)
class TailSettings:
    """`hop_s`: from the decision until a moved row runs again, its second prefill not counted. Rows move when the
    owner's end comes sooner by `least_gain` of what is left, and by `least_gain_s`.
    """

    cost: CostModel
    hop_s: float = 0.1
    least_gain: float = 0.05
    least_gain_s: float = 0.0


def measured_pace(progress: Progress, batch_rows: int, context_tokens: float, cost: CostModel) -> Pace | None:
    """The pace that a report shows; None when its replica hardly worked."""
    if progress.running_rows == 0 or progress.tokens_per_s <= 0.0:
        return None
    step_s = progress.running_rows / progress.tokens_per_s
    return Pace(batch_rows, step_s / _step_s(progress.running_rows, context_tokens, cost))


def lend(
    progress: Progress,
    open_shards: Sequence[Shard],
    owner: Pace,
    helpers: Mapping[str, Pace],
    settings: TailSettings,
) -> tuple[MigrateRows, ...]:
    """Rows of the reporting replica that idle `helpers` should take; empty when it does not pay.

    `open_shards`: in the order in which they were opened; the last ones' rows have most of their way to go and move
    first. Half of what the running rows were predicted to generate is taken to be left.
    """
    shards = [shard for shard in open_shards if shard.has_engine_work]
    rows = tail_rows(progress, shards)
    if not helpers or not rows.num_rows:
        return ()
    shares = rows_to_lend(rows, owner, list(helpers.values()), settings)
    available = {shard.shard_id: dict(progress.open_shards).get(shard.shard_id, 0) for shard in shards}
    commands = []
    for helper, share in zip(helpers, shares, strict=True):
        for shard in reversed(shards):
            lent = min(share, available[shard.shard_id])
            if lent:
                adapter = shard.adapters[0] if len(shard.adapters) == 1 else ""
                commands.append(MigrateRows(shard.shard_id, progress.replica_id, helper, adapter, lent))
            share -= lent
            available[shard.shard_id] -= lent
    return tuple(commands)


def tail_rows(progress: Progress, open_shards: Sequence[Shard]) -> TailRows:
    """What the reporting replica's engine still has to do for its own shards."""
    total = sum(shard.num_rows for shard in open_shards)
    left = sum(rows for _, rows in progress.open_shards) - progress.lent_rows
    if not total or left <= 0:
        return TailRows(0, 0.0, 0.0)
    output = sum(shard.predicted_output_tokens for shard in open_shards) / total
    prompt = sum(shard.prompt_tokens for shard in open_shards) / total
    running = min(progress.running_rows, left)
    return TailRows(left, prompt + output / 2, output * (left - running / 2) / left)


def rows_to_lend(rows: TailRows, owner: Pace, helpers: Sequence[Pace], settings: TailSettings) -> list[int]:
    """Rows each helper should take, in proportion to its pace; zeros when it does not pay.

    The split with the soonest end wins, fewer rows on ties.
    """
    cost = settings.cost
    stay_s = _work_s(rows.num_rows, rows, owner, cost)
    best_s = min(stay_s * (1 - settings.least_gain), stay_s - settings.least_gain_s)
    best = [0] * len(helpers)
    speed = sum(1 / helper.slowness for helper in helpers)
    # The last row goes too: a slow owner is better rid of it.
    for lent in range(rows.num_rows, 0, -max(1, rows.num_rows // _MAX_SPLITS)):
        shares = [int(lent / helper.slowness / speed) for helper in helpers]
        shares[0] += lent - sum(shares)
        end_s = settings.hop_s + _work_s(rows.num_rows - lent, rows, owner, cost)
        for share, helper in zip(shares, helpers, strict=True):
            prefill_s = (cost.step_s + cost.prefill_token_s * share * rows.context_tokens) * helper.slowness
            end_s = max(end_s, settings.hop_s + prefill_s + _work_s(share, rows, helper, cost))
        if end_s <= best_s and end_s < stay_s:
            best_s, best = end_s, shares
    return best


def _work_s(num_rows: int, rows: TailRows, pace: Pace, cost: CostModel) -> float:
    """Seconds to decode what is left of so many rows, batch after batch."""
    context = rows.context_tokens + rows.remaining_tokens / 2
    full, rest = divmod(num_rows, pace.batch_rows)
    step_s = full * _step_s(pace.batch_rows, context, cost) if full else 0.0
    step_s += _step_s(rest, context, cost) if rest else 0.0
    return step_s * rows.remaining_tokens * pace.slowness


def _step_s(num_rows: int, context_tokens: float, cost: CostModel) -> float:
    return float(cost.step_seconds(StepLoad(decode_rows=num_rows, context_tokens=num_rows * context_tokens)))
