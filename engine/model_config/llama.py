"""Reads `config.json` as a `ModelConfig` for the families that differ from Llama only in data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .families import Family
from .model import ModelConfig, PackedSite
from .raw import RawConfig, first_token_id, stop_token_ids
from .rope import FULL, WINDOWED, context_tokens, read_ropes


def read_llama_shaped(family: Family, raw: RawConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """Read one file. Raises `EngineError` or `ModelFilesError` with all its problems at once."""
    hidden_size, num_layers = raw.integer("hidden_size"), raw.num_layers("num_hidden_layers")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raw.damage("num_key_value_heads", f"expected a divisor of num_attention_heads={num_heads}")
    head_dim = raw.optional_integer("head_dim") or max(hidden_size // num_heads, 2)
    ropes = read_ropes(raw, family, head_dim)
    layer_types = read_layer_types(raw, family, num_layers)
    activation = raw.choice(family.activation_key, family.activations, str(raw.get(family.activation_key)))
    for key in family.ignored_keys:
        if raw.get(key):
            raw.refuse(key, "expected null or false")
    model = ModelConfig(
        family=family.name,
        names=family.names,
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.integer("intermediate_size"),
        vocab_size=raw.integer("vocab_size"),
        max_context_tokens=context_tokens(raw.integer("max_position_embeddings"), ropes),
        norm_kind=family.norm_kind,
        norm_eps=raw.number("rms_norm_eps"),
        has_norm_weights=True,
        activation=family.activations[activation],
        has_gate=True,
        is_tied=raw.flag("tie_word_embeddings"),
        biased_sites=_biased_sites(raw, family),
        layer_ropes=tuple(ropes[kind] for kind in layer_types),
        sliding_windows=read_windows(raw, family, layer_types),
        embedding_scale=hidden_size**0.5 if family.scales_embeddings else 1.0,
        position_offset=0,
        attention_scale=(raw.number("query_pre_attn_scalar") if family.has_query_scalar else head_dim) ** -0.5,
        attention_softcap=raw.optional_number("attn_logit_softcapping") if family.has_attention_softcap else None,
        logit_softcap=raw.optional_number("final_logit_softcapping") if family.has_logit_softcap else None,
        eos_token_ids=stop_token_ids(raw, generation),
        bos_token_id=first_token_id(raw),
    )
    raw.raise_problems()
    return model


def _biased_sites(raw: RawConfig, family: Family) -> frozenset[PackedSite]:
    def is_on(rule: bool | str) -> bool:
        return raw.flag(rule) if isinstance(rule, str) else rule

    sites: set[PackedSite] = set()
    if is_on(family.qkv_bias):
        sites.add("qkv")
    if is_on(family.o_bias):
        sites.add("o")
    if is_on(family.mlp_bias):
        sites |= {"gate_up", "down"}
    return frozenset(sites)


def read_layer_types(raw: RawConfig, family: Family, num_layers: int) -> tuple[str, ...]:
    """`sliding_attention` or `full_attention` for each layer."""
    if family.window_rule == "none":
        return (FULL,) * num_layers
    listed = raw.get("layer_types")
    if family.window_rule == "every_layer":
        everywhere = (FULL if raw.get("sliding_window") is None else WINDOWED,) * num_layers
        if listed is not None and _listed(raw, listed, num_layers) != everywhere:
            raw.refuse("layer_types", f"expected {everywhere[0]} in every layer")
        return everywhere
    if listed is not None:
        return _listed(raw, listed, num_layers)
    if family.window_rule == "last_layers":
        if not raw.flag("use_sliding_window") or raw.get("sliding_window") is None:
            return (FULL,) * num_layers
        first = raw.get("max_window_layers")
        if not isinstance(first, int):
            raw.damage("max_window_layers", "expected an integer")
            return (FULL,) * num_layers
        return tuple(WINDOWED if layer >= first else FULL for layer in range(num_layers))
    period = family.window_period
    if family.window_period_key is not None:
        period = raw.optional_integer(family.window_period_key) or period
    return tuple(WINDOWED if (layer + 1) % period else FULL for layer in range(num_layers))


def read_windows(raw: RawConfig, family: Family, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    """Window of each layer in tokens; None attends to all."""
    if WINDOWED not in layer_types:
        return (None,) * len(layer_types)
    if family.window_rule == "last_layers" and not raw.flag("use_sliding_window"):
        raw.damage("use_sliding_window", f"expected true, as layer_types names {WINDOWED}")
    window = raw.integer("sliding_window")
    return tuple(window if kind == WINDOWED else None for kind in layer_types)


def _listed(raw: RawConfig, listed: object, num_layers: int) -> tuple[str, ...]:
    if not isinstance(listed, list) or len(listed) != num_layers:
        raw.damage("layer_types", f"expected a list of {num_layers} names")
        return (FULL,) * num_layers
    return tuple(raw.choice("layer_types", (FULL, WINDOWED), str(kind)) for kind in listed)
