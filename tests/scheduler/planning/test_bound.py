"""The lower bound of a job: never above the optimum, which tiny jobs have by trying every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from lorabatch.scheduler.costs.cost import CostModel, StepLoad, lora_load, prompt_pairs
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M, H200_LLAMA_3_8B
from lorabatch.scheduler.planning.bound import JobWork, job_bound, work_bound
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload
from lorabatch.scheduler.workload import Workload
from lorabatch.tests.oracle.examples import examples

RANKS = np.array([8.0, 64.0])
STEP_TOKENS = 64


class TinyReplica:
    """The least seconds in which one replica can serve some rows: every order, batch, merge and way to cut prompts is
    tried.
    """

    def __init__(self, workload: Workload, cost: CostModel, batch_rows: int, step_tokens: int) -> None:
        self.workload, self.cost, self.batch_rows, self.limit = workload, cost, batch_rows, step_tokens
        self.step_s = cache(self._step_s)
        self.optimum_s = cache(self._optimum_s)

    def _step_s(self, served: tuple[tuple[int, int, int], ...], merged: int | None) -> float:
        """One step over (row, tokens stored, tokens it computes) of each row served."""
        prompt = self.workload.prompt_tokens
        new = [(done, tokens) for row, done, tokens in served if done < prompt[row]]
        old = [done for row, done, _ in served if done >= prompt[row]]
        rows = np.array([row for row, _, _ in served])
        tokens = np.array([tokens for _, _, tokens in served])
        lora = lora_load(self.workload.adapter_index[rows], tokens, RANKS, merged_adapter=merged)
        load = replace(
            lora,
            prefill_tokens=sum(tokens for _, tokens in new),
            prefill_pairs=sum(float(prompt_pairs(tokens, done)) for done, tokens in new),
            decode_rows=len(old),
            context_tokens=sum(done + 1 for done in old),
        )
        assert isinstance(load, StepLoad)
        return float(self.cost.step_seconds(load))

    def _tokens(self, row: int, done: int) -> range:
        """How many tokens a step may compute of a row."""
        return range(1, max(1, min(self.limit, int(self.workload.prompt_tokens[row]) - done)) + 1)

    def _optimum_s(self, done: tuple[int, ...], rows: tuple[int, ...], merged: int | None, has_merged: bool) -> float:
        assert self.workload.output_tokens is not None
        # The last token is not stored.
        ends = [int(self.workload.prompt_tokens[row] + self.workload.output_tokens[row]) - 1 for row in rows]
        left = [i for i, end in enumerate(ends) if done[i] < end]
        if not left:
            return 0.0
        best = float("inf")
        for size in range(1, min(self.batch_rows, len(left)) + 1):
            for batch in combinations(left, size):
                for tokens in product(*(self._tokens(rows[i], done[i]) for i in batch)):
                    if sum(tokens) > self.limit:
                        continue
                    served = tuple((rows[i], done[i], count) for i, count in zip(batch, tokens, strict=True))
                    computed = dict(zip(batch, tokens, strict=True))
                    after = tuple(stored + computed.get(i, 0) for i, stored in enumerate(done))
                    for wanted in (None, 0, 1):
                        switch_s = self.cost.merge_s if wanted != merged else 0.0
                        switch_s += self.cost.first_merge_s if wanted is not None and not has_merged else 0.0
                        rest_s = self.optimum_s(after, rows, wanted, has_merged or wanted is not None)
                        best = min(best, switch_s + self.step_s(served, wanted) + rest_s)
        return best

    def loads_s(self, rows: Sequence[int]) -> float:
        """Of the adapters of these rows, one after the other. Steps may run beside them."""
        used = {int(self.workload.adapter_index[row]) for row in rows} - {-1}
        return sum(self.cost.load_seconds(self.workload.adapters[number].weight_bytes, "host") for number in used)


def optimum_s(
    workload: Workload, cost: CostModel, batch_rows: int, step_tokens: int, slowness: Sequence[float]
) -> float:
    """Of all ways to deal the rows to the replicas; no run can end before."""
    replica = TinyReplica(workload, cost, batch_rows, step_tokens)
    best = float("inf")
    for owners in product(range(len(slowness)), repeat=workload.num_rows):
        ends = []
        for number, slow in enumerate(slowness):
            rows = tuple(row for row, owner in enumerate(owners) if owner == number)
            steps_s = slow * replica.optimum_s((0,) * len(rows), rows, None, False)
            ends.append(max(steps_s, replica.loads_s(rows)))
        best = min(best, max(ends))
    return best


def draw(
    generator: np.random.Generator, num_rows: int, most_prompt: int
) -> tuple[Workload, CostModel, int, tuple[float, ...]]:
    workload = make_workload(
        make_adapters([8, 64]),
        generator.integers(-1, 2, num_rows).astype(np.int32),
        generator.integers(1, most_prompt + 1, num_rows).astype(np.int32),
        generator.integers(1, 4, num_rows).astype(np.int32),
    )
    preset = CPU_SMOLLM2_135M if generator.random() < 0.5 else H200_LLAMA_3_8B
    # Each coefficient is sometimes what decides.
    names = ("step_s", "prefill_token_s", "decode_row_s", "context_token_s", "lora_step_s", "adapter_s", "rank_token_s")
    scaled = {name: getattr(preset, name) * float(10 ** generator.uniform(-2, 2)) for name in (*names, "merge_s")}
    load_s = preset.step_s * float(10 ** generator.uniform(-3, 1))
    cost = replace(preset, **scaled, load_s=load_s, host_bytes_per_s=1e18)
    slowness = tuple((1 / generator.uniform(0.1, 1.0, int(generator.integers(1, 3)))).tolist())
    return workload, cost, int(generator.integers(1, 3)), slowness


def over_bound(generator: np.random.Generator, num_rows: int, most_prompt: int, step_tokens: int) -> float:
    """Optimum of a random tiny job over its bound."""
    workload, cost, batch_rows, slowness = draw(generator, num_rows, most_prompt)
    assert workload.output_tokens is not None
    lengths = workload.output_tokens.astype(np.float64)
    bound = job_bound(workload, lengths, cost, batch_rows=batch_rows, step_tokens=step_tokens, slowness=slowness)
    return optimum_s(workload, cost, batch_rows, step_tokens, slowness) / bound.seconds


@pytest.mark.parametrize("seed", range(10))
def test_no_way_to_run_a_tiny_job_is_faster_than_its_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    over = [over_bound(generator, int(generator.integers(1, 4)), 3, 64) for _ in range(examples(100))]
    assert min(over) >= 1 - 1e-9
    # It is a bound that says something: some jobs reach it.
    assert min(over) < 1.2


@pytest.mark.parametrize("seed", range(10))
def test_no_way_to_cut_prompts_is_faster_than_the_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    over = [over_bound(generator, 2, 8, int(generator.integers(2, 5))) for _ in range(examples(50))]
    assert min(over) >= 1 - 1e-9
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
    adapter_ids = [adapter.adapter_id for adapter in workload.adapters]
    slot = workload.adapter_index.astype(np.int64) % 3
    prompt = workload.prompt_tokens.astype(np.float64)
    parts = [
        JobWork.of_rows([*adapter_ids, None], slot[part], prompt[part], prompt[part], lengths[part] - 1)
        for part in np.array_split(generator.permutation(num_rows), 7)
    ]
    ranks = dict(zip(adapter_ids, RANKS, strict=True))
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
