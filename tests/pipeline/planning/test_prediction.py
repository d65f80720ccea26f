"""What a run is built from is what simulated workers are built from."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from peft_oracle import register_all
from threaded_group import make_group

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.limits import total_host_bytes
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.pipeline.cluster.devices import Device
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.prediction import some_of
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.batchers.batching import Batcher, ReplicaFacts
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.estimates.lengths import MOST_TASKS, OTHER_TASKS, AnswerLengths
from lorabatch.scheduler.simulation import run as simulated
from lorabatch.scheduler.simulation.replica import SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload


def settings_for(model: Path, **options: Any) -> RunSettings:
    config = EngineConfig(num_threads=1, device="cpu", cost=CPU_SMOLLM2_135M, pool_bytes=1 << 24, **options)
    device = Device("cpu", "CPU", total_host_bytes())
    return RunSettings(config, read_model_config(model), device)


def described(batcher: Any) -> Any:
    """Types and parameters of a batcher, without its state and the functions that tell it about its replica."""
    if isinstance(batcher, partial):
        return batcher.func, *map(described, batcher.args), batcher.keywords
    if isinstance(batcher, FunctionType):
        held = zip(batcher.__code__.co_freevars, batcher.__closure__ or (), strict=True)
        return batcher.__qualname__, {name: described(cell.cell_contents) for name, cell in held if name not in FACTS}
    if not is_dataclass(batcher):
        return batcher if isinstance(batcher, int | float | str | None) else type(batcher)
    names = [f.name for f in fields(batcher) if f.name not in FACTS and not f.name.startswith("_")]
    parts = {name: described(getattr(batcher, name)) for name in names}
    return type(batcher), parts


#: Functions that each replica makes for its own batcher.
FACTS = {f.name for f in fields(ReplicaFacts)} - {"cost", "max_batch_rows"}


@pytest.fixture
def batchers(monkeypatch: pytest.MonkeyPatch) -> list[Batcher]:
    """Batchers of the simulated replicas that are made from now on."""
    seen: list[Batcher] = []

    class Seen(SimulatedReplica):
        def __init__(self, number: int, workload: Any, cost: Any, batcher: Batcher, *more: Any) -> None:
            seen.append(batcher)
            super().__init__(number, workload, cost, batcher, *more)

    monkeypatch.setattr(simulated, "SimulatedReplica", Seen)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batcher": "dlora"},
        {"batcher": "s-lora", "max_batch_rows": 7},
        {"mode": "merged", "max_step_tokens": 33},
        {"mode": "unmerged"},
        {"mode": "exact", "max_batch_rows": 3},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "auto",
)
def test_engines_and_simulated_workers_have_one_batcher_and_one_set_of_limits(
    tiny_llama: Path, batchers: list[Batcher], options: dict[str, Any]
) -> None:
    settings = settings_for(tiny_llama, **options)
    engine, replica = Engine(tiny_llama, settings.engine), prediction.replica_settings(settings)
    rows = make_workload(
        make_adapters([8]), np.zeros(4, np.int32), np.full(4, 9, np.int32), np.full(4, 5, np.int32), max_tokens=5
    )
    prediction.simulate(settings, rows, 2)
    assert [described(batcher) for batcher in batchers] == 2 * [described(engine.batcher)]
    assert (replica.max_batch_rows, replica.max_step_tokens) == (engine.config.batch_rows, engine.config.step_tokens)
    pages = engine.telemetry().pages_total
    assert replica.kv_tokens is not None
    assert replica.kv_tokens // replica.page_tokens == pages
    assert replica.run_pages == engine.backend.run_pages


@pytest.mark.parametrize("num_members", [2, 3])
def test_simulated_groups_have_the_memory_of_real_ones(
    tiny_llama: Path, tiny_adapters: dict[str, Path], num_members: int
) -> None:
    """Keys and values that several members have, and what each has of an adapter, count as often as they are there."""
    settings, alone = settings_for(tiny_llama, tensor_parallel=num_members), settings_for(tiny_llama)
    group = make_group(tiny_llama, num_members, pool_bytes=1 << 24)
    try:
        register_all(group, {"rank1": tiny_adapters["rank1"]})
        audit = audit_adapter(tiny_adapters["rank1"], group.model, "rank1")
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        list(group.run([Request("0", (5, 6), audit.content_sha256, sampling)]))
        pages, used = group.telemetry().pages_total, group.telemetry().pages_used
    finally:
        group.close()
    replica = prediction.replica_settings(settings)
    assert replica.kv_tokens is not None
    assert replica.kv_tokens // replica.page_tokens == pages
    (adapter,) = make_adapters([1])
    adapter = replace(adapter, weight_bytes=4 * sum(s.rank * (s.in_features + s.out_features) for s in audit.sites))
    assert used == max(1, -(-adapter.weight_bytes // (replica.page_tokens * replica.token_bytes)))
    assert f"an engine is {num_members} processes that share the model" in settings.notes[0]
    assert alone.notes == ()


def test_simulated_workers_learn_lengths_as_engines_do(tiny_llama: Path) -> None:
    """Half of `max_tokens` at first, then what has ended."""
    means: list[float] = []
    settings = settings_for(tiny_llama, max_batch_rows=2)

    def facts_seen(facts: ReplicaFacts) -> Batcher:
        class Watching:
            def __call__(self, view: Any) -> Any:
                means.append(facts.lengths.mean())
                return inner(view)

        inner = settings.batcher(facts)
        return Watching()

    rows = make_workload((), np.full(8, -1, np.int32), np.full(8, 9, np.int32), np.full(8, 5, np.int32), max_tokens=100)
    plan = prediction.cut_rows(settings, rows, 1).plan
    simulated.run_planned(
        rows, plan, settings.cost, prediction.replica_settings(settings), 1, facts_seen, settings.scheduler(1)
    )
    assert means[0] == 50.0
    assert means[-1] < means[len(means) // 2] < 50.0


def test_some_workers_stand_for_all_of_them() -> None:
    slowness = [1.0] * 6 + [2.0] * 2 + [8.0] * 2
    chosen = some_of(slowness, 4)
    assert len(chosen) == 4
    assert sum(1 / slow for slow in chosen) / 4 == pytest.approx(sum(1 / slow for slow in slowness) / 10)
    assert chosen == sorted(chosen)
    assert some_of(slowness, 10) == slowness


def test_what_earlier_jobs_measured_changes_predictions_and_no_decision(tiny_llama: Path) -> None:
    rows = make_workload(
        make_adapters([8]), np.arange(200, dtype=np.int32) % 2 - 1, np.full(200, 9, np.int32), np.full(200, 5, np.int32)
    )
    settings = settings_for(tiny_llama)
    learned = replace(settings, prices=CPU_SMOLLM2_135M.scaled(3.0))
    assert (learned.engine, learned.scheduler(2)) == (settings.engine, settings.scheduler(2))
    first, second = (prediction.forecast(each, rows, 2, max_rows=1000) for each in (settings, learned))
    assert second.plan.shards == first.plan.shards
    assert second.predicted_s > 2 * first.predicted_s
    assert prediction.bound(learned, rows, 2).work_s == pytest.approx(3 * prediction.bound(settings, rows, 2).work_s)


def test_adapters_that_earlier_jobs_have_had_are_expected_to_answer_as_then(tiny_llama: Path) -> None:
    rows = make_workload(
        make_adapters([8]), np.array([-1, 0, 0], np.int32), np.full(3, 9, np.int32), np.full(3, 100, np.int32)
    )
    rows = replace(rows, max_tokens=np.array([100, 100, 12], np.int32))
    settings = settings_for(tiny_llama)
    assert prediction.expected_tokens(settings, rows).tolist() == [50, 50, 6]
    adapter_id = rows.adapters[0].adapter_id
    learned = replace(settings, lengths={(adapter_id, 0): AnswerLengths.of([(1000, 20_000, False)])})
    assert prediction.expected_tokens(learned, rows) == pytest.approx([50, 20, 12], rel=0.03)
    assert prediction.expected_tokens(learned, rows).max() <= 100
    fixed = replace(rows, fixed_tokens=np.array([0, 3, 12], np.int32))
    assert prediction.expected_tokens(learned, fixed, length_share=1.0) == pytest.approx([100, 3, 12])


def test_lengths_of_one_task_say_nothing_of_another_task_of_the_same_adapter(tiny_llama: Path) -> None:
    rows = make_workload(
        make_adapters([8]), np.array([0, 0, -1, -1], np.int32), np.full(4, 9, np.int32), np.full(4, 100, np.int32)
    )
    rows = replace(rows, task=np.array([7, 8, 7, 8], np.uint64))
    adapter_id = rows.adapters[0].adapter_id
    lengths = {
        (adapter_id, 7): AnswerLengths.of([(1000, 20_000, False)]),
        (None, 8): AnswerLengths.of([(1000, 70_000, False)]),
    }
    learned = replace(settings_for(tiny_llama), lengths=lengths)
    assert prediction.expected_tokens(learned, rows) == pytest.approx([20, 50, 50, 70], rel=0.05)
    assert prediction.guesses_lengths(learned, rows)
    assert prediction.known_adapters(learned, rows) == 2
    of_known = rows.part(np.array([0, 3]))
    assert not prediction.guesses_lengths(learned, of_known)
    assert prediction.known_adapters(learned, of_known.part(np.array([0]))) == 1


def test_rare_tasks_of_an_adapter_are_one_group(tiny_llama: Path) -> None:
    """Rows that each have a system message of their own."""
    count = 300
    rows = make_workload(
        make_adapters([8]),
        np.zeros(count, np.int32),
        np.full(count, 9, np.int32),
        np.full(count, 100, np.int32),
    )
    rows = replace(rows, task=np.maximum(np.arange(count), 100).astype(np.uint64) + np.uint64(1))
    keys, group = prediction.answer_groups(rows)
    adapter_id = rows.adapters[0].adapter_id
    assert len(keys) == MOST_TASKS + 1
    assert keys[group[0]] == (adapter_id, 101), "the task of 101 rows is one by itself"
    assert np.bincount(group)[keys.index((adapter_id, OTHER_TASKS))] == count - 101 - (MOST_TASKS - 1)
    learned = replace(
        settings_for(tiny_llama), lengths={(adapter_id, OTHER_TASKS): AnswerLengths.of([(1000, 20_000, False)])}
    )
    assert prediction.expected_tokens(learned, rows)[[0, -1]] == pytest.approx([50, 20], rel=0.05)


def test_lengths_are_a_guess_where_nothing_says_how_long_an_answer_is(tiny_llama: Path) -> None:
    rows = make_workload(
        make_adapters([8]), np.array([-1, 0], np.int32), np.full(2, 9, np.int32), np.full(2, 100, np.int32)
    )
    settings, adapter_id = settings_for(tiny_llama), rows.adapters[0].adapter_id
    learned = replace(settings, lengths={(adapter_id, 0): AnswerLengths.of([(1000, 20_000, False)])})
    assert prediction.guesses_lengths(settings, rows)
    assert prediction.guesses_lengths(learned, rows), "nothing is known of the base model"
    assert not prediction.guesses_lengths(learned, replace(rows, fixed_tokens=np.array([7, 0], np.int32)))
    of_all = learned.lengths | {(None, 0): AnswerLengths.of([(9, 90, False)])}
    assert not prediction.guesses_lengths(replace(learned, lengths=of_all), rows)
    assert not prediction.guesses_lengths(replace(settings, length_share=1.0), rows)


@pytest.mark.parametrize("max_tokens", [3, 5, 9, 13])
def test_a_plan_takes_no_less_than_its_bound_where_half_of_max_tokens_is_no_whole_number(
    max_tokens: int, tiny_llama: Path
) -> None:
    rows = make_workload((), np.full(640, -1, np.int32), np.full(640, 20, np.int32), np.full(640, max_tokens, np.int32))
    settings = replace(settings_for(tiny_llama), migrates=False)
    assert (
        prediction.forecast(settings, rows, 2, max_rows=1000).predicted_s >= prediction.bound(settings, rows, 2).seconds
    )
