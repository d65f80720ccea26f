"""Reads the rotary settings of `config.json`, in both spellings, with every default filled in.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, which holds both,
for Gemma 3 once per kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from .families import Family
from .model import RopeConfig, RopeKind
from .raw import RawConfig

WINDOWED, FULL = "sliding_attention", "full_attention"
_ORIGINAL = "original_max_position_embeddings"


def read_ropes(raw: RawConfig, family: Family, head_dim: int) -> dict[str, RopeConfig]:
    """The rope of windowed and of full layers."""
    scaling, parameters = raw.mapping("rope_scaling"), raw.mapping("rope_parameters")
    key = "rope_scaling" if scaling else "rope_parameters"
    if not family.has_ropes_by_layer_type:
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raw.refuse("rope_parameters", "expected one object for all layers", sorted(parameters))
            parameters = {}
        rope = _read_rope(raw, family, raw.part(key, scaling or parameters), raw.number("rope_theta"), head_dim)
        return {WINDOWED: rope, FULL: rope}
    if parameters and not {WINDOWED, FULL} & parameters.keys():
        raw.refuse("rope_parameters", f"expected an object each for {WINDOWED} and {FULL}", sorted(parameters))
    nested = raw.part("rope_parameters", parameters)
    of_full = {**nested.mapping(FULL), **scaling}
    of_windowed = nested.part(WINDOWED, nested.mapping(WINDOWED))
    return {
        WINDOWED: _read_rope(raw, family, of_windowed, raw.number("rope_local_base_freq"), head_dim),
        FULL: _read_rope(raw, family, nested.part(FULL, of_full), raw.number("rope_theta"), head_dim),
    }


def context_tokens(max_positions: int, ropes: Mapping[str, RopeConfig]) -> int:
    """Longest row: the position limit, or what stretching by `dynamic` and `yarn` makes of it."""
    stretched = [r.scaling["factor"] * r.scaling[_ORIGINAL] for r in ropes.values() if r.kind in ("dynamic", "yarn")]
    return max([max_positions, *map(int, stretched)])


def _read_rope(raw: RawConfig, family: Family, settings: RawConfig, theta: float, head_dim: int) -> RopeConfig:
    key = "rope_type" if settings.get("rope_type") else "type"
    named = str(settings.get(key) or "default")
    kind = cast(RopeKind, settings.choice(key, family.rope_kinds, family.rope_aliases.get(named, named)))
    share = settings.optional_number("partial_rotary_factor") or raw.optional_number("partial_rotary_factor") or 1.0
    if share != 1.0 and not family.can_rotate_partially:
        raw.refuse("partial_rotary_factor", "supported: 1.0", share)
    rotary_size = int(head_dim * share)
    if head_dim % 2:
        raw.damage("head_dim", f"expected an even number, not {head_dim}")
    elif rotary_size % 2 or not 2 <= rotary_size <= head_dim:
        raw.damage("partial_rotary_factor", f"rotates {rotary_size} of {head_dim} features, expected an even part")
    scaling, attention_factor = _scaling(raw, family, kind, settings, rotary_size)
    return RopeConfig(rotary_size, settings.optional_number("rope_theta") or theta, kind, attention_factor, scaling)


def _scaling(
    raw: RawConfig, family: Family, kind: RopeKind, settings: RawConfig, rotary_size: int
) -> tuple[dict[str, Any], float]:
    """Numbers of the kinds other than `default`, and the factor on cosine and sine."""
    if kind == "default":
        return {}, 1.0
    if kind == "linear":
        return {"factor": settings.number("factor")}, 1.0
    max_positions = raw.integer("max_position_embeddings")
    if kind == "dynamic":
        return {"factor": settings.number("factor"), _ORIGINAL: max_positions}, 1.0
    # the key at the top wins over the one inside, as it does in transformers
    at_top = None if family.has_ropes_by_layer_type else raw.optional_integer(_ORIGINAL)
    original = at_top or settings.optional_integer(_ORIGINAL) or max_positions
    if kind == "llama3":
        numbers = {key: settings.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        if numbers["low_freq_factor"] == numbers["high_freq_factor"]:
            settings.damage("low_freq_factor", "expected another number than high_freq_factor")
        return {**numbers, _ORIGINAL: original}, 1.0
    factor = settings.optional_number("factor") or max_positions / original
    given = settings.optional_number("attention_factor")
    if kind == "longrope":
        factors = {key: settings.numbers(key, rotary_size // 2) for key in ("short_factor", "long_factor")}
        return {**factors, _ORIGINAL: original}, given or _longrope_temperature(factor, original)
    scaling = {
        "factor": factor,
        _ORIGINAL: original,
        "beta_fast": settings.optional_number("beta_fast") or 32,
        "beta_slow": settings.optional_number("beta_slow") or 1,
        "truncate": settings.get("truncate") is None or settings.flag("truncate"),
    }
    weights = settings.optional_number("mscale"), settings.optional_number("mscale_all_dim")
    return scaling, given or _yarn_temperature(factor, *weights)


def _longrope_temperature(factor: float, original: int) -> float:
    """Ding 2024 (LongRoPE), as transformers implies it from the stretch."""
    return 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_temperature(factor: float, weight: float | None, weight_all: float | None) -> float:
    """Peng 2023 (YaRN), section 3.4: grows with the logarithm of the stretch."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return temperature(weight) / temperature(weight_all) if weight and weight_all else temperature(1.0)
