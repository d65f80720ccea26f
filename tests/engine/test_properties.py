"""Whatever comes in whatever order: each row answers as if it were alone, and the engine's books are right throughout.

Scenarios are drawn by hypothesis: arrivals, lengths, adapters and their ranks, aborts, sizes of pool, host tier, batch
and step, and a batcher that switches weights, pauses rows and admits as it pleases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabatch.engine.adapter import audit_adapter
from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.scheduler.batching import BatchView, ReplicaMode, StepPlan

PAGE_BYTES = 8192  # 16 tokens of the tiny model
# An adapter of rank 64 takes 58 pages, a row at most 4.
MIN_POOL_PAGES = 62
SHARED = tuple(3 + i * 11 % 250 for i in range(40))


@dataclass(frozen=True)
class Scenario:
    """Rows by the step before which they arrive and, for some, the step before which they are aborted."""

    config: dict[str, int]
    arrivals: list[tuple[int, Request]]
    aborts: dict[int, list[str]]
    seed: int


@pytest.fixture(scope="module")
def adapter_ids(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> dict[str, Path]:
    """Folders by content hash."""
    engine = make_engine(tiny_llama, {}, "unmerged")
    folders = {}
    for name, folder in tiny_adapters.items():
        identity = audit_adapter(folder, engine.model, name).identity_sha256
        assert identity is not None
        folders[identity] = folder
    return folders


def make_engine(model: Path, adapters: dict[str, Path], mode: Mode, batcher: object = None, **config: int) -> Engine:
    # one thread: a tiny model's steps are shorter than waking others up
    engine = Engine(model, EngineConfig(mode=mode, num_threads=1, **config), batcher)  # type: ignore[arg-type]
    for adapter_id, folder in adapters.items():
        engine.register_adapter(adapter_id, folder)
    return engine


@st.composite
def scenarios(draw: st.DrawFn, num_adapters: int) -> Scenario:
    """Rows name adapters by number; -1 is the base."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    num_rows = draw(st.integers(1, 14))
    arrivals, aborts = [], {}
    for i in range(num_rows):
        own = tuple(rng.randrange(3, 300) for _ in range(rng.randrange(1, 20)))
        prompt = SHARED[: rng.choice((0, 0, 16, 33, 40))] + own
        sampling = SamplingParams(max_tokens=rng.randrange(1, 7), ignore_eos=rng.random() < 0.7, logprobs=True)
        adapter = rng.randrange(-1, num_adapters)
        arrival = rng.randrange(0, 12)
        arrivals.append((arrival, Request(f"row-{i}", prompt, str(adapter), sampling)))
        if rng.random() < 0.15:
            aborts.setdefault(arrival + rng.randrange(1, 8), []).append(f"row-{i}")
    config = {
        "max_batch_rows": draw(st.integers(1, 8)),
        "max_step_tokens": draw(st.sampled_from((1, 7, 24, 64))),
        "pool_bytes": PAGE_BYTES * draw(st.sampled_from((MIN_POOL_PAGES, 75, 120, 400))),
        "host_tier_bytes": draw(st.sampled_from((0, 200_000, 10**7))),
    }
    return Scenario(config, arrivals, aborts, rng.randrange(10**6))


def play(engine: Engine, scenario: Scenario, ids: list[str]) -> dict[str, Result]:
    """Serve a scenario, checking the books after each step. Returns the results of rows that were not aborted."""
    aborted: set[str] = set()
    results: dict[str, Result] = {}
    last = max([*scenario.aborts, *(step for step, _ in scenario.arrivals)])
    step = 0
    while step <= last or engine.num_unfinished:
        assert step < 3000, f"{engine.num_unfinished} rows do not come to an end"
        engine.add(renamed(request, ids) for at, request in scenario.arrivals if at == step)
        gone = [row for row in scenario.aborts.get(step, ()) if row not in results]
        engine.abort(gone)
        aborted.update(gone)
        for result in engine.step():
            assert result.request_id not in results
            assert result.request_id not in aborted
            results[result.request_id] = result
        engine.check_integrity()
        step += 1
    assert results.keys() | aborted == {request.request_id for _, request in scenario.arrivals}
    return results


def renamed(request: Request, ids: list[str]) -> Request:
    """The request for the adapter behind its number."""
    number = int(request.adapter_id or -1)
    adapter_id = None if number < 0 else ids[number]
    return Request(request.request_id, request.prompt_token_ids, adapter_id, request.sampling)


