"""Rows that take more pages as they grow: none is lost, tables hold what rows wrote, the simulator does the same."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import CpuBackend
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.engine.runner.sampler import SampledTokens
from lorabatch.engine.sequence import Sequence
from lorabatch.scheduler.batchers.batching import BatchView, StepPlan, clustered
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.tests.engine.batching.simulated import Rows, numbers, play_replica

PAGE = 16
PAGE_BYTES = 8192  # of the tiny model
MAX_TOKENS = 60
EOS, OTHER = 2, 7


class TableRunner:
    """Writes to block tables which tokens a row has stored where, instead of keys and values, and reads them back.

    A row's answer is `OTHER` again and again, and `EOS` as its last token.
    """

    def __init__(self, answer_tokens: dict[str, int], steps_ahead: int) -> None:
        self.steps_ahead = steps_ahead
        self._answer_tokens = answer_tokens
        self._content: dict[tuple[int, int], int] = {}

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """See `StepRunner`."""
        for entry in entries:
            runs = (entry.pages, *entry.extensions)
            table = [*entry.shared, *(page for run in runs for page in range(run.start, run.end))]
            sequence, stored = entry.sequence, entry.sequence.num_stored
            for place, written in enumerate(self._written(sequence, stored + entry.num_tokens)):
                at = table[place // PAGE], place % PAGE
                if place >= stored:
                    self._content[at] = written
                assert self._content[at] == written, f"{sequence.request.request_id}, {place}"
        sampled = tuple(entry.sequence for entry in entries if entry.yields_token)
        tokens = [self._token(sequence, sequence.num_generated) for sequence in sampled]
        return LaunchedStep(
            sampled, lambda: SampledTokens(tokens, [0.0] * len(tokens), [()] * len(tokens), [()] * len(tokens))
        )

    def _written(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Digest of all tokens up to each of the first places. Only the device knows a pending token."""
        prompt, digest, digests = sequence.request.prompt_token_ids, 0, []
        for place in range(num_tokens):
            known = place < len(prompt)
            digest = hash((digest, prompt[place] if known else self._token(sequence, place - len(prompt))))
            digests.append(digest)
        return digests

    def _token(self, sequence: Sequence, number: int) -> int:
        """Token `number` of the row's answer."""
        return EOS if number + 1 >= self._answer_tokens[sequence.request.request_id] else OTHER


class Backend(CpuBackend):
    """Of block tables, without arithmetic."""

    steps_ahead = 0
    answer_tokens: dict[str, int]

    run_pages, has_block_tables, reads_other_rows = 1, True, False

    def runner(self, *args: Any) -> TableRunner:
        return TableRunner(self.answer_tokens, self.steps_ahead)


def make_engine(
    model: Path,
    rows: Rows,
    *,
    num_pages: int,
    batch_rows: int = 8,
    step_tokens: int = 64,
    steps_ahead: int = 0,
    max_tokens: int = MAX_TOKENS,
    **options: Any,
) -> Engine:
    """With all rows waiting."""
    kind = type("Backend", (Backend,), {"steps_ahead": steps_ahead, "answer_tokens": {}})
    kind.answer_tokens = {f"row-{i}": answer for i, (_, answer) in enumerate(rows)}  # type: ignore[attr-defined]
    config = EngineConfig(
        max_batch_rows=batch_rows,
        max_step_tokens=step_tokens,
        pool_bytes=PAGE_BYTES * num_pages,
        num_threads=1,
        mode="unmerged",
        **options,
    )
    engine = Engine(model, config, clustered, kind)
    sampling = SamplingParams(max_tokens=max_tokens)
    engine.add(Request(f"row-{i}", tuple(range(3, 3 + prompt)), None, sampling) for i, (prompt, _) in enumerate(rows))
    return engine


def play(engine: Engine) -> tuple[dict[str, Result], int]:
    """All results, and the most rows that ran at once."""
    results, most = {}, 0
    for _ in range(20_000):
        for result in engine.step():
            assert result.request_id not in results
            results[result.request_id] = result
        engine.check_integrity()
        most = max(most, engine.telemetry().num_running)
        if not engine.num_unfinished:
            return results, most
    raise AssertionError(f"{engine.num_unfinished} rows do not come to an end")


ROWS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, MAX_TOKENS)), min_size=1, max_size=14)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    num_pages=st.integers(10, 40),
    batch_rows=st.integers(1, 8),
    step_tokens=st.sampled_from([16, 50]),
    steps_ahead=st.integers(0, 1),
    shares=st.booleans(),
)
def test_every_row_ends_once_with_its_own_tokens_whatever_memory_there_is(
    tiny_llama: Path, rows: Rows, num_pages: int, batch_rows: int, step_tokens: int, steps_ahead: int, shares: bool
) -> None:
    engine = make_engine(
        tiny_llama,
        rows,
        num_pages=num_pages,
        batch_rows=batch_rows,
        step_tokens=step_tokens,
        steps_ahead=steps_ahead,
        uses_prefix_cache=shares,
    )
    results, _ = play(engine)
    assert {name: len(result.token_ids) for name, result in results.items()} == {
        f"row-{i}": answer for i, (_, answer) in enumerate(rows)
    }
    assert all(result.finish_reason in ("stop", "length") for result in results.values())
    assert set().union(*(result.token_ids[:-1] for result in results.values())) <= {OTHER}


