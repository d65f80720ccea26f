"""Reads adapters of mlx-lm: LoRA and DoRA, `adapters.safetensors` with `adapter_config.json`.

Facts of mlx-lm 0.32 (`tuner/lora.py`, `tuner/dora.py`, `tuner/utils.py`):
- A linear layer adds `scale * x @ lora_a @ lora_b`, lora_a [in_features, rank], lora_b [rank, out_features]: PEFT's A
  and B transposed, with alpha = scale * rank. An embedding has lora_a [vocab_size, rank], lora_b [rank, hidden_size].
- A tied head is the embedding with its pair (`as_linear`), which PEFT says with `ensure_weight_tying`.
- DoRA's `m` is PEFT's magnitude for a linear layer. For an embedding it has a number for each token, PEFT's has one for
  each feature.
- The last `num_layers` layers are adapted, -1 and 0 mean all: there the modules that `keys` names, without `keys` all
  linear ones (up to 0.20 queries and values). `keys` may also name modules of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ....system.untrusted import shown
from ...model_config.model import HEAD
from ..config import AdapterConfig, read_number, read_positive_int
from ..findings import Ledger
from ..names import BaseLayout
from ..tensor_file import TensorEntry

NOTE = "an adapter of mlx-lm: its tensors are named and shaped here as PEFT would store them"
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_NOT_READ = "mlx-lm does not read it when it loads an adapter"
_RETRAIN = "Correct the configuration, or save the adapter again"


def read_mlx(
    raw: Mapping[str, Any], tensors: Mapping[str, TensorEntry], layout: BaseLayout, ledger: Ledger
) -> tuple[AdapterConfig, Mapping[str, TensorEntry]]:
    """Configuration and tensors in PEFT's terms; what stands against them is entered as refusals."""
    is_dora = _reads_dora(raw, ledger)
    rank, scale, keys = _read_parameters(raw, ledger)
    num_layers = _read_num_layers(raw, ledger)
    for key in raw:
        if key not in ledger.key_uses:
            ledger.ignore_key(key, _NOT_READ)
    ledger.notes.append(NOTE)
    modules = {match["module"] for match in map(_TENSOR.fullmatch, tensors) if match}
    embedding = layout.embedding.rpartition(".")[2]
    adapted = [name for name in modules if name.rpartition(".")[2] == embedding]
    if adapted and is_dora:
        ledger.refuse(
            f"{adapted[0]}: DoRA of mlx-lm on an embedding, with lengths of tokens and not, as in PEFT, of features. "
            "Train it without the embedding"
        )
    if layout.is_tied and HEAD in (keys or ()) and HEAD not in modules:
        ledger.notes.append(f"key {HEAD} names no module of mlx-lm's, since the head is the embedding")
    config = AdapterConfig(
        r=rank,
        lora_alpha=scale * rank,
        use_dora=is_dora,
        target_modules=_targets(keys, modules, num_layers, layout),
        ensure_weight_tying=bool(adapted) and layout.is_tied,
    )
    return config, _translated(tensors, embedding, layout, ledger)


def _reads_dora(raw: Mapping[str, Any], ledger: Ledger) -> bool:
    kind, older = raw.get("fine_tune_type", "lora"), raw.get("use_dora", False)
    if kind not in ("lora", "dora"):
        why = "expected 'lora' or 'dora'"
        if kind == "full":
            why += "; the file holds whole weights. Fuse it (mlx_lm.fuse) and name the result as --model"
        ledger.refuse_key("fine_tune_type", kind, why)
    elif "fine_tune_type" in raw:
        ledger.use_key("fine_tune_type")
    if type(older) is not bool:
        ledger.refuse_key("use_dora", older, f"expected true or false. {_RETRAIN}")
    elif "use_dora" in raw:
        ledger.use_key("use_dora")
    if older is True and raw.get("fine_tune_type") == "lora":
        ledger.refuse_key("use_dora", older, f"fine_tune_type says 'lora', unclear which one is meant. {_RETRAIN}")
    return kind == "dora" or older is True


