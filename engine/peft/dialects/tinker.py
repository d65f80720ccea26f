"""Reads adapters that Tinker saves: PEFT's form, but for the names of some layers.

Facts of tinker-cookbook (`weights/_merge*.py`):
- Tensors are PEFT's A and B, and the factor is lora_alpha / r.
- The head is called `model.unembed_tokens`. In a tied base the cookbook's merge changes the embedding as well, which
  the pair alone does not say.
- `in_proj_qkv` of the gated delta rule has three pairs, `in_proj_q`, `in_proj_k` and `in_proj_v`, whose outputs stand
  one behind the other in it.
- `target_modules` is `all-linear`, whichever kinds of layers were trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ....kernels.layouts.delta_sizes import DeltaSizes
from ...model_config.model import HEAD
from ..config import AdapterConfig
from ..findings import Ledger
from ..names import BaseLayout, parse_name
from ..targets import ALL_LINEAR
from ..tensor_file import ELEMENT_BYTES, TensorEntry, TensorPart

_HEAD_OF_TINKER = "model.unembed_tokens."
_SPLIT = re.compile(r"(?P<stem>.*\.linear_attn\.in_proj_)(?P<part>[qkv])\.(?P<rest>lora_(?P<half>[AB])\..+)")
_JOINED = r"linear_attn\.in_proj_qkv"


def is_of_tinker(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether tensors have names that only Tinker gives."""
    return any(_HEAD_OF_TINKER in key or _SPLIT.fullmatch(key) for key in tensors)


def read_tinker(
    config: AdapterConfig, tensors: Mapping[str, TensorEntry], layout: BaseLayout, ledger: Ledger
) -> tuple[AdapterConfig, Mapping[str, TensorEntry]]:
    """Configuration and tensors in PEFT's terms; what stands against them is entered as refusals. `config`: as read by
    PEFT's rules.
    """
    config, tensors = _with_joined_pairs(config, tensors, layout, ledger)
    own = [key for key in tensors if _HEAD_OF_TINKER in key]
    if own and layout.is_tied:
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
    if own:
        ledger.notes.append(f"tensor names of Tinker, whose unembed_tokens is read as {HEAD}")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        config = replace(config, target_modules=_trained_kinds(found, layout))
    return config, found


def _trained_kinds(tensors: Iterable[str], layout: BaseLayout) -> tuple[str, ...]:
    """All layers of each kind that has a pair somewhere, by the ends of their names."""
    modules = [name.module for key in tensors if (name := parse_name(key)) is not None]
    kinds = {module.rpartition(".")[2] for module in modules}
    stack = layout.layers.rpartition(".")[2]
    in_layers = (
        name.removeprefix(f"{layout.layers}.") for name in layout.linear if name.startswith(f"{layout.layers}.")
    )
    targets = tuple(f"{stack}.{name}" for name in in_layers if name.rpartition(".")[2] in kinds)
    return (*targets, HEAD) if HEAD in kinds else targets


def _with_joined_pairs(
    config: AdapterConfig, tensors: Mapping[str, TensorEntry], layout: BaseLayout, ledger: Ledger
) -> tuple[AdapterConfig, Mapping[str, TensorEntry]]:
    """The three pairs of each `in_proj_qkv` as one. What does not fit together is left as it is, to be refused: no base
    has layers of such names.
    """
    if layout.delta is None or config.rank_pattern or config.alpha_pattern:
        return config, tensors
    groups: dict[tuple[str, str, str], dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        match = _SPLIT.fullmatch(key)
        if match is not None:
            groups.setdefault((match["stem"], match["half"], match["rest"]), {})[match["part"]] = entry
    joined: dict[str, TensorEntry] = {}
    for (stem, half, rest), by_part in groups.items():
        whole = _joined(f"{stem}qkv.{rest}", half, by_part, config.r, layout.delta)
        if whole is not None:
            joined[whole.key] = whole
    if not joined:
        return config, tensors
    ledger.notes.append("three pairs of Tinker for each in_proj_qkv, which are read as one of three times the rank")
    gone = {part.key for entry in joined.values() for part in entry.parts}
    growth = math.sqrt(3.0) if config.use_rslora else 3.0
    config = replace(config, rank_pattern={_JOINED: 3 * config.r}, alpha_pattern={_JOINED: growth * config.lora_alpha})
    return config, {key: entry for key, entry in tensors.items() if key not in gone} | joined


def _joined(
    name: str, half: str, by_part: Mapping[str, TensorEntry], rank: int, sizes: DeltaSizes
) -> TensorEntry | None:
    """The A of three pairs one below the other, or their B along the diagonal; None where they do not fit together."""
    outputs = {"q": sizes.num_keys, "k": sizes.num_keys, "v": sizes.num_values}
    parts = [by_part[part] for part in outputs if part in by_part]
    if len(parts) < len(outputs) or len({entry.dtype for entry in parts}) > 1:
        return None
    if half == "A":
        in_features = parts[0].shape[-1:]
        shapes = [(rank, *in_features)] * len(parts)
        shape = (len(parts) * rank, *in_features)
    else:
        shapes = [(size, rank) for size in outputs.values()]
        shape = (sum(outputs.values()), len(parts) * rank)
    if [entry.shape for entry in parts] != shapes:
        return None
    first, num_bytes = parts[0], math.prod(shape) * ELEMENT_BYTES[parts[0].dtype]
    places = tuple(TensorPart(part.key, part.shape, part.file_name, part.start, part.num_bytes) for part in parts)
    return TensorEntry(
        name, first.dtype, shape, first.file_name, first.start, num_bytes, parts=places, is_diagonal=half == "B"
    )
