"""Layers computed in one call have the bits of layers computed one kernel after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from peft_oracle import make_engine, prompts, register_all, serve

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.compiled_layers import CompiledLayers
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.kernels.decoder_layers import DecoderLayers
from lorabatch.kernels.native import native_build
from lorabatch.kernels.packed_weight import can_multiply
from lorabatch.scheduler.batchers.batching import BatchView, StepPlan

pytestmark = pytest.mark.skipif(native_build() is None, reason="compiled kernels were not built on this machine")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "phi3": {"sliding_window": 20},
}
FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "base_quantization": "int8"},
}


class Mixing:
    """A batcher that keeps one adapter merged and mixes rows of others in."""

    def __call__(self, view: BatchView) -> StepPlan:
        admit = np.arange(min(view.max_batch_rows - len(view.running_adapter), len(view.waiting_adapter)))
        return StepPlan("mixture", 1, np.ones(len(view.running_adapter), bool), admit)


def answers(engine: Engine, adapters: dict[str, Path]) -> dict[str, Result]:
    served = [None, *register_all(engine, adapters).values()]
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=5, logprobs=True, ignore_eos=True)
    rows = [
        Request(f"{i}", p, served[i % len(served)], params)
        for i, p in enumerate(prompts(4 * len(served), engine.model.vocab_size, seed=2))
    ]
    return serve(engine, rows)


def bits(results: dict[str, Result]) -> dict[str, Any]:
    return {key: (result.token_ids, result.token_logprobs) for key, result in results.items()}


def both(
    make: Callable[[], Engine], adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, dict[str, Any], dict[str, Any], list[int]]:
    """An engine that computes layers in one call, its answers, those of one that does not, and layers of each call."""
    engine, layers = make(), list[int]()
    compiled = DecoderLayers.forward_

    def counted(self: DecoderLayers, x: torch.Tensor, num_layers: int, *rest: Any) -> None:
        layers.append(num_layers)
        compiled(self, x, num_layers, *rest)

    monkeypatch.setattr(DecoderLayers, "forward_", counted)
    in_one = bits(answers(engine, adapters))
    alone = make()
    alone.backend.decoder.compiled_layers = None
    num_calls = len(layers)
    one_by_one = bits(answers(alone, adapters))
    assert len(layers) == num_calls, "layers were to be computed one by one"
    return engine, in_one, one_by_one, layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("products", FORMATS)
def test_answers_have_the_same_bits(
    family: str, products: Any, tmp_path: Path, make_model: Any, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_multiply(products):
        pytest.skip(f"this processor has no instructions for products in {products}")
    folder = make_model(tmp_path / "model", family, **FAMILIES[family])
    adapters = {
        "all": make_adapter(tmp_path / "all", folder, seed=1, r=4),
        "some": make_adapter(tmp_path / "some", folder, seed=2, r=6, target_modules=["o_proj", "down_proj"]),
    }
    engine, in_one, one_by_one, layers = both(
        lambda: make_engine(folder, "unmerged", **FORMATS[products]), adapters, monkeypatch
    )
    assert in_one == one_by_one
    num_layers = engine.model.num_layers
    assert set(layers) == {num_layers, num_layers - 1}, "steps of prompts leave the last layer, others do not"


def test_rows_beside_a_merged_adapter_have_the_same_bits(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the base and of others takes the merged adapter back: a second table, over the first."""
    config = EngineConfig(mode="auto", max_batch_rows=8, max_step_tokens=24, pool_bytes=4 << 20)
    _, in_one, one_by_one, layers = both(lambda: Engine(tiny_llama, config, Mixing()), tiny_adapters, monkeypatch)
    assert in_one == one_by_one
    assert layers


def test_weights_that_are_replaced_are_those_of_the_next_step(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, in_one, one_by_one, layers = both(lambda: make_engine(tiny_llama, "merged"), tiny_adapters, monkeypatch)
    assert in_one == one_by_one
    assert layers


def test_weights_that_are_replaced_are_freed_before_the_next_step(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_llama, "merged")
    first, second = list(register_all(engine, tiny_adapters).values())[:2]
    serve(engine, [Request("row", (5, 6, 7), first, SamplingParams(max_tokens=3, ignore_eos=True))])
    layer = engine.backend.decoder.layers[0].linears["qkv"]
    merged = ref(layer.packed)
    engine.switch_weights(second)
    assert merged() is None, "two adapters' merged weights would be in memory at once"


def test_a_bias_that_is_gone_is_not_read(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, "unmerged")
    linear = engine.backend.decoder.layers[0].linears["o"]
    found = []
    for value in (None, 0.5, None):
        linear.bias = None if value is None else torch.full((linear.shape[0],), value)
        found.append(bits(answers(engine, {})))
    assert found[0] != found[1]
    assert found[0] == found[2]


def test_threads_change_nothing(tiny_llama: Path, tiny_adapters: dict[str, Path]) -> None:
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(bits(answers(make_engine(tiny_llama, "unmerged"), tiny_adapters)))
    finally:
        torch.set_num_threads(num_threads)
    assert found[0] == found[1] == found[2]


def test_families_with_other_layers_are_computed_one_by_one(tmp_path: Path, make_model: Any) -> None:
    for family in ("gemma", "opt"):
        engine = make_engine(make_model(tmp_path / family, family), "unmerged")
        assert engine.backend.decoder.compiled_layers is None
    assert isinstance(make_engine(make_model(tmp_path / "llama")).backend.decoder.compiled_layers, CompiledLayers)
