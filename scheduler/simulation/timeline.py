"""Times of everything that happened in a simulation (`Timeline`), and the metrics of a job (`job_metrics`).

One array per fact, rows `[num_rows]` in input order, NaN until it has happened. Seconds unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..workload import Workload
from .passes import Passes


@dataclass(slots=True, eq=False)
class Timeline:
    """Times of every row and counts of every replica in one simulation."""

    #: Seconds at which each row joined a batch, `[num_rows]`.
    admit_s: NDArray[np.float64]
    #: Seconds at which each row got its first token, `[num_rows]`.
    first_token_s: NDArray[np.float64]
    #: Seconds at which each row ended, `[num_rows]`.
    finish_s: NDArray[np.float64]
    #: Replica that each row ran on last, `[num_rows]`; -1 before.
    replica: NDArray[np.int32]
    #: Steps in which each row held memory and sat out, `[num_rows]`.
    paused_steps: NDArray[np.int64]
    #: Seconds in steps, merges and waits for adapters included, `[num_replicas]`.
    busy_s: NDArray[np.float64]
    #: Seconds of `busy_s` that changing the merged adapter took, `[num_replicas]`.
    switch_s: NDArray[np.float64]
    #: Seconds of `busy_s` that steps waited for adapters, `[num_replicas]`.
    load_s: NDArray[np.float64]
    #: Forward passes, `[num_replicas]`.
    num_steps: NDArray[np.int64]
    #: Tokens generated, that is rows of all passes that got a token, `[num_replicas]`.
    row_steps: NDArray[np.int64]
    #: Prompt tokens computed, `[num_replicas]`.
    prompt_tokens: NDArray[np.int64]
    #: Forward passes with a merged adapter, `[num_replicas]`.
    merged_steps: NDArray[np.int64]
    #: Forward passes with prompts and decoding rows, `[num_replicas]`.
    mixed_steps: NDArray[np.int64]
    #: Times that a row lost its memory to others, `[num_replicas]`.
    preempted: NDArray[np.int64]
    #: Most adapters resident at once, `[num_replicas]`.
    peak_adapters: NDArray[np.int64]
    #: Adapters that became resident, again where they had been evicted, `[num_replicas]`.
    num_loads: NDArray[np.int64]

    @classmethod
    def empty(cls, num_rows: int, num_replicas: int) -> Timeline:
        """A timeline in which nothing has happened yet."""
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
            num_loads=np.zeros(num_replicas, np.int64),
        )

    def count(self, replica: int, passes: Passes, seconds: float, *, is_merged: bool) -> None:
        """Count passes of a replica. `seconds`: their time, merges and waits for adapters included."""
        is_prompt = passes.chunk > 0
        self.busy_s[replica] += seconds
        self.num_steps[replica] += passes.number
        self.row_steps[replica] += int(passes.tokens.sum())
        self.prompt_tokens[replica] += int(passes.chunk.sum())
        self.merged_steps[replica] += passes.number * is_merged
        self.mixed_steps[replica] += passes.number * bool(is_prompt.any() and not is_prompt.all())

    def computing_s(self, replica: int) -> float:
        """Seconds in steps of one replica, without merges and waits for adapters."""
        return float(self.busy_s[replica] - self.switch_s[replica] - self.load_s[replica])

    def forget(self, rows: NDArray[np.int64]) -> None:
        """Erase the times of rows whose work is lost, so that they start again."""
        for array in (self.admit_s, self.first_token_s, self.finish_s):
            array[rows] = np.nan
        self.replica[rows] = -1
        self.paused_steps[rows] = 0


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """Metrics of an offline job over all replicas."""

    #: Seconds until the last part.
    makespan_s: float
    #: Output tokens of all rows per second of the makespan.
    output_tokens_per_s: float
    #: Busy time over makespan, mean of the replicas.
    utilisation: float
    #: Mean rows per forward pass.
    batch_rows: float
    #: Share of busy time that changing the merged adapter took.
    switch_share: float
    #: Share of busy time that steps waited for adapters.
    load_share: float
    #: Share of passes with a merged adapter.
    merged_share: float
    #: Share of passes with prompts and decoding rows.
    mixed_share: float
    #: Times that a row lost its memory to others.
    num_preempted: int


def job_metrics(workload: Workload, timeline: Timeline, makespan_s: float) -> JobMetrics:
    """Metrics of an offline job. Needs true lengths."""
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
