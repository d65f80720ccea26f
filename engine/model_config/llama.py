"""Reads `config.json` as a `ModelConfig` for the families that are described by data (`families.FAMILIES`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...kernels.layouts.delta_sizes import DeltaSizes
from .family import LLAMA_NAMES, Family
from .layer import Attention, LayerConfig, RopeConfig
from .model import ModelConfig
from .names import ModuleNames, PackedSite
from .raw import RawConfig, first_token_id, stop_token_ids
from .rope import FULL, WINDOWED, context_tokens, read_query_growth, read_ropes

_DELTA = "linear_attention"


def read_llama_shaped(family: Family, raw: RawConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """Read one file. Raises `EngineError` or `ModelFilesError` with all its problems at once."""
    hidden_size, num_layers = raw.integer("hidden_size"), raw.num_layers("num_hidden_layers")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = num_heads
    if family.has_grouped_heads:
        num_kv_heads = raw.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raw.damage("num_key_value_heads", f"expected a divisor of num_attention_heads={num_heads}")
    head_dim = _head_dim(raw, family, hidden_size, num_heads)
    ropes = read_ropes(raw, family, head_dim)
    layer_types = read_layer_types(raw, family, num_layers)
    activation = raw.choice(family.activation_key, family.activations, str(raw.get(family.activation_key)))
    _refuse_settings(raw, family)
    layers = _layers(raw, family, Attention(num_heads, num_kv_heads, head_dim), layer_types, ropes)
    names, factors = _names(raw, family, layers), _factors(raw, family)
    layer_input_size, layer_vocab_size = _layer_inputs(raw, family)
    scaled_by = raw.number("query_pre_attn_scalar") if family.has_query_scalar else head_dim
    default_scale = 1.0 if family.has_unit_scale else scaled_by**-0.5
    model = ModelConfig(
        family=family.name,
        names=names,
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        layers=layers,
        vocab_size=raw.integer("vocab_size"),
        max_context_tokens=context_tokens(raw.integer("max_position_embeddings"), ropes),
        norm_kind=family.norm_kind,
        norm_eps=raw.number(family.norm_eps_key),
        has_norm_weights=True,
        activation=family.activations[activation],
        has_gate=family.has_gate,
        is_tied=raw.flag("tie_word_embeddings"),
        biased_sites=_biased_sites(raw, family),
        embedding_scale=hidden_size**0.5 if family.scales_embeddings else factors.get("embedding_scale", 1.0),
        position_offset=0,
        attention_scale=factors.get("attention_scale", default_scale),
        attention_softcap=raw.optional_number("attn_logit_softcapping") if family.has_attention_softcap else None,
        logit_softcap=raw.optional_number("final_logit_softcapping") if family.has_logit_softcap else None,
        eos_token_ids=stop_token_ids(raw, generation),
        bos_token_id=first_token_id(raw),
        head_norm="head" if names.norms.query is None else family.head_norm,
        has_head_bias=family.has_head_bias,
        is_parallel=family.is_parallel,
        residual_scale=factors.get("residual_scale", 1.0),
        logit_scale=factors.get("logit_scale", 1.0) / factors.get("logit_divisor", 1.0),
        query_growth=read_query_growth(raw, family),
        layer_input_size=layer_input_size,
        layer_vocab_size=layer_vocab_size,
    )
    raw.raise_problems()
    return model


def _layers(
    raw: RawConfig,
    family: Family,
    heads: Attention,
    layer_types: tuple[str, ...],
    ropes: Mapping[str, RopeConfig],
) -> tuple[LayerConfig, ...]:
    """All layers. `heads`: attention with the heads that it has in each."""
    delta = _delta_sizes(raw) if _DELTA in layer_types else None
    heads = replace(heads, has_output_gate=family.has_output_gate)
    inner = _intermediate_size(raw, family, raw.integer("hidden_size"))
    if family.read_layers is not None:
        return family.read_layers(raw, heads, layer_types, ropes, inner)
    mixers = (
        delta if delta is not None and kind == _DELTA else replace(heads, rope=rope, window=window)
        for kind, rope, window in zip(
            layer_types,
            _layer_ropes(raw, family, layer_types, ropes),
            read_windows(raw, family, layer_types),
            strict=True,
        )
    )
    return tuple(LayerConfig(mixer, inner) for mixer in mixers)


def _delta_sizes(raw: RawConfig) -> DeltaSizes:
    """Sizes of layers of the gated delta rule."""
    sizes = DeltaSizes(
        raw.integer("linear_num_key_heads"),
        raw.integer("linear_num_value_heads"),
        raw.integer("linear_key_head_dim"),
        raw.integer("linear_value_head_dim"),
        raw.integer("linear_conv_kernel_dim"),
    )
    if sizes.value_heads % sizes.key_heads:
        raw.damage("linear_num_value_heads", f"expected a multiple of linear_num_key_heads={sizes.key_heads}")
    return sizes


def _head_dim(raw: RawConfig, family: Family, hidden_size: int, num_heads: int) -> int:
    if family.rope_rule == "no_layer":
        if hidden_size % num_heads:
            raw.damage("num_attention_heads", f"expected a divisor of hidden_size={hidden_size}")
        return max(hidden_size // num_heads, 1)
    return raw.optional_integer("head_dim") or max(hidden_size // num_heads, 2)


def _intermediate_size(raw: RawConfig, family: Family, hidden_size: int) -> int:
    if family.has_default_mlp_size and raw.get(family.mlp_size_key) is None:
        return 4 * hidden_size
    return raw.integer(family.mlp_size_key)


def _refuse_settings(raw: RawConfig, family: Family) -> None:
    for key in family.ignored_keys:
        if raw.get(key):
            raw.refuse(key, "expected null or false")
    for key in family.required_keys:
        if raw.get(key) is not True:
            raw.refuse(key, "expected true")


def _names(raw: RawConfig, family: Family, layers: tuple[LayerConfig, ...]) -> ModuleNames:
    names = family.names
    if family.has_layer_inputs and not raw.get("hidden_size_per_layer_input"):
        sites = {site: members for site, members in names.sites.items() if site in LLAMA_NAMES.sites}
        names = replace(names, sites=sites, norms=replace(names.norms, layer_input=None), layer_inputs=None)
    key = family.head_norm_key
    if key is not None and not raw.flag(key):
        names = replace(names, norms=replace(names.norms, query=None, key=None))
    readers = [str(i) for i, layer in enumerate(layers) if layer.attention and layer.attention.source is not None]
    if readers:
        unread = rf"(?:\w+\.)*layers\.(?:{'|'.join(readers)})\.self_attn\.[kv]_(?:proj|norm)\."
        names = replace(names, unread=unread)
    return names


def _layer_inputs(raw: RawConfig, family: Family) -> tuple[int, int]:
    """Features of each layer's own inputs, and tokens that have some; zeros where layers have none."""
    if not family.has_layer_inputs or not raw.get("hidden_size_per_layer_input"):
        return 0, 0
    num_tokens = raw.integer("vocab_size_per_layer_input")
    if num_tokens < raw.integer("vocab_size"):
        raw.refuse("vocab_size_per_layer_input", "expected at least vocab_size")
    return raw.integer("hidden_size_per_layer_input"), num_tokens