def test_rows_that_may_become_long_run_beside_each_other(tiny_llama: Path) -> None:
    """A row may take 15 pages and takes 3: a pool of 40 holds two whole ones."""
    engine = make_engine(tiny_llama, [(30, 16)] * 40, num_pages=40, batch_rows=12, max_tokens=200)
    results, most = play(engine)
    assert {result.error for result in results.values()} == {None}
    assert most == 12
    assert engine.num_preempted == 0


def test_of_rows_that_outgrow_the_pool_the_last_ones_start_again(tiny_llama: Path) -> None:
    rows = [(16, 5)] * 8 + [(16, 60)] * 8
    engine = make_engine(tiny_llama, rows, num_pages=24, batch_rows=8)
    results, _ = play(engine)
    assert len(results) == 16
    assert engine.num_preempted > 0


def test_rows_of_a_known_length_hold_it_from_the_start(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, [], num_pages=24)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    kind = engine.backend
    assert isinstance(kind, Backend)
    kind.answer_tokens.update({f"row-{i}": 1000 for i in range(12)})
    engine.add(Request(f"row-{i}", (3,) * 16, None, sampling) for i in range(12))
    _, most = play(engine)
    assert most == 24 // 5
    assert engine.num_preempted == 0


class MixtureFirst:
    """Mixtures with the first adapter merged, for as long as a row runs or waits for it."""

    def __call__(self, view: BatchView) -> StepPlan:
        """See `Batcher`."""
        serve, admit = np.ones(len(view.running_adapter), bool), np.arange(len(view.waiting_adapter))
        if len(serve) or 0 in view.waiting_adapter:
            return StepPlan("mixture", 0, serve, admit)
        return StepPlan("unmerged", None, serve, admit)


def test_a_row_alone_beside_a_subtracted_adapter_may_lose_its_pages(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    audit = audit_adapter(tiny_adapters["rank8"], read_model_config(tiny_llama), "rank8")
    assert audit.content_sha256 is not None
    num_numbers = sum(site.rank * (site.in_features + site.out_features) for site in audit.sites)
    config = EngineConfig(
        max_batch_rows=2,
        # the adapter, three pages for the row of the base, which will need five, and one for the other
        pool_bytes=PAGE_BYTES * (-(-num_numbers * 4 // PAGE_BYTES) + 4),
        num_threads=1,
        uses_prefix_cache=False,
    )
    kind = type("Backend", (Backend,), {"answer_tokens": {"merged": 2, "base": MAX_TOKENS}})
    engine = Engine(tiny_llama, config, MixtureFirst(), kind)
    engine.register_adapter(audit.content_sha256, tiny_adapters["rank8"])
    engine.add([Request("merged", (3,), audit.content_sha256, SamplingParams(max_tokens=2))])
    engine.add([Request("base", tuple(range(3, 19)), None, SamplingParams(max_tokens=MAX_TOKENS))])
    results, most = play(engine)
    assert most == 2
    assert {name: len(result.token_ids) for name, result in results.items()} == {"merged": 2, "base": MAX_TOKENS}
    assert results["base"].mode == "mixture"
    assert engine.num_preempted == 1


@pytest.mark.long
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, batch_rows=st.integers(1, 8), num_pages=st.integers(10, 40), step_tokens=st.sampled_from([16, 50]))
# the last chunk of a row that starts again is its last token alone
@example(rows=[(1, 1), (36, 15), (71, 11)], batch_rows=2, num_pages=10, step_tokens=16)
def test_a_simulated_replica_lets_rows_grow_as_the_engine_does(
    tiny_llama: Path, rows: Rows, batch_rows: int, num_pages: int, step_tokens: int
) -> None:
    limits = ReplicaSettings(batch_rows, step_tokens, kv_tokens=PAGE * num_pages, page_tokens=PAGE, rows_grow=True)
    simulated = play_replica(rows, limits, CPU_SMOLLM2_135M, clustered, MAX_TOKENS)
    engine = make_engine(
        tiny_llama,
        rows,
        num_pages=num_pages,
        batch_rows=batch_rows,
        step_tokens=step_tokens,
        uses_prefix_cache=False,
    )
    steps: list[Any] = []
    engine.observe_step = lambda sample, _: steps.append(numbers(sample.load))
    play(engine)
    assert steps == simulated.steps
    assert engine.num_preempted == simulated.num_preempted


def test_leaps_of_the_simulator_end_where_rows_grow() -> None:
    rows = [(16, 5)] * 8 + [(16, 60)] * 8
    limits = ReplicaSettings(8, 64, kv_tokens=PAGE * 24, page_tokens=PAGE, rows_grow=True)
    one, leaping = (
        play_replica(rows, replace(limits, leap_steps=n), CPU_SMOLLM2_135M, clustered, MAX_TOKENS) for n in (1, 8)
    )
    assert one.num_preempted == leaping.num_preempted > 0
    assert one.end_s == pytest.approx(leaping.end_s)
