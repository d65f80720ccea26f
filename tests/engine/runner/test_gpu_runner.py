"""Running ahead of the host: padding, pending tokens, late ends, and steps by graphs."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft_oracle import register_all
from safetensors.torch import load_file, save_file

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.model_config.partition import Partition
from lorabatch.engine.parallel.collectives import shared_memory
from lorabatch.engine.parallel.device_sums import DeviceSums
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import GpuBackend, MakeBackend, choose_backend
from lorabatch.engine.runner.gpu_graphs import GraphKey, StepExecutor
from lorabatch.engine.runner.gpu_runner import GpuRunner
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.paged_attention.libraries import PromptAttention, attend_by_flashinfer, attend_by_varlen
from lorabatch.scheduler.batchers.batching import Batcher, BatchView, StepPlan
from lorabatch.tests.kernels.test_prompt_attention import Wrapper, varlen

PROMPT = (5, 6, 7, 8, 9)


def make_engine(
    folder: Path, batcher: Batcher | None = None, make_backend: MakeBackend = choose_backend, **config: Any
) -> Engine:
    settings: dict[str, Any] = {"max_batch_rows": 12, "max_step_tokens": 64, "page_tokens": 4, "pool_bytes": 4 << 20}
    settings |= {"device": "cpu", "mode": "unmerged", "uses_prefix_cache": False}
    return Engine(folder, EngineConfig(**(settings | config)), batcher, make_backend)


def device_engine(
    folder: Path, batcher: Batcher | None = None, make_backend: MakeBackend = choose_backend, **config: Any
) -> Engine:
    on_device = {"kernels": "triton"} if is_interpreted() else {"device": "cuda", "dtype": "float32"}
    return make_engine(folder, batcher, make_backend, **on_device, **config)


def with_runner(kind: type[GpuRunner]) -> MakeBackend:
    """A backend whose steps a runner of this kind computes."""

    class Backend(GpuBackend):
        def runner(self, live: Any, memory: Any, layout: Any, config: Any, stop_tokens: Any) -> GpuRunner:
            return kind(self.decoder, live, memory, layout, config, stop_tokens, self.executor())

    return Backend


def as_part(kind: type[GpuRunner]) -> MakeBackend:
    """The same as the only member of a group, which adds up with itself."""

    def make(folder: Path, config: EngineConfig, model: ModelConfig) -> GpuBackend:
        partition = Partition(model, 1, 0)
        sums = DeviceSums(partition, torch.device("cpu"))
        sums.connect(shared_memory("rendezvous", 0))

        class Backend(GpuBackend):
            def runner(self, live: Any, memory: Any, layout: Any, config: Any, stop_tokens: Any) -> GpuRunner:
                settings = self.decoder, live, memory, layout, config, stop_tokens, self.executor()
                return kind(*settings, share=sums.share)

        return Backend(folder, config, model, sums)

    return make


def rows(count: int, **sampling: Any) -> list[Request]:
    return [Request(f"{i}", (*PROMPT, i + 3), None, SamplingParams(**sampling), i) for i in range(count)]


def by_id(results: list[Result]) -> dict[str, Result]:
    return {result.request_id: result for result in results}


@pytest.mark.long
def test_rows_beside_a_merged_adapter_take_it_out_again(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    names = ["rank8", "rank20"]
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    found = {}
    for kind in ("unmerged", "mixture"):
        if kind == "unmerged":
            engine = make_engine(tiny_llama)
        else:
            engine = device_engine(tiny_llama, MergesFirst(), mode="auto")
        ids = register_all(engine, {name: tiny_adapters[name] for name in names})
        adapters = [None, *ids.values()]
        requests = [Request(f"{i}", (*PROMPT, i + 3), adapters[i % 3], sampling) for i in range(6)]
        found[kind] = by_id(list(engine.run(requests)))
    tokens = {kind: {key: result.token_ids for key, result in results.items()} for kind, results in found.items()}
    assert tokens["mixture"] == tokens["unmerged"]
    assert [found["mixture"][f"{i}"].mode for i in range(3)] == ["mixture", "merged", "mixture"]


@pytest.mark.long
def test_rows_with_rules_have_the_answers_of_a_cpu_beside_rows_that_run_ahead(tiny_llama: Path) -> None:
    options: list[dict[str, Any]] = [
        {"regex": "[a-c]{2,4}"}, {}, {"repetition_penalty": 1.5, "logprobs": True}, {},
        {"choice": ("yes", "no"), "min_tokens": 6}, {"min_tokens": 3, "temperature": 0.8},
    ]  # fmt: skip
    asked = [
        replace(row, sampling=replace(row.sampling, **o)) for row, o in zip(rows(6, max_tokens=6), options, strict=True)
    ]
    expected = by_id(list(make_engine(tiny_llama).run(asked)))
    engine = device_engine(tiny_llama)
    found = by_id(list(engine.run(asked)))
    assert {name: (r.text, r.finish_reason) for name, r in found.items()} == {
        name: (r.text, r.finish_reason) for name, r in expected.items()
    }
    assert found["2"].token_logprobs == pytest.approx(expected["2"].token_logprobs, abs=1e-4)


class MergesFirst:
    """Merges the first adapter and serves all rows beside it."""

    def __call__(self, view: BatchView) -> StepPlan:
        all_rows = np.ones(len(view.running_adapter), bool)
        return StepPlan("mixture", 0, all_rows, np.arange(len(view.waiting_adapter)))


class Noting(StepExecutor):
    """Runs at once, as the interpreter must, and notes which graphs a GPU would have had."""

    def __init__(self) -> None:
        self.keys: list[GraphKey] = []

    def run(self, key: GraphKey, work: Any) -> None:
        self.keys.append(key)
        super().run(key, work)


class Replaying(StepExecutor):
    """Runs the first work of each key again and again, as a graph does: what the host knows of later steps is not in
    it."""

    def __init__(self) -> None:
        self.works: dict[GraphKey, Callable[[], None]] = {}
        self.runs: list[GraphKey] = []

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        self.runs.append(key)
        self.works.setdefault(key, work)()

    def forget(self) -> None:
        self.works.clear()


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "[a-c]{5,9}", "ignore_eos": False, "logprobs": True},
        pytest.param({"repetition_penalty": 1.5, "temperature": 0.8}, marks=pytest.mark.long),
        pytest.param({"top_logprobs": 2, "logprobs": True}, marks=pytest.mark.long),
    ],
)
def test_rows_beside_one_that_asks_for_more_keep_their_graph(
    tiny_llama: Path, tiny_adapters: dict[str, Path], asked: dict[str, Any]
) -> None:
    """All steps but the prompts' run by graphs, and those with that row by ones that end with logits."""
    graphs, launched = Replaying(), list[int]()

    class Runner(GpuRunner):
        def launch(self, entries: Any) -> LaunchedStep:
            launched.append(sum(entry.is_decode for entry in entries))
            return super().launch(entries)

    class Backend(GpuBackend):
        def runner(self, live: Any, memory: Any, layout: Any, config: Any, rules: Any) -> GpuRunner:
            return Runner(self.decoder, live, memory, layout, config, rules, graphs)

    found = []
    for engine in (device_engine(tiny_llama, make_backend=Backend), make_engine(tiny_llama)):
        ids = [None, *register_all(engine, {"rank1": tiny_adapters["rank1"]}).values()]
        requests = [replace(row, adapter_id=ids[i % 2]) for i, row in enumerate(rows(4, max_tokens=6, ignore_eos=True))]
        requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, seed=3, **asked))
        found.append(by_id(list(engine.run(requests))))
    assert {key: r.token_ids for key, r in found[0].items()} == {key: r.token_ids for key, r in found[1].items()}
    for name, result in found[0].items():
        assert result.error is None
        assert result.token_logprobs == pytest.approx(found[1][name].token_logprobs, abs=1e-4)
    assert len(graphs.runs) == sum(count > 0 for count in launched)
    kinds = [key.chooses for key in graphs.runs]
    assert kinds.count(False) >= 2, "steps with that row"
    assert "top_logprobs" in asked or kinds.count(True) >= 2, "steps between, without it"


