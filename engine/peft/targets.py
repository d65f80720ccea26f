"""Decides which modules a configuration targets, by PEFT's own matching rules (`check_target_module_exists`).

All names here are those of the trained model, because the patterns in the configuration were written for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .config import AdapterConfig
from .patterns import LAYER, PART, WHOLE, first_matches

ALL_LINEAR = "all-linear"
EMBEDDING_NAMES = ("embed_tokens", "lm_head")
# Family -> modules that PEFT targets when target_modules is null; it names nothing for other families.
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "opt"), ("q_proj", "v_proj")
    ),
    "gpt2": ("c_attn",),
}
# Last parts of the names of embeddings, which all-linear leaves out.
_EMBEDDINGS = ("embed_tokens", "wte")


def targeted(config: AdapterConfig, modules: Iterable[str], head: str, family: str) -> set[str]:
    """The modules that the configuration targets. `head` is the output layer, which all-linear leaves out.

    Raises `AdapterRefusedError` for a pattern that takes too long.
    """
    names = tuple(modules)
    return _targets(config, names, head, family) - _excluded(config, names)


def _targets(config: AdapterConfig, modules: tuple[str, ...], head: str, family: str) -> set[str]:
    given = DEFAULT_TARGETS.get(family, ()) if config.target_modules is None else config.target_modules
    if isinstance(given, str):
        if given.lower() == ALL_LINEAR:
            return {name for name in modules if name != head and name.rpartition(".")[2] not in _EMBEDDINGS}
        return set(first_matches((given,), WHOLE, modules))
    targets = frozenset(given)
    ending = {name for name in modules if name not in targets and not targets.isdisjoint(_ends(name))}
    return set(targets.intersection(modules)) | _in_chosen_layers(config, ending)


def _ends(module: str) -> list[str]:
    """The parts of a name behind each of its dots."""
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]


def _in_chosen_layers(config: AdapterConfig, modules: set[str]) -> set[str]:
    chosen = config.layers_to_transform
    if chosen is None or chosen == ():
        return modules
    layers = _layers_of(config, modules)
    numbers = {chosen} if isinstance(chosen, int) else set(chosen)
    return {name for name in modules if name in layers and layers[name] in numbers}


def _layers_of(config: AdapterConfig, modules: set[str]) -> dict[str, int]:
    """The first numbered part of each name, or the one that follows a layers_pattern."""
    if not config.layers_pattern:
        matches = {name: re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", name) for name in modules}
        return {name: int(match["index"]) for name, match in matches.items() if match}
    found = first_matches(config.layers_pattern, LAYER, modules)
    return {name: int(index) for name, (_, index) in found.items() if index is not None}


def _excluded(config: AdapterConfig, modules: tuple[str, ...]) -> set[str]:
    excluded = config.exclude_modules or ()
    if isinstance(excluded, str):
        found = set(first_matches((excluded,), WHOLE, modules))
    else:
        names = frozenset(excluded)
        found = {name for name in modules if not names.isdisjoint((name, *_ends(name)))}
    return found | first_matches(config.modules_to_save, PART, modules).keys()


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
        return bool(first_matches((targets,), WHOLE, EMBEDDING_NAMES))
    return any(name.rpartition(".")[2] in EMBEDDING_NAMES for name in targets or ())
