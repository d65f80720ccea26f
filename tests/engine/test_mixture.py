"""One adapter is merged, rows of all others run beside it, and weights change while rows run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft_oracle import Oracle, make_engine, prompts, register_all, serve, weights_sha256

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.scheduler.batchers.batching import (
    BATCHERS,
    Batcher,
    BatchView,
    MergeWaveBatcher,
    StepPlan,
    clustered,
    in_clusters,
)
from lorabatch.scheduler.batchers.cost_batching import CostBatcher
from lorabatch.scheduler.costs.machines import DLORA_A800_LLAMA_2_7B
from lorabatch.scheduler.estimates.lengths import LengthEstimator


class Chosen:
    """A batcher that follows a script: for each step the adapter to merge (None: unmerged); others mix in."""

    def __init__(self, choose: Callable[[BatchView], int | None]) -> None:
        self._choose = choose

    def __call__(self, view: BatchView) -> StepPlan:
        merged = self._choose(view)
        free = max(0, view.max_batch_rows - len(view.running_adapter))
        admit = np.arange(min(free, len(view.waiting_adapter)))
        mode = "unmerged" if merged is None else "mixture"
        return StepPlan(mode, merged, np.ones(len(view.running_adapter), bool), admit)  # type: ignore[arg-type]


def make_mixing_engine(model: Path, batcher: Batcher, **config: Any) -> Engine:
    settings = {"max_batch_rows": 8, "max_step_tokens": 24, "pool_bytes": 4 << 20} | config
    return Engine(model, EngineConfig(mode="auto", **settings), batcher)


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> Oracle:
    return Oracle(tiny_llama, tiny_adapters)


@pytest.mark.parametrize("merged", [1, *(pytest.param(m, marks=pytest.mark.long) for m in (0, 2, 3))])
def test_rows_of_all_adapters_beside_a_merged_one_equal_peft_row_by_row(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle, merged: int
) -> None:
    engine = make_mixing_engine(tiny_llama, Chosen(lambda view: merged))
    ids = register_all(engine, tiny_adapters)
    names = [None, *tiny_adapters]
    rows = {f"row-{i}": (p, names[i % 5]) for i, p in enumerate(prompts(15, engine.model.vocab_size, seed=merged))}
    sampling = SamplingParams(max_tokens=8, logprobs=True, ignore_eos=True)
    results = serve(engine, [Request(k, p, ids.get(name or ""), sampling) for k, (p, name) in rows.items()])
    for key, (prompt, name) in rows.items():
        result = results[key]
        assert result.token_logprobs is not None
        found = zip(
            result.token_ids, result.token_logprobs, oracle.logprobs_of(prompt, result.token_ids, name), strict=True
        )
        for i, (token, logprob, expected) in enumerate(found):
            assert token == int(expected.argmax()), f"{key} under {name}, token {i}"
            assert abs(logprob - float(expected[token])) < 1e-3
        assert result.mode == ("merged" if name == names[merged + 1] else "mixture")


@pytest.mark.parametrize("seed", range(4))
def test_weights_change_while_rows_run_and_no_row_notices(
    tiny_llama: Path, tiny_adapters: dict[str, Path], seed: int
) -> None:
    unmerged = make_engine(tiny_llama)
    ids = [None, *register_all(unmerged, tiny_adapters).values()]
    rng = random.Random(seed)
    requests = [
        Request(
            f"row-{i}",
            prompt,
            rng.choice(ids),
            SamplingParams(max_tokens=rng.randrange(1, 14), temperature=rng.choice((0.0, 1.0)), ignore_eos=True),
            stream_id=i,
        )
        for i, prompt in enumerate(prompts(24, unmerged.model.vocab_size, seed=seed))
    ]
    expected = serve(unmerged, requests)
    # a pool in which rows wait for pages and adapters have to leave
    engine = make_mixing_engine(
        tiny_llama, Chosen(lambda view: rng.choice((None, 0, 1, 2, 3))), pool_bytes=rng.choice((700_000, 4 << 20))
    )
    register_all(engine, tiny_adapters)
    before = weights_sha256(engine)
    results = serve(engine, requests)
    assert {k: r.token_ids for k, r in results.items()} == {k: r.token_ids for k, r in expected.items()}
    assert engine.num_switches > 5
    assert {result.mode for result in results.values()} >= {"mixture"}
    engine.switch_weights(None)
    assert weights_sha256(engine) == before


def test_a_merged_adapter_that_finds_no_room_in_the_pool_is_not_mixed(
    tiny_llama: Path, tiny_adapters: dict[str, Path], oracle: Oracle
) -> None:
    # rows of rank1 fill the pool, so that rank64 does not fit beside them
    engine = make_mixing_engine(tiny_llama, Chosen(lambda view: 3), pool_bytes=520_000)
    ids = register_all(engine, tiny_adapters)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    rows = {f"row-{i}": p for i, p in enumerate(prompts(12, engine.model.vocab_size))}
    results = serve(engine, [Request(key, p, ids["rank1"], sampling) for key, p in rows.items()])
    for key, prompt in rows.items():
        assert results[key].token_ids == oracle.greedy(prompt, "rank1", 6, stop_id=-1)
    assert {result.mode for result in results.values()} <= {"unmerged", "mixture"}


class Pausing:
    """Serves one adapter at a time, unmerged, and admits whatever it may: paused rows come to hold all memory."""

    def __call__(self, view: BatchView) -> StepPlan:
        admit = np.arange(min(view.max_batch_rows, len(view.waiting_adapter)))
        serve = np.zeros(len(view.running_adapter), bool)
        return StepPlan("unmerged", None, serve, admit)


def test_rows_that_a_batcher_pauses_for_ever_go_on_when_memory_is_full(tiny_llama: Path) -> None:
    engine = make_mixing_engine(tiny_llama, Pausing(), pool_bytes=300_000)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    results = serve(engine, [Request(f"{i}", (5, 6, 7), None, sampling) for i in range(20)])
    assert {result.completion_tokens for result in results.values()} == {5}


@pytest.mark.parametrize("batcher", BATCHERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_exact_only_when_merged_is_never_mixed(
    make_adapter: Callable[..., Path], tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, batcher: str
) -> None:
    dora = make_adapter(tmp_path / "dora", tiny_llama, seed=9, use_dora=True)
    config = EngineConfig(mode="auto", batcher=batcher, max_batch_rows=4, pool_bytes=4 << 20)
    engine = Engine(tiny_llama, config)
    ids = [None, *register_all(engine, tiny_adapters | {"dora": dora}).values()]
    assert audit_adapter(dora, engine.model, "dora").verdict == "exact-by-merge"
    rng = random.Random(3)
    order = [rng.choice(ids) for _ in range(30)]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [Request(f"{i}", (5, 6, 7, 3 + i), adapter, sampling) for i, adapter in enumerate(order)]
    results = serve(engine, requests)
    alone = make_engine(tiny_llama)
    register_all(alone, tiny_adapters | {"dora": dora})
    for request in requests:
        expected = serve(alone, [request])[request.request_id]
        assert results[request.request_id].token_ids == expected.token_ids
        assert results[request.request_id].mode == expected.mode or request.adapter_id != ids[-1]
    assert {results[f"{i}"].mode for i, adapter in enumerate(order) if adapter == ids[-1]} == {"merged"}


def test_a_merged_wave_filled_with_other_rows_has_a_fuller_batch_than_one_that_drains(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    lora_is_dear = replace(DLORA_A800_LLAMA_2_7B, lora_step_s=0.001, rank_token_s=0.001)
    draining = MergeWaveBatcher(clustered, lambda adapter: False, min_rows=1)
    rng = random.Random(5)
    steps, occupancy, modes, tokens = {}, {}, {}, {}
    for name in ("drained", "filled"):
        ranks = np.array([1.0, 8.0, 20.0, 64.0])
        filling = partial(
            in_clusters,
            CostBatcher(
                lora_is_dear, lambda ranks=ranks: ranks, LengthEstimator.of_rows(np.array([1000]), np.array([0]))
            ),
        )
        engine = make_mixing_engine(tiny_llama, draining if name == "drained" else filling)
        ids = list(register_all(engine, tiny_adapters).values())
        rng.seed(5)
        requests = [
            Request(f"{i}", prompt, ids[i // 12], SamplingParams(max_tokens=rng.randrange(2, 30), ignore_eos=True))
            for i, prompt in enumerate(prompts(48, engine.model.vocab_size))
        ]
        results = serve(engine, requests)
        telemetry = engine.telemetry()
        steps[name], occupancy[name] = telemetry.num_steps, telemetry.filled_steps / telemetry.num_steps
        modes[name] = {result.mode for result in results.values()}
        tokens[name] = {key: result.token_ids for key, result in results.items()}
    assert tokens["filled"] == tokens["drained"]
    assert modes["drained"] == {"merged"}
    assert modes["filled"] >= {"merged", "mixture"}
    assert occupancy["filled"] > occupancy["drained"] * 1.1, occupancy
    assert steps["filled"] < steps["drained"]