@pytest.mark.long
def test_a_padded_bucket_gives_what_the_rows_alone_give(tiny_llama: Path) -> None:
    noting = Noting()

    class Backend(GpuBackend):
        def executor(self) -> Noting:
            return noting

    engine = device_engine(tiny_llama, make_backend=Backend)
    requests = [*rows(8, max_tokens=2, ignore_eos=True), *rows(9, max_tokens=3, ignore_eos=True)[8:]]
    found = by_id(list(engine.run(requests)))
    expected = by_id(list(make_engine(tiny_llama).run(requests)))
    assert {key: r.token_ids for key, r in found.items()} == {key: r.token_ids for key, r in expected.items()}
    keys = [GraphKey(10, False, False, chooses=True), GraphKey(1, False, False, chooses=True)]
    assert noting.keys == keys, "9 rows run in a bucket of 10"


@pytest.mark.long
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_decode_rows_beside_prompts_keep_their_graph_and_their_tokens(
    tiny_llama: Path, tiny_adapters: dict[str, Path], temperature: float
) -> None:
    """Prompts of 30 tokens in steps of 12: rows that decode are launched by themselves, and fed by both launches."""
    noting = Noting()

    class Backend(GpuBackend):
        def executor(self) -> Noting:
            return noting

    names = ["rank1", "rank20"]
    found = []
    for engine in (device_engine(tiny_llama, make_backend=Backend, max_step_tokens=12), make_engine(tiny_llama)):
        ids = [None, *register_all(engine, {name: tiny_adapters[name] for name in names}).values()]
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=temperature, seed=7, logprobs=True)
        requests = [Request(str(i), PROMPT * (1 if i < 3 else 6), ids[i % 3], sampling, i) for i in range(5)]
        found.append(by_id(list(engine.run(requests))))
        engine.check_integrity()
    assert {key: r.token_ids for key, r in found[0].items()} == {key: r.token_ids for key, r in found[1].items()}
    for key, result in found[0].items():
        assert result.token_logprobs == pytest.approx(found[1][key].token_logprobs, abs=1e-4)
    assert {key.draws for key in noting.keys} == {temperature > 0}
    assert len(noting.keys) >= 8, "steps with and without prompts have their decode rows in a graph"


