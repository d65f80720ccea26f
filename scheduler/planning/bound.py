"""`job_bound`: seconds below which no policy can finish a job, given what its rows really are.

The bound is the largest of three times, each of them necessary: all work over the capacity of all replicas; the longest
row alone on the fastest replica; and the adapters' loads, shared by all links. Work is counted as the cost model counts
it, with every step as full as the limits of a step allow. An adapter is unmerged throughout, or merged at least once,
whichever is less; either way it is part of as many steps as its longest row has. Pauses, drains and waiting count
nothing, so the bound is rarely reached.

Work needs few numbers of the rows, and these can be added up (`JobWork`): a job that has run is not read again for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..costs.cost import AdapterSource, CostModel, prompt_pairs
from ..workload import Workload


@dataclass(frozen=True, slots=True)
class JobBound:
    """Lower bounds in seconds: `work_s`, `longest_row_s` and `loads_s`; the job's is the largest of them."""

    work_s: float
    longest_row_s: float
    loads_s: float

    @property
    def seconds(self) -> float:
        """Seconds below which no run of the job can end."""
        return max(self.work_s, self.longest_row_s, self.loads_s)


@dataclass(frozen=True, slots=True)
class AdapterWork:
    """Work of engines for the rows of one adapter."""

    #: Id of the adapter; None for the base model.
    adapter_id: str | None
    #: Rows of the adapter.
    num_rows: int
    #: Their prompt tokens that are computed; the others are copied.
    computed_tokens: float
    #: Their tokens generated after the first of each row, which comes out of the prompt.
    decoded_tokens: float
    #: Most decoded tokens of one row.
    longest_decoded: float = 0.0


@dataclass(frozen=True, slots=True)
class JobWork:
    """Work of engines for some rows, in sums that can be added up."""

    #: Work of each adapter that has rows.
    adapters: tuple[AdapterWork, ...] = ()
    #: Pairs of tokens that attention computes for the prompts of all rows (`prompt_pairs`).
    row_pairs: float = 0.0
    #: KV slots that decode steps read.
    context_tokens: float = 0.0
    #: Rows among which the longest is, or one about as long: those with most decoded and most computed tokens.
    #: Tokens of the prompt, of these those that are computed, and decoded tokens of each.
    longest: tuple[tuple[float, float, float], ...] = ()

    @classmethod
    def of_rows(
        cls,
        adapters: Sequence[str | None],
        slot: NDArray[np.int64],
        prompt: NDArray[np.float64],
        computed: NDArray[np.float64],
        decoded: NDArray[np.float64],
    ) -> Self:
        """Add up rows. All arrays are `[num_rows]`; `slot` is the index of each row's adapter in `adapters`."""
        if not len(slot):
            return cls()
        num_rows, all_computed, all_decoded = (
            np.bincount(slot, weights=column, minlength=len(adapters)) for column in (None, computed, decoded)
        )
        longest = np.zeros(len(adapters))
        np.maximum.at(longest, slot, decoded)
        chosen = {int(np.argmax(decoded)), int(np.argmax(computed))}
        return cls(
            tuple(
                AdapterWork(key, int(num_rows[i]), float(all_computed[i]), float(all_decoded[i]), float(longest[i]))
                for i, key in enumerate(adapters)
                if num_rows[i]
            ),
            float(prompt_pairs(computed, prompt - computed).sum()),
            float(_contexts(prompt, decoded).sum()),
            tuple((float(prompt[i]), float(computed[i]), float(decoded[i])) for i in sorted(chosen)),
        )

    @classmethod
    def total(cls, parts: Iterable[JobWork]) -> Self:
        """Add up the work of several groups of rows."""
        parts = [part for part in parts if part.adapters]
        if not parts:
            return cls()
        sums: dict[str | None, NDArray[np.float64]] = {}
        most: dict[str | None, float] = {}
        for work in (work for part in parts for work in part.adapters):
            counted = np.array([work.num_rows, work.computed_tokens, work.decoded_tokens])
            sums[work.adapter_id] = sums.get(work.adapter_id, 0.0) + counted
            most[work.adapter_id] = max(most.get(work.adapter_id, 0.0), work.longest_decoded)
        longest = [row for part in parts for row in part.longest]
        chosen = {max(longest, key=lambda row: row[2]), max(longest, key=lambda row: row[1])}
        return cls(
            tuple(AdapterWork(a, int(n), float(c), float(d), most[a]) for a, (n, c, d) in sums.items()),
            sum(part.row_pairs for part in parts),
            sum(part.context_tokens for part in parts),
            tuple(chosen),
        )


def work_bound(
    work: JobWork,
    ranks: Mapping[str, float],
    cost: CostModel,
    *,
    batch_rows: int,
    step_tokens: int,
    slowness: Sequence[float],
) -> JobBound:
    """Lower bound for work that was added up, without loads. `ranks`: LoRA rank by adapter id. For the rest see
    `job_bound`.
    """
    alone_s = (
        float(_alone_seconds(prompt, computed, decoded, cost, step_tokens))
        for prompt, computed, decoded in work.longest
    )
    longest_s = max(alone_s, default=0.0)
    all_s = _work_seconds(work, ranks, cost, batch_rows, step_tokens)
    return JobBound(all_s / _capacity(slowness), longest_s * min(slowness), 0.0)


