"""The layout read from a configuration is that of the model transformers builds from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorabatch.engine.adapter.base_layout import base_layout
from lorabatch.engine.config import read_model_config


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