def _factors(raw: RawConfig, family: Family) -> dict[str, float]:
    return {field: raw.number(key) for field, key in family.factors.items()}


def _layer_ropes(
    raw: RawConfig, family: Family, layer_types: tuple[str, ...], ropes: Mapping[str, RopeConfig]
) -> tuple[RopeConfig | None, ...]:
    """The rope of each layer."""
    rule = family.rope_rule
    everywhere = tuple(ropes.get(kind) for kind in layer_types)
    if rule == "listed_layers":
        return tuple(
            rope if is_on else None
            for rope, is_on in zip(everywhere, rotated_layers(raw, len(layer_types)), strict=True)
        )
    if rule == "listed_thetas":
        return tuple(
            rope if rope is None or theta is None else replace(rope, theta=theta) if theta else None
            for rope, theta in zip(everywhere, _listed_thetas(raw, len(layer_types)), strict=True)
        )
    if rule == "if_asked":
        return everywhere if raw.get("position_embedding_type") == "rope" else (None,) * len(layer_types)
    if rule == "every_layer" or (rule == "windowed_layers_or_all" and raw.get("sliding_window") is None):
        return everywhere
    return tuple(rope if kind == WINDOWED else None for rope, kind in zip(everywhere, layer_types, strict=True))


def rotated_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a rope, by `no_rope_layers` (1 where it has one) or `no_rope_layer_interval`."""
    listed = raw.get("no_rope_layers")
    if listed is None:
        interval = raw.integer("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_right = isinstance(listed, list) and len(listed) >= num_layers and all(item in (0, 1) for item in listed)
    if not is_right:
        raw.damage("no_rope_layers", f"expected a list of {num_layers} numbers, each 0 or 1")
        return (True,) * num_layers
    return tuple(map(bool, listed[:num_layers]))


def _listed_thetas(raw: RawConfig, num_layers: int) -> tuple[float | None, ...]:
    """Base of each layer's frequencies by `layer_rope_theta`, 0 where it has no rope; Nones where there is no list."""
    key = "layer_rope_theta"
    listed = raw.get(key)
    if listed is None:
        return (None,) * num_layers
    is_right = isinstance(listed, list) and len(listed) == num_layers
    if not is_right or not all(type(item) in (int, float) and 0 <= item < math.inf for item in listed):
        raw.damage(key, f"expected a list of {num_layers} numbers, 0 or more")
        return (None,) * num_layers
    return tuple(map(float, listed))


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
    """`sliding_attention`, `full_attention` or, of the gated delta rule, `linear_attention` for each layer."""
    listed = raw.get("layer_types")
    if family.has_delta_layers:
        return _hybrid_types(raw, num_layers, listed)
    if family.lists_attention and listed != ["attention"] * num_layers and listed != [FULL] * num_layers:
        raw.refuse("layer_types", f"expected attention in each of {num_layers} layers")
    if family.window_rule == "none":
        return (FULL,) * num_layers
    if family.window_rule == "every_layer":
        everywhere = (FULL if raw.get("sliding_window") is None else WINDOWED,) * num_layers
        if listed is not None and _listed(raw, listed, num_layers) != everywhere:
            raw.refuse("layer_types", f"expected {everywhere[0]} in every layer")
        return everywhere
    if listed is not None:
        return _listed(raw, listed, num_layers)
    if family.window_rule == "every_layer_unless_listed":
        return (FULL if raw.get("sliding_window") is None else WINDOWED,) * num_layers
    if family.window_rule == "unrotated_layers":
        has_window = raw.flag("use_sliding_window") and raw.get("sliding_window") is not None
        return tuple(FULL if is_on or not has_window else WINDOWED for is_on in rotated_layers(raw, num_layers))
    if raw.get("sliding_window") is None and family.rope_rule == "windowed_layers_or_all":
        return (FULL,) * num_layers
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
    first = 0 if family.window_rule == "all_but_first_of_n" else 1
    return tuple(WINDOWED if (layer + first) % period else FULL for layer in range(num_layers))


