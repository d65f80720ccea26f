"""Forecast of a job before it starts: the numbers that `lorabatch plan` prints.

Seconds come from playing the plan in the simulator, on answers of the lengths that are expected. A large job is played
by a sample of its shards (`JobSample`). The placement of shards on replicas, with its bound and its gap, says which
shards each worker opens first; its seconds are no forecast, for they lack the last part of a job, and rows that batches
of several adapters share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .costs.cost import CostModel
from .planning.placement import Placement, PlacementProblem, as_placed, place_shards
from .planning.waves import Shard, ShardMode, ShardPlan, dealt_shards, dispatch_order, plan_shards, with_merged_waves
from .policies import RowsToDeal
from .simulation.run import PolicyRun
from .workload import AdapterInfo, Workload

WaveMode = Literal["auto", "unmerged", "merged"]
#: Plays a plan with the settings of a run: (rows, plan, number of simulated replicas) -> run.
Play = Callable[[Workload, ShardPlan, int], PolicyRun]
# Replicas of a sample: two, so that rows can move between them.
_LEAST_REPLICAS = 2
# The part of a sample's work in which it is in full swing: neither filling its first batches nor running out of rows.
_FULL_SWING = (0.15, 0.75)


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Prediction for one job: its plan, where its shards are placed, and how long it takes."""

    #: The job's shards.
    plan: ShardPlan
    #: Replica of each shard, with a bound (None: shards are for whichever replica has room).
    placement: Placement | None
    #: Engine seconds of each shard, float64 `[num_shards]`.
    shard_s: NDArray[np.float64]
    #: Tokens that each row is expected to generate, float64 `[num_rows]`.
    predicted: NDArray[np.float64]
    #: Engine seconds of each row, float64 `[num_rows]`.
    row_s: NDArray[np.float64]
    #: Makespan in seconds.
    predicted_s: float
    #: Rows that were played to find the makespan.
    simulated_rows: int
    #: Seconds of all replicas together, the makespan times their number: a price per hour multiplies with these.
    replica_s: float
    #: Prompt tokens that a prefix cache need not compute again.
    shared_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CutRows:
    """Shards of a job, and what is expected of them and of their rows."""

    #: The shards.
    plan: ShardPlan
    #: Engine seconds of each shard, float64 `[num_shards]`.
    shard_s: NDArray[np.float64]
    #: Tokens that each row is expected to generate, float64 `[num_rows]`.
    predicted: NDArray[np.float64]
    #: Engine seconds of each row, float64 `[num_rows]`.
    row_s: NDArray[np.float64]
    #: Replica of each shard, with a bound (None: the shards are not placed).
    placement: Placement | None = None

    @classmethod
    def of(cls, plan: ShardPlan, predicted: NDArray[np.float64], row_s: NDArray[np.float64]) -> CutRows:
        """Make the record of a plan from what is expected of its rows; a shard takes as long as its rows together."""
        return cls(plan, np.array([row_s[plan.rows_of(s.shard_id)].sum() for s in plan.shards]), predicted, row_s)


def with_canary_first(canary: CutRows, rest: CutRows, is_canary: NDArray[np.bool_]) -> CutRows:
    """The shards of a job whose canary was cut apart from its other rows; the canary's come first.

    `is_canary` bool `[num_rows]`: rows of the canary; both parts have their rows in the order of the job.
    """
    rows = np.flatnonzero(is_canary), np.flatnonzero(~is_canary)
    num_first, first_wave = len(canary.plan.shards), 1 + max((s.wave_id for s in canary.plan.shards), default=-1)
    shards = (
        *canary.plan.shards,
        *(
            replace(shard, shard_id=num_first + shard.shard_id, wave_id=first_wave + shard.wave_id)
            for shard in rest.plan.shards
        ),
    )
    order = np.concatenate([rows[0][canary.plan.row_order], rows[1][rest.plan.row_order]])
    offsets = np.concatenate([canary.plan.shard_offsets, rows[0].size + rest.plan.shard_offsets[1:]])
    predicted, row_s = np.empty(len(is_canary)), np.empty(len(is_canary))
    for mine, part in zip(rows, (canary, rest), strict=True):
        predicted[mine], row_s[mine] = part.predicted, part.row_s
    return CutRows.of(ShardPlan(order, offsets, shards), predicted, row_s)


