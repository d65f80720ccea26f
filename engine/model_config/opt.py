"""Reads `config.json` as a `ModelConfig` for OPT (Zhang 2022): learned positions, LayerNorm, biases, no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import ACTIVATIONS
from .layer import Attention, LayerConfig
from .model import ModelConfig
from .names import LayerNorms, ModuleNames
from .raw import RawConfig, first_token_id, stop_token_ids

#: Published models, for the table of families.
MODELS = "OPT, Galactica"
#: Difference from Llama in words, for the table of families.
DIFFERS_BY = "learned positions, LayerNorm before or after, biases, no gate, optional projections"
DEFAULTS: Mapping[str, Any] = {
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
# Rows 0 and 1 of the position table are padding.
_POSITION_OFFSET = 2
_LAYER_NORM_EPS = 1e-5
_FIRST_NORM, _SECOND_NORM = "self_attn_layer_norm", "final_layer_norm"


def read_opt(raw: RawConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """Read one file. Raises `EngineError` or `ModelFilesError` with all its problems at once."""
    hidden_size, num_layers = raw.integer("hidden_size"), raw.num_layers("num_hidden_layers")
    num_heads = raw.integer("num_attention_heads")
    head_dim = max(hidden_size // num_heads, 1)
    if hidden_size % num_heads:
        raw.damage("num_attention_heads", f"expected a divisor of hidden_size={hidden_size}")
    embedding_size = raw.optional_integer("word_embed_proj_dim") or hidden_size
    activation = raw.choice("activation_function", ACTIVATIONS, str(raw.get("activation_function")))
    model = ModelConfig(
        family="opt",
        names=_names(raw, has_projections=embedding_size != hidden_size),
        hidden_size=hidden_size,
        embedding_size=embedding_size,
        layers=(LayerConfig(Attention(num_heads, num_heads, head_dim), raw.integer("ffn_dim")),) * num_layers,
        vocab_size=raw.integer("vocab_size"),
        max_context_tokens=raw.integer("max_position_embeddings"),
        norm_kind="layer",
        norm_eps=_LAYER_NORM_EPS,
        has_norm_weights=raw.flag("layer_norm_elementwise_affine"),
        activation=ACTIVATIONS[activation],
        has_gate=False,
        is_tied=raw.flag("tie_word_embeddings"),
        biased_sites=frozenset(("qkv", "o", "gate_up", "down") if raw.flag("enable_bias") else ()),
        embedding_scale=1.0,
        position_offset=_POSITION_OFFSET,
        attention_scale=head_dim**-0.5,
        attention_softcap=None,
        logit_softcap=None,
        eos_token_ids=stop_token_ids(raw, generation),
        bos_token_id=first_token_id(raw),
    )
    raw.raise_problems()
    return model


def _names(raw: RawConfig, *, has_projections: bool) -> ModuleNames:
    """Norms stand before attention and MLP, or (OPT-350m) after them on the sum."""
    is_before = raw.flag("do_layer_norm_before")
    before = LayerNorms(before_attention=_FIRST_NORM, before_mlp=_SECOND_NORM)
    after = LayerNorms(before_attention=None, after_attention=_FIRST_NORM, before_mlp=None, after_mlp=_SECOND_NORM)
    has_final_norm = is_before and not raw.flag("_remove_final_layer_norm")
    return ModuleNames(
        sites={
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.out_proj",),
            "gate_up": ("fc1",),
            "down": ("fc2",),
        },
        norms=before if is_before else after,
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm" if has_final_norm else None,
        positions="model.decoder.embed_positions",
        project_in="model.decoder.project_in" if has_projections else None,
        project_out="model.decoder.project_out" if has_projections else None,
    )