def test_the_next_step_is_launched_before_the_last_is_read(tiny_llama: Path) -> None:
    calls: list[str] = []

    class Noted(GpuRunner):
        def launch(self, entries: Any) -> LaunchedStep:
            calls.append("launch")
            made = super().launch(entries)
            return LaunchedStep(made.sampled, lambda: (calls.append("read"), made.read())[1])  # type: ignore[func-returns-value]

    make = with_runner(Noted)
    ahead = list(device_engine(tiny_llama, make_backend=make).run(rows(1, max_tokens=3, ignore_eos=True)))
    assert calls == ["launch", "launch", "read", "launch", "read", "read"]
    calls.clear()
    behind = device_engine(tiny_llama, make_backend=make, launches_ahead=False)
    assert list(behind.run(rows(1, max_tokens=3, ignore_eos=True))) == ahead
    assert calls == ["launch", "read"] * 3


def test_a_row_that_ends_early_costs_one_row_of_one_step_and_no_token(tiny_llama: Path) -> None:
    """The second token of row 0 ends it, the host learns of it when the third is being computed."""
    whole = by_id(list(make_engine(tiny_llama).run(rows(2, max_tokens=5, ignore_eos=True))))
    stop = next(c for c in whole["0"].text[1:] if c not in whole["0"].text[0])
    requests = [*rows(1, max_tokens=5, ignore_eos=True, stop=(stop,)), rows(2, max_tokens=5, ignore_eos=True)[1]]
    expected_engine, engine = make_engine(tiny_llama), device_engine(tiny_llama)
    expected, found = by_id(list(expected_engine.run(requests))), by_id(list(engine.run(requests)))
    assert expected["0"].finish_reason == "stop"
    assert found == expected
    engine.check_integrity()
    assert engine.telemetry().pages_used == 0
    assert engine.telemetry().generated_tokens == expected_engine.telemetry().generated_tokens


def test_a_row_taken_out_in_flight_leaves_nothing_and_may_come_again(tiny_llama: Path) -> None:
    engine = device_engine(tiny_llama)
    requests = rows(2, max_tokens=4, ignore_eos=True)
    expected = by_id(list(make_engine(tiny_llama).run(requests)))
    engine.add(requests)
    engine.step()
    engine.step()
    engine.abort(["0"])
    engine.add([requests[0]])
    found: list[Result] = []
    while engine.num_unfinished:
        found += engine.step()
        engine.check_integrity()
    assert by_id(found) == expected


