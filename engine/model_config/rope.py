"""Reads the rotary settings of `config.json`, in both spellings, with every default filled in.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, which holds both,
for Gemma 3 once per kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from .family import Family
from .layer import RopeConfig, RopeKind
from .raw import RawConfig

WINDOWED, FULL = "sliding_attention", "full_attention"
# Steps in which queries may grow: published models have 17.
_MAX_GROWTHS = 1 << 16
_ORIGINAL = "original_max_position_embeddings"


def read_ropes(raw: RawConfig, family: Family, head_dim: int) -> dict[str, RopeConfig]:
    """The rope of windowed and of full layers; empty where no layer rotates."""
    if family.rope_rule == "no_layer":
        return {}
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
    windowed_theta = family.windowed_theta or raw.number("rope_local_base_freq")
    return {
        WINDOWED: _read_rope(raw, family, of_windowed, windowed_theta, head_dim),
        FULL: _read_rope(raw, family, nested.part(FULL, of_full), raw.number("rope_theta"), head_dim),
    }


def read_query_growth(raw: RawConfig, family: Family) -> tuple[float, int] | None:
    """(beta, length) of queries that grow with their position; None where they do not."""
    if not family.has_query_growth:
        return None
    key = "rope_scaling" if raw.mapping("rope_scaling") else "rope_parameters"
    settings = raw.part(key, raw.mapping(key))
    beta = 0.0 if settings.get("llama_4_scaling_beta") == 0 else settings.number("llama_4_scaling_beta")
    length = settings.integer(_ORIGINAL)
    if raw.integer("max_position_embeddings") // length > _MAX_GROWTHS:
        settings.damage(_ORIGINAL, f"expected at least max_position_embeddings / {_MAX_GROWTHS}")
    return (beta, length) if beta else None


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
    is_proportional = kind == "proportional"
    rotary_size = head_dim if is_proportional else int(head_dim * share)
    if head_dim % 2:
        raw.damage("head_dim", f"expected an even number, not {head_dim}")
    elif rotary_size % 2 or not 2 <= rotary_size <= head_dim:
        raw.damage("partial_rotary_factor", f"rotates {rotary_size} of {head_dim} features, expected an even part")
    if family.has_position_axes:
        _check_axes(settings, rotary_size)
    theta = settings.optional_number("rope_theta") or theta
    if is_proportional:
        if share > 1.0:
            settings.damage("partial_rotary_factor", "expected at most 1.0")
        factor = settings.optional_number("factor") or 1.0
        return RopeConfig(rotary_size, theta, kind, 1.0, {"factor": factor, "share": share})
    if family.has_fixed_stretch and kind == "dynamic" and settings.get("alpha"):
        # Peng 2023 (YaRN), appendix A, with one stretch for rows of all lengths
        kind, theta = "default", theta * settings.number("alpha") ** (rotary_size / (rotary_size - 2 or 1))
    scaling, attention_factor = _scaling(raw, family, kind, settings, rotary_size)
    return RopeConfig(rotary_size, theta, kind, attention_factor, scaling, family.is_rope_interleaved)


def _check_axes(settings: RawConfig, rotary_size: int) -> None:
    """Note sections of axes that do not fill a head. For text all axes have one position: nothing else counts."""
    sections = settings.get("mrope_section")
    is_right = (
        isinstance(sections, list)
        and len(sections) == 3
        and all(type(part) is int and part > 0 for part in sections)
        and sum(sections) == rotary_size // 2
    )
    if sections is not None and not is_right:
        settings.damage("mrope_section", f"expected three positive integers of sum {rotary_size // 2}")


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
