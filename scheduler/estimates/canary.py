"""The canary of a job: rows of each adapter that are answered first, and the plan with the lengths that they measured.

A canary's rows are chosen before the job by strata: adapters, and within an adapter by task, limit and length of
prompt. They are shards of their own, the first of the plan, and no row is answered twice. Once they have their answers,
the other shards are predicted anew, and waves are merged where that pays for the measured lengths.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..messages import CanaryAnswered
from ..planning.waves import Shard
from ..workload import Workload
from .lengths import AnswerLengths, spread_quantiles


def canary_rows(
    workload: Workload, num_each: int, before: Mapping[int, int] | None = None, total: Mapping[int, int] | None = None
) -> NDArray[np.bool_]:
    """Rows of the canary, bool `[num_rows]`: `num_each` rows with work of each adapter and of the base model, or all of
    one that has fewer. Rows of one group are chosen together, and count as one. Deterministic.

    `workload`: a job or one block of it; then `before` and `total` have the rows of each adapter in the blocks before,
    and in the whole job, by `adapter_index`, and the block gets its part of the canary.
    """
    is_first = np.ones(workload.num_rows, bool)
    if workload.groups is not None:
        is_first[1:] = workload.groups[1:] != workload.groups[:-1]
    candidates = np.flatnonzero((workload.max_tokens > 0) & is_first)
    task = np.zeros(workload.num_rows, np.uint64) if workload.task is None else workload.task
    keys = (workload.places, workload.prompt_tokens, workload.max_tokens, task, workload.adapter_index)
    ordered = candidates[np.lexsort(tuple(key[candidates] for key in keys))]
    chosen = np.zeros(workload.num_rows, bool)
    starts = np.flatnonzero(np.diff(workload.adapter_index[ordered])) + 1
    for rows in np.split(ordered, starts) if len(ordered) else []:
        number = int(workload.adapter_index[rows[0]])
        quota = num_each
        if total is not None:
            seen, whole = (before or {}).get(number, 0), max(1, total.get(number, 1))
            of_block = int((workload.adapter_index == number).sum())
            quota = num_each * min(whole, seen + of_block) // whole - num_each * seen // whole
        chosen[_spread(rows, quota)] = True
    if workload.groups is not None:
        return np.isin(workload.groups, workload.groups[chosen])
    return chosen


def _spread(rows: NDArray[np.int64], num_chosen: int) -> NDArray[np.int64]:
    """One row of each of `num_chosen` strata of about equal size, in the order of `rows`. Its place varies from one
    stratum to the next, so that no period of the input is met.
    """
    if not 0 < num_chosen < len(rows):
        return rows[: max(0, num_chosen)]
    # Strata of whole rows, at least one each: two of them never meet in a row.
    bounds = np.arange(num_chosen + 1) * len(rows) // num_chosen
    places = bounds[:-1] + spread_quantiles(np.arange(1, num_chosen + 1)) * np.diff(bounds)
    return rows[places.astype(np.int64)]


def mean_lengths(answered: CanaryAnswered) -> dict[str | None, float]:
    """Mean tokens of the answers of each adapter in the canary (None: the base model)."""
    rows, tokens = Counter[str | None](), Counter[str | None]()
    for found in answered.answers:
        rows[found.adapter_id] += found.num_rows
        tokens[found.adapter_id] += found.output_tokens
    return {adapter_id: tokens[adapter_id] / num_rows for adapter_id, num_rows in rows.items() if num_rows}


def answer_lengths(answered: CanaryAnswered) -> dict[str | None, AnswerLengths]:
    """Lengths of the answers of each adapter in the canary (None: the base model)."""
    groups: defaultdict[str | None, list[tuple[float, float, bool]]] = defaultdict(list)
    for found in answered.answers:
        groups[found.adapter_id].append((found.num_rows, found.output_tokens, False))
    return {adapter_id: AnswerLengths.of(of_adapter) for adapter_id, of_adapter in groups.items()}


def with_canary(shards: Sequence[Shard], answered: CanaryAnswered | None) -> tuple[Shard, ...]:
    """The shards of a plan, in their order, as the canary's answers predict them; the canary's own stay as they are.

    Rows of an adapter keep their proportions: they are predicted longer or shorter by one factor. Rows of a shard with
    several adapters get the mean of these. `answered`: None leaves all as they are.
    """
    if answered is None:
        return tuple(shards)
    means = mean_lengths(answered)
    rows: defaultdict[tuple[str, ...], int] = defaultdict(int)
    tokens: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for shard in shards:
        if shard.has_engine_work and not shard.is_canary:
            rows[shard.adapters] += shard.num_rows
            tokens[shard.adapters] += shard.predicted_output_tokens
    factors = {}
    for adapters, num_rows in rows.items():
        found = [means[adapter_id] for adapter_id in adapters or (None,) if adapter_id in means]
        predicted = tokens[adapters] / num_rows
        factors[adapters] = sum(found) / len(found) / predicted if found and predicted > 0 else 1.0
    return tuple(_refreshed(shard, factors.get(shard.adapters, 1.0), answered) for shard in shards)


def _refreshed(shard: Shard, factor: float, answered: CanaryAnswered) -> Shard:
    if shard.is_canary or not shard.has_engine_work:
        return shard
    mode = shard.mode
    if answered.merged_waves is not None and mode in ("merged", "unmerged"):
        mode = "merged" if shard.wave_id in answered.merged_waves else "unmerged"
    return replace(
        shard,
        mode=mode,
        predicted_output_tokens=round(factor * shard.predicted_output_tokens),
        longest_output_tokens=round(factor * shard.longest_output_tokens),
    )
