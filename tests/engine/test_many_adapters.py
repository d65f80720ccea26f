"""More adapters than the pool holds: every row right, each adapter read and loaded once, memory for exact ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lorabatch.engine.adapter_use import AdapterUse
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, Result, SamplingParams

NUM_ADAPTERS = 60
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> ModelConfig:
    return read_model_config(tiny_llama)


@pytest.fixture(scope="module")
def folders(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of ranks 1 to 8 that change answers thoroughly."""
    root = tmp_path_factory.mktemp("many")
    return [
        write_random_adapter(root / f"{i}", model, 1 + i % 8, seed=i, deviations=(0.2, 0.2))
        for i in range(NUM_ADAPTERS)
    ]


@pytest.fixture(scope="module")
def requests(folders: list[Path], model: ModelConfig) -> list[Request]:
    """Three rows for each adapter, adapters in turn."""
    ids = [audit_adapter(folder, model, folder.name).identity_sha256 for folder in folders]
    return [
        Request(f"{turn}-{i}", (5, 6 + turn, 7, 8 + i), adapter_id, SAMPLING)
        for turn in range(3)
        for i, adapter_id in enumerate(ids)
    ]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, folders: list[Path], requests: list[Request]) -> dict[str, Result]:
    """Every row by itself in an engine with room for all."""
    engine = make_engine(tiny_llama, folders, requests, pool_bytes=16 << 20)
    return {request.request_id: next(iter(engine.run([request]))) for request in requests}


def make_engine(model_folder: Path, folders: list[Path], requests: list[Request], **config: object) -> Engine:
    settings = {"max_batch_rows": 8, "mode": "unmerged"} | config
    engine = Engine(model_folder, EngineConfig(num_threads=1, **settings))  # type: ignore[arg-type]
    for folder, request in zip(folders, requests, strict=False):
        assert request.adapter_id is not None
        engine.register_adapter(request.adapter_id, folder)
    return engine


def serve(engine: Engine, requests: list[Request]) -> dict[str, Result]:
    engine.add(requests)
    results: dict[str, Result] = {}
    while engine.num_unfinished:
        results |= {result.request_id: result for result in engine.step()}
        engine.check_integrity()
    return results


def assert_right(results: dict[str, Result], expected: dict[str, Result]) -> None:
    assert results.keys() == expected.keys()
    for key, result in results.items():
        assert result.error is None, result.error
        assert result.token_ids == expected[key].token_ids, key
        assert result.token_logprobs == pytest.approx(expected[key].token_logprobs, abs=1e-3), key


def test_a_pool_that_holds_few_loads_each_adapter_once(
    tiny_llama: Path, folders: list[Path], requests: list[Request], expected: dict[str, Result]
) -> None:
    # 40 pages of 8 KiB: eight rows of one page, and about eight adapters of one to seven pages
    engine = make_engine(tiny_llama, folders, requests, pool_bytes=40 * 8192)
    assert_right(serve(engine, requests), expected)
    telemetry = engine.telemetry()
    assert len(telemetry.resident_adapter_ids) < 16
    assert telemetry.adapters.loads == telemetry.adapters.disk_reads == NUM_ADAPTERS
    assert telemetry.adapters.stall_s > 0
    assert len({result.token_ids for result in expected.values()}) > NUM_ADAPTERS, "adapters change the answers"


@pytest.mark.parametrize("has_host_tier", [True, False])
def test_an_adapter_that_left_the_pool_comes_back_from_host_memory(
    tiny_llama: Path,
    folders: list[Path],
    requests: list[Request],
    expected: dict[str, Result],
    has_host_tier: bool,
) -> None:
    host_tier_bytes = 1 << 20 if has_host_tier else 0
    engine = make_engine(tiny_llama, folders, requests, pool_bytes=40 * 8192, host_tier_bytes=host_tier_bytes)
    first, second = (
        requests[:24],
        [replace(request, request_id=f"again-{i}") for i, request in enumerate(requests[:24])],
    )
    serve(engine, first)
    results = serve(engine, second)
    assert_right(results, {r.request_id: expected[requests[i].request_id] for i, r in enumerate(second)})
    reads = engine.telemetry().adapters.disk_reads
    assert reads == 24 if has_host_tier else reads > 40
    assert engine.telemetry().adapters.loads > 40


def test_an_adapter_that_cannot_be_read_ahead_costs_its_rows_when_their_turn_comes(
    tiny_llama: Path, folders: list[Path], requests: list[Request], expected: dict[str, Result], tmp_path: Path
) -> None:
    gone = shutil.copytree(folders[9], tmp_path / "gone")
    engine = make_engine(tiny_llama, [*folders[:9], gone, *folders[10:20]], requests)
    shutil.rmtree(gone)
    results = serve(engine, requests[:20])
    refused = results.pop("0-9")
    assert refused.finish_reason == "error"
    assert_right(results, {key: expected[key] for key in results})
    assert len(results) == 19


