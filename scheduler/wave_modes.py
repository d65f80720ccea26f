"""Which waves should run merged: decided from the whole histogram before the job starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cost import CostModel, StepLoad
from .waves import Shard, ShardPlan
from .workload import Workload


def with_merged_waves(
    plan: ShardPlan, workload: Workload, cost: CostModel, *, batch_rows: int, num_replicas: int
) -> ShardPlan:
    """The same plan, waves of one adapter that run sooner merged marked so. Rows and order are untouched."""
    ranks = {adapter.name: adapter.rank for adapter in workload.adapters}
    waves: dict[int, list[Shard]] = {}
    for shard in plan.shards:
        waves.setdefault(shard.wave_id, []).append(shard)
    merged = {
        wave_id
        for wave_id, shards in waves.items()
        if shards[0].mode == "unmerged"
        and len({name for shard in shards for name in shard.adapters}) == 1
        and pays_to_merge(shards, ranks[shards[0].adapters[0]], cost, batch_rows=batch_rows, num_replicas=num_replicas)
    }
    shards = tuple(replace(s, mode="merged") if s.wave_id in merged else s for s in plan.shards)
    return replace(plan, shards=shards)


def pays_to_merge(shards: Sequence[Shard], rank: int, cost: CostModel, *, batch_rows: int, num_replicas: int) -> bool:
    """Whether a wave of one adapter gains more than its switches cost (there and back, on each replica it uses).

    It must fill a batch twice over: a homogeneous batch that is too small loses more than an adapter costs (dLoRA
    section 4.1).
    """
    if sum(shard.num_rows for shard in shards) < 2 * batch_rows:
        return False
    passes = sum(shard.predicted_output_tokens for shard in shards) / batch_rows
    tokens = sum(shard.predicted_output_tokens + shard.prompt_tokens for shard in shards)
    once_s = float(cost.step_seconds(StepLoad(num_adapters=1, rank_sum=rank))) - cost.step_s
    saved_s = passes * once_s + tokens * (rank * cost.rank_token_s + cost.lora_token_s)
    return saved_s > (2 * cost.merge_s + cost.first_merge_s) * min(num_replicas, len(shards))