def _hybrid_types(raw: RawConfig, num_layers: int, listed: object) -> tuple[str, ...]:
    """Kinds of layers where some are of the gated delta rule: as listed, or all but every nth."""
    if listed is None:
        period = raw.integer("full_attention_interval")
        types = tuple(_DELTA if (layer + 1) % period else FULL for layer in range(num_layers))
    else:
        types = _listed(raw, listed, num_layers, (FULL, _DELTA))
    if FULL not in types:
        raw.refuse("layer_types", f"expected {FULL} in some layer", sorted(set(types)))
        return (FULL,) * num_layers
    return types


def read_windows(raw: RawConfig, family: Family, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    """Window of each layer in tokens; None attends to all."""
    if WINDOWED not in layer_types:
        return (None,) * len(layer_types)
    if family.window_rule in ("last_layers", "unrotated_layers") and not raw.flag("use_sliding_window"):
        raw.damage("use_sliding_window", f"expected true, as layer_types names {WINDOWED}")
    window = raw.integer("sliding_window")
    return tuple(window if kind == WINDOWED else None for kind in layer_types)


def _listed(
    raw: RawConfig, listed: object, num_layers: int, kinds: tuple[str, ...] = (FULL, WINDOWED)
) -> tuple[str, ...]:
    if not isinstance(listed, list) or len(listed) != num_layers:
        raw.damage("layer_types", f"expected a list of {num_layers} names")
        return (FULL,) * num_layers
    return tuple(raw.choice("layer_types", kinds, str(kind)) for kind in listed)
