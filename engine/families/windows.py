"""Which layers attend to a sliding window only."""

from __future__ import annotations

from .family import Family
from .raw_config import RawConfig
from .rope import FULL, WINDOWED


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