@pytest.mark.long
def test_rows_that_grow_and_lose_their_pages_generate_what_they_would_with_all_memory(tiny_llama: Path) -> None:
    """A whole row takes 8 pages and enters with 5: four of them fill the pool, and two can stay to the end."""
    asked = rows(5, max_tokens=24, ignore_eos=True, stop=("what no row says",))
    page_bytes = 2048
    engine = device_engine(tiny_llama, pool_bytes=20 * page_bytes)
    engine.add(asked)
    results: list[Result] = []
    while engine.num_unfinished:
        results += engine.step()
        engine.check_integrity()
    assert engine.num_preempted > 0
    expected = by_id(list(make_engine(tiny_llama).run(asked)))
    assert {key: r.token_ids for key, r in by_id(results).items()} == {key: r.token_ids for key, r in expected.items()}


def test_rows_share_prefixes_page_by_page(tiny_llama: Path) -> None:
    shared = tuple(range(5, 25))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [Request(str(i), (*shared, i + 3), None, sampling) for i in range(3)]
    engine = device_engine(tiny_llama, uses_prefix_cache=True)
    engine.add(requests)
    found, pages = [], []
    while engine.num_unfinished:
        found += engine.step()
        engine.check_integrity()
        pages.append(engine.telemetry().pages_used)
    assert by_id(found) == by_id(list(make_engine(tiny_llama).run(requests)))
    assert [by_id(found)[str(i)].reused_prompt_tokens for i in range(3)] == [0, 20, 20]
    assert engine.telemetry().reused_prompt_tokens == 2 * 20
    assert pages[:2] == [3 * 6, 5 + 3], "a row enters with six pages of four tokens, five of them become shared"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns
def test_a_row_whose_numbers_overflow_is_an_error_and_the_rows_beside_it_go_on(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    huge = tmp_path / "huge"
    shutil.copytree(tiny_adapters["rank1"], huge)
    tensors = load_file(huge / "adapter_model.safetensors")
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, huge / "adapter_model.safetensors")
    engine = device_engine(tiny_llama)
    (bad_id,) = register_all(engine, {"huge": huge}).values()
    good = rows(2, max_tokens=3, ignore_eos=True)
    bad = Request("bad", PROMPT, bad_id, SamplingParams(max_tokens=3, temperature=1.0))
    results = by_id(list(engine.run([good[0], bad, good[1]])))
    expected = by_id(list(make_engine(tiny_llama).run(good)))
    assert "NaN or infinite" in (results["bad"].error or "")
    assert {key: results[key].token_ids for key in expected} == {key: r.token_ids for key, r in expected.items()}


@pytest.mark.long
@pytest.mark.parametrize("library", ["varlen", pytest.param("flashinfer", marks=pytest.mark.long)])
def test_a_library_s_attention_over_prompts_gives_the_same_tokens(
    tiny_llama: Path, tiny_adapters: dict[str, Path], library: str
) -> None:
    """By its twin on the CPU: prompts that are cut into steps, some beside decoding rows."""
    found_in: list[int] = []

    class Backend(GpuBackend):
        def prompt_attention(self, layout: Any, config: Any) -> PromptAttention:
            def noted(query: Any, *rest: Any, **options: Any) -> Any:
                found_in.append(len(query))
                return varlen(query, *rest, **options)

            noted.__signature__ = inspect.signature(varlen)  # type: ignore[attr-defined]
            if library == "varlen":
                return partial(attend_by_varlen, noted)
            return partial(attend_by_flashinfer, cache(lambda _rule: Wrapper()), torch.float32)

    tokens = []
    engines = (
        make_engine(tiny_llama, max_step_tokens=16),
        device_engine(tiny_llama, None, Backend, max_step_tokens=16),
    )
    for engine in engines:
        ids = [None, *register_all(engine, {"rank8": tiny_adapters["rank8"]}).values()]
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        requests = [Request(f"{i}", tuple(range(3, 9 + 7 * i)), ids[i % 2], sampling, i) for i in range(3)]
        tokens.append({key: result.token_ids for key, result in by_id(list(engine.run(requests))).items()})
    assert tokens[0] == tokens[1]
    assert found_in or library != "varlen"
