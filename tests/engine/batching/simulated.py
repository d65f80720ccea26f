"""The steps of a simulated replica, to be compared with those of an engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lorabatch.scheduler.batchers.batching import Batcher
from lorabatch.scheduler.costs.cost import CostModel, StepLoad
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import make_workload
from lorabatch.scheduler.simulation.timeline import Timeline

#: Prompt tokens of each row, and tokens of its answer or the most that it may have.
Rows = list[tuple[int, int]]


class Played(NamedTuple):
    """`steps`: what `numbers` says of each. `num_preempted`: rows that started again. `end_s`: when all were done."""

    steps: list[tuple[float, ...]]
    num_preempted: int
    end_s: float


def numbers(load: StepLoad) -> tuple[float, ...]:
    """What the cost model is asked about a step of base rows."""
    return tuple(float(x) for x in (load.prefill_tokens, load.decode_rows, load.context_tokens, load.prefill_pairs))  # type: ignore[arg-type]


def play_replica(
    rows: Rows, limits: ReplicaSettings, cost: CostModel, batcher: Batcher, max_tokens: int | None = None
) -> Played:
    """All of `rows` on one replica that has them from the start. `max_tokens`: of a row (None: its answer's)."""
    prompts, outputs = np.array(rows, np.int32).T
    base = np.full(len(rows), -1, np.int32)
    workload = make_workload((), base, prompts, outputs, max_tokens=outputs if max_tokens is None else max_tokens)
    steps, timeline = [], Timeline.empty(len(rows), 1)

    class Recorder(CostModel):
        def step_seconds(self, load: StepLoad) -> Any:
            steps.append(numbers(load))
            return super().step_seconds(load)

    replica = SimulatedReplica(0, workload, Recorder(**cost.to_json()), batcher, limits, timeline)
    replica.add(np.arange(len(rows)))
    now_s = 0.0
    while replica.num_rows:
        now_s, _ = replica.step(now_s)
        replica.check_integrity()
    return Played(steps, int(timeline.preempted[0]), now_s)
