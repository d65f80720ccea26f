"""Times of everything that happened in a simulation (`Timeline`), and the metrics of a job (`job_metrics`).

One array per fact, rows `[num_rows]` in input order, NaN until it has happened. Seconds unless a name says otherwise; a
row that never finished counts as infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..workload import Workload


@dataclass(slots=True, eq=False)
class Timeline:
    """`admit_s`: joined a batch; `first_token_s`; `finish_s`: float64 seconds since the start. `replica`: int32, the
    last one it ran on. `paused_steps` int64: steps in which it held memory and sat out. `busy_s`, `switch_s`, `load_s`
    float64 `[num_replicas]`: time in steps (all included), of which changing the merged adapter, and loading adapters.
    `num_steps` int64, `row_steps` int64, `prompt_tokens` int64 (computed), `merged_steps` int64, `mixed_steps` int64
    `[num_replicas]`: the latter with prompts and decoding rows. `preempted` int64 `[num_replicas]`: times that a row
    lost its memory to others.
    `peak_adapters` int64 `[num_replicas]`: most adapters resident at once.
    """

    admit_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    replica: NDArray[np.int32]
    paused_steps: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    switch_s: NDArray[np.float64]
    load_s: NDArray[np.float64]
    num_steps: NDArray[np.int64]
    row_steps: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    merged_steps: NDArray[np.int64]
    mixed_steps: NDArray[np.int64]
    preempted: NDArray[np.int64]
    peak_adapters: NDArray[np.int64]

    @classmethod
    def empty(cls, num_rows: int, num_replicas: int) -> Timeline:
        """Nothing has happened yet."""
        return cls(
            admit_s=np.full(num_rows, np.nan),
            first_token_s=np.full(num_rows, np.nan),
            finish_s=np.full(num_rows, np.nan),
            replica=np.full(num_rows, -1, np.int32),
            paused_steps=np.zeros(num_rows, np.int64),
            busy_s=np.zeros(num_replicas),
            switch_s=np.zeros(num_replicas),
            load_s=np.zeros(num_replicas),
            num_steps=np.zeros(num_replicas, np.int64),
            row_steps=np.zeros(num_replicas, np.int64),
            prompt_tokens=np.zeros(num_replicas, np.int64),
            merged_steps=np.zeros(num_replicas, np.int64),
            mixed_steps=np.zeros(num_replicas, np.int64),
            preempted=np.zeros(num_replicas, np.int64),
            peak_adapters=np.zeros(num_replicas, np.int64),
        )

    def computing_s(self, replica: int) -> float:
        """Seconds in steps of one replica, without merges and waits for adapters."""
        return float(self.busy_s[replica] - self.switch_s[replica] - self.load_s[replica])

    def forget(self, rows: NDArray[np.int64]) -> None:
        """What these rows had done is lost; they start again."""
        for array in (self.admit_s, self.first_token_s, self.finish_s):
            array[rows] = np.nan
        self.replica[rows] = -1
        self.paused_steps[rows] = 0


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """`latency_per_token_s`: dLoRA's average latency, end-to-end seconds over output tokens, both summed.

    `queueing_s`: mean time from release to admission. `ttft_p95_s`: time to the first token. `output_tokens_per_s`:
    from the first release to the last finish.
    """

    latency_per_token_s: float
    latency_p90_s: float
    queueing_s: float
    ttft_p95_s: float
    output_tokens_per_s: float


def serving_metrics(workload: Workload, timeline: Timeline) -> ServingMetrics:
    """Over all rows. Needs release times and true lengths."""
    assert workload.release_s is not None, "requests need release times"
    assert workload.output_tokens is not None, "a simulation knows the true lengths"
    released, tokens = workload.release_s, np.maximum(1, workload.output_tokens)
    is_done = np.isfinite(timeline.finish_s)
    latency = _or_infinite(timeline.finish_s - released)
    span = float(timeline.finish_s[is_done].max() - released.min()) if is_done.any() else float("inf")
    return ServingMetrics(
        latency_per_token_s=float(latency.sum() / tokens.sum()),
        latency_p90_s=_quantile(latency, 0.9),
        queueing_s=float(_or_infinite(timeline.admit_s - released).mean()),
        ttft_p95_s=_quantile(_or_infinite(timeline.first_token_s - released), 0.95),
        output_tokens_per_s=float(tokens[is_done].sum() / span),
    )


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """`utilisation`: busy time over makespan, all replicas. `batch_rows`: mean rows per pass. `switch_share`,
    `load_share`: of busy time. `merged_share`, `mixed_share`: of passes, those with a merged adapter and those with
    prompts and decoding rows. `num_preempted`: times that a row lost its memory.
    """

    makespan_s: float
    output_tokens_per_s: float
    utilisation: float
    batch_rows: float
    switch_share: float
    load_share: float
    merged_share: float
    mixed_share: float
    num_preempted: int


def job_metrics(workload: Workload, timeline: Timeline, makespan_s: float) -> JobMetrics:
    """Of an offline job."""
    assert workload.output_tokens is not None
    busy, passes = float(timeline.busy_s.sum()), int(timeline.num_steps.sum())
    return JobMetrics(
        makespan_s=makespan_s,
        output_tokens_per_s=float(workload.output_tokens.sum()) / makespan_s if makespan_s > 0 else 0.0,
        utilisation=busy / (makespan_s * len(timeline.busy_s)) if makespan_s > 0 else 0.0,
        batch_rows=float(timeline.row_steps.sum()) / passes if passes else 0.0,
        switch_share=float(timeline.switch_s.sum()) / busy if busy else 0.0,
        load_share=float(timeline.load_s.sum()) / busy if busy else 0.0,
        merged_share=float(timeline.merged_steps.sum()) / passes if passes else 0.0,
        mixed_share=float(timeline.mixed_steps.sum()) / passes if passes else 0.0,
        num_preempted=int(timeline.preempted.sum()),
    )


def _or_infinite(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isnan(seconds), np.inf, seconds)


def _quantile(values: NDArray[np.float64], share: float) -> float:
    """The value below which `share` of them lie; never interpolates, so that infinities stay what they are."""
    return float(np.sort(values)[min(len(values) - 1, int(share * len(values)))]) if len(values) else 0.0
