"""Predicts runs: cuts rows into shards as a run does, and plays them on simulated workers with a run's settings.

Answers have no length before a job runs. Plans expect a mean of each row, as earlier jobs have had it or else a share
of `max_tokens`; simulated engines draw lengths from the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...engine.memory.limits import ROWS_GROW, adapter_growth
from ...scheduler.batchers.batching import Batcher, ReplicaFacts
from ...scheduler.estimates.canary import canary_rows
from ...scheduler.estimates.lengths import OTHER_TASKS, AnswerKey, AnswerModel, frequent_tasks, spread_quantiles
from ...scheduler.forecast import (
    CutRows,
    Forecast,
    JobSample,
    cut_job,
    forecast_job,
    place_cut,
    plan_dealt,
    row_seconds,
    with_canary_first,
)
from ...scheduler.planning.bound import JobBound, job_bound
from ...scheduler.planning.waves import ShardPlan, shard_rows, with_whole_groups
from ...scheduler.policies import POLICIES, RowsToDeal, dealing
from ...scheduler.simulation.replica import ReplicaSettings
from ...scheduler.simulation.run import PolicyRun, run_planned
from ...scheduler.workload import Workload
from .settings import RunSettings

# Most steps of an exact leap of the simulator: shards that arrive meanwhile wait for its end.
_LEAP_STEPS = 8
# Rows that a simulated batcher looks at: all that wait, as an engine's batcher does.
_ALL_ROWS = 1 << 30
# Bytes of a shard's answers at most where shards are cut by the size of the job: a worker has several open.
_SHARD_ANSWER_BYTES = 128 << 20
# Rows of a sample that is played, and the least number of full batches in it, over all of its replicas.
_SAMPLE_ROWS = 4_000
_LEAST_BATCHES = 24


def replica_settings(settings: RunSettings) -> ReplicaSettings:
    """A simulated replica with the limits of the engines."""
    limits = settings.limits
    # bytes by which the pages of adapters are counted
    token_bytes = int(limits.token_bytes / adapter_growth(settings.model, settings.engine.tensor_parallel))
    return ReplicaSettings(
        max_batch_rows=limits.batch_rows,
        max_step_tokens=limits.step_tokens,
        kv_tokens=limits.pool_bytes // limits.token_bytes,
        page_tokens=limits.page_tokens,
        run_pages=limits.run_pages,
        row_pages=limits.row_pages,
        token_bytes=0 if settings.engine.mode == "merged" else token_bytes,
        rows_grow=ROWS_GROW[settings.device.kind] and settings.length_share < 1,
        adapter_source="storage",
        host_tier_bytes=limits.host_tier_bytes,
        loads_beside_steps=settings.device.kind != "cpu",
        fetch_cores=settings.fetch_cores,
        look_ahead=_ALL_ROWS,
        leap_steps=_LEAP_STEPS,
    )


def with_reuse(settings: RunSettings, workload: Workload) -> Workload:
    """The rows with `shared_tokens` rounded down to tokens that an engine of this job copies instead of computing
    them: whole pages, never a prompt's last token. They are None when engines do not share beginnings of prompts.
    """
    if workload.shared_tokens is None or not settings.shares_prefixes:
        return replace(workload, shared_tokens=None)
    page_tokens = settings.limits.page_tokens
    shared = np.minimum(workload.shared_tokens, np.maximum(workload.prompt_tokens - 1, 0))
    return replace(workload, shared_tokens=(shared // page_tokens * page_tokens).astype(np.int32))


def cut_rows(
    settings: RunSettings,
    rows: Workload,
    num_workers: int,
    job_rows: int | None = None,
    length_share: float | None = None,
) -> CutRows:
    """Cut a job, or a block of its rows, into shards. `job_rows`: rows of the whole job, which decide the size of
    shards; None when `rows` are the whole job.
    """
    batch_rows = settings.limits.batch_rows
    num_rows = rows.num_rows if job_rows is None else job_rows
    if settings.canary:
        is_canary = canary_rows(rows, settings.canary)
        return _canary_first(settings, rows, is_canary, num_workers, num_rows, length_share)
    most_rows = _rows_in_memory(settings, rows)
    rows_per_shard = settings.rows_per_shard or min(shard_rows(num_rows, batch_rows, num_workers), most_rows)
    predicted = expected_tokens(settings, rows, length_share)
    rows = with_reuse(settings, rows)
    cut = _cut(settings, rows, predicted, num_workers, rows_per_shard)
    plan = with_whole_groups(cut.plan, rows, predicted)
    if plan is not cut.plan:
        cut = CutRows.of(plan, predicted, cut.row_s)
    return place_cut(cut, rows.adapters, settings.cost, num_workers) if settings.places(num_workers) else cut


def _rows_in_memory(settings: RunSettings, rows: Workload) -> int:
    """Rows of a shard whose answers take `_SHARD_ANSWER_BYTES` if they are as long as they may be."""
    is_asked = rows.max_tokens > 0
    if not settings.answer_token_bytes or not is_asked.any():
        return _ALL_ROWS
    # tokens of given completions are counted with their prompts, and the last one is fixed
    is_given = False if rows.fixed_tokens is None else rows.fixed_tokens == 1
    most_tokens = np.where(is_given, rows.prompt_tokens, rows.max_tokens)[is_asked].mean(dtype=np.float64)
    return max(1, int(_SHARD_ANSWER_BYTES / (settings.answer_token_bytes * most_tokens)))


def _canary_first(
    settings: RunSettings,
    rows: Workload,
    is_canary: NDArray[np.bool_],
    num_workers: int,
    job_rows: int,
    length_share: float | None,
) -> CutRows:
    """Cut the canary of a job, or of a block of its rows, and the other rows."""
    without = replace(settings, canary=0)
    canary = cut_canary(without, rows.part(np.flatnonzero(is_canary)), num_workers, job_rows, length_share)
    rest = cut_rows(without, rows.part(np.flatnonzero(~is_canary)), num_workers, job_rows, length_share)
    return with_canary_first(canary, rest, is_canary)


def cut_canary(
    settings: RunSettings,
    rows: Workload,
    num_workers: int,
    job_rows: int,
    length_share: float | None = None,
) -> CutRows:
    """Cut the rows of a canary into shards: about one for each worker, so that all of them answer it together."""
    usual = settings.rows_per_shard or min(
        shard_rows(job_rows, settings.limits.batch_rows, num_workers), _rows_in_memory(settings, rows)
    )
    settings = replace(settings, canary=0, rows_per_shard=max(1, min(usual, -(-rows.num_rows // num_workers))))
    cut = cut_rows(settings, rows, num_workers, job_rows, length_share)
    return replace(cut, plan=replace(cut.plan, shards=tuple(replace(s, is_canary=True) for s in cut.plan.shards)))


def _cut(
    settings: RunSettings, rows: Workload, predicted: NDArray[np.float64], num_workers: int, rows_per_shard: int
) -> CutRows:
    batch_rows, deal = settings.limits.batch_rows, dealing(settings.policy, settings.placement)
    if deal is None:
        return cut_job(
            rows,
            predicted,
            settings.cost,
            batch_rows,
            num_workers,
            rows_per_shard=rows_per_shard,
            mode=settings.wave_mode,
            prices=settings.prices,
        )
    row_s = row_seconds(rows, predicted, settings.cost, batch_rows)
    to_deal = RowsToDeal(rows, predicted, row_s, settings.cost, num_workers, batch_rows, rows_per_shard)
    policy = POLICIES[settings.policy]
    plan = plan_dealt(
        to_deal,
        deal(to_deal),
        shard_mode=None if policy.deal is None else policy.shard_mode,
        mode=settings.wave_mode,
    )
    return CutRows.of(plan, predicted, row_seconds(rows, predicted, settings.step_prices, batch_rows))


def expected_tokens(settings: RunSettings, rows: Workload, length_share: float | None = None) -> NDArray[np.float64]:
    """Tokens that rows will generate on average, float64 `[num_rows]`: their fixed number, else as in earlier jobs
    with their adapter and task, else a share of `max_tokens`.
    """
    model, group = _answers(settings, rows, length_share)
    expected = model.mean(rows.max_tokens, group)
    fixed = rows.fixed_tokens
    return expected if fixed is None else np.where(fixed > 0, fixed, expected)


def with_answers(
    settings: RunSettings,
    rows: Workload,
    length_share: float | None = None,
    quantile: NDArray[np.float64] | None = None,
) -> Workload:
    """The rows with lengths of answers drawn from the expected distribution. `quantile`: quantile of each row's
    length, from 0 to below 1; by default spread evenly over the rows, and always the same for a row of the input.
    """
    if quantile is None:
        quantile = spread_quantiles(rows.places)
    model, group = _answers(settings, rows, length_share)
    drawn, fixed = model.drawn(rows.max_tokens, group, quantile), rows.fixed_tokens
    return replace(rows, output_tokens=drawn if fixed is None else np.where(fixed > 0, fixed, drawn))


def _answers(
    settings: RunSettings, rows: Workload, length_share: float | None
) -> tuple[AnswerModel, NDArray[np.int64]]:
    """The model of the rows' answers, and the number of each row's group in it, int64 `[num_rows]`."""
    keys, group = answer_groups(rows)
    model = AnswerModel(
        settings.length_share if length_share is None else length_share, [settings.lengths.get(key) for key in keys]
    )
    return model, group


def answer_groups(rows: Workload) -> tuple[list[AnswerKey], NDArray[np.int64]]:
    """Adapter and task of each group of rows whose answers are expected to have like lengths, and the number of each
    row's group, int64 `[num_rows]`. Of an adapter with many tasks, the rare ones are one group.
    """
    pairs = np.empty(rows.num_rows, np.dtype([("adapter", np.int32), ("task", np.uint64)]))
    pairs["adapter"] = rows.adapter_index
    pairs["task"] = OTHER_TASKS if rows.task is None else rows.task
    found, group, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    ids = (*(adapter.adapter_id for adapter in rows.adapters), None)
    of_adapter: dict[int, dict[int, float]] = {}
    for (adapter, task), count in zip(found.tolist(), counts.tolist(), strict=True):
        of_adapter.setdefault(adapter, {})[task] = count
    frequent = {adapter: frequent_tasks(tasks) for adapter, tasks in of_adapter.items()}
    keys = [(ids[adapter], task if task in frequent[adapter] else OTHER_TASKS) for adapter, task in found.tolist()]
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return list(number), np.array([number[key] for key in keys], np.int64)[group]


def known_adapters(settings: RunSettings, rows: Workload) -> int:
    """Number of adapters that rows ask for, the base model included, of which earlier jobs say how long answers are."""
    keys, _ = answer_groups(rows.part(np.flatnonzero(rows.max_tokens > 0)))
    return len({adapter_id for adapter_id, task in keys if (adapter_id, task) in settings.lengths})


def guesses_lengths(settings: RunSettings, rows: Workload) -> bool:
    """Whether there are rows whose length of answer is a guess: it is not fixed, and earlier jobs did not have the
    row's adapter with the row's task.
    """
    keys, group = answer_groups(rows)
    is_known = np.array([key in settings.lengths for key in keys], np.bool_)[group]
    if rows.fixed_tokens is not None:
        is_known |= rows.fixed_tokens > 0
    return settings.length_share < 1 and bool((~is_known & (rows.max_tokens > 0)).any())


def play(
    settings: RunSettings, rows: Workload, plan: ShardPlan, num_workers: int, slowness: Sequence[float] | None = None
) -> PolicyRun:
    """Play a plan on simulated workers. The rows need true lengths, which only the simulated engines see.

    `slowness`: seconds of each worker's steps over those of the cost model, which only the workers have.
    """
    merged_only = [adapter.adapter_id in settings.merged_only for adapter in rows.adapters]

    def make_batcher(facts: ReplicaFacts) -> Batcher:
        return settings.batcher(replace(facts, must_merge=merged_only.__getitem__, cost=settings.cost))

    rows = with_reuse(settings, rows)
    return run_planned(
        rows,
        plan,
        settings.step_prices,
        replica_settings(settings),
        num_workers,
        make_batcher,
        settings.scheduler(num_workers, rows.adapters),
        slowness,
    )


def play_expected(settings: RunSettings, rows: Workload, plan: ShardPlan, num_workers: int) -> PolicyRun:
    """Play a plan on simulated workers, with lengths of answers drawn from the expected distribution."""
    return play(settings, with_answers(settings, rows), plan, num_workers)


def forecast(
    settings: RunSettings,
    rows: Workload,
    num_workers: int,
    *,
    max_rows: int,
    length_share: float | None = None,
    slowness: Sequence[float] | None = None,
) -> Forecast:
    """Predict waves, their modes, placement and seconds of a job. A sample is played of a job with more than
    `max_rows` rows.

    `slowness`: seconds of each worker's steps over those of the cost model. A sample on fewer workers has some of
    them, scaled to the mean speed of all.
    """
    rows = replace(rows, input_place=rows.places)
    cut = cut_rows(settings, rows, num_workers, length_share=length_share)
    played = _rows_to_play(settings, rows.num_rows, max_rows)

    def play_sample(rows: Workload, plan: ShardPlan, num_played: int) -> PolicyRun:
        of_played = None if slowness is None else some_of(slowness, num_played)
        return play(settings, with_answers(settings, rows, length_share), plan, num_played, of_played)

    return forecast_job(with_reuse(settings, rows), cut, settings.cost, num_workers, play_sample, played)


def bound(settings: RunSettings, rows: Workload, num_workers: int, slowness: Sequence[float] | None = None) -> JobBound:
    """Seconds below which no run of these rows ends, if answers have the lengths with which `forecast` plays them.
    `slowness`: seconds of each worker's steps over those of the cost model.
    """
    rows = with_answers(settings, rows)
    assert rows.output_tokens is not None, f"{rows.num_rows} rows without lengths"
    return job_bound(
        with_reuse(settings, rows),
        rows.output_tokens.astype(np.float64),
        settings.step_prices,
        batch_rows=settings.limits.batch_rows,
        step_tokens=settings.limits.step_tokens,
        slowness=[1.0] * num_workers if slowness is None else slowness,
        adapter_source="storage",
    )


def sample(settings: RunSettings, job_rows: int, num_workers: int, *, max_rows: int) -> JobSample:
    """An empty sample of a job of `job_rows` rows, to which blocks of rows are added before it is played."""
    return JobSample(job_rows, num_workers, _rows_to_play(settings, job_rows, max_rows))


def _rows_to_play(settings: RunSettings, job_rows: int, max_rows: int) -> int:
    """Number of rows to play: all rows of a job of up to `max_rows`, else enough to see the job's pace. Steps of
    large batches take the simulator no longer than others.
    """
    least = _LEAST_BATCHES * settings.limits.batch_rows
    return job_rows if job_rows <= max(max_rows, least) else max(_SAMPLE_ROWS, least)


def simulate(
    settings: RunSettings, rows: Workload, num_workers: int, slowness: Sequence[float] | None = None
) -> PolicyRun:
    """Plan a whole job as a run does, without its true lengths, and play it on simulated workers."""
    return play(settings, rows, cut_rows(settings, rows, num_workers).plan, num_workers, slowness)


def some_of(slowness: Sequence[float], count: int) -> list[float]:
    """Slowness of `count` workers, evenly spread from the fastest to the slowest, scaled to the mean speed of all."""
    ordered = sorted(slowness)
    chosen = [ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count)]
    if len(chosen) == len(slowness):
        return list(slowness)
    mean_speed = sum(1 / slow for slow in slowness) / len(slowness)
    chosen_speed = sum(1 / slow for slow in chosen) / count
    return [slow * chosen_speed / mean_speed for slow in chosen]
