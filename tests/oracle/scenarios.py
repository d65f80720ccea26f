"""Whatever may happen to rows, drawn by hypothesis: arrivals, lengths, adapters, sampling, aborts and moves between two
engines; and what each row answers by itself, to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.scheduler.batchers.batching import BatchView, ReplicaMode, StepPlan

PAGE_BYTES = 8192  # 16 tokens of the tiny model
# An adapter of rank 64 takes 60 pages in panels, 62 otherwise; a row at most 4.
MIN_POOL_PAGES = 66
SHARED = tuple(3 + i * 11 % 250 for i in range(40))
NUM_ADAPTERS = 4

ANYTHING = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Scenario:
    """Rows by the step before which they arrive; for some, the steps before which they are aborted or move to the
    other engine. Rows name adapters by number; -1 is the base."""

    config: dict[str, int]
    arrivals: list[tuple[int, Request]]
    aborts: dict[int, list[str]]
    moves: dict[int, list[str]]
    seed: int

    @property
    def last_step(self) -> int:
        return max([*self.aborts, *self.moves, *(step for step, _ in self.arrivals)])


def make_engine(model: Path, adapters: dict[str, Path], mode: Mode, batcher: object = None, **config: int) -> Engine:
    """An engine that knows all adapters. One thread by default: a tiny model's steps are shorter than waking more."""
    engine = Engine(model, EngineConfig(mode=mode, **{"num_threads": 1} | config), batcher)  # type: ignore[arg-type]
    for adapter_id, folder in adapters.items():
        engine.register_adapter(adapter_id, folder)
    return engine


@st.composite
def scenarios(draw: st.DrawFn, *, draws_freely: bool = False) -> Scenario:
    """`draws_freely`: rows may be drawn from the whole vocabulary. Otherwise from few candidates: where arithmetic may
    round otherwise, few draws are then near enough to another token to notice."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    arrivals, aborts, moves = [], {}, {}
    for i in range(draw(st.integers(1, 14))):
        row, arrival = f"row-{i}", rng.randrange(0, 12)
        own = tuple(rng.randrange(3, 300) for _ in range(rng.randrange(1, 20)))
        prompt = SHARED[: rng.choice((0, 0, 16, 33, 40))] + own
        adapter = str(rng.randrange(-1, NUM_ADAPTERS))
        arrivals.append(
            (arrival, Request(row, prompt, adapter, _sampling(rng, draws_freely), stream_id=rng.getrandbits(64)))
        )
        if rng.random() < 0.15:
            aborts.setdefault(arrival + rng.randrange(1, 8), []).append(row)
        for _ in range(rng.choice((0, 0, 1, 2))):
            moves.setdefault(arrival + rng.randrange(1, 10), []).append(row)
    config = {
        "max_batch_rows": draw(st.integers(1, 8)),
        "max_step_tokens": draw(st.sampled_from((1, 7, 24, 64))),
        "pool_bytes": PAGE_BYTES * draw(st.sampled_from((MIN_POOL_PAGES, 75, 120, 400))),
        "host_tier_bytes": draw(st.sampled_from((0, 200_000, 10**7))),
        "uses_prefix_cache": draw(st.booleans()),
    }
    return Scenario(config, arrivals, aborts, moves, rng.randrange(10**6))


def _sampling(rng: random.Random, draws_freely: bool) -> SamplingParams:
    max_tokens = rng.randrange(1, 7)
    greedy = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, max_tokens + 1),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.random() < 0.8,
        stop=rng.choice(((), (), ("e", "the"), ("\n",))),
    )
    if rng.random() < 0.6:
        return greedy
    top_k, top_p = rng.choice(((0, 1.0), (0, 0.9), (5, 0.5)) if draws_freely else ((1, 1.0), (2, 1.0), (3, 0.9)))
    return replace(greedy, temperature=rng.choice((0.3, 1.0)), top_k=top_k, top_p=top_p, seed=rng.randrange(99))


def play(engines: Sequence[Engine], scenario: Scenario, ids: list[str]) -> dict[str, Result]:
    """Serve a scenario: rows come to the first engine and move to the next one. All books are checked after each step.
    Returns the results of rows that were not aborted."""
    aborted: set[str] = set()
    results: dict[str, Result] = {}
    step = 0
    while step <= scenario.last_step or any(engine.num_unfinished for engine in engines):
        assert step < 3000, f"{[engine.num_unfinished for engine in engines]} rows do not come to an end"
        engines[0].add(renamed(request, ids) for at, request in scenario.arrivals if at == step)
        gone = [row for row in scenario.aborts.get(step, ()) if row not in results]
        aborted.update(gone)
        taken = [engine.export_rows(scenario.moves.get(step, ())) for engine in engines]
        for engine, rows in zip([*engines[1:], engines[0]], taken, strict=True):
            engine.import_rows(rows)
        for engine in engines:
            engine.abort(gone)
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
    return replace(request, adapter_id=None if number < 0 else ids[number])


class Alone:
    """What each row answers by itself in an engine that shares nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answer: Callable[[Request], Result] = cache(self._serve)

    def _serve(self, request: Request) -> Result:
        (result,) = self._engine.run([request])
        return result

    def of(self, request: Request) -> Result:
        return replace(self._answer(replace(request, request_id="alone")), request_id=request.request_id)


def assert_same_answers(results: dict[str, Result], alone: Alone, requests: Iterable[Request]) -> None:
    """Equal tokens, texts and log-probabilities. Where two tokens are equally likely but for rounding, either may be
    chosen, and what follows differs; a draw may fall that near to another token once in a scenario."""
    num_redrawn = 0
    for request in requests:
        if request.request_id not in results:
            continue
        found, expected = results[request.request_id], alone.of(request)
        assert found.error is None, found.error
        pairs = list(zip(found.token_ids, expected.token_ids, strict=False))
        num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        is_drawn = request.sampling.temperature > 0
        if num_equal == len(pairs):
            assert (found.token_ids, found.text, found.finish_reason) == (
                expected.token_ids, expected.text, expected.finish_reason), request  # fmt: skip
        num_redrawn += is_drawn and num_equal < len(pairs)
        if request.sampling.logprobs:
            assert found.token_logprobs is not None
            assert expected.token_logprobs is not None
            # the first two greedy tokens that differ are equally likely
            compared = slice(num_equal + (not is_drawn))
            assert found.token_logprobs[compared] == pytest.approx(expected.token_logprobs[compared], abs=2e-3), request
    assert num_redrawn < 2


@dataclass
class AnyBatcher:
    """Every plan that the rules of `StepPlan` allow, at random; it never stalls for long."""

    rng: random.Random

    def __call__(self, view: BatchView) -> StepPlan:
        merged = view.merged_adapter
        if self.rng.random() < 0.3:
            merged = self.rng.choice([None, *range(NUM_ADAPTERS)])
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
