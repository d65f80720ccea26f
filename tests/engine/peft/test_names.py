"""Tensor names: every form that PEFT and its users write, and nothing else.

The layout read from a configuration is that of the model transformers builds from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft.names import RENAMINGS, TensorName, base_layout, choose_renaming, parse_name

Q = "model.layers.0.self_attn.q_proj"
E = "model.embed_tokens"


@pytest.mark.parametrize(
    ("rest", "role", "adapter", "parameter"),
    [
        (f"{Q}.lora_A.weight", "lora_a", None, None),
        (f"{Q}.lora_A.default.weight", "lora_a", "default", None),
        (f"{Q}.lora_B.weight", "lora_b", None, None),
        (f"{Q}.lora_B.my-adapter_2.weight", "lora_b", "my-adapter_2", None),
        (f"{Q}.lora_B.bias", "lora_b_bias", None, None),
        (f"{Q}.lora_B.default.bias", "lora_b_bias", "default", None),
        (f"{E}.lora_embedding_A", "embedding_a", None, None),
        (f"{E}.lora_embedding_B.default", "embedding_b", "default", None),
        (f"{Q}.lora_magnitude_vector", "magnitude", None, None),
        (f"{Q}.lora_magnitude_vector.weight", "magnitude", None, None),
        (f"{Q}.lora_magnitude_vector.default.weight", "magnitude", "default", None),
        (f"{Q}.lora_magnitude_vector.default", "magnitude", "default", None),
        (f"{E}.token_adapter.trainable_tokens_delta", "token_rows", None, None),
        (f"{E}.token_adapter.trainable_tokens_delta.default", "token_rows", "default", None),
        (f"{E}.token_adapter.base_layer.weight", "saved_base", None, "weight"),
        (f"{Q}.base_layer.bias", "saved_base", None, "bias"),
        (f"{E}.weight", "saved", None, "weight"),
        (f"{Q}.bias", "saved", None, "bias"),
        (f"{E}.modules_to_save.weight", "saved_copy", None, "weight"),
        (f"{E}.modules_to_save.default.weight", "saved_copy", "default", "weight"),
        (f"{E}.original_module.weight", "original", None, "weight"),
    ],
)
@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model._orig_mod."])
def test_a_known_form_names_module_and_role(
    prefix: str, rest: str, role: str, adapter: str | None, parameter: str | None
) -> None:
    module = Q if rest.startswith(Q) else E
    assert parse_name(prefix + rest) == TensorName(prefix + rest, module, role, adapter, parameter)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key",
    [
        f"{Q}.lora_A",
        f"{Q}.lora_A.weight.more",
        f"{Q}.lora_C.weight",
        f"{Q}.lora_diag.default",
        f"{Q}.lora_monteclora_sampler.default.std",
        f"{Q}.lora_A.a.b.weight",
        f"{Q}.base_layer.lora_A.weight",
        f"{E}.token_adapter.trainable_tokens_original.default",
        "prompt_embeddings",
        "prompt_encoder.default.embedding.weight",
        "weight",
        "",
        f"{Q}.running_mean",
    ],
)
def test_any_other_form_is_unknown(key: str) -> None:
    assert parse_name(f"base_model.model.{key}") is None
    assert parse_name(key) is None


BASE_MODULES = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)] + ["model.embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("model.layers.2.self_attn.q_proj", 0),
        ("model.language_model.layers.2.self_attn.q_proj", 1),
        ("language_model.model.layers.2.self_attn.q_proj", 2),
        ("language_model.layers.2.self_attn.q_proj", 3),
        ("layers.2.self_attn.q_proj", 4),
    ],
)
def test_a_decoder_that_went_by_other_names_is_recognised(trained: str, expected: int) -> None:
    renaming = choose_renaming([trained, "lm_head"], BASE_MODULES)
    assert renaming == RENAMINGS[expected]
    assert renaming.to_base(trained) == "model.layers.2.self_attn.q_proj"
    assert renaming.to_trained("model.layers.2.self_attn.q_proj") == trained


def test_names_of_a_gpt2_without_its_head_begin_below_transformer() -> None:
    base = ["transformer.wte", "transformer.h.0.attn.c_attn", "transformer.h.11.mlp.c_proj", "lm_head"]
    for names in (["h.0.attn.c_attn", "h.11.mlp.c_proj"], ["wte", "h.0.attn.c_attn"], ["h.11.mlp.c_proj", "lm_head"]):
        renaming = choose_renaming(names, base)
        assert [renaming.to_trained(renaming.to_base(name)) for name in names] == names
        assert {renaming.to_base(name) for name in names} <= set(base)
    assert choose_renaming(base, base) == RENAMINGS[0]


def test_names_that_fit_nothing_are_left_as_they_are() -> None:
    assert choose_renaming(["transformer.h.0.attn.c_attn"], BASE_MODULES) == RENAMINGS[0]
    assert choose_renaming([], BASE_MODULES) == RENAMINGS[0]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_names_and_shapes_are_those_of_the_model(bases: Any, family: str, is_tied: bool) -> None:
    base = bases(family, is_tied)
    expected = {name: tuple(tensor.shape) for name, tensor in base.model.state_dict().items()}
    layout = base_layout(base.config)
    assert dict(layout.parameters) == expected
    assert layout.is_tied is is_tied
    assert layout.vocab_size == 32


@pytest.mark.parametrize("settings", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_asked_for_in_the_configuration_are_listed(tmp_path: Path, settings: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, vocab_size=32, **settings
    )
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(tmp_path)
    assert dict(base_layout(read_model_config(tmp_path)).parameters) == expected


def test_modules_own_parameters_and_embedding_head_and_linear_layers_are_adaptable(llama: Any) -> None:
    layout = base_layout(llama.config)
    assert "model.norm" in layout.modules
    assert len(layout.modules) == len(set(layout.modules)) == 21
    assert set(layout.adaptable) == {module for module in layout.modules if "norm" not in module}
    assert layout.batched == set(layout.linear) - {"lm_head"}
