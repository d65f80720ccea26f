"""Rows that take more pages as they grow: none is lost, tables hold what rows wrote, the simulator does the same."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.request import Request, Result, SamplingParams, Sequence
from lorabatch.engine.runner.backend import CpuBackend, KernelTraits
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.pipeline.planning.profile import load_of
from lorabatch.scheduler.batching import ClusteredBatcher
from lorabatch.scheduler.cost import CPU_SMOLLM2_135M, CostModel, StepLoad
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import make_workload
from lorabatch.scheduler.simulation.timeline import Timeline

PAGE = 16
PAGE_BYTES = 8192  # of the tiny model
MAX_TOKENS = 60
EOS, OTHER = 2, 7
#: Prompt tokens and tokens of the answer of each row.
Rows = list[tuple[int, int]]


class TableRunner:
    """Writes to block tables which tokens a row has stored where, instead of keys and values, and reads them back.

    A row's answer is `OTHER` again and again, and `EOS` as its last token.
    """

    def __init__(self, answer_tokens: dict[str, int], steps_ahead: int) -> None:
        self.steps_ahead = steps_ahead
        self._answer_tokens = answer_tokens
        self._content: dict[tuple[int, int], tuple[str, int]] = {}

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """See `StepRunner`."""
        for entry in entries:
            runs = (entry.run, *entry.extensions)
            table = [*entry.shared, *(page for run in runs for page in range(run.start, run.end))]
            sequence, stored = entry.sequence, entry.sequence.num_stored
            for place in range(stored + entry.num_tokens):
                at = table[place // PAGE], place % PAGE
                if place >= stored:
                    self._content[at] = self._written(sequence, place)
                assert self._content[at] == self._written(sequence, place), f"{sequence.request.request_id}, {place}"
        sampled = tuple(entry.sequence for entry in entries if entry.yields_token)
        tokens = [self._token(sequence) for sequence in sampled]
        return LaunchedStep(sampled, lambda: (tokens, [0.0] * len(tokens)))

    def _written(self, sequence: Sequence, place: int) -> tuple[str, int]:
        """All prompts begin alike, so that rows may share their pages."""
        prompt = sequence.request.prompt_token_ids
        return ("prompt" if place < len(prompt) else sequence.request.request_id), place

    def _token(self, sequence: Sequence) -> int:
        return EOS if sequence.num_generated + 1 >= self._answer_tokens[sequence.request.request_id] else OTHER


class Backend(CpuBackend):
    """Of block tables, without arithmetic."""

    steps_ahead = 0
    answer_tokens: dict[str, int]

    @property
    def traits(self) -> KernelTraits:
        return replace(super().traits, run_pages=1, has_block_tables=True, reads_other_rows=False)

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
    engine = Engine(model, config, ClusteredBatcher(), kind)
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


STEPS: list[tuple[float, ...]] = []


def numbers(load: StepLoad) -> tuple[float, ...]:
    """What the cost model is asked about a step of base rows."""
    return tuple(float(x) for x in (load.prefill_tokens, load.decode_rows, load.context_tokens, load.prefill_pairs))  # type: ignore[arg-type]


class Recorder(CostModel):
    """A cost model that keeps what it is asked."""

    def step_seconds(self, load: StepLoad) -> Any:
        """See `CostModel.step_seconds`."""
        STEPS.append(numbers(load))
        return super().step_seconds(load)


def simulated_steps(rows: Rows, batch_rows: int, step_tokens: int, num_pages: int) -> tuple[list[Any], int]:
    """Steps of a simulated replica with the same limits, and how many rows were preempted."""
    prompts, outputs = np.array(rows, np.int32).T
    workload = make_workload((), np.full(len(rows), -1, np.int32), prompts, outputs, max_tokens=MAX_TOKENS)
    limits = ReplicaSettings(batch_rows, step_tokens, kv_tokens=PAGE * num_pages, page_tokens=PAGE, rows_grow=True)
    timeline = Timeline.empty(len(rows), 1)
    cost = Recorder(**CPU_SMOLLM2_135M.to_json())
    replica = SimulatedReplica(0, workload, cost, ClusteredBatcher(), limits, timeline)
    replica.add(np.arange(len(rows)))
    STEPS.clear()
    now_s = 0.0
    while replica.num_rows:
        now_s = replica.step(now_s).end_s
        replica.check_integrity()
    return list(STEPS), int(timeline.preempted[0])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, batch_rows=st.integers(1, 8), num_pages=st.integers(10, 40), step_tokens=st.sampled_from([16, 50]))
def test_a_simulated_replica_lets_rows_grow_as_the_engine_does(
    tiny_llama: Path, rows: Rows, batch_rows: int, num_pages: int, step_tokens: int
) -> None:
    simulated, num_preempted = simulated_steps(rows, batch_rows, step_tokens, num_pages)
    engine = make_engine(
        tiny_llama,
        rows,
        num_pages=num_pages,
        batch_rows=batch_rows,
        step_tokens=step_tokens,
        uses_prefix_cache=False,
    )
    steps: list[Any] = []
    engine.observe_step = lambda entries: steps.append(numbers(load_of(entries, {})))
    play(engine)
    assert steps == simulated
    assert engine.num_preempted == num_preempted


def test_leaps_of_the_simulator_end_where_rows_grow(tiny_llama: Path) -> None:
    prompts, outputs = np.array([(16, 5)] * 8 + [(16, 60)] * 8, np.int32).T
    workload = make_workload((), np.full(16, -1, np.int32), prompts, outputs, max_tokens=MAX_TOKENS)
    ends = []
    for leap_steps in (1, 8):
        limits = ReplicaSettings(8, 64, kv_tokens=PAGE * 24, page_tokens=PAGE, rows_grow=True, leap_steps=leap_steps)
        timeline = Timeline.empty(16, 1)
        replica = SimulatedReplica(0, workload, CPU_SMOLLM2_135M, ClusteredBatcher(), limits, timeline)
        replica.add(np.arange(16))
        now_s = 0.0
        while replica.num_rows:
            now_s = replica.step(now_s).end_s
            replica.check_integrity()
        ends.append((now_s, int(timeline.preempted[0])))
    assert ends[0][1] == ends[1][1] > 0
    assert ends[0][0] == pytest.approx(ends[1][0])
