"""Decides which modules a configuration targets, by PEFT's own matching rules (`check_target_module_exists`).

All names here are those of the trained model, because the patterns in the configuration were written for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .config import AdapterConfig

ALL_LINEAR = "all-linear"
EMBEDDING_NAMES = ("embed_tokens", "lm_head")
# What PEFT targets when target_modules is null; it names nothing for other families.
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "opt"), ("q_proj", "v_proj")
)


def targeted(config: AdapterConfig, modules: Iterable[str], head: str, family: str) -> set[str]:
    """Those of `modules` that the configuration targets. `head` is the output layer, which all-linear leaves out."""
    given = DEFAULT_TARGETS.get(family, ()) if config.target_modules is None else config.target_modules
    names = given if isinstance(given, str) else frozenset(given)
    return {
        module for module in modules if not _is_excluded(config, module) and _is_target(config, names, module, head)
    }


def _is_target(config: AdapterConfig, targets: str | frozenset[str], module: str, head: str) -> bool:
    if isinstance(targets, str):
        if targets.lower() == ALL_LINEAR:
            return module != head and module.rpartition(".")[2] != "embed_tokens"
        return re.fullmatch(targets, module) is not None
    if module in targets:
        return True
    return not targets.isdisjoint(_ends(module)) and _is_layer_chosen(config, module)


def _ends(module: str) -> list[str]:
    """What follows each dot of the name."""
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]


def _is_layer_chosen(config: AdapterConfig, module: str) -> bool:
    chosen = config.layers_to_transform
    if chosen is None or chosen == ():
        return True
    layer = _layer_of(config, module)
    return layer == chosen if isinstance(chosen, int) else layer in chosen


def _layer_of(config: AdapterConfig, module: str) -> int | None:
    """The first numbered part of the name, or the one that follows a layers_pattern."""
    if not config.layers_pattern:
        match = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)
        return int(match["index"]) if match else None
    for pattern in config.layers_pattern:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module)
        if match:
            return int(match["index"])
    return None


def _is_excluded(config: AdapterConfig, module: str) -> bool:
    excluded = config.exclude_modules
    if isinstance(excluded, str):
        if excluded and re.fullmatch(excluded, module):
            return True
    elif excluded and (module in excluded or any(module.endswith(f".{name}") for name in excluded)):
        return True
    return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.modules_to_save)


def is_saved_module(config: AdapterConfig, module: str) -> bool:
    """Whether modules_to_save names this module or one that holds it; PEFT compares the plain ends of names."""
    if not config.modules_to_save:
        return False
    parts = module.split(".")
    holders = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(holder.endswith(name) for holder in holders for name in config.modules_to_save)


def unmatched_targets(config: AdapterConfig, modules: Iterable[str]) -> tuple[str, ...]:
    """Entries of a target_modules list that name no module at all."""
    if not isinstance(config.target_modules, tuple):
        return ()
    named = {name for module in modules for name in (module, *_ends(module))}
    return tuple(target for target in config.target_modules if target not in named)


def ties_saved(config: AdapterConfig) -> bool:
    """Whether ensure_weight_tying ties a saved embedding to the head (PEFT's `_check_tied_modules`)."""
    return config.ensure_weight_tying and any(
        name.rpartition(".")[2] in EMBEDDING_NAMES for name in config.modules_to_save
    )


def ties_targets(config: AdapterConfig) -> bool:
    """Whether ensure_weight_tying puts tied pairs on both embedding and head."""
    if not config.ensure_weight_tying or ties_saved(config):
        return False
    targets = config.target_modules
    if isinstance(targets, str):
        return any(re.fullmatch(targets, name) for name in EMBEDDING_NAMES)
    return any(name.rpartition(".")[2] in EMBEDDING_NAMES for name in targets or ())
