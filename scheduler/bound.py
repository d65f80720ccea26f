"""`job_bound`: seconds below which no policy can finish a job, given what its rows really are.

The bound is the largest of three times, each of them necessary: all work over the capacity of all replicas; the longest
row alone on the fastest replica; and the adapters' loads, shared by all links. Work is counted as the cost model counts
it, with every step as full as the limits of a step allow, and each adapter's rows either unmerged throughout or merged
for the price of one merge, whichever is less. Pauses, drains and waiting count nothing, so the bound is rarely reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost import AdapterSource, CostModel, prompt_pairs
from .workload import Workload


@dataclass(frozen=True, slots=True)
class JobBound:
    """Lower bounds in seconds: `work_s`, `longest_row_s` and `loads_s`; the job's is the largest of them."""

    work_s: float
    longest_row_s: float
    loads_s: float

    @property
    def seconds(self) -> float:
        """Below which no run of the job can end."""
        return max(self.work_s, self.longest_row_s, self.loads_s)


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
    """Of a job on replicas that take `slowness[i]` times what `cost` says.

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
    steps_alone = decoded + np.maximum(1.0, np.ceil(computed / step_tokens))
    row_s = (
        cost.prefill_token_s * computed
        + cost.prefill_pair_s * prompt_pairs(computed, prompt - computed)
        + cost.decode_row_s * decoded
        # A decode step reads the prompt and what was generated before it.
        + cost.context_token_s * (prompt * decoded + decoded * (decoded + 1) / 2)
    )
    num_steps = max(float((decoded + 1).sum()) / batch_rows, float((decoded + computed).sum()) / step_tokens)
    adapters = _adapter_seconds(workload, has_work, computed, decoded, cost, batch_rows)
    all_s = cost.step_s * num_steps + float(row_s.sum()) + adapters
    fastest = min(slowness)
    capacity = sum(1.0 / slow for slow in slowness)
    longest_s = float((row_s + cost.step_s * steps_alone).max()) * fastest
    return JobBound(all_s / capacity, longest_s, _load_seconds(workload, has_work, cost, len(slowness), adapter_source))


def _adapter_seconds(
    workload: Workload,
    has_work: NDArray[np.bool_],
    computed: NDArray[np.float64],
    decoded: NDArray[np.float64],
    cost: CostModel,
    batch_rows: int,
) -> float:
    """The least that each adapter adds: its rows unmerged in full batches of its own, or one merge."""
    slot = workload.adapter_index[has_work]
    num_adapters = len(workload.adapters)
    if not num_adapters:
        return 0.0
    of_adapter = slot >= 0
    tokens = np.bincount(slot[of_adapter], weights=(computed + decoded)[of_adapter], minlength=num_adapters)
    outputs = np.bincount(slot[of_adapter], weights=(decoded + 1)[of_adapter], minlength=num_adapters)
    ranks = np.array([adapter.rank for adapter in workload.adapters], dtype=np.float64)
    per_step = cost.lora_step_s + cost.adapter_s + cost.rank_s * ranks
    unmerged = tokens * (cost.lora_token_s + cost.rank_token_s * ranks) + outputs / batch_rows * per_step
    return float(np.minimum(unmerged, cost.merge_s).sum())


def _load_seconds(
    workload: Workload, has_work: NDArray[np.bool_], cost: CostModel, num_replicas: int, source: AdapterSource
) -> float:
    """Each adapter in use is loaded once, by one of the replicas."""
    used = np.unique(workload.adapter_index[has_work])
    loads = [
        cost.load_seconds(workload.adapters[number].weight_bytes, source) for number in used.tolist() if number >= 0
    ]
    return max([sum(loads) / num_replicas, *loads], default=0.0)
