"""Pages, not `max_batch_rows`, limit the batch: mode `auto` merges for rows that can run, and pauses none for long."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft_oracle import make_engine, prompts, register_all

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.scheduler.batchers.batching import Batcher, BatchView, StepPlan
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M, DLORA_A800_LLAMA_2_7B

PAGE_BYTES = 8192  # 16 tokens of the tiny model


def make_small_engine(
    model: Path, mode: str, num_pages: int, cost: CostModel | None = None, batcher: Batcher | None = None
) -> Engine:
    pool_bytes = PAGE_BYTES * num_pages
    config = EngineConfig(mode=mode, max_batch_rows=64, pool_bytes=pool_bytes, num_threads=1, cost=cost)  # type: ignore[arg-type]
    return Engine(model, config, batcher)


def make_rows(name: str, num_rows: int, adapter_id: str, num_tokens: int, spread: int) -> list[Request]:
    """Rows that each may generate `num_tokens` to `num_tokens + spread - 1` tokens, and do."""
    rng = random.Random(name)
    return [
        Request(
            f"{name}-{i}",
            prompt[:20],
            adapter_id,
            SamplingParams(max_tokens=num_tokens + rng.randrange(spread), ignore_eos=True),
        )
        for i, prompt in enumerate(prompts(num_rows, 256, seed=num_rows))
    ]


def play(engine: Engine, first: list[Request], then: list[Request]) -> dict[str, Result]:
    """Serve `first`, and from its third step on `then` too."""
    engine.add(first)
    results = {}
    for step in range(100_000):
        if step == 3:
            engine.add(then)
        for result in engine.step():
            results[result.request_id] = result
        engine.check_integrity()
        if step >= 3 and not engine.num_unfinished:
            return results
    raise AssertionError(f"{engine.num_unfinished} rows do not come to an end")


@pytest.mark.parametrize("cost", [CPU_SMOLLM2_135M, pytest.param(DLORA_A800_LLAMA_2_7B, marks=pytest.mark.long)])
def test_a_long_queue_does_not_stop_rows_that_hold_the_memory(
    tiny_llama: Path, tiny_adapters: dict[str, Path], cost: CostModel
) -> None:
    engines = {mode: make_small_engine(tiny_llama, mode, 110, cost) for mode in ("unmerged", "auto")}
    results = {}
    for mode, engine in engines.items():
        ids = register_all(engine, tiny_adapters)
        # twelve rows of nine pages fill the pool; those of the other adapter take four
        long = make_rows("long", 12, ids["rank8"], 120, 9)
        results[mode] = play(engine, long, make_rows("short", 120, ids["rank1"], 30, 20))
        assert engine.telemetry().pages_total == 110
    assert {k: r.token_ids for k, r in results["auto"].items()} == {
        k: r.token_ids for k, r in results["unmerged"].items()
    }
    steps = {mode: engine.telemetry().num_steps for mode, engine in engines.items()}
    assert steps["auto"] <= steps["unmerged"] * 1.2, steps
    assert engines["auto"].num_switches <= 4


class Insisting:
    """Wants an adapter merged and alone as soon as one of its rows is there, whatever memory allows."""

    def __init__(self, adapter: int) -> None:
        self._adapter = adapter

    def __call__(self, view: BatchView) -> StepPlan:
        serve, own = view.running_adapter == self._adapter, np.flatnonzero(view.waiting_adapter == self._adapter)
        if serve.any() or len(own):
            return StepPlan("merged", self._adapter, serve, own[: view.max_batch_rows])
        return StepPlan("unmerged", None, ~serve, np.arange(len(view.waiting_adapter)))


class Mixing(Insisting):
    """The same in a mixture with all others."""

    def __call__(self, view: BatchView) -> StepPlan:
        plan = super().__call__(view)
        is_merged = plan.merged_adapter is not None
        return StepPlan("mixture" if is_merged else "unmerged", plan.merged_adapter, plan.serve | True, plan.admit)


@pytest.mark.parametrize("batcher", [Insisting, Mixing])
def test_weights_are_not_switched_before_a_row_of_the_adapter_is_in(
    tiny_llama: Path, tiny_adapters: dict[str, Path], batcher: type[Insisting]
) -> None:
    engine = make_small_engine(tiny_llama, "auto", 54, batcher=batcher(0))
    ids = register_all(engine, tiny_adapters)
    # four rows of nine pages, all of one length: no other enters before they end
    results = play(engine, make_rows("long", 4, ids["rank8"], 120, 1), make_rows("short", 2, ids["rank1"], 120, 1))
    assert {result.mode for key, result in results.items() if key.startswith("long")} == {"unmerged"}
    assert engine.num_switches <= 2
    assert engine.telemetry().num_steps < 260


@pytest.mark.long
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    num_pages=st.integers(64, 140),
    num_rows=st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(1, 20)), min_size=2, max_size=5),
    is_lora_dear=st.booleans(),
)
def test_rows_end_after_few_switches_whatever_the_pool_holds(
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    num_pages: int,
    num_rows: list[tuple[int, int]],
    is_lora_dear: bool,
) -> None:
    cost = DLORA_A800_LLAMA_2_7B if is_lora_dear else CPU_SMOLLM2_135M
    plain, engine = make_engine(tiny_llama), make_small_engine(tiny_llama, "auto", num_pages, cost)
    ids = list(register_all(engine, tiny_adapters).values())
    register_all(plain, tiny_adapters)
    groups = [make_rows(f"{i}", n, ids[adapter], 10 + 20 * adapter, 10) for i, (adapter, n) in enumerate(num_rows)]
    rest = [row for group in groups[1:] for row in group]
    results, expected = play(engine, groups[0], rest), play(plain, groups[0], rest)
    assert {k: r.token_ids for k, r in results.items()} == {k: r.token_ids for k, r in expected.items()}
    # an adapter's rows are worth one way there and one back, now and then one more
    assert engine.num_switches <= 3 * len(num_rows)
