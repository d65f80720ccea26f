"""Rows whose prompts begin alike compute the beginning once and answer as if each were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams

PAGE_TOKENS = 16
SYSTEM_PROMPT = tuple(3 + i * 7 % 200 for i in range(50))  # three whole pages and two tokens


def make_engine(model: Path, **config: object) -> Engine:
    settings = {"max_batch_rows": 8, "max_step_tokens": 64, "pool_bytes": 2 << 20, "mode": "unmerged"} | config
    return Engine(model, EngineConfig(page_tokens=PAGE_TOKENS, num_threads=1, **settings))  # type: ignore[arg-type]


def register(engine: Engine, folder: Path) -> str:
    content = audit_adapter(folder, engine.model, folder.name).identity_sha256
    assert content is not None
    engine.register_adapter(content, folder)
    return content


def rows(adapter_ids: list[str | None], count: int, first: int = 0) -> list[Request]:
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=True)
    return [
        Request(f"{a}-{i}", (*SYSTEM_PROMPT, 5 + i, 9, 11 + i), adapter_id, sampling)
        for a, adapter_id in enumerate(adapter_ids)
        for i in range(first, first + count)
    ]


def serve(engine: Engine, requests: list[Request]) -> dict[str, Result]:
    engine.add(requests)
    results: dict[str, Result] = {}
    while engine.num_unfinished:
        results |= {result.request_id: result for result in engine.step()}
        engine.check_integrity()
    return results


def assert_equal(found: dict[str, Result], expected: dict[str, Result]) -> None:
    assert found.keys() == expected.keys()
    for key, result in expected.items():
        assert found[key].token_ids == result.token_ids, key
        assert found[key].token_logprobs == pytest.approx(result.token_logprobs, abs=1e-4), key


@pytest.fixture(scope="module")
def adapter(tiny_adapters: dict[str, Path]) -> Path:
    return tiny_adapters["rank8"]


@pytest.mark.parametrize("mode", ["unmerged", "merged"])
def test_a_shared_beginning_is_computed_once_for_each_adapter(tiny_llama: Path, adapter: Path, mode: Mode) -> None:
    engine = make_engine(tiny_llama, mode=mode)
    requests = rows([None, register(engine, adapter)], 6)
    alone = make_engine(tiny_llama, mode=mode, uses_prefix_cache=False)
    register(alone, adapter)
    together, apart = serve(engine, requests), serve(alone, requests)
    assert_equal(together, apart)
    telemetry = engine.telemetry()
    assert telemetry.reused_prompt_tokens == 2 * 5 * 3 * PAGE_TOKENS
    assert sorted(result.reused_prompt_tokens or 0 for result in together.values()) == [0] * 2 + [48] * 10
    assert {result.reused_prompt_tokens for result in apart.values()} == {0}
    assert telemetry.prompt_tokens + telemetry.reused_prompt_tokens == alone.telemetry().prompt_tokens
    assert telemetry.prefix_hit_rate == pytest.approx(480 / (12 * 53))
    assert alone.telemetry().prefix_hit_rate == 0


def test_rows_that_come_later_find_what_is_still_in_memory(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    serve(engine, rows([None], 2))
    serve(engine, rows([None], 1, first=2))
    assert engine.telemetry().reused_prompt_tokens == 2 * 3 * PAGE_TOKENS


def test_equal_prompts_of_two_adapters_share_nothing(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = make_engine(tiny_llama)
    ids = [register(engine, tiny_adapters[name]) for name in ("rank1", "rank8", "rank64")]
    serve(engine, rows([None, *ids], 1))
    assert engine.telemetry().reused_prompt_tokens == 0


def test_the_last_token_of_a_prompt_is_computed_even_when_all_its_pages_are_there(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = SYSTEM_PROMPT[: 3 * PAGE_TOKENS]
    results = serve(engine, [Request(f"{i}", prompt, None, sampling) for i in range(3)])
    assert len({result.token_ids for result in results.values()}) == 1
    assert engine.telemetry().reused_prompt_tokens == 2 * 2 * PAGE_TOKENS


def test_shared_pages_leave_before_a_row_is_refused(tiny_llama: Path) -> None:
    # 8 pages: a row takes 4, so its beginning cannot stay beside two rows
    engine = make_engine(tiny_llama, pool_bytes=8 * 8192)
    assert engine.telemetry().pages_total == 8
    alone = make_engine(tiny_llama, uses_prefix_cache=False)
    requests = rows([None], 6)
    assert_equal(serve(engine, requests), serve(alone, requests))
    large = SamplingParams(max_tokens=128 - 53 + 1, ignore_eos=True)
    engine.add([Request("large", (*SYSTEM_PROMPT, 5, 9, 11), None, large), *rows([None], 2)])
    engine.step()
    assert engine.telemetry().num_running == 1
    assert engine.telemetry().pages_used == 8


def test_aborted_rows_wait_for_no_page(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, max_batch_rows=2)
    requests = rows([None], 6)
    engine.add(requests)
    engine.step()
    engine.abort([request.request_id for request in requests])
    engine.check_integrity()
    assert engine.num_unfinished == 0


def test_angles_that_depend_on_length_share_nothing(make_model: Callable[..., Path], tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    stretched = make_model(tmp_path / "dynamic", rope_parameters=scaling)
    engine = make_engine(stretched)
    serve(engine, rows([None], 3))
    assert engine.telemetry().reused_prompt_tokens == 0