def test_a_hundred_small_adapters_and_a_large_one_take_what_they_hold(
    tiny_llama: Path, model: ModelConfig, tmp_path: Path
) -> None:
    folders = [write_random_adapter(tmp_path / f"{i}", model, 256 if i == 100 else 8, seed=i) for i in range(101)]
    ids = [audit_adapter(folder, model, folder.name).identity_sha256 for folder in folders]
    requests = [Request(f"{i}", (5, 6, 7), adapter_id, SAMPLING) for i, adapter_id in enumerate(ids)]
    engine = make_engine(tiny_llama, folders, requests, pool_bytes=16 << 20)
    serve(engine, requests)
    telemetry = engine.telemetry()
    assert len(telemetry.resident_adapter_ids) == 101
    page_bytes = page_layout(model, 16, 4).page_elements * 4
    per_rank = sum(sum(shape) for name, shape in model.linear_shapes().items() if name != "lm_head") * 4
    assert telemetry.pages_used * page_bytes <= 1.1 * (100 * 8 + 256) * per_rank


def test_500_adapters_enter_a_fragmented_pool_without_waiting_while_pages_are_free(tiny_llama: Path) -> None:
    """No two free pages lie side by side but for those of a row; the pool has room for all adapters."""
    found = []
    for is_fragmented in (True, False):
        config = EngineConfig(
            num_threads=1,
            mode="unmerged",
            load_format="dummy",
            max_batch_rows=50,
            pool_bytes=12_000 * 8192,
            host_tier_bytes=0,
        )
        engine = Engine(tiny_llama, config)
        ids = [engine.register_dummy_adapter(f"{i}", 1 + i % 8) for i in range(500)]
        pool = engine._batch.pool
        needed = sum(max(1, engine._registry.num_pages[adapter_id]) for adapter_id in ids)
        if is_fragmented:
            for page in range(2 * needed):
                pool.allocate(("other", page), 1)
            pool.allocate(("other", -1), pool.num_free - 200)
            for page in range(0, 2 * needed, 2):
                pool.release(("other", page))
            assert pool.num_free == needed + 200
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.add(Request(f"{i}", (5, 6, 7), adapter_id, sampling) for i, adapter_id in enumerate(ids))
        tokens: dict[str, tuple[int, ...]] = {}
        num_calls = 0
        while engine.num_unfinished:
            tokens |= {result.request_id: result.token_ids for result in engine.step()}
            num_calls += 1
        engine.check_integrity()
        said = engine.telemetry()
        assert said.num_steps == num_calls, "no step is left without rows"
        assert said.adapters.loads == said.adapters.disk_reads == len(said.resident_adapter_ids) == 500
        found.append(tokens)
    assert found[0] == found[1]


def test_what_adapters_cost_adds_up(
    tiny_llama: Path, folders: list[Path], requests: list[Request], expected: dict[str, Result]
) -> None:
    """A pool for a few adapters; a clock that ticks a second each time it is asked."""
    seconds = iter(range(1 << 30))
    config = EngineConfig(
        num_threads=1, mode="unmerged", max_batch_rows=8, pool_bytes=40 * 8192, host_tier_bytes=1 << 20
    )
    engine = Engine(tiny_llama, config, clock=lambda: float(next(seconds)))
    for folder, request in zip(folders, requests, strict=False):
        assert request.adapter_id is not None
        engine.register_adapter(request.adapter_id, folder, folder.name)
    engine.add(requests[: 2 * NUM_ADAPTERS])
    while engine.num_unfinished:
        engine.step()
        said = engine.telemetry()
        held = sum(engine._registry.num_pages[adapter_id] for adapter_id in said.resident_adapter_ids)
        assert said.adapter_pages == held <= said.pages_used
    use = said.adapters
    assert use.step_s >= said.num_steps
    assert use.loads == use.disk_reads + use.host_loads
    assert use.loads + use.pool_hits == 2 * NUM_ADAPTERS, "each row found its adapter, or it was loaded for it"
    assert (use.lora_steps, use.step_adapters) == (said.steps.num_lora_steps, said.steps.num_adapters)
    assert use.present_row_s >= said.steps.decode_rows > 0
    assert use.page_s == said.pages_total * use.step_s
    assert 0 < use.adapter_page_s < use.page_s
    assert use.adapter_page_s + use.row_page_s + use.prefix_page_s <= use.page_s
    assert said.host_tier_used_bytes <= said.host_tier_bytes == 1 << 20
    assert use.since(use) == AdapterUse()
    assert AdapterUse().since(use) == AdapterUse(), "an engine that starts again counts from zero"
    assert use + AdapterUse(peer_fetches=2) == replace(use, peer_fetches=2)
