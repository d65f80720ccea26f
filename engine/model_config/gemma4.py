"""Reads the layers of Gemma 4, whose heads, MLPs and keys differ from layer to layer. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .layer import Attention, LayerConfig, RopeConfig
from .raw import RawConfig
from .rope import FULL, WINDOWED

# Sizes that a layer may have of its own.
_OVERRIDDEN = {"head_dim", "num_key_value_heads"}


def read_layers(
    raw: RawConfig, heads: Attention, layer_types: tuple[str, ...], ropes: Mapping[str, RopeConfig], inner: int
) -> tuple[LayerConfig, ...]:
    """All layers. `heads`: heads of windowed layers. `layer_types`: as the file lists them; the last layer attends to
    all whatever it says. `inner`: features of an MLP.
    """
    layer_types = (*layer_types[:-1], FULL)
    windowed, full = _heads_by_type(raw, heads, layer_types)
    rope = ropes[FULL]
    rotary_size = rope.rotary_size * full.head_dim // heads.head_dim
    if rotary_size % 2:
        raw.damage("global_head_dim", f"rotates {rotary_size} of {full.head_dim} features, expected an even part")
    window = raw.integer("sliding_window") if WINDOWED in layer_types else None
    of_type = {
        WINDOWED: replace(windowed, rope=ropes[WINDOWED], window=window),
        FULL: replace(full, rope=replace(rope, rotary_size=rotary_size), keys_are_values=raw.flag("attention_k_eq_v")),
    }
    sources = _sources(raw, layer_types)
    shared_inner = 2 * inner if raw.flag("use_double_wide_mlp") else inner
    return tuple(
        LayerConfig(replace(of_type[kind], source=source), inner if source is None else shared_inner)
        for kind, source in zip(layer_types, sources, strict=True)
    )


def _heads_by_type(raw: RawConfig, heads: Attention, layer_types: tuple[str, ...]) -> tuple[Attention, Attention]:
    """Heads of windowed layers, and of those that attend to all: as `per_layer_config` says, which transformers writes
    from 5.24 on, or `global_head_dim` and `num_global_key_value_heads`.
    """
    heads = replace(heads, has_value_norm=True)
    if raw.get("per_layer_config") is None:
        kv_heads = raw.optional_integer("num_global_key_value_heads") if raw.flag("attention_k_eq_v") else None
        size = raw.optional_integer("global_head_dim") or 512
        full = replace(heads, head_dim=size, num_kv_heads=kv_heads or heads.num_kv_heads)
        return _checked(raw, heads), _checked(raw, full)
    of_type: dict[str, Attention] = {}
    overrides = raw.mapping("per_layer_config")
    for layer, kind in enumerate(layer_types):
        given = overrides.get(str(layer)) or {}
        if not isinstance(given, Mapping) or not given.keys() <= _OVERRIDDEN:
            raw.refuse("per_layer_config", f"expected {' and '.join(sorted(_OVERRIDDEN))} alone, by layer", given)
            given = {}
        own = raw.part(f"per_layer_config.{layer}", given)
        found = replace(
            heads,
            head_dim=own.optional_integer("head_dim") or heads.head_dim,
            num_kv_heads=own.optional_integer("num_key_value_heads") or heads.num_kv_heads,
        )
        if of_type.setdefault(kind, found) != found:
            raw.refuse("per_layer_config", f"expected the same heads in each layer of {kind}", given)
    return _checked(raw, of_type.get(WINDOWED, heads)), _checked(raw, of_type[FULL])


def _checked(raw: RawConfig, heads: Attention) -> Attention:
    """The heads, once a problem with them is noted."""
    if heads.num_heads % heads.num_kv_heads:
        key = "num_global_key_value_heads"
        raw.damage(key, f"expected a divisor of num_attention_heads={heads.num_heads}, not {heads.num_kv_heads}")
        return replace(heads, num_kv_heads=heads.num_heads)
    return heads


def _sources(raw: RawConfig, layer_types: tuple[str, ...]) -> list[int | None]:
    """The layer whose keys and values each layer reads: of the last `num_kv_shared_layers`, the last layer before them
    of the same type; None for a layer that has its own.
    """
    num_shared = raw.integer("num_kv_shared_layers") if raw.get("num_kv_shared_layers") else 0
    first = len(layer_types) - num_shared
    last_of = {kind: layer for layer, kind in enumerate(layer_types[: max(first, 0)])}
    if not set(layer_types) <= last_of.keys():
        raw.damage("num_kv_shared_layers", "expected a layer of each type before those that share keys and values")
        return [None] * len(layer_types)
    return [None if layer < first else last_of[kind] for layer, kind in enumerate(layer_types)]
