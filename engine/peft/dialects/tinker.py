"""Reads adapters that Tinker saves: PEFT's form, but for the head, which is called `model.unembed_tokens` there.

Facts of tinker-cookbook (`weights/_merge*.py`): tensors are PEFT's A and B, the factor is lora_alpha / r, and
`target_modules` is `all-linear`, which leaves the head out in PEFT, whether the head was trained or not. In a tied base
the cookbook's merge changes the embedding as well, which the pair alone does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...model_config.model import HEAD
from ..config import AdapterConfig
from ..findings import Ledger
from ..names import BaseLayout
from ..targets import ALL_LINEAR
from ..tensor_file import TensorEntry

_HEAD_OF_TINKER = "model.unembed_tokens."


def is_of_tinker(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether tensors have names that only Tinker gives."""
    return any(_HEAD_OF_TINKER in key for key in tensors)


def read_tinker(
    config: AdapterConfig, tensors: Mapping[str, TensorEntry], layout: BaseLayout, ledger: Ledger
) -> tuple[AdapterConfig, Mapping[str, TensorEntry]]:
    """Configuration and tensors in PEFT's terms; what stands against them is entered as refusals. `config`: as read by
    PEFT's rules.
    """
    own = [key for key in tensors if _HEAD_OF_TINKER in key]
    if layout.is_tied:
        why = (
            "a pair of Tinker's on the head of a tied base, where it is unclear whether the embedding changes too. "
            "Train it without the head (train_unembed)"
        )
        ledger.refuse_tensors(own, "tied head", why)
    found: dict[str, TensorEntry] = {}
    for key, entry in tensors.items():
        name = key.replace(_HEAD_OF_TINKER, f"{HEAD}.") if key in own else key
        if name in found:
            ledger.refuse_tensors(
                [key], "twice", f"plays the same part as {name}, unclear which one is meant. Remove one"
            )
        found[name] = replace(entry, key=name)
    ledger.notes.append(f"tensor names of Tinker, whose unembed_tokens is read as {HEAD}")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        stack = layout.layers.rpartition(".")[2]
        in_layers = [
            name.removeprefix(f"{layout.layers}.") for name in layout.linear if name.startswith(f"{layout.layers}.")
        ]
        config = replace(config, target_modules=(*(f"{stack}.{name}" for name in in_layers), HEAD))
    return config, found
