"""A simulated replica takes the steps that an engine takes: the same rows, chunks of prompts and contexts, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.scheduler.batchers.batching import Batcher, clustered
from lorabatch.scheduler.batchers.cost_batching import PromptsTogether
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.tests.engine.batching.simulated import Rows, numbers, play_replica

PAGE_BYTES = 8192  # 16 tokens of the tiny model


def batcher(cost: CostModel) -> Batcher:
    """Unmerged; holds rows back where mixed steps cost more than others."""
    ranks = np.zeros(0)
    return PromptsTogether(clustered, cost, lambda: ranks) if cost.mixed_step_s else clustered


def engine_steps(
    model: Path, rows: Rows, batch_rows: int, step_tokens: int, num_pages: int, cost: CostModel = CPU_SMOLLM2_135M
) -> list[tuple[float, ...]]:
    """Steps of an engine that has all rows from the start."""
    config = EngineConfig(
        cost=cost,
        max_batch_rows=batch_rows,
        max_step_tokens=step_tokens,
        pool_bytes=PAGE_BYTES * num_pages,
        num_threads=1,
        uses_prefix_cache=False,
    )
    engine, steps = Engine(model, config, batcher(cost)), []
    engine.observe_step = lambda sample, _: steps.append(numbers(sample.load))
    engine.add(
        Request(f"row-{i}", tuple(range(3, 3 + prompt)), None, SamplingParams(max_tokens=output, ignore_eos=True))
        for i, (prompt, output) in enumerate(rows)
    )
    while engine.num_unfinished:
        engine.step()
    return steps


def simulated_steps(
    rows: Rows, batch_rows: int, step_tokens: int, num_pages: int, cost: CostModel = CPU_SMOLLM2_135M
) -> list[tuple[float, ...]]:
    """Steps of a simulated replica with the same limits."""
    limits = ReplicaSettings(batch_rows, step_tokens, kv_tokens=16 * num_pages, page_tokens=16, run_pages=4)
    return play_replica(rows, limits, cost, batcher(cost)).steps


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=14),
    batch_rows=st.integers(1, 8),
    step_tokens=st.sampled_from([16, 24, 50, 100]),
)
def test_prompts_are_cut_as_the_engine_cuts_them(
    tiny_llama: Path, rows: Rows, batch_rows: int, step_tokens: int
) -> None:
    limits = (batch_rows, step_tokens, 400)
    assert simulated_steps(rows, *limits) == engine_steps(tiny_llama, rows, *limits)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=14),
    batch_rows=st.integers(1, 8),
    num_pages=st.sampled_from([30, 400]),
    mixed_steps=st.floats(0.2, 4),
)
def test_rows_are_held_back_as_in_the_engine(
    tiny_llama: Path, rows: Rows, batch_rows: int, num_pages: int, mixed_steps: float
) -> None:
    """`mixed_steps`: what a mixed step costs, in steps."""
    cost = replace(CPU_SMOLLM2_135M, mixed_step_s=mixed_steps * CPU_SMOLLM2_135M.step_s)
    rows = rows if num_pages == 400 else [rows[0]] * len(rows)
    limits = (batch_rows, 50, num_pages, cost)
    assert simulated_steps(rows, *limits) == engine_steps(tiny_llama, rows, *limits)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.tuples(st.integers(1, 90), st.integers(1, 12)),
    num_rows=st.integers(1, 14),
    num_pages=st.integers(8, 30),
    step_tokens=st.sampled_from([16, 50]),
)
def test_rows_wait_for_pages_as_in_the_engine(
    tiny_llama: Path, row: tuple[int, int], num_rows: int, num_pages: int, step_tokens: int
) -> None:
    """Rows of one size: pages that are free lie side by side."""
    limits = (8, step_tokens, num_pages)
    assert simulated_steps([row] * num_rows, *limits) == engine_steps(tiny_llama, [row] * num_rows, *limits)


@pytest.mark.parametrize("num_pages", [8, 20, 40])
def test_of_rows_of_many_sizes_an_engine_needs_few_steps_more(tiny_llama: Path, num_pages: int) -> None:
    """An engine's free pages may lie apart."""
    rng = np.random.default_rng(num_pages)
    rows = list(zip(rng.integers(1, 90, 40).tolist(), rng.integers(1, 30, 40).tolist(), strict=True))
    simulated = simulated_steps(rows, 16, 64, num_pages)
    assert len(simulated) <= len(engine_steps(tiny_llama, rows, 16, 64, num_pages)) <= 1.1 * len(simulated) + 1
