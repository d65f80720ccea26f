"""A family of models: everything in which it differs from Llama, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..model_config import Activation, LayerNorms, ModuleNames, NormKind, RopeKind

# Which layers attend to a window of latest tokens only:
# none; every layer; those after max_window_layers where use_sliding_window allows; all but every n-th.
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
    """One Llama-shaped family. `defaults`: what transformers assumes where `config.json` is silent.

    `qkv_bias`, `o_bias`, `mlp_bias`: a truth, or the name of the key that decides. `activation_key`: the key that
    names the MLP's function. `window_period`: n of the rule `all_but_every_nth`, and `window_period_key` the key
    that overrides it. `rope_aliases`: older names of rope kinds. `has_ropes_by_layer_type`: windowed layers have a
    rope of their own. `ignored_keys`: settings that transformers reads but does not apply, hence refused.
    """

    name: str
    defaults: Mapping[str, Any]
    names: ModuleNames = LLAMA_NAMES
    norm_kind: NormKind = "rms"
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    activation_key: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    window_rule: WindowRule = "none"
    window_period: int = 0
    window_period_key: str | None = None
    rope_kinds: tuple[RopeKind, ...] = ALL_ROPES
    rope_aliases: Mapping[str, RopeKind] = field(default_factory=dict)
    has_ropes_by_layer_type: bool = False
    can_rotate_partially: bool = False
    scales_embeddings: bool = False
    has_query_scalar: bool = False
    has_attention_softcap: bool = False
    has_logit_softcap: bool = False
    ignored_keys: tuple[str, ...] = ()


QUERY_KEY_NORMS = LayerNorms(query="self_attn.q_norm", key="self_attn.k_norm")
SANDWICH_NORMS = LayerNorms(
    attention_output="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
