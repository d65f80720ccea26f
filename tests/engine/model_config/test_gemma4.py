"""Gemma 4 beyond its logits: memory of layers that share keys, adapters with tensors that nothing reads, and what is
refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.errors import EngineError, ModelFilesError
from lorabatch.engine.memory.limits import cpu_limits, cpu_memory, weight_bytes
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.model_config import parse_model_config
from lorabatch.engine.models.load import stored_weights
from lorabatch.engine.peft import audit_adapter

SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 16,
}


@pytest.fixture(scope="module")
def gemma(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gemma4") / "model", "gemma4_text", **SIZES)


def test_layers_that_share_keys_take_no_memory_for_them(gemma: Path) -> None:
    model = read_model_config(gemma)
    sources = [layer.attention.source for layer in model.layers if layer.attention is not None]
    assert sources == [None, None, None, None, 2, 3]
    assert model.key_places == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1))
    layout = page_layout(model, 16, 4)
    assert layout.page_elements == 16 * 2 * (2 * 2 * 16 + 2 * 2 * 32)
    assert layout.row_pages == 0


def test_memory_is_planned_for_the_inputs_of_layers(gemma: Path) -> None:
    """In published models their table is larger than all else."""
    model = read_model_config(gemma)
    num_bytes = (gemma / "model.safetensors").stat().st_size
    limits = cpu_limits(0, EngineConfig(pool_bytes=1 << 20), model, 4)
    planned = cpu_memory(EngineConfig(), model, limits, num_bytes).weights
    assert not model.is_tied
    assert planned == pytest.approx(num_bytes, rel=0.05)
    assert weight_bytes(model, 4) == pytest.approx(num_bytes, rel=0.05)


def test_keys_that_a_checkpoint_has_for_such_layers_do_not_matter(gemma: Path, tmp_path: Path) -> None:
    shutil.copytree(gemma, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    own = tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors | {"model.layers.4.self_attn.k_proj.weight": own.clone()}, path, {"format": "pt"})
    model = read_model_config(tmp_path / "model")
    assert stored_weights(tmp_path / "model", model).keys() == stored_weights(gemma, model).keys()
    save_file(tensors | {"model.layers.3.self_attn.other.weight": own.clone()}, path, {"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"layers\.3\.self_attn\.other\.weight: not part of"):
        stored_weights(tmp_path / "model", model)


@pytest.mark.parametrize("is_whole", [False, True])
def test_tensors_of_adapters_for_such_layers_are_passed_over_and_counted(
    is_whole: bool, gemma: Path, make_adapter: Callable[..., Path], tmp_path: Path, compare: Any
) -> None:
    """As transformers passes them over; whether names begin as the text model's or as the whole model's do."""
    adapter = make_adapter(tmp_path / "adapter", gemma, r=4, target_modules=["q_proj", "k_proj", "down_proj"])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for role, shape in (("lora_A", (4, 64)), ("lora_B", (32, 4))):
        tensors[f"base_model.model.model.layers.4.self_attn.k_proj.{role}.weight"] = torch.randn(shape)
    if is_whole:
        tensors = {key.replace(".model.layers", ".model.language_model.layers"): x for key, x in tensors.items()}
    expected_of = compare.model(gemma, adapter)
    save_file(tensors, path)
    engine = compare.engine(gemma)
    audit = audit_adapter(adapter, engine.model, "adapter")
    assert audit.verdict == "exact"
    note = "2 tensors are of a layer that reads the keys and values of an earlier one, and are not used"
    assert note in audit.notes
    assert audit.num_tower_tensors == 0
    prompt = compare.prompt(30, engine)
    compare.equal_everywhere(engine, prompt, compare.generate(expected_of, prompt), compare.register(engine, adapter))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"enable_moe_block": True}, "enable_moe_block=True"),
    "attention to later tokens": ({"use_bidirectional_attention": "all"}, "each token sees those before it"),
    "too many shared layers": ({"num_kv_shared_layers": 5}, "a layer of each type before those that share"),
    "key heads that do not divide": (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "divisor of num_attention_heads=4, not 3"
    ),
    "few tokens with inputs": ({"vocab_size_per_layer_input": 8}, "vocab_size_per_layer_input=8"),
    "other sizes of single layers": (
        {"per_layer_config": {"1": {"hidden_size": 3}}}, "head_dim and num_key_value_heads alone"
    ),
    "heads that differ within a type": (
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}, "5": {"head_dim": 32}}},
        "the same heads in each layer of full_attention",
    ),
    "a rotation of more than all": (
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}},
        "partial_rotary_factor.*at most 1.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(case: str, gemma: Path) -> None:
    settings, message = REFUSED[case]
    raw = json.loads((gemma / "config.json").read_text())
    own_sizes = {key: value for key, value in raw.items() if key != "per_layer_config"}
    with pytest.raises((EngineError, ModelFilesError), match=f"(?s)config.json.*{message}"):
        parse_model_config(own_sizes | {"global_head_dim": 32} | settings, {})


def test_single_layers_of_other_families_have_no_sizes_of_their_own(tiny_llama: Path) -> None:
    raw = json.loads((tiny_llama / "config.json").read_text())
    with pytest.raises(EngineError, match=r"per_layer_config=.*sizes of single layers are read in Gemma 4 alone"):
        parse_model_config(raw | {"per_layer_config": {"1": {"head_dim": 32}}}, {})
