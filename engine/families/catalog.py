"""The Llama-shaped families, each as the list of its differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..model_config import ModuleNames
from .family import ACTIVATIONS, LLAMA_NAMES, QUERY_KEY_NORMS, SANDWICH_NORMS, Family

_PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_QWEN = {
    **_PLAIN,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_LLAMA = Family("llama", _PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_MISTRAL = Family(
    "mistral",
    {**_PLAIN, "max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    window_rule="every_layer",
)
_QWEN2 = Family("qwen2", _QWEN, qkv_bias=True, window_rule="last_layers")
_QWEN3 = Family(
    "qwen3",
    {**_QWEN, "head_dim": 128},
    names=replace(LLAMA_NAMES, norms=QUERY_KEY_NORMS),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    window_rule="last_layers",
)
_GEMMA1 = Family(
    "gemma",
    {**_GEMMA, "num_key_value_heads": 16},
    norm_kind="rms_from_zero",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    # Gemma's first configurations say gelu and mean its tanh form, with which the models were trained
    activations={**ACTIVATIONS, "gelu": "gelu_tanh"},
    scales_embeddings=True,
    ignored_keys=("use_bidirectional_attention",),
)
_GEMMA2 = replace(
    _GEMMA1,
    name="gemma2",
    defaults={**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    names=replace(LLAMA_NAMES, norms=SANDWICH_NORMS),
    activation_key="hidden_activation",
    activations=ACTIVATIONS,
    window_rule="all_but_every_nth",
    window_period=2,
    has_query_scalar=True,
    has_attention_softcap=True,
    has_logit_softcap=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    defaults={
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    names=replace(LLAMA_NAMES, norms=replace(SANDWICH_NORMS, query="self_attn.q_norm", key="self_attn.k_norm")),
    window_period=6,
    window_period_key="sliding_window_pattern",
    rope_kinds=("default", "linear", "llama3"),
    has_ropes_by_layer_type=True,
    has_attention_softcap=False,
    ignored_keys=("use_bidirectional_attention", "attn_logit_softcapping"),
)
_PHI3 = Family(
    "phi3",
    {
        **_PLAIN,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    names=ModuleNames(
        sites={
            "qkv": ("self_attn.qkv_proj",),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_up_proj",),
            "down": ("mlp.down_proj",),
        }
    ),
    window_rule="every_layer",
    rope_kinds=("default", "longrope"),
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    can_rotate_partially=True,
)

LLAMA_SHAPED: Mapping[str, Family] = {
    family.name: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GEMMA1, _GEMMA2, _GEMMA3, _PHI3)
}
