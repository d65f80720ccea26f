"""A base in floating point numbers of 8 bits: GPU kernels give what the CPU's decoder gives with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import Oracle, prompts, register_all, serve, weights_sha256

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.decoder import Decoder
from lorabatch.engine.models.gguf.blocks import Weight
from lorabatch.engine.models.weight_cache import Packed
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import Backend, CpuBackend
from lorabatch.kernels.launch import is_interpreted

CONFIG: dict[str, Any] = {"max_batch_rows": 8, "max_step_tokens": 64, "page_tokens": 4, "pool_bytes": 8 << 20}
# Triton's interpreter on CPU tensors, or with TRITON_INTERPRET=0 a GPU that multiplies in 8 bits
ON_DEVICE: dict[str, Any] = {"device": "cpu", "kernels": "triton"} if is_interpreted() else {"device": "cuda"}


class _Twin(CpuBackend):
    """The CPU's decoder over weights of 8 bits, multiplied by torch."""

    def load(self, model_folder: Path) -> tuple[dict[str, Weight], Packed]:
        return Backend.load(self, model_folder)

    def build_decoder(self, weights: dict[str, Weight], packed: Packed) -> Decoder:
        decoder = Decoder(self.model, weights, self.dtype, products=None)
        for layer in decoder.layers:
            for linear in layer.linears.values():
                linear.quantize()
        return decoder


@pytest.fixture
def adapters(
    tiny_llama: Path, tiny_adapters: dict[str, Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> dict[str, Path]:
    """One that runs unmerged, and one that is exact by merge only."""
    dora = make_adapter(tmp_path / "dora", tiny_llama, seed=9, use_dora=True)
    return {"rank20": tiny_adapters["rank20"], "dora": dora}


def answers(engine: Engine, adapters: dict[str, Path]) -> dict[str, Result]:
    """One prompt with every adapter and with none."""
    served = {"base": None} | register_all(engine, adapters)
    sampling = SamplingParams(max_tokens=2, logprobs=True, ignore_eos=True)
    return serve(engine, [Request(name, prompts(1, 300)[0], served[name], sampling) for name in served])


@pytest.mark.long
def test_gpu_kernels_serve_a_base_of_8_bits(tiny_llama: Path, adapters: dict[str, Path]) -> None:
    engine = Engine(tiny_llama, EngineConfig(base_quantization="fp8", **CONFIG, **ON_DEVICE))
    linears = [linear for layer in engine.backend.decoder.layers for linear in layer.linears.values()]
    assert not any(linear.has_buffer for linear in linears), "every layer is held in 8 bits"
    before = weights_sha256(engine)
    found = answers(engine, adapters)
    expected = answers(Engine(tiny_llama, EngineConfig(device="cpu", **CONFIG), make_backend=_Twin), adapters)
    for name, result in found.items():
        assert (result.error, result.mode) == (None, expected[name].mode)
        # one number that falls on the other side of a middle changes others by hundredths
        assert result.token_logprobs[0] == pytest.approx(expected[name].token_logprobs[0], abs=0.05)
    engine.switch_weights(None)
    assert weights_sha256(engine) == before, "the base is whole after a merge"


@pytest.mark.long
def test_products_of_8_bits_are_near_those_of_fp32(tiny_llama: Path, adapters: dict[str, Path]) -> None:
    engine = Engine(tiny_llama, EngineConfig(device="cpu", **CONFIG), make_backend=_Twin)
    oracle, served = Oracle(tiny_llama, adapters), {"base": None} | register_all(engine, adapters)
    errors = []
    for i, prompt in enumerate(prompts(12, 300)):
        name = list(served)[i % len(served)]
        logits = oracle.logits(prompt, None if name == "base" else name)
        sampling = SamplingParams(max_tokens=1, logprobs=True, ignore_eos=True)
        [result] = serve(engine, [Request("row", prompt, served[name], sampling)]).values()
        [token], spread = result.token_ids, float(logits.std())
        errors.append(abs(float(logits.log_softmax(-1)[token]) - result.token_logprobs[0]) / spread)
    assert torch.tensor(errors).mean() < 0.3, errors
