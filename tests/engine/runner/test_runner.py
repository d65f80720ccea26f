"""Steps in flight: what counts as stored and pending, what is read when, and how long each step took."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft_oracle import register_all

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.memory.pool import PageRange
from lorabatch.engine.models.merge import LiveWeights
from lorabatch.engine.models.step_batch import StepEntry
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.runner import LaunchedStep, StepsInFlight
from lorabatch.engine.runner.sampler import SampledTokens
from lorabatch.engine.runner.step_counts import StepCounts
from lorabatch.engine.sequence import Sequence
from lorabatch.scheduler.costs.fitting import StepSample
from lorabatch.tests.engine.stub_device import StubDevice, backend_of, tokens_and_seconds


def sequence(max_tokens: int = 3) -> Sequence:
    return Sequence(Request("row", (1, 2, 3, 4), None, SamplingParams(max_tokens=max_tokens)))


def launched(steps: StepsInFlight, row: Sequence, num_tokens: int, token: int | None) -> None:
    sampled = () if token is None else (row,)
    tokens = [] if token is None else [token]
    entry = StepEntry(row, num_tokens, PageRange(0, 1), None)
    assert entry.yields_token == (token is not None)
    none: list[tuple[Any, ...]] = [()] * len(tokens)
    read = SampledTokens(tokens, [0.0] * len(tokens), none, none)
    steps.add(LaunchedStep(sampled, lambda: read, [entry], StepCounts.of([entry], 1), num_tokens))


def read(steps: StepsInFlight, keep: int) -> list[int]:
    return [token for _, tokens in steps.read(keep) for _, token, *_ in tokens]


def test_a_row_goes_on_by_tokens_that_only_the_device_knows() -> None:
    steps, row = StepsInFlight(), sequence()
    launched(steps, row, 3, None)
    assert (row.num_stored, row.num_pending, row.is_decoding) == (3, 0, False)
    launched(steps, row, 1, 10)
    assert (row.num_stored, row.total_tokens, row.is_decoding) == (4, 5, True)
    launched(steps, row, 1, 11)
    assert (row.num_stored, row.total_tokens, row.num_pending, row.awaits_end) == (5, 6, 2, False)
    launched(steps, row, 1, 12)
    assert row.awaits_end, "its third and last token is on its way"
    assert read(steps, keep=1) == [10, 11]
    assert row.num_pending == 1
    assert read(steps, keep=0) == [12]
    assert (row.num_pending, row.token_ids) == (0, []), "what a token means is the engine's to say"


def test_a_step_without_sampled_rows_is_read_as_nothing() -> None:
    steps, row = StepsInFlight(), sequence()
    launched(steps, row, 2, None)
    assert read(steps, keep=0) == []


def seconds_of(entries: Any) -> float:
    """Another number for each load, without rounding."""
    return sum(
        (1 / 64 if e.is_decode else float(e.num_tokens)) + (e.sequence.num_stored + e.num_tokens) / 1024
        for e in entries
    )


def timed_engine(model: Path, device: StubDevice, **config: Any) -> tuple[Engine, list[StepSample]]:
    """An engine on a device without arithmetic, and the samples of the steps that it will read."""
    options = {"max_batch_rows": 6, "max_step_tokens": 50, "pool_bytes": 1 << 20, "mode": "unmerged"} | config
    engine = Engine(model, EngineConfig(num_threads=1, **options), None, backend_of(device), device.clock)
    samples: list[StepSample] = []
    engine.observe_step = lambda sample, _: samples.append(sample)
    return engine, samples


def assert_right(samples: list[StepSample], device: StubDevice, num_unread: int = 0) -> None:
    """Each sample has the seconds of its own load. Steps that nobody waits for are not measured."""
    for sample in samples:
        load: Any = sample.load
        expected_s = load.prefill_tokens + load.decode_rows / 64 + load.context_tokens / 1024
        assert sample.seconds == expected_s, load
    found = [tokens_and_seconds(sample) for sample in samples]
    left = iter(device.steps)
    assert all(step in left for step in found), "in the order of launching"
    assert len(device.steps) - len(found) <= num_unread


ROWS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9), st.sampled_from(["", "ends", "rules"])), max_size=8)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.tuples(ROWS, st.integers(0, 30), st.integers(0, 8), st.booleans()), min_size=1, max_size=3),
    pool_pages=st.integers(12, 100),
    steps_ahead=st.integers(0, 1),
)
# a step of a row that has ended is in flight while the engine has nothing to do
@example(batches=[([(5, 2, "ends")], 9, 0, False), ([(7, 2, "")], 0, 0, False)], pool_pages=40, steps_ahead=1)
# and one of a row that was taken out, on a device that still computes it
@example(batches=[([(5, 9, "")], 2, 0, True), ([(7, 2, "")], 0, 0, False)], pool_pages=40, steps_ahead=1)
def test_each_step_is_measured_by_itself_whatever_comes_between(
    tiny_llama: Path, batches: list[tuple[Any, int, int, bool]], pool_pages: int, steps_ahead: int
) -> None:
    """Rows come while others run and while none does, some are refused (no prompt), some end before `max_tokens`, some
    take part in every second step (rules), some start again for want of memory, and some are taken out.
    """
    device = StubDevice(seconds_of, steps_ahead)
    engine, samples = timed_engine(tiny_llama, device, pool_bytes=8192 * pool_pages)
    for number, (rows, num_steps, pause, is_aborted) in enumerate(batches):
        requests = [
            Request(
                f"{number}-{i}",
                tuple(range(3, 3 + prompt)),
                None,
                SamplingParams(
                    max_tokens=20 if kind == "ends" else answer,
                    ignore_eos=kind != "ends",
                    presence_penalty=0.5 if kind == "rules" else 0.0,
                ),
            )
            for i, (prompt, answer, kind) in enumerate(rows)
        ]
        device.answer_tokens.update((r.request_id, row[1]) for r, row in zip(requests, rows, strict=True))
        engine.add(requests)
        for _ in range(num_steps if number + 1 < len(batches) else 1000):
            if engine.num_unfinished:
                engine.step()
                device.wait(pause / 8, is_busy=True)
        if is_aborted:
            engine.abort([request.request_id for request in requests])
        if not engine.num_unfinished:
            device.wait(1000.0, is_busy=False)
    assert not engine.num_unfinished
    assert engine.telemetry().num_steps == len(samples)
    assert_right(samples, device, num_unread=len(batches))


def test_steps_around_an_adapter_that_cannot_be_loaded_have_their_own_seconds(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    device = StubDevice(seconds_of)
    engine, samples = timed_engine(tiny_llama, device)
    shutil.copytree(tiny_adapters["rank8"], tmp_path / "lost")
    lost = register_all(engine, {"lost": tmp_path / "lost"})["lost"]
    shutil.rmtree(tmp_path / "lost")
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.add(Request(f"{i}", tuple(range(3, 60)), None, sampling) for i in range(2))
    results = [result for _ in range(3) for result in engine.step()]
    engine.add([Request("lost", (3, 4, 5), lost, sampling)])
    while engine.num_unfinished:
        results += engine.step()
    assert [result.request_id for result in results if result.error] == ["lost"]
    assert_right(samples, device)


def test_a_step_that_counts_for_nothing_leaves_those_around_it_their_seconds(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights merged for it are not finite, which a GPU says once the step is launched."""
    device = StubDevice(seconds_of)
    engine, samples = timed_engine(tiny_llama, device, mode="merged", pool_bytes=4 << 20)
    names = list(tiny_adapters)[:3]
    ids = register_all(engine, {name: tiny_adapters[name] for name in names})
    merged: list[str] = []

    def confirm(live: LiveWeights) -> None:
        if live.merged_adapter_id is not None and live.merged_adapter_id not in merged:
            merged.append(live.merged_adapter_id)
            if len(merged) == 2:
                live.undo()
                raise AdapterRefusedError("not finite")

    monkeypatch.setattr(LiveWeights, "confirm", confirm)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add(Request(name, tuple(range(3, 60)), ids.get(name), sampling) for name in names)
    results = []
    while engine.num_unfinished:
        results += engine.step()
    assert [ids[result.request_id] for result in results if result.error] == merged[1:2]
    assert len(merged) == 3
    assert_right(samples, device, num_unread=1)
    assert len(device.steps) == len(samples) + 1


def test_a_device_that_runs_ahead_gets_steps_of_a_second(tiny_llama: Path) -> None:
    """A token of a prompt takes 2 ms: 500 of them are a second."""
    device = StubDevice(lambda entries: 0.002 * sum(e.num_tokens for e in entries))
    engine, samples = timed_engine(tiny_llama, device, max_batch_rows=64, max_step_tokens=16384, pool_bytes=16 << 20)
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.add(Request(f"{i}", (i + 3, *range(3, 202)), None, sampling) for i in range(60))
    while engine.num_unfinished:
        engine.step()
    assert [sample.load.prefill_tokens for sample in samples[:4]] == [256, 256, 500, 500]
    assert all(sample.seconds == pytest.approx(1.0, abs=0.01) for sample in samples[2:-1])
