"""Policies of a job by name: how its rows are dealt out, how engines batch them, and when they move.

`planner` is this project's. The others are those of papers and of other systems (`baselines/`), imported only when a
job asks for them. A run, its plan and its simulation make their rules here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .assignment.dispatch import DealtShards
from .costs.cost import CostModel
from .estimates.canary import with_canary
from .planning.waves import Shard, ShardMode
from .scheduler import Scheduler
from .settings import SchedulerSettings
from .workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class RowsToDeal:
    """All rows of a job, to be dealt out to replicas before it starts."""

    #: Rows of the job.
    workload: Workload
    #: Expected tokens of each answer, float64 `[num_rows]`.
    output_tokens: NDArray[np.float64]
    #: A replica's seconds for each row, float64 `[num_rows]`.
    row_s: NDArray[np.float64]
    #: Costs of the replicas' steps and loads.
    cost: CostModel
    #: Replicas to deal to.
    num_replicas: int
    #: Sequences one replica decodes together.
    batch_rows: int
    #: Rows of a shard.
    rows_per_shard: int


#: The replica of each row, int64 `[num_rows]`.
Deal = Callable[[RowsToDeal], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy. Functions are named as `module:function` below `scheduler`."""

    #: A name in `batchers.batching.BATCHERS` (None: as the engine's mode says).
    batcher: str | None = None
    #: Whether it merges adapters that need not be merged.
    may_merge: bool = True
    #: A `Deal` (None: rows are planned in waves, and shards go to any replica with room).
    deal: str | None = None
    #: Mode of dealt shards with adapters.
    shard_mode: ShardMode = "unmerged"
    #: Makes its `MigrationRule` from shards and settings (None: that of `planner` where rows may move).
    migration: str | None = None
    #: Whether running rows may move between replicas.
    moves_rows: bool = False


_IN_TURN = "baselines.dealing:in_turn"
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "planner": Policy(moves_rows=True),
        "dlora": Policy(
            "dlora",
            deal="baselines.dealing:by_pending_time",
            migration="baselines.dlora_reactive:CoMigration",
            moves_rows=True,
        ),
        "s-lora": Policy("s-lora", may_merge=False, deal=_IN_TURN),
        "vllm-like": Policy("vllm-like", may_merge=False, deal=_IN_TURN),
        "merged-only": Policy("merged-only", deal=_IN_TURN, shard_mode="merged"),
        "peft-like": Policy("peft-like", deal=_IN_TURN, shard_mode="merged"),
    }
)
#: Placement -> the rule that deals rows out instead of the policy's (None: the policy's own). Where
#: no rows are dealt out, the shards of `planned`, and of `planner` on many replicas, are placed on replicas, which open
#: their own first; those of `none` are for whichever replica has room.
PLACEMENTS: Mapping[str, str | None] = MappingProxyType(
    {
        "planner": None,
        "planned": None,
        "none": None,
        "loraserve": "baselines.dealing:by_routing",
        "loraserve-levelled": "baselines.dealing:by_levelled_routing",
    }
)


def dealing(policy: str, placement: str) -> Deal | None:
    """The rule by which rows are dealt out before the job; None: they are not dealt out."""
    name = PLACEMENTS[placement] or POLICIES[policy].deal
    return None if name is None else _function(name)


def make_scheduler(
    shards: Sequence[Shard], *, committed: Collection[int] = (), settings: SchedulerSettings
) -> Scheduler:
    """The scheduler of a job, with the rules of its policy."""
    shards = with_canary(shards, settings.canary)
    with_work = [shard for shard in shards if shard.has_engine_work]
    name = POLICIES[settings.policy].migration
    return Scheduler(
        shards,
        committed=committed,
        settings=settings,
        dispatch=DealtShards(with_work) if settings.is_dealt else None,
        migration=None if name is None or settings.tail is None else _function(name)(with_work, settings),
    )


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f".{module}", __package__), function)
    return found