def _read_parameters(raw: Mapping[str, Any], ledger: Ledger) -> tuple[int, float, tuple[str, ...] | None]:
    """Rank, scale and keys of `lora_parameters`; defaults where they are refused."""
    name, given = "lora_parameters", raw.get("lora_parameters")
    if not isinstance(given, Mapping):
        ledger.refuse_key(name, given, f"expected an object with rank and scale, as mlx-lm writes it. {_RETRAIN}")
        return 1, 1.0, None
    ledger.use_key(name)
    rank, scale, keys = 1, 1.0, None
    try:
        rank, scale = read_positive_int(given.get("rank")), read_number(given.get("scale"))
    except ValueError as error:
        ledger.refuse_key(name, dict(given), f"expected rank and scale, each {error}. {_RETRAIN}")
    listed = given.get("keys")
    if isinstance(listed, list) and listed and all(isinstance(key, str) and key for key in listed):
        keys = tuple(dict.fromkeys(listed))
    elif listed is not None:
        ledger.refuse_key(name, dict(given), f"expected keys to be null or a list of module names. {_RETRAIN}")
    unknown = sorted(given.keys() - {"rank", "scale", "dropout", "keys", "alpha"})
    if unknown:
        why = f"{shown(unknown[0])} is not known, so what it changes is not known. Remove it if it does not matter"
        ledger.refuse_key(name, dict(given), why)
    if "lora_layers" in raw and given.get("alpha") not in (None, rank):
        ledger.refuse_key(
            name,
            dict(given),
            "alpha differs from rank. Up to version 0.14.1 mlx-lm multiplied scale by alpha / rank, later versions did "
            "not, and the file does not say which one wrote it. Put the factor that was trained with into scale, and "
            "remove alpha",
        )
    return rank, scale, keys


def _read_num_layers(raw: Mapping[str, Any], ledger: Ledger) -> int:
    """Number of the last layers that are adapted; not positive: all."""
    name = "lora_layers" if "num_layers" not in raw and "lora_layers" in raw else "num_layers"
    value = raw.get(name)
    if type(value) is int:
        ledger.use_key(name)
        return value
    ledger.refuse_key(name, value, f"expected the number of adapted layers, or -1 for all. {_RETRAIN}")
    return -1


def _targets(
    keys: tuple[str, ...] | None, modules: Collection[str], num_layers: int, layout: BaseLayout
) -> tuple[str, ...]:
    """Modules that are adapted, by the ends of their names, which are the same in the trained model and the base."""
    first = max(layout.num_layers - num_layers, 0) if num_layers > 0 else 0
    stack = layout.layers.rpartition(".")[2]
    chosen = range(first, layout.num_layers)
    if keys is None:
        in_layers = re.compile(rf"(?:.*\.)?{re.escape(stack)}\.\d+\.(?P<key>.+)")
        found = map(in_layers.fullmatch, modules)
        keys = tuple(sorted({match["key"] for match in found if match}))
    targets: list[str] = []
    # The model of mlx-lm has no module of this name where the head is the embedding, and passes over the key.
    keys = tuple(key for key in keys if not (key == HEAD and layout.is_tied and HEAD not in modules))
    for key in keys:
        names = [f"{layer}.{key}" for layer in chosen if f"{layout.layers}.{layer}.{key}" in layout.linear]
        # A key without a module is mlx-lm's to ignore; it is kept, to be named.
        targets += [f"{stack}.{name}" for name in names] or [key]
    return tuple(targets)


def _translated(
    tensors: Mapping[str, TensorEntry], embedding: str, layout: BaseLayout, ledger: Ledger
) -> dict[str, TensorEntry]:
    """Tensors by PEFT's names; what has no place there is entered as refused."""
    found: dict[str, TensorEntry] = {}
    for key, entry in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            why = "expected lora_a, lora_b or m of a module, as mlx-lm names them. Save a plain LoRA adapter"
            ledger.refuse_tensors([key], "unknown tensor", why)
            continue
        for name, translated in _peft_names(match["module"], match["part"], entry, embedding, is_tied=layout.is_tied):
            if name in found:
                why = "plays the same part as another tensor, unclear which one is meant. Remove one"
                ledger.refuse_tensors([key], "twice", why)
            found[name] = replace(translated, key=name)
    return found


def _peft_names(
    module: str, part: str, entry: TensorEntry, embedding: str, *, is_tied: bool
) -> list[tuple[str, TensorEntry]]:
    """PEFT's names and entries of one tensor: two for a tied embedding, where the head has it, too."""
    if part == "m":
        return [(f"{module}.lora_magnitude_vector", entry)]
    half = part[-1].upper()
    turned = _transposed(entry)
    if module.rpartition(".")[2] != embedding:
        return [(f"{module}.lora_{half}.weight", turned)]
    found = [(f"{module}.lora_embedding_{half}", turned)]
    if is_tied:
        other = {"A": "B", "B": "A"}[half]
        found.append((f"{_beside(module)}.lora_{other}.weight", entry))
    return found


def _beside(embedding: str) -> str:
    """The trained model's name of the head: it stands beside `model`, which has the embedding."""
    holders = embedding.split(".")[:-2]
    return ".".join([*holders, HEAD])


def _transposed(entry: TensorEntry) -> TensorEntry:
    if len(entry.shape) != 2:
        return entry
    return replace(entry, shape=entry.shape[::-1], is_transposed=True)
