"""Tiny random base models of every family that is served, made by transformers: cases for tests over families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.model import ModelConfig

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2, "max_position_embeddings": 128}
# case -> family, and what its config.json says beyond the sizes that all share
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama tied": (
        "llama",
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e5}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral windowed": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 32, "hidden_act": "gelu", "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "phi3": ("phi3", {"sliding_window": 20}),
    "opt": ("opt", {**OPT, "tie_word_embeddings": True}),
    "opt with projections": ("opt", {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "opt bare": (
        "opt",
        {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 16,
    "tie_word_embeddings": True,
}
# families that are described by data alone
DENSE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 2.0}),
    "gpt2": ("gpt2", {"n_inner": 96, "tie_word_embeddings": True}),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
    "smollm3 windowed": (
        "smollm3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [1, 0, 1, 0]},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 0.5},
    ),
    "granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2}),
    "granite 4": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "mamba_n_heads": 8,
        },
    ),
    "granite 4 without a rope": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 8,
            "attention_multiplier": 0.2,
        },
    ),
    "granite swash": (
        "granite_swa",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_rope_theta": [0, 1e4, 5e5, 0],
            "attention_multiplier": 0.3,
        },
    ),
    "granite swash with one base": ("granite_swa", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 16}),
    "olmo3 stretched": (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 16, "rope_scaling": YARN | {"rope_theta": 5e5}},
    ),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 16}),
    "exaone4 of full layers": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere": ("cohere", {"logit_scale": 2.0}),
    "cohere with norms of heads": ("cohere", {"logit_scale": 20.0, "use_qk_norm": True, "attention_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 24, "mlp_bias": True, "attention_out_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 16}),
    "phi": ("phi", {}),
    "phi with norms of heads": ("phi", {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan stretched": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "helium": ("helium", {"head_dim": 16, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "arcee": ("arcee", {}),
    "vaultgemma": (
        "vaultgemma",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16, "attn_logit_softcapping": 2.0},
    ),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "gemma4 with shared keys": (
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 330},
    ),
    "gemma4 whose keys are values": (
        "gemma4_text",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4 of both": (
        "gemma4_text",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e4,
                    "factor": 2.0,
                },
            },
        },
    ),
    "qwen3.5 of wide heads": (
        "qwen3_5_text",
        DELTA
        | {
            "head_dim": 16,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "attention_bias": True,
        },
    ),
    "gpt2 untied": ("gpt2", {"n_inner": 96, "tie_word_embeddings": False, "activation_function": "relu"}),
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 0,
}
VISION = {"hidden_size": 32, "intermediate_size": 32}
SIGLIP = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
AXES = {"type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
# case -> wrapper, what its text part says beyond what all share, its vision part, and what stands at the top
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
        SIGLIP,
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "gemma4",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 330,
            "sliding_window": 16,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 5.0,
            "use_bidirectional_attention": "vision",
        },
        VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        {},
    ),
    "mistral3 of ministral3": (
        "mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
        SIGLIP | {"model_type": "pixtral", "head_dim": 16},
        {},
    ),
    "mistral3 of mistral": (
        "mistral3",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        SIGLIP | {"model_type": "pixtral", "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "idefics3": ("idefics3", {"model_type": "llama", "head_dim": 16}, SIGLIP, {"scale_factor": 2}),
    "smolvlm": (
        "smolvlm",
        {"model_type": "llama", "rms_norm_eps": 1e-5},
        SIGLIP,
        {"scale_factor": 2, "tie_word_embeddings": True},
    ),
    "qwen2_vl": ("qwen2_vl", {"rope_parameters": AXES}, QWEN | {"embed_dim": 32, "hidden_size": 64}, {}),
    "qwen2_vl tied and stretched": (
        "qwen2_vl",
        {"rope_parameters": YARN | {"mrope_section": [2, 3, 3]}},
        QWEN | {"embed_dim": 32, "hidden_size": 64},
        {"tie_word_embeddings": True},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"rope_parameters": AXES, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        QWEN | {"fullatt_block_indexes": [0]},
        {},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 1e4,
            },
        },
        QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {"tie_word_embeddings": True},
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
        QWEN | {"num_position_embeddings": 16},
        {"tie_word_embeddings": True},
    ),
}  # fmt: skip


def write_wrapper(folder: Path, case: str, make_model: Callable[..., Path]) -> Path:
    """The folder of a random model with images of `WRAPPED`."""
    from transformers import AutoModelForImageTextToText

    family, text, vision, at_top = WRAPPED[case]
    make_model(folder)  # for its tokenizer
    vocab_size = read_model_config(folder).vocab_size
    (folder / "model.safetensors").unlink()
    config = AutoConfig.for_model(
        family, text_config=TEXT | {"vocab_size": vocab_size} | text, vision_config=vision, **at_top
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def whole_model(folder: Path, adapter: Path | None = None) -> Any:
    """The whole model in fp32, which is given text alone."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


def with_attention(model: ModelConfig, **changes: Any) -> ModelConfig:
    """The model with other settings of attention in every layer that has it."""
    layers = (
        layer if layer.attention is None else replace(layer, mixer=replace(layer.attention, **changes))
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))