def forecast_job(
    workload: Workload, cut: CutRows, cost: CostModel, num_replicas: int, play: Play, played_rows: int
) -> Forecast:
    """Predict a job that was cut into shards, by playing about `played_rows` of its rows.

    Rows without engine work cost nothing. Deterministic.
    """
    placement = cut.placement
    if any(shard.replica is not None for shard in cut.plan.shards):
        placement = placement or place_job(workload.adapters, cut.plan.shards, cut.shard_s, cost, num_replicas)
    sample = JobSample(workload.num_rows, num_replicas, played_rows)
    sample.add(workload, cut)
    predicted_s = sample.predict(play)
    return Forecast(
        cut.plan,
        placement,
        cut.shard_s,
        cut.predicted,
        cut.row_s,
        predicted_s,
        sample.num_rows,
        replica_s=predicted_s * num_replicas,
        shared_prompt_tokens=int(workload.prompt_tokens.sum() - workload.computed_prompt_tokens.sum()),
    )


class JobSample:
    """Shards of a job, evenly spread over it, with their rows: few enough to be played. A small job is all of them.

    The sample runs on fewer replicas than the job, each with as many rows as in the job. Where even two replicas have
    more rows than may be played, they get a part of them, and the rest is added at the pace that the sample has in full
    swing: the beginning and the end of a job take as long whatever its rows. `num_rows`: rows of the sample.
    """

    def __init__(self, job_rows: int, num_replicas: int, played_rows: int) -> None:
        share = played_rows / max(job_rows, 1)
        sampled_replicas = min(num_replicas, max(_LEAST_REPLICAS, int(share * num_replicas)))
        self._is_whole = share >= 1
        self._job_replicas = num_replicas
        self._replicas = num_replicas if self._is_whole else sampled_replicas
        self._share = min(share, sampled_replicas / num_replicas)
        self._job_work_s = 0.0
        self._num_seen = self._num_blocks = 0
        self._blocks: list[Workload] = []
        self._shards: list[Shard] = []
        self._sizes: list[int] = []
        self._row_s: list[NDArray[np.float64]] = []
        self.num_rows = 0

    def add(self, rows: Workload, cut: CutRows) -> None:
        """Take in a job, or its next block."""
        self._num_blocks += 1
        self._job_work_s += float(cut.row_s.sum())
        shards = [shard for shard in cut.plan.shards if shard.has_engine_work]
        number = np.arange(self._num_seen, self._num_seen + len(shards))
        self._num_seen += len(shards)
        is_taken = np.floor((number + 1) * self._share + 0.5) > np.floor(number * self._share + 0.5)
        first_wave = max((shard.wave_id + 1 for shard in self._shards), default=0)
        for shard in (s for s, taken in zip(shards, is_taken | self._is_whole, strict=True) if taken):
            of_shard = cut.plan.rows_of(shard.shard_id)
            # placed for the job's replicas, of which the sample has some only
            home = shard.replica if self._is_whole or cut.placement is None else None
            self._shards.append(replace(shard, wave_id=shard.wave_id + first_wave, replica=home))
            self._blocks.append(rows.part(of_shard))
            self._sizes.append(len(of_shard))
            self._row_s.append(cut.row_s[of_shard])
        self.num_rows = sum(self._sizes)

    def predict(self, play: Play) -> float:
        """Predicted seconds of the whole job."""
        if not self._shards:
            return 0.0
        rows, plan = self._played()
        run = play(rows, plan, self._replicas)
        if self._is_whole:
            return run.metrics.makespan_s
        row_s = np.concatenate(self._row_s)
        work_s = float(row_s.sum()) / self._replicas
        missing_s = self._job_work_s / self._job_replicas - work_s
        return run.metrics.makespan_s + missing_s * _pace(run.timeline.finish_s, row_s / self._replicas, work_s)

    def _played(self) -> tuple[Workload, ShardPlan]:
        """Workload and plan of the sample, as a job of its own."""
        rows = Workload.joined(self._blocks)
        starts = np.concatenate([[0], np.cumsum(self._sizes)])
        order = dispatch_order(self._shards) if self._num_blocks > 1 else range(len(self._shards))
        chosen = [self._shards[i] for i in order]
        if not self._is_whole:
            # Shards that were dealt out are dealt anew, in turn, to the replicas of the sample.
            turn = [None if shard.replica is None else n % self._replicas for n, shard in enumerate(chosen)]
            chosen = [replace(shard, replica=number) for shard, number in zip(chosen, turn, strict=True)]
        row_order = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
        offsets = np.concatenate([[0], np.cumsum([self._sizes[i] for i in order])])
        shards = tuple(replace(shard, shard_id=number) for number, shard in enumerate(chosen))
        return rows, ShardPlan(row_order, offsets, shards)


