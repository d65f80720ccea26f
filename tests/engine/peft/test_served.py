"""Every kind of adapter in one mixed batch through the real engine, row by row equal to PEFT."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from peft_oracle import last_logits, weights_sha256

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.kernels.packed_weight import can_multiply

NUM_TOKENS = 6
ZOO: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {"layers.1.*": 9},
    },
    "one layer": {"layers_to_transform": [1], "target_modules": ["v_proj", "up_proj"]},
    "dora": {"use_dora": True, "target_modules": "all-linear"},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "o_proj", "lm_head"]},
    "bias": {"bias": "all", "target_modules": ["q_proj", "o_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding and head, tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "saved head and norms": {"modules_to_save": ["lm_head", "norm"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved block": {"modules_to_save": ["mlp", "k_proj"]},
    "tokens": {"trainable_token_indices": [7, 30, 31, 32]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": list(range(40, 60))}},
    "larger vocabulary": {"vocab_size": 331},
    "larger vocabulary, adapted": {"vocab_size": 325, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
}


@torch.no_grad()
def check_row(trained: Any, prompt: tuple[int, ...], result: Any, model: Any) -> None:
    """The row's greedy tokens and their log-probabilities are PEFT's."""
    tokens = [*prompt, *result.token_ids]
    expected = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert result.finish_reason == "length", result.error
    for step, (token, logprob) in enumerate(zip(result.token_ids, result.token_logprobs, strict=True)):
        best = float(expected[step].max())
        assert abs(float(expected[step, token]) - best) < 1e-3, f"{trained}: token {step} is not the likeliest"
        assert abs(logprob - best) < 1e-3, f"{trained}: log-probability of token {step}"


@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_a_mixed_batch_of_every_kind_equals_peft_row_by_row(
    served_base: Any, train: Any, family: str, is_tied: bool
) -> None:
    base = served_base(family, is_tied)
    zoo = {name: train(base, name=name, **settings) for name, settings in ZOO.items()}
    options = EngineConfig(mode="auto", max_batch_rows=8, max_step_tokens=32, pool_bytes=4 << 20)
    engine = Engine(base.folder, options)
    models: dict[str, tuple[str | None, Any]] = {"base": (None, base.model)}
    for name, trained in zoo.items():
        audit = trained.audit()
        assert audit.content_sha256, audit.reasons
        engine.register_adapter(audit.content_sha256, trained.folder, name)
        models[name] = (audit.content_sha256, trained.model)
    dice = random.Random(5)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, logprobs=True, ignore_eos=True)
    shared = tuple(dice.randrange(3, 320) for _ in range(20))  # the same prompt must not share a cache
    prompts = {f"{i} {name}": (*shared, 5 + i) for i in range(2) for name in models}
    requests = [Request(key, prompt, models[key.partition(" ")[2]][0], sampling) for key, prompt in prompts.items()]
    dice.shuffle(requests)
    engine.add(requests)
    results = {}
    while engine.num_unfinished:
        results |= {result.request_id: result for result in engine.step()}
        engine.check_integrity()
    assert results.keys() == prompts.keys()
    for key, prompt in prompts.items():
        check_row(key, prompt, results[key], models[key.partition(" ")[2]][1])
    assert {results[f"0 {name}"].mode for name in ("dora", "tokens", "larger vocabulary")} == {"merged"}


@pytest.mark.long
@pytest.mark.skipif(not can_multiply("bfloat16"), reason="this processor has no instructions for products in bf16")
@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_in_bf16_logits_of_every_kind_are_as_near_to_fp32_as_those_of_peft(
    served_base: Any, train: Any, family: str, is_tied: bool
) -> None:
    base = served_base(family, is_tied)
    engine = Engine(base.folder, EngineConfig(dtype="bfloat16", max_batch_rows=8, pool_bytes=4 << 20))
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 320) for _ in range(dice.randint(1, 24))) for _ in range(12)]
    errors: dict[str, tuple[float, float]] = {}
    for name, settings in ZOO.items():
        trained = train(base, name=name, **settings)
        adapter_id = trained.audit().content_sha256
        engine.register_adapter(adapter_id, trained.folder, name)
        expected = [logits_after(trained.model, prompt) for prompt in prompts]
        rounded = trained.model.bfloat16()
        theirs = [logits_after(rounded, prompt) for prompt in prompts]
        ours = [last_logits(engine, prompt, adapter_id)[: len(expected[0])] for prompt in prompts]
        errors[name] = mean_error(ours, expected), mean_error(theirs, expected)
    assert all(ours <= theirs for ours, theirs in errors.values()), errors


@torch.no_grad()
def logits_after(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1].float()
    return logits


def mean_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Mean distance of logits from those expected, relative to these."""
    distances = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    return sum(distances) / len(distances)


def test_a_merge_that_fails_half_way_leaves_the_base_as_it_was(served_base: Any, train: Any) -> None:
    import numpy as np

    from lorabatch.engine.errors import AdapterUnusableError

    base = served_base("llama", True)
    trained = train(base, target_modules="all-linear")
    tensors = trained.tensors()
    for key, value in tensors.items():
        if "layers.1.mlp.down_proj" in key:
            tensors[key] = value * np.float32(1e25)
    trained.write(tensors)
    engine = Engine(base.folder, EngineConfig(pool_bytes=4 << 20))
    before = weights_sha256(engine)
    adapter_id = trained.audit().content_sha256
    engine.register_adapter(adapter_id, trained.audit().folder)
    with pytest.raises(AdapterUnusableError, match=r"layers\.1\.mlp\.down_proj\.weight merged in .* is not finite"):
        engine.switch_weights(adapter_id)
    assert weights_sha256(engine) == before
    assert engine.telemetry().mode == "base"