class Alone:
    """What each row answers by itself in an engine that shares nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.answer: Callable[[tuple[int, ...], str | None, SamplingParams], Result] = cache(self._serve)

    def _serve(self, prompt: tuple[int, ...], adapter_id: str | None, sampling: SamplingParams) -> Result:
        (result,) = self._engine.run([Request("alone", prompt, adapter_id, sampling)])
        return result

    def of(self, request: Request) -> Result:
        return self.answer(request.prompt_token_ids, request.adapter_id, request.sampling)


def assert_same_answers(results: dict[str, Result], alone: Alone, requests: Iterable[Request]) -> None:
    """Equal tokens and log-probabilities. Where two tokens are equally likely but for rounding, either may be chosen,
    and what follows differs."""
    for request in requests:
        if request.request_id not in results:
            continue
        found, expected = results[request.request_id], alone.of(request)
        assert found.error is None, found.error
        assert found.token_logprobs is not None
        assert expected.token_logprobs is not None
        pairs = list(zip(found.token_ids, expected.token_ids, strict=False))
        num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        compared = slice(num_equal + 1)  # at the first difference, two equally likely tokens
        assert found.token_logprobs[compared] == pytest.approx(expected.token_logprobs[compared], abs=2e-3), request
        if num_equal == len(pairs):
            assert len(found.token_ids) == len(expected.token_ids), request


@dataclass
class AnyBatcher:
    """Every plan that the rules of `StepPlan` allow, at random; it never stalls for long."""

    rng: random.Random
    num_adapters: int

    def next_step(self, view: BatchView) -> StepPlan:
        merged = view.merged_adapter
        if self.rng.random() < 0.3:
            merged = self.rng.choice([None, *range(self.num_adapters)])
        mode: ReplicaMode = "unmerged" if merged is None else self.rng.choice(("merged", "mixture"))
        running, waiting = view.running_adapter, view.waiting_adapter
        may_run = np.ones(len(running), bool) if mode != "merged" else running == merged
        serve = may_run & (self.rng.random() < 0.7 or np.array([self.rng.random() < 0.6 for _ in running], bool))
        places = max(0, view.max_batch_rows - len(running))
        allowed = [i for i in range(len(waiting)) if mode != "merged" or waiting[i] == merged]
        self.rng.shuffle(allowed)
        plan = StepPlan(mode, merged, serve, np.array(allowed[:places], np.int64))
        plan.check_integrity(view)
        return plan


ANYTHING = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, adapter_ids: dict[str, Path]) -> Alone:
    return Alone(make_engine(tiny_llama, adapter_ids, "unmerged", pool_bytes=4 << 20, uses_prefix_cache=False))


@pytest.mark.parametrize("mode", ["unmerged", "merged", "auto"])
@ANYTHING
@given(scenario=scenarios(num_adapters=4))
def test_rows_answer_as_if_alone(
    tiny_llama: Path, adapter_ids: dict[str, Path], alone: Alone, mode: Mode, scenario: Scenario
) -> None:
    ids = list(adapter_ids)
    engine = make_engine(tiny_llama, adapter_ids, mode, **scenario.config)
    weights = engine.weights_sha256()
    results = play(engine, scenario, ids)
    assert_same_answers(results, alone, (renamed(request, ids) for _, request in scenario.arrivals))
    engine.add([Request("base", (5, 6), None, SamplingParams(max_tokens=1))])
    while engine.num_unfinished:
        engine.step()
    assert engine.weights_sha256() == weights


@ANYTHING
@given(scenario=scenarios(num_adapters=4))
def test_a_batcher_may_switch_pause_and_admit_as_it_pleases(
    tiny_llama: Path, adapter_ids: dict[str, Path], alone: Alone, scenario: Scenario
) -> None:
    ids = list(adapter_ids)
    batcher = AnyBatcher(random.Random(scenario.seed), len(ids))
    # room for a large adapter beside every row's own
    config = scenario.config | {"pool_bytes": PAGE_BYTES * 400}
    engine = make_engine(tiny_llama, adapter_ids, "auto", batcher, **config)
    weights = engine.weights_sha256()
    results = play(engine, scenario, ids)
    assert_same_answers(results, alone, (renamed(request, ids) for _, request in scenario.arrivals))
    engine._live.restore()
    assert engine.weights_sha256() == weights
