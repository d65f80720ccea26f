"""Back ends: which one an engine gets, and that an engine with another serves the same rows."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import POOL_BYTES, prompts, register_all, serve

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.memory.packed import PackedAdapter
from lorabatch.engine.memory.registry import AdapterRegistry
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.backend import (
    CpuBackend,
    GpuBackend,
    MakeBackend,
    backend_type,
    choose_device,
    choose_formats,
    gpu_loader_threads,
)
from lorabatch.kernels.packed_weight import can_multiply

CPU = torch.device("cpu")


def tokens(model: Path, adapters: dict[str, Path], make_backend: MakeBackend) -> dict[str, tuple[int, ...]]:
    """Greedy tokens of rows that begin alike, over the base and two adapters, in a pool with little room."""
    config = EngineConfig(
        max_batch_rows=4, max_step_tokens=24, pool_bytes=POOL_BYTES // 8, device="cpu", mode="unmerged"
    )
    engine = Engine(model, config, make_backend=make_backend)
    ids = [None, *register_all(engine, {name: adapters[name] for name in ("rank8", "rank20")}).values()]
    start = tuple(range(5, 25))
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    ends = prompts(12, engine.model.vocab_size)
    rows = [Request(f"{i}", start + end[:9], ids[i % len(ids)], sampling) for i, end in enumerate(ends)]
    results = serve(engine, rows)
    assert [result.error for result in results.values()] == [None] * len(rows)
    return {key: result.token_ids for key, result in results.items()}


@pytest.mark.parametrize(
    ("config", "device"),
    [
        (EngineConfig(), torch.device("cuda", 0)),
        (EngineConfig(device="cuda"), torch.device("cuda")),
        (EngineConfig(device="cpu", kernels="triton"), CPU),
    ],
)
def test_triton_kernels_without_triton_are_refused_with_what_to_install(
    config: EngineConfig, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    with pytest.raises(EngineError, match=rf"device='{config.device}': engines on GPUs need .*pip install triton"):
        backend_type(config, device)
    assert backend_type(EngineConfig(), CPU) is CpuBackend


@pytest.mark.parametrize(
    "changes",
    [{"run_pages": 1}, {"has_lora_panels": False}, {"reads_other_rows": True}, {"run_pages": 7}],
    ids=lambda changes: next(iter(changes)),
)
def test_memory_and_batching_follow_the_traits_of_the_kernels(
    tiny_llama: Path, tiny_adapters: dict[str, Path], changes: dict[str, Any]
) -> None:
    other = type("Other", (CpuBackend,), changes)
    assert tokens(tiny_llama, tiny_adapters, other) == tokens(tiny_llama, tiny_adapters, CpuBackend)


def test_a_pool_without_room_for_a_page_is_refused_with_both_sizes(tiny_llama: Path) -> None:
    with pytest.raises(EngineError, match="pool_bytes=10: one page of this model takes 8192 bytes"):
        Engine(tiny_llama, EngineConfig(device="cpu", pool_bytes=10))


def test_a_cpu_computes_in_fp32_but_for_linear_layers_if_it_is_asked_to() -> None:
    for asked, products in (("auto", "float32"), ("bfloat16", "bfloat16")):
        if can_multiply(products):
            config = EngineConfig(device="cpu", dtype=asked)
            assert choose_device(config) == CPU
            assert choose_formats(config, CPU) == (torch.float32, products, getattr(torch, products))
    if can_multiply("int8"):
        config = EngineConfig(device="cpu", base_quantization="int8")
        assert choose_formats(config, CPU) == (torch.float32, "int8", torch.bfloat16)
    interpreted = EngineConfig(device="cpu", dtype="bfloat16", kernels="triton")
    assert choose_formats(interpreted, CPU) == (torch.bfloat16, None, torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(device="cpu", dtype="float16"), "dtype='float16': this processor multiplies float32 only"),
        (EngineConfig(device="cpu", dtype="bfloat16"), "dtype='bfloat16': this processor .* AVX512_BF16"),
        (EngineConfig(device="cpu", base_quantization="int8"), "'int8': .* neither AVX512_VNNI nor AVX_VNNI"),
        (
            EngineConfig(device="cpu", base_quantization="int8", dtype="float16"),
            "dtype='float16': this processor multiplies float32 only",
        ),
        (
            EngineConfig(device="cpu", base_quantization="int8", kernels="triton"),
            "base_quantization='int8': served on CPUs only",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_format_that_would_be_slow_in_silence_is_refused(
    config: EngineConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.kernels.packed_weight.has_dots", lambda products: False)
    with pytest.raises(EngineError, match=message):
        choose_formats(config, CPU)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)], ids=lambda c: f"{c[0]}.{c[1]}")
def test_products_of_8_bits_need_a_gpu_that_has_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_capability", lambda device: capability),
        ("get_device_name", lambda device: "A GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    config = EngineConfig(device="cuda", base_quantization="fp8")
    device = choose_device(config)
    assert device == torch.device("cuda", 0)
    if capability < (8, 9):
        with pytest.raises(EngineError, match=r"'fp8': A GPU does not multiply in 8-bit .* 8\.9 and later"):
            choose_formats(config, device)
        return
    assert choose_formats(config, device) == (torch.bfloat16, None, torch.bfloat16)
    with pytest.raises(EngineError, match="'fp8', dtype='float16': products of 8 bits give bfloat16"):
        choose_formats(replace(config, dtype="float16"), device)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="dtype='int8': must be auto, float32, bfloat16, float16"):
        choose_formats(EngineConfig(device="cpu", dtype="int8"), CPU)


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorabatch.engine.runner.backend.is_interpreted", lambda: True)
    assert backend_type(EngineConfig(kernels="triton"), CPU) is GpuBackend
    assert backend_type(EngineConfig(), CPU) is CpuBackend
    assert backend_type(EngineConfig(), torch.device("cuda")) is GpuBackend
    monkeypatch.setattr("lorabatch.engine.runner.backend.is_interpreted", lambda: False)
    with pytest.raises(EngineError, match="TRITON_INTERPRET=1"):
        backend_type(EngineConfig(kernels="triton"), CPU)


@pytest.mark.parametrize(
    ("num_cores", "num_engines", "expected"), [(16, 1, 8), (192, 8, 8), (32, 8, 2), (64, 1, 8), (2, 1, 1), (1, 8, 1)]
)
def test_engines_on_gpus_read_adapters_with_half_of_their_share_of_the_cores(
    num_cores: int, num_engines: int, expected: int
) -> None:
    assert gpu_loader_threads(num_cores, num_engines) == expected


def test_an_engine_reads_adapters_in_as_many_threads_as_its_backend_says(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three adapters are read only when three threads read at the same time."""
    together = threading.Barrier(3)
    load_packed = AdapterRegistry.load_packed

    def load_together(self: AdapterRegistry, adapter_id: str) -> PackedAdapter:
        together.wait(timeout=60)
        return load_packed(self, adapter_id)

    class ThreeThreads(CpuBackend):
        loader_threads = 3

    monkeypatch.setattr(AdapterRegistry, "load_packed", load_together)
    config = EngineConfig(max_batch_rows=4, max_step_tokens=24, pool_bytes=POOL_BYTES, device="cpu", mode="unmerged")
    engine = Engine(tiny_llama, config, make_backend=ThreeThreads)
    ids = register_all(engine, {name: tiny_adapters[name] for name in ("rank1", "rank8", "rank20")})
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    rows = [Request(name, (1, 2, 3), adapter_id, sampling) for name, adapter_id in ids.items()]
    assert all(result.error is None for result in engine.run(rows))
    engine.close()
