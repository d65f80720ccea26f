"""Forecast of a job before it starts: the numbers that `lorabatch plan` prints.

Seconds come from playing the plan in the simulator on expected lengths. Jobs too large for that get the placement's
makespan, which lacks the tail. `bound_s` and `gap` belong to the placement of shards on replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .batching import Batcher
from .cost import CostModel
from .lengths import PRIOR_SHARE, expected_tokens
from .placement import Placement, PlacementProblem, place_shards
from .simulation.replica import ReplicaSettings
from .simulation.run import run_planned
from .waves import Shard, ShardPlan, plan_shards, with_merged_waves
from .workload import AdapterInfo, Workload

WaveMode = Literal["auto", "unmerged", "merged"]


@dataclass(frozen=True, slots=True)
class AdapterForecast:
    """One adapter's share of the job; the base model has the name "" and rank 0. `engine_s`: of one replica."""

    name: str
    rank: int
    num_rows: int
    prompt_tokens: int
    predicted_output_tokens: int
    engine_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """`predicted_s`: makespan. `is_simulated`: how it was found. `shard_s` `[num_shards]`: engine seconds of each.

    `replica_s`: busy seconds of all replicas together, what a price per hour multiplies with. `shared_prompt_tokens`:
    those that a prefix cache need not compute again.
    """

    plan: ShardPlan
    placement: Placement
    adapters: tuple[AdapterForecast, ...]
    shard_s: NDArray[np.float64]
    predicted_s: float
    is_simulated: bool
    replica_s: float
    shared_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CutRows:
    """Shards and what is expected of them: engine seconds of each, `[num_shards]`, and tokens to generate and engine
    seconds of each row, `[num_rows]`.
    """

    plan: ShardPlan
    shard_s: NDArray[np.float64]
    predicted: NDArray[np.float64]
    row_s: NDArray[np.float64]


def forecast_job(
    workload: Workload,
    cost: CostModel,
    settings: ReplicaSettings,
    num_replicas: int,
    *,
    length_share: float = PRIOR_SHARE,
    rows_per_shard: int | None = None,
    mode: WaveMode = "auto",
    make_batcher: Callable[[], Batcher] | None = None,
    max_simulated_rows: int = 50_000,
) -> Forecast:
    """Plan a job and predict it. Rows without engine work cost nothing. Deterministic.

    `length_share`: of `max_tokens` that rows are expected to generate. `make_batcher`: of each simulated replica; by
    default the planner's own.
    """
    cut = cut_job(
        workload, cost, settings, num_replicas, length_share=length_share, rows_per_shard=rows_per_shard, mode=mode
    )
    plan = cut.plan
    placement = place_job(workload.adapters, plan.shards, cut.shard_s, cost, num_replicas)
    predicted_s, is_simulated = placement.makespan_s, False
    if 0 < workload.num_rows <= max_simulated_rows:
        guessed = replace(workload, output_tokens=np.rint(cut.predicted).astype(np.int32))
        predicted_s = run_planned(guessed, plan, cost, settings, num_replicas, make_batcher).metrics.makespan_s
        is_simulated = True
    adapters = _per_adapter(workload, cut.predicted, cut.row_s)
    shared = int(workload.prompt_tokens.sum() - workload.computed_prompt_tokens.sum())
    replica_s = predicted_s * num_replicas
    return Forecast(plan, placement, adapters, cut.shard_s, predicted_s, is_simulated, replica_s, shared)


def cut_job(
    workload: Workload,
    cost: CostModel,
    settings: ReplicaSettings,
    num_replicas: int,
    *,
    length_share: float = PRIOR_SHARE,
    rows_per_shard: int | None = None,
    mode: WaveMode = "auto",
) -> CutRows:
    """Cut a job, or a block of one, into shards, with what they will take."""
    predicted = expected_tokens(workload.max_tokens, length_share)
    batch_rows = settings.max_batch_rows
    plan = plan_waves(
        workload,
        cost,
        predicted,
        batch_rows=batch_rows,
        num_replicas=num_replicas,
        rows_per_shard=rows_per_shard,
        mode=mode,
    )
    row_s = _row_seconds(workload, predicted, cost, batch_rows)
    shard_s = np.array([row_s[plan.rows_of(shard.shard_id)].sum() for shard in plan.shards])
    return CutRows(plan, shard_s, predicted, row_s)


def place_job(
    adapters: Sequence[AdapterInfo],
    shards: Sequence[Shard],
    shard_s: NDArray[np.float64],
    cost: CostModel,
    num_replicas: int,
) -> Placement:
    """Where the shards should run: their seconds, and one load from storage per adapter and replica."""
    number = {adapter.name: i for i, adapter in enumerate(adapters)}
    problem = PlacementProblem(
        shard_s,
        tuple(tuple(number[name] for name in shard.adapters) for shard in shards),
        np.array([cost.load_seconds(adapter.weight_bytes, "storage") for adapter in adapters]),
        num_replicas,
    )
    return place_shards(problem)


def plan_waves(
    workload: Workload,
    cost: CostModel,
    predicted: NDArray[np.float64],
    *,
    batch_rows: int,
    num_replicas: int,
    rows_per_shard: int | None = None,
    mode: WaveMode = "auto",
) -> ShardPlan:
    """Shards from predicted lengths, and their modes: from the cost model, or one for all as asked."""
    plan = plan_shards(
        workload,
        batch_rows=batch_rows,
        num_replicas=num_replicas,
        predicted_output_tokens=predicted,
        rows_per_shard=rows_per_shard,
    )
    if mode == "auto":
        return with_merged_waves(plan, workload, cost, batch_rows=batch_rows, num_replicas=num_replicas)
    return replace(plan, shards=tuple(replace(s, mode=mode) if s.mode == "unmerged" else s for s in plan.shards))


def _row_seconds(
    workload: Workload, predicted: NDArray[np.float64], cost: CostModel, batch_rows: int
) -> NDArray[np.float64]:
    ranks = np.array([adapter.rank for adapter in workload.adapters] + [0], dtype=np.float64)
    seconds = cost.row_seconds(
        workload.prompt_tokens,
        predicted,
        batch_rows=batch_rows,
        rank=ranks[workload.adapter_index],
        num_adapters=1,
        shared_tokens=workload.prompt_tokens - workload.computed_prompt_tokens,
    )
    return np.where(workload.max_tokens > 0, seconds, 0.0)


def _per_adapter(
    workload: Workload, predicted: NDArray[np.float64], row_s: NDArray[np.float64]
) -> tuple[AdapterForecast, ...]:
    slots = len(workload.adapters) + 1
    slot = workload.adapter_index % slots
    rows = np.bincount(slot, minlength=slots)
    prompt, output, seconds = (
        np.bincount(slot, weights=column, minlength=slots) for column in (workload.prompt_tokens, predicted, row_s)
    )
    names = [(adapter.name, adapter.rank) for adapter in workload.adapters] + [("", 0)]
    return tuple(
        AdapterForecast(name, rank, int(rows[i]), int(prompt[i]), round(float(output[i])), float(seconds[i]))
        for i, (name, rank) in enumerate(names)
        if rows[i]
    )
