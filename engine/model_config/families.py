"""Describes the Llama-shaped families: each as data, by what it differs in from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .model import Activation, LayerNorms, ModuleNames, NormKind, RopeKind

# Layers that attend to a window of the latest tokens only: none; every layer; those after max_window_layers where
# use_sliding_window allows; all but every n-th.
WindowRule = Literal["none", "every_layer", "last_layers", "all_but_every_nth"]
ALL_ROPES: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Spellings of `hidden_act` and its like, and the function they mean.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
LLAMA_NAMES = ModuleNames(
    sites={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
)


@dataclass(frozen=True, slots=True)
class Family:
    """One Llama-shaped family: how it differs from Llama, and how its `config.json` is read."""

    #: `model_type` in `config.json`.
    name: str
    #: Values that transformers assumes for keys that `config.json` lacks.
    defaults: Mapping[str, Any]
    #: Checkpoint names of the model's parts.
    names: ModuleNames = LLAMA_NAMES
    #: Formula of all norms.
    norm_kind: NormKind = "rms"
    #: Whether queries, keys and values have a bias, or the name of the key that decides.
    qkv_bias: bool | str = False
    #: Whether attention's output has a bias, or the name of the key that decides.
    o_bias: bool | str = False
    #: Whether the MLP's layers have biases, or the name of the key that decides.
    mlp_bias: bool | str = False
    #: Key that names the MLP's function.
    activation_key: str = "hidden_act"
    #: Names of functions in `config.json` -> the functions they mean.
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    #: Layers that attend to a window of the latest tokens.
    window_rule: WindowRule = "none"
    #: n of the rule `all_but_every_nth`.
    window_period: int = 0
    #: Key that overrides `window_period`; None: no key does.
    window_period_key: str | None = None
    #: Supported kinds of rotary embeddings.
    rope_kinds: tuple[RopeKind, ...] = ALL_ROPES
    #: Older names of rope kinds -> the kinds.
    rope_aliases: Mapping[str, RopeKind] = field(default_factory=dict)
    #: Whether windowed layers have a rope of their own.
    has_ropes_by_layer_type: bool = False
    #: Whether `partial_rotary_factor` may leave features of a head unrotated.
    can_rotate_partially: bool = False
    #: Whether embeddings are multiplied by the root of the hidden size.
    scales_embeddings: bool = False
    #: Whether `query_pre_attn_scalar`, instead of the head's size, scales the scores.
    has_query_scalar: bool = False
    #: Whether `attn_logit_softcapping` is applied.
    has_attention_softcap: bool = False
    #: Whether `final_logit_softcapping` is applied.
    has_logit_softcap: bool = False
    #: Settings that transformers reads but does not apply, hence refused.
    ignored_keys: tuple[str, ...] = ()


QUERY_KEY_NORMS = LayerNorms(query="self_attn.q_norm", key="self_attn.k_norm")
SANDWICH_NORMS = LayerNorms(
    attention_output="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
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
