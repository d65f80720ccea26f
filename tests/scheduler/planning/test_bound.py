"""The lower bound of a job: never above the optimum, which tiny jobs have by trying every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from lorabatch.scheduler.cost import CPU_SMOLLM2_135M, H200_LLAMA_3_8B, CostModel, StepLoad, lora_load, prompt_pairs
from lorabatch.scheduler.planning.bound import JobWork, job_bound, work_bound
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.workload import Workload
from lorabatch.tests.oracle.examples import examples

RANKS = np.array([8.0, 64.0])
STEP_TOKENS = 64


class TinyReplica:
    """The least seconds in which one replica can serve some rows: every order, every batch and every merge is tried."""

    def __init__(self, workload: Workload, cost: CostModel, batch_rows: int) -> None:
        self.workload, self.cost, self.batch_rows = workload, cost, batch_rows
        self.step_s = cache(self._step_s)
        self.optimum_s = cache(self._optimum_s)

    def _step_s(self, served: tuple[tuple[int, int], ...], merged: int | None) -> float:
        """One step over (row, tokens it has) of each row served."""
        prompt = self.workload.prompt_tokens
        new = [row for row, done in served if not done]
        old = [(row, done) for row, done in served if done]
        rows = np.array([row for row, _ in served])
        tokens = np.array([1 if done else int(prompt[row]) for row, done in served])
        lora = lora_load(self.workload.adapter_index[rows], tokens, RANKS, merged_adapter=merged)
        load = replace(
            lora,
            prefill_tokens=sum(int(prompt[row]) for row in new),
            prefill_pairs=sum(float(prompt_pairs(int(prompt[row]))) for row in new),
            decode_rows=len(old),
            context_tokens=sum(int(prompt[row]) + done for row, done in old),
        )
        assert isinstance(load, StepLoad)
        return float(self.cost.step_seconds(load))

    def _optimum_s(self, done: tuple[int, ...], rows: tuple[int, ...], merged: int | None, has_merged: bool) -> float:
        assert self.workload.output_tokens is not None
        left = [i for i, row in enumerate(rows) if done[i] < self.workload.output_tokens[row]]
        if not left:
            return 0.0
        best = float("inf")
        for size in range(1, min(self.batch_rows, len(left)) + 1):
            for batch in combinations(left, size):
                served = tuple((rows[i], done[i]) for i in batch)
                after = tuple(tokens + (i in batch) for i, tokens in enumerate(done))
                for wanted in (None, 0, 1):
                    switch_s = self.cost.merge_s if wanted != merged else 0.0
                    switch_s += self.cost.first_merge_s if wanted is not None and not has_merged else 0.0
                    rest_s = self.optimum_s(after, rows, wanted, has_merged or wanted is not None)
                    best = min(best, switch_s + self.step_s(served, wanted) + rest_s)
        return best


def optimum_s(workload: Workload, cost: CostModel, batch_rows: int, slowness: Sequence[float]) -> float:
    """Of all ways to deal the rows to the replicas."""
    replica = TinyReplica(workload, cost, batch_rows)
    best = float("inf")
    for owners in product(range(len(slowness)), repeat=workload.num_rows):
        ends = []
        for number, slow in enumerate(slowness):
            rows = tuple(row for row, owner in enumerate(owners) if owner == number)
            ends.append(slow * replica.optimum_s((0,) * len(rows), rows, None, False))
        best = min(best, max(ends))
    return best


def draw(generator: np.random.Generator) -> tuple[Workload, CostModel, int, tuple[float, ...]]:
    num_rows = int(generator.integers(1, 4))
    workload = make_workload(
        make_adapters([8, 64]),
        generator.integers(-1, 2, num_rows).astype(np.int32),
        generator.integers(1, 20, num_rows).astype(np.int32),
        generator.integers(1, 4, num_rows).astype(np.int32),
    )
    preset = CPU_SMOLLM2_135M if generator.random() < 0.5 else H200_LLAMA_3_8B
    # Each coefficient is sometimes what decides.
    names = ("step_s", "prefill_token_s", "decode_row_s", "context_token_s", "lora_step_s", "adapter_s", "rank_token_s")
    scaled = {name: getattr(preset, name) * float(10 ** generator.uniform(-2, 2)) for name in (*names, "merge_s")}
    cost = replace(preset, **scaled, load_s=0.0, host_bytes_per_s=1e18)
    slowness = tuple((1 / generator.uniform(0.1, 1.0, int(generator.integers(1, 3)))).tolist())
    return workload, cost, int(generator.integers(1, 3)), slowness


@pytest.mark.parametrize("seed", range(10))
def test_no_way_to_run_a_tiny_job_is_faster_than_its_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    over = []
    for _ in range(examples(100)):
        workload, cost, batch_rows, slowness = draw(generator)
        assert workload.output_tokens is not None
        lengths = workload.output_tokens.astype(np.float64)
        bound = job_bound(
            workload, lengths, cost, batch_rows=batch_rows, step_tokens=STEP_TOKENS, slowness=slowness
        ).seconds
        over.append(optimum_s(workload, cost, batch_rows, slowness) / bound)
    assert min(over) >= 1 - 1e-9
    # It is a bound that says something: some jobs reach it.
    assert min(over) < 1.2


def test_the_parts_of_the_bound() -> None:
    flat = replace(
        H200_LLAMA_3_8B, prefill_token_s=0.0, prefill_pair_s=0.0, decode_row_s=0.0, context_token_s=0.0, load_s=3.0
    )
    rows = np.zeros(128, np.int32)
    lengths = np.full(128, 10, np.int32)
    workload = make_workload((), rows - 1, rows + 5, lengths)
    limits = {"batch_rows": 64, "step_tokens": 8192}
    one = job_bound(workload, lengths.astype(float), flat, slowness=(1.0,), **limits)
    assert one.work_s == pytest.approx(20 * flat.step_s)
    assert one.longest_row_s == pytest.approx(10 * flat.step_s)
    assert (one.loads_s, one.seconds) == (0.0, one.work_s)
    three = job_bound(workload, lengths.astype(float), flat, slowness=(1.0, 2.0, 4.0), **limits)
    assert three.work_s == pytest.approx(one.work_s / 1.75)
    assert three.longest_row_s == one.longest_row_s
    stored = make_workload(make_adapters([8, 8], bytes_per_rank=0), rows % 2, rows + 5, lengths)
    assert job_bound(stored, lengths.astype(float), flat, slowness=(1.0, 1.0), **limits).loads_s == 3.0


def test_rows_without_engine_work_count_nothing() -> None:
    nothing = make_workload(
        (), np.full(3, -1, np.int32), np.full(3, 5, np.int32), np.zeros(3, np.int32), max_tokens=np.zeros(3, np.int32)
    )
    found = job_bound(nothing, np.zeros(3), H200_LLAMA_3_8B, batch_rows=8, step_tokens=64, slowness=(1.0,))
    assert found.seconds == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_work_that_was_added_up_has_the_bound_of_its_rows(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_rows = 60
    workload = make_workload(
        make_adapters([8, 64]),
        generator.integers(-1, 2, num_rows).astype(np.int32),
        generator.integers(1, 200, num_rows).astype(np.int32),
        generator.integers(1, 40, num_rows).astype(np.int32),
    )
    assert workload.output_tokens is not None
    lengths = workload.output_tokens.astype(np.float64)
    limits = {"batch_rows": 8, "step_tokens": STEP_TOKENS}
    free_loads = replace(CPU_SMOLLM2_135M, host_bytes_per_s=1e18)
    whole = job_bound(workload, lengths, free_loads, slowness=(1.0, 2.0), **limits)
    names = [adapter.name for adapter in workload.adapters]
    slot = workload.adapter_index.astype(np.int64) % 3
    prompt = workload.prompt_tokens.astype(np.float64)
    parts = [
        JobWork.of_rows([*names, ""], slot[part], prompt[part], prompt[part], lengths[part] - 1)
        for part in np.array_split(generator.permutation(num_rows), 7)
    ]
    ranks = dict(zip(names, RANKS, strict=True))
    added = work_bound(JobWork.total([*parts, JobWork()]), ranks, free_loads, slowness=(1.0, 2.0), **limits)
    assert added.work_s == pytest.approx(whole.work_s)
    # Of the longest row two candidates are kept.
    assert 0.75 * whole.longest_row_s <= added.longest_row_s <= whole.longest_row_s * (1 + 1e-9)


def test_an_adapter_is_part_of_as_many_steps_as_its_longest_row() -> None:
    only_adapters = replace(
        H200_LLAMA_3_8B,
        **dict.fromkeys(("prefill_token_s", "prefill_pair_s", "decode_row_s", "context_token_s", "load_s"), 0.0),
        rank_token_s=0.0,
        lora_step_s=0.0,
        host_bytes_per_s=1e18,
    )
    lengths = np.full(64, 10, np.int32)
    lengths[0] = 100
    adapter = np.repeat([0, 1], 32).astype(np.int32)
    workload = make_workload(make_adapters([8, 64]), adapter, np.ones(64, np.int32), lengths)
    limits = {"batch_rows": 64, "step_tokens": 8192, "slowness": (1.0,)}
    steps_s = only_adapters.step_s * (63 * 10 + 100) / 64
    each_s = [only_adapters.adapter_s + only_adapters.rank_s * rank for rank in (8, 64)]
    found = job_bound(workload, lengths.astype(float), only_adapters, **limits)
    assert found.work_s == pytest.approx(steps_s + 100 * each_s[0] + 10 * each_s[1])
    # Merged for nothing, it is still subtracted from the rows beside it, or runs in emptier steps.
    free_merges = replace(only_adapters, merge_s=0.0)
    assert job_bound(workload, lengths.astype(float), free_merges, **limits).work_s == pytest.approx(found.work_s)
    # Alone in a full batch it costs the merge.
    alone = make_workload(make_adapters([64]), adapter * 0, np.ones(64, np.int32), lengths)
    found = job_bound(alone, lengths.astype(float), replace(only_adapters, merge_s=1e-4), **limits)
    assert found.work_s == pytest.approx(steps_s + 1e-4)
