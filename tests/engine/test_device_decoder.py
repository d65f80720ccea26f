"""The whole engine on GPU kernels gives the CPU engine's tokens: prompts in chunks, decoding, adapters, families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lorabatch.engine.engine as engine_module
from lorabatch.engine.adapter import audit_adapter
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.device_adapters import DeviceAdapters
from lorabatch.engine.device_decoder import DeviceDecoder, DeviceMemory
from lorabatch.engine.device_step import DeviceLimits, DeviceStep, build_device_step
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, Result, SamplingParams

CONFIG = EngineConfig(
    max_batch_rows=8, max_step_tokens=24, page_tokens=4, pool_bytes=8 << 20, device="cpu", mode="unmerged"
)


def on_kernels(engine: Engine, monkeypatch: pytest.MonkeyPatch, steps: list[DeviceStep]) -> None:
    """Let `engine` prepare and run its steps as on a GPU; they are noted in `steps`."""
    model, decoder = engine.model, engine._decoder
    num_pages = engine._batch.pool.num_pages
    limits = DeviceLimits.of(CONFIG.max_step_tokens, num_pages, CONFIG.page_tokens)
    adapters = DeviceAdapters(engine._memory, model, max_residents=4, max_chunks=400)
    memory = DeviceMemory.allocate(model, adapters.table, limits, CONFIG.page_tokens)
    for scratch in (memory.scratch, memory.partials.values, memory.partials.stats):
        scratch.fill_(torch.nan)

    def prepare(entries: Any, model: Any, layout: Any, dtype: torch.dtype) -> DeviceStep:
        steps.append(build_device_step(entries, model, layout, adapters, limits))
        return steps[-1]

    monkeypatch.setattr(engine_module, "build_step", prepare)
    decoder.__class__ = DeviceDecoder
    monkeypatch.setattr(decoder, "forward", lambda step, pool: decoder.forward_step(step, memory))


def requests(adapter_ids: list[str | None], max_tokens: int = 2) -> list[Request]:
    """Rows of different lengths, one longer than a step."""
    lengths = [5, 26, 1, 9, 4]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=True)
    return [
        Request(str(i), tuple((7 * i + 3 * j) % 250 for j in range(lengths[i % 5])), adapter_id, sampling, i)
        for i, adapter_id in enumerate(adapter_ids)
    ]


def run(
    folder: Path, adapters: dict[str, Path], rows: list[Request], prepare: Callable[[Engine], object]
) -> list[Result]:
    engine = Engine(folder, CONFIG)
    for adapter_id, path in adapters.items():
        engine.register_adapter(adapter_id, path)
    prepare(engine)
    results = sorted(engine.run(rows), key=lambda result: int(result.request_id))
    engine.check_integrity()
    return results


def assert_equal(found: list[Result], expected: list[Result]) -> None:
    assert [r.error for r in found] == [None] * len(found)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, list[Path]], list[DeviceStep]]:
    """`compare(model_folder, adapter_folders)`: the same rows on both engines; returns the device's steps."""

    def check(folder: Path, adapters: list[Path]) -> list[DeviceStep]:
        model = read_model_config(folder)
        ids = {audit_adapter(path, model, path.name).content_sha256 or "": path for path in adapters}
        rows = requests([None, *ids])
        steps: list[DeviceStep] = []
        expected = run(folder, ids, rows, lambda engine: None)
        with monkeypatch.context() as patch:
            found = run(folder, ids, rows, lambda engine: on_kernels(engine, patch, steps))
        assert_equal(found, expected)
        return steps

    return check


def test_many_adapters_and_the_base_in_one_batch(
    tiny_llama: Path, tiny_adapters: dict[str, Path], compare: Callable[..., list[DeviceStep]]
) -> None:
    steps = compare(tiny_llama, list(tiny_adapters.values()))
    residents = {tile.plus for step in steps for tile in step.segments.tiles_list()}
    assert residents == {-1, 0, 1, 2, 3}
    assert any(len(step.token_ids) == CONFIG.max_step_tokens for step in steps), "no prompt came in chunks"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"head_dim": 20}),
        ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("phi3", {}),
    ],
)
def test_families_with_other_norms_ropes_windows_and_activations(
    family: str,
    settings: dict[str, Any],
    tmp_path: Path,
    make_model: Callable[..., Path],
    make_adapter: Callable[..., Path],
    compare: Callable[..., list[DeviceStep]],
) -> None:
    folder = make_model(tmp_path / "base", family, **settings)
    compare(folder, [make_adapter(tmp_path / "adapter", folder, r=20)])
