"""Engines whose linear layers multiply in bf16 or in 8 bits: what they promise is what engines in fp32 promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import Oracle, last_logits, make_engine, prompts, register_all, serve, weights_sha256

from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.kernels.packed_weight import Products, can_multiply

FORMATS: dict[Products, dict[str, Any]] = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"base_quantization": "int8"}}


@pytest.fixture(params=list(FORMATS))
def products(request: pytest.FixtureRequest) -> Products:
    chosen: Products = request.param
    if not can_multiply(chosen):
        pytest.skip(f"this processor has no instructions for products in {chosen}")
    return chosen


@pytest.fixture
def adapters(tiny_llama: Path, tiny_adapters: dict[str, Path], make_adapter: Any, tmp_path: Path) -> dict[str, Path]:
    """Some that run unmerged, and one that is exact by merge only."""
    return tiny_adapters | {"dora": make_adapter(tmp_path / "dora", tiny_llama, seed=9, use_dora=True)}


def rows_for(engine: Engine, adapters: dict[str, Path], **sampling: Any) -> list[Request]:
    served = [None, *register_all(engine, adapters).values()]
    params = SamplingParams(max_tokens=6, logprobs=True, ignore_eos=True, **sampling)
    texts = prompts(3 * len(served), 300)
    return [Request(f"row-{i}", text, served[i % len(served)], params) for i, text in enumerate(texts)]


def bits(results: dict[str, Result]) -> dict[str, Any]:
    return {key: (result.token_ids, result.token_logprobs) for key, result in results.items()}


@pytest.mark.parametrize("mode", ["exact", "unmerged"])
def test_a_row_has_the_same_bits_alone_and_in_company(
    products: Products, mode: Any, tiny_llama: Path, adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_llama, mode, **FORMATS[products])
    rows = rows_for(engine, adapters, temperature=0.7, seed=3)
    together = bits(serve(engine, rows))
    alone = make_engine(tiny_llama, mode, max_batch_rows=1, **FORMATS[products])
    register_all(alone, adapters)
    assert bits(serve(alone, rows)) == together


def test_the_base_is_whole_after_rows_of_an_adapter_that_must_be_merged(
    products: Products, tiny_llama: Path, adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_llama, **FORMATS[products])
    before = weights_sha256(engine)
    for adapter_id in [*register_all(engine, adapters).values(), None]:
        engine.switch_weights(adapter_id)
    assert weights_sha256(engine) == before


def test_logits_are_near_those_of_fp32(products: Products, tiny_llama: Path, adapters: dict[str, Path]) -> None:
    """bf16: no further than transformers and PEFT in bf16. 8 bits: by a few hundredths of their spread."""
    engine = make_engine(tiny_llama, **FORMATS[products])
    ids = register_all(engine, adapters)
    oracle, rounded = Oracle(tiny_llama, adapters), Oracle(tiny_llama, adapters, torch.bfloat16)
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i, prompt in enumerate(prompts(24, 300)):
        adapter = [None, *adapters][i % (1 + len(adapters))]
        expected = oracle.logits(prompt, adapter)
        ours = last_logits(engine, prompt, None if adapter is None else ids[adapter])
        errors["ours"].append(float((ours - expected).norm() / expected.norm()))
        errors["theirs"].append(float((rounded.logits(prompt, adapter).float() - expected).norm() / expected.norm()))
    mean = {name: sum(found) / len(found) for name, found in errors.items()}
    assert mean["ours"] <= mean["theirs"] if products == "bfloat16" else mean["ours"] < 0.08, mean