def job_bound(
    workload: Workload,
    output_tokens: NDArray[np.float64],
    cost: CostModel,
    *,
    batch_rows: int,
    step_tokens: int,
    slowness: Sequence[float],
    adapter_source: AdapterSource = "host",
) -> JobBound:
    """Lower bound for a job on replicas that take `slowness[i]` times as long as `cost` says.

    `output_tokens` float64 `[num_rows]`: true or expected lengths; rows without engine work count nothing.
    `batch_rows`, `step_tokens`: most rows and tokens of a step. Deterministic; linear in rows.
    """
    has_work = workload.max_tokens > 0
    if not has_work.any():
        return JobBound(0.0, 0.0, 0.0)
    prompt = workload.prompt_tokens[has_work].astype(np.float64)
    computed = workload.computed_prompt_tokens[has_work].astype(np.float64)
    # The first token comes out of the prefill.
    decoded = np.maximum(output_tokens[has_work] - 1.0, 0.0)
    ranks = {adapter.adapter_id: float(adapter.rank) for adapter in workload.adapters}
    slot = workload.adapter_index[has_work].astype(np.int64) % (len(ranks) + 1)
    work = JobWork.of_rows([*ranks, None], slot, prompt, computed, decoded)
    all_s = _work_seconds(work, ranks, cost, batch_rows, step_tokens)
    longest_s = float(_alone_seconds(prompt, computed, decoded, cost, step_tokens).max())
    loads_s = _load_seconds(workload, has_work, cost, len(slowness), adapter_source)
    return JobBound(all_s / _capacity(slowness), longest_s * min(slowness), loads_s)


def _capacity(slowness: Sequence[float]) -> float:
    """Number of replicas as fast as the cost model that all replicas together are worth."""
    return sum(1.0 / slow for slow in slowness)


def _contexts(prompt: NDArray[np.float64], decoded: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slots that decode steps read: each the prompt and what was generated before it."""
    return prompt * decoded + decoded * (decoded + 1) / 2


def _alone_seconds(
    prompt: ArrayLike, computed: ArrayLike, decoded: ArrayLike, cost: CostModel, step_tokens: int
) -> NDArray[np.float64]:
    """Seconds of each row when it has a replica for itself and no adapter. The columns are those of
    `JobWork.longest`."""
    prompt, computed, decoded = (np.asarray(column, dtype=np.float64) for column in (prompt, computed, decoded))
    num_steps = decoded + np.maximum(1.0, np.ceil(computed / step_tokens))
    return np.asarray(
        cost.step_s * num_steps
        + cost.prefill_token_s * computed
        + cost.prefill_pair_s * prompt_pairs(computed, prompt - computed)
        + cost.decode_row_s * decoded
        + cost.context_token_s * _contexts(prompt, decoded)
    )


def _work_seconds(
    work: JobWork, ranks: Mapping[str, float], cost: CostModel, batch_rows: int, step_tokens: int
) -> float:
    """Seconds of all rows on one replica, every step as full as it may be."""
    num_rows = sum(part.num_rows for part in work.adapters)
    computed = sum(part.computed_tokens for part in work.adapters)
    decoded = sum(part.decoded_tokens for part in work.adapters)
    rows_s = (
        cost.prefill_token_s * computed
        + cost.prefill_pair_s * work.row_pairs
        + cost.decode_row_s * decoded
        + cost.context_token_s * work.context_tokens
    )

    def steps_s(num_steps: float, place_s: float) -> float:
        adapters_s = (
            _adapter_seconds(part, ranks[part.adapter_id], cost, batch_rows, place_s)
            for part in work.adapters
            if part.adapter_id is not None
        )
        return cost.step_s * num_steps + sum(adapters_s)

    # An empty place may cost nothing in steps that tokens limit.
    by_rows = steps_s((num_rows + decoded) / batch_rows, cost.step_s / batch_rows)
    return rows_s + max(by_rows, steps_s((computed + decoded) / step_tokens, 0.0))


def _adapter_seconds(work: AdapterWork, rank: float, cost: CostModel, batch_rows: int, place_s: float) -> float:
    """Least seconds that an adapter adds. `place_s`: seconds of a place of a step that no row takes.

    A step with rows of the adapter pays for it, also while it is merged and rows of others, from which it is
    subtracted, are beside them. A step in which it is merged and alone has no more rows than the adapter.
    """
    tokens = work.computed_tokens + work.decoded_tokens
    places = work.num_rows + work.decoded_tokens
    together = min(work.num_rows, batch_rows)
    num_steps = max(places / together, work.longest_decoded + 1)
    step_s = cost.adapter_s + cost.rank_s * rank
    unmerged_s = tokens * (cost.lora_token_s + cost.rank_token_s * rank)
    unmerged_s += places / batch_rows * cost.lora_step_s + num_steps * step_s
    return min(unmerged_s, cost.merge_s + num_steps * min(step_s, place_s * (batch_rows - together)))


def _load_seconds(
    workload: Workload, has_work: NDArray[np.bool_], cost: CostModel, num_replicas: int, source: AdapterSource
) -> float:
    """Least seconds of the adapter loads: each adapter in use is loaded once, by one of the replicas."""
    used = np.unique(workload.adapter_index[has_work])
    loads = [
        cost.load_seconds(workload.adapters[number].weight_bytes, source) for number in used.tolist() if number >= 0
    ]
    return max([sum(loads) / num_replicas, *loads], default=0.0)
