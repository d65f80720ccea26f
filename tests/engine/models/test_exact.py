"""Mode `exact` is refused where it would promise nothing, and what it promises less is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_bases import with_attention

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.exact import check_exact_on_cpu, check_exact_on_gpu, is_arithmetic_fixed
from lorabatch.kernels.native import native_build, native_function
from lorabatch.kernels.packed_weight import onednn

compiled = pytest.mark.skipif(native_build() is None, reason="compiled kernels were not built on this machine")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lorabatch.kernels.native._library", lambda: None)
    native_function.cache_clear()
    yield
    native_function.cache_clear()


@compiled
def test_with_compiled_kernels_there_is_nothing_to_say(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    Engine(tiny_llama, EngineConfig(mode="exact", device="cpu", pool_bytes=1 << 20))
    assert not caplog.records


@compiled
def test_heads_that_torch_attends_to_are_reported(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = with_attention(read_model_config(tiny_llama), head_dim=40)
    check_exact_on_cpu(model)
    assert "heads of 40 numbers" in caplog.text
    assert not is_arithmetic_fixed(model)


@pytest.mark.usefixtures("without_kernels")
def test_without_compiled_kernels_less_is_promised_and_without_onednn_nothing(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(mode="exact", device="cpu", pool_bytes=1 << 20)
    Engine(tiny_llama, config)
    (said,) = [record for record in caplog.records if "mode='exact'" in record.message]
    assert said.levelno == logging.WARNING
    assert "give engine_threads" in said.message
    monkeypatch.setattr("lorabatch.kernels.packed_weight.has_onednn", lambda: False)
    with pytest.raises(EngineError, match="C compiler"):
        Engine(tiny_llama, config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"base_quantization": "fp8"}, "base_quantization='fp8': must be 'none'.* or use another mode"),
        ({"tensor_parallel": 2}, "tensor_parallel=2: must be 1.* or another mode"),
    ],
)
def test_gpu_kernels_refuse_what_rounds_by_other_rows(settings: dict[str, Any], problem: str) -> None:
    check_exact_on_gpu(EngineConfig(mode="exact"))
    with pytest.raises(EngineError, match=f"^mode='exact', {problem}"):
        check_exact_on_gpu(EngineConfig(mode="exact", **settings))


def test_gpu_kernels_share_prompt_beginnings_in_mode_exact(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorabatch.engine.runner.backend.fix_products", lambda: None)
    modes: tuple[Literal["exact", "unmerged"], ...] = ("exact", "unmerged")
    for mode in modes:
        engine = Engine(tiny_llama, EngineConfig(mode=mode, device="cpu", kernels="triton", pool_bytes=1 << 20))
        assert engine.backend.is_arithmetic_fixed == (mode == "exact")


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_onednn_rounds_alike_for_any_number_of_rows(num_threads: int) -> None:
    """What stands in for compiled kernels."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    weight = onednn.OneDnnWeight(torch.randn(960, 576, generator=generator))
    x = torch.randn(130, 576, generator=generator)
    try:
        torch.set_num_threads(num_threads)
        whole = weight.multiply(x, None)
        for num_rows in (1, 2, 3, 4, 15, 16, 17, 33, 64, 100):
            assert torch.equal(weight.multiply(x[:num_rows].clone(), None), whole[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)