def _pace(finish_s: NDArray[np.float64], work_s: NDArray[np.float64], all_s: float) -> float:
    """Seconds that a second of priced work takes in full swing: 1 where rows cost what they are priced at.

    `work_s` `[num_rows]`: priced seconds of each row, `all_s` their sum.
    """
    order = np.argsort(finish_s, kind="stable")
    done_s, at_s = np.cumsum(work_s[order]), finish_s[order]
    is_in_swing = (done_s >= _FULL_SWING[0] * all_s) & (done_s <= _FULL_SWING[1] * all_s)
    if np.ptp(done_s[is_in_swing]) <= 0:
        return float(at_s[-1] / all_s)
    return float(np.polyfit(done_s[is_in_swing], at_s[is_in_swing], 1)[0])


def cut_job(
    workload: Workload,
    predicted: NDArray[np.float64],
    cost: CostModel,
    batch_rows: int,
    num_replicas: int,
    *,
    rows_per_shard: int,
    mode: WaveMode,
    prices: CostModel | None = None,
) -> CutRows:
    """Cut a job, or a block of one, into shards, with the seconds that they will take.

    `predicted`: tokens that rows are expected to generate, `[num_rows]`. `mode`: mode of waves with adapters, `auto`
    for that which the cost model favours. `prices`: costs of steps, where they are known better than the costs by which
    modes are chosen.
    """
    plan = plan_shards(
        workload,
        batch_rows=batch_rows,
        num_replicas=num_replicas,
        predicted_output_tokens=predicted,
        rows_per_shard=rows_per_shard,
    )
    plan = _with_modes(plan, workload, cost, batch_rows, num_replicas, mode)
    return CutRows.of(plan, predicted, row_seconds(workload, predicted, prices or cost, batch_rows))


def plan_dealt(
    rows: RowsToDeal, replica_of: NDArray[np.int64], *, shard_mode: ShardMode | None, mode: WaveMode
) -> ShardPlan:
    """Plan shards of rows that were dealt out to replicas.

    `replica_of` int64 `[num_rows]`: replica of each row. `shard_mode`: mode of shards in input order; None: each
    replica's rows are planned in waves, with `mode` as in `cut_job`.
    """
    if shard_mode is None:
        return _planned_apart(rows, replica_of, mode)
    return dealt_shards(
        rows.workload,
        replica_of,
        rows.num_replicas,
        rows_per_shard=rows.rows_per_shard,
        predicted_output_tokens=rows.output_tokens,
        mode=shard_mode,
    )


def _planned_apart(rows: RowsToDeal, replica_of: NDArray[np.int64], mode: WaveMode) -> ShardPlan:
    """Plan waves and shards of each replica by itself; rows without engine work are for any replica."""
    owner = np.where(rows.workload.max_tokens > 0, replica_of, rows.num_replicas)
    shards: list[Shard] = []
    rows_of: list[NDArray[np.int64]] = []
    for replica in np.unique(owner).tolist():
        mine = np.flatnonzero(owner == replica)
        share = rows.workload.part(mine)
        plan = plan_shards(
            share,
            batch_rows=rows.batch_rows,
            num_replicas=1,
            predicted_output_tokens=rows.output_tokens[mine],
            rows_per_shard=rows.rows_per_shard,
        )
        plan = _with_modes(plan, share, rows.cost, rows.batch_rows, 1, mode)
        first_wave = max((shard.wave_id + 1 for shard in shards), default=0)
        number = replica if replica < rows.num_replicas else None
        shards += [replace(shard, wave_id=shard.wave_id + first_wave, replica=number) for shard in plan.shards]
        rows_of += [mine[plan.rows_of(shard.shard_id)] for shard in plan.shards]
    order = dispatch_order(shards)
    return ShardPlan(
        np.concatenate([np.zeros(0, np.int64), *(rows_of[i] for i in order)]),
        np.cumsum([0, *(len(rows_of[i]) for i in order)]).astype(np.int64),
        tuple(replace(shards[i], shard_id=number) for number, i in enumerate(order)),
    )


def _with_modes(
    plan: ShardPlan, workload: Workload, cost: CostModel, batch_rows: int, num_replicas: int, mode: WaveMode
) -> ShardPlan:
    """Mark waves with adapters with their mode."""
    if mode == "auto":
        return with_merged_waves(plan, workload, cost, batch_rows=batch_rows, num_replicas=num_replicas)
    return replace(plan, shards=tuple(replace(s, mode=mode) if s.mode == "unmerged" else s for s in plan.shards))


def place_job(
    adapters: Sequence[AdapterInfo],
    shards: Sequence[Shard],
    shard_s: NDArray[np.float64],
    cost: CostModel,
    num_replicas: int,
) -> Placement:
    """Place the shards on replicas: a shard takes its seconds, and each replica loads each adapter it needs once from
    storage. Shards that were dealt out run where they were dealt to.
    """
    number = {adapter.adapter_id: i for i, adapter in enumerate(adapters)}
    problem = PlacementProblem(
        shard_s,
        tuple(tuple(number[adapter_id] for adapter_id in shard.adapters) for shard in shards),
        np.array([cost.load_seconds(adapter.weight_bytes, "storage") for adapter in adapters]),
        num_replicas,
    )
    if any(shard.replica is not None for shard in shards):
        return as_placed(problem, np.array([shard.replica or 0 for shard in shards], np.int64))
    return place_shards(problem)


def place_cut(cut: CutRows, adapters: Sequence[AdapterInfo], cost: CostModel, num_replicas: int) -> CutRows:
    """Place the shards of a job, or of a block of it, on replicas, which then open them first."""
    placement = place_job(adapters, cut.plan.shards, cut.shard_s, cost, num_replicas)
    homes = zip(cut.plan.shards, placement.replica_of.tolist(), strict=True)
    shards = tuple(replace(shard, replica=home if shard.has_engine_work else None) for shard, home in homes)
    return replace(cut, plan=replace(cut.plan, shards=shards), placement=placement)


def row_seconds(
    workload: Workload, predicted: NDArray[np.float64], cost: CostModel, batch_rows: int
) -> NDArray[np.float64]:
    """A replica's seconds for each row, float64 `[num_rows]`; 0 without engine work."""
    ranks = np.array([adapter.rank for adapter in workload.adapters] + [0], dtype=np.float64)
    seconds = cost.row_seconds(
        workload.prompt_tokens,
        predicted,
        batch_rows=batch_rows,
        rank=ranks[workload.adapter_index],
        num_adapters=1,
        shared_tokens=workload.prompt_tokens - workload.computed_prompt_tokens,
        is_drawn=False if workload.is_drawn is None else workload.is_drawn,
        is_scored=False if workload.is_scored is None else workload.is_scored,
    )
    return np.where(workload.max_tokens > 0, seconds, 0.0)
