"""Says how other engines read an adapter, where that is known: tensors that they leave out, and what they refuse.

PEFT: the rules of `set_peft_model_state_dict` (0.21), which loads tensors by name and passes over the others without a
word; a test compares them with PEFT. vLLM: the rules of its loader as the source of 0.33.0 has them (`PEFTHelper` in
`vllm/lora/peft_helper.py`, `LoRAModel` in `lora_model.py`, `activate_adapter` in `model_manager.py`, `utils.py`); vLLM
was not run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ...system.untrusted import shown
from ..model_config.model import HEAD
from .names import LORA_ROLES, BaseLayout, parse_name
from .sites import Contents
from .tensor_file import TensorEntry

#: Findings about one engine by kind: `leaves_out` (tensors), `refuses` and `differs` (clauses).
EngineFindings = Mapping[str, tuple[str, ...]]
_ROOT = "base_model.model."
_VLLM_PAIR = re.compile(r"(?P<module>.+)\.(?:lora_[AB]\.weight|lora_embedding_[AB])")
_VLLM_SKIPPED = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
# Values of --max-lora-rank; the default is 16.
_VLLM_RANKS, _VLLM_RANK = (1, 8, 16, 32, 64, 128, 256, 320, 512), 16
_VLLM_REQUIRED = ("r", "lora_alpha", "target_modules")
_VLLM_REFUSED_KEYS = (
    "modules_to_save", "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora",
    "use_qalora",
)  # fmt: skip
_VLLM_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Families whose classes in vLLM were read; of others nothing is said.
_VLLM_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "opt")
# Families whose class names no embedding_modules, so that pairs on embedding and head are unexpected modules.
_VLLM_WITHOUT_EMBEDDING = ("qwen2", "gemma", "gemma2", "gemma3_text", "opt")


def other_engines(
    contents: Contents,
    raw: Mapping[str, Any],
    stored: Mapping[str, TensorEntry],
    dialect: str,
    targeted: Collection[str],
) -> dict[str, EngineFindings]:
    """Engine -> what is known of how it reads this adapter; only findings that there are.

    `raw`: keys of its configuration. `stored`: tensors as the files name them. `dialect`: whose form the files have.
    `targeted`: modules of the trained model that the configuration targets.
    """
    stray, layout = _stray_pairs(contents, targeted), contents.layout
    is_known = layout.family in _VLLM_FAMILIES and not layout.wrapper
    found = {
        "peft": {"leaves_out": sorted({*stray, *(key for key in contents.entries if parse_name(key) is None)})},
    }
    if dialect != "peft":
        found["vllm"] = {"refuses": [_FORMS[dialect]]}
    elif is_known:
        found["vllm"] = _vllm(contents, raw, stored, stray)
    return {
        engine: kinds
        for engine, findings in found.items()
        if (kinds := {kind: tuple(values) for kind, values in findings.items() if values})
    }


_FORMS = {"mlx": "files of mlx-lm, expected adapter_model.safetensors and PEFT's keys", "gguf": "adapters in GGUF"}


def _stray_pairs(contents: Contents, targeted: Collection[str]) -> list[str]:
    """LoRA tensors of modules that PEFT gives no pair."""
    return sorted(name.key for name in contents.names if name.role in LORA_ROLES and name.module not in targeted)


def _vllm(
    contents: Contents, raw: Mapping[str, Any], stored: Mapping[str, TensorEntry], stray: Collection[str]
) -> dict[str, list[str]]:
    layout, tensors = contents.layout, [key for key in stored if not key.endswith(_VLLM_SKIPPED)]
    pairs = {key: match["module"].replace(_ROOT, "") for key in tensors if (match := _VLLM_PAIR.fullmatch(key))}
    other = sorted(key for key in tensors if key not in pairs)
    known = _vllm_modules(layout)
    unexpected = sorted({name for name in pairs.values() if name.rpartition(".")[2] not in known})
    # A module of a known name is looked up by its path; where the model has none of that path, nothing is said.
    lost = [key for key, name in pairs.items() if name not in layout.adaptable and name.rpartition(".")[2] in known]
    applied = [key for key in stray if key in pairs and key not in lost and pairs[key] not in unexpected]
    refuses = _keys_that_vllm_refuses(contents, raw)
    refuses += [f"{len(other)} tensors that are no LoRA pair, first {other[0]}"] if other else []
    refuses += [f"pairs on {len(unexpected)} modules, first {unexpected[0]}"] if unexpected else []
    refuses += [
        f"a vocabulary of {stored[key].shape[1]} tokens, the base has {layout.vocab_size}"
        for key in pairs
        if key.endswith("lora_embedding_A") and stored[key].shape[1:] not in ((), (layout.vocab_size,))
    ]
    differs = [f"applies {len(applied)} tensors that are not targeted, first {applied[0]}"] if applied else []
    skipped = [key for key in stored if key.endswith(_VLLM_SKIPPED)]
    return {"leaves_out": sorted([*skipped, *lost]), "refuses": refuses, "differs": differs}


def _vllm_modules(layout: BaseLayout) -> set[str]:
    """Last parts of the names of modules that may have a pair in vLLM."""
    has_embedding = layout.family not in _VLLM_WITHOUT_EMBEDDING
    ends = {name.rpartition(".")[2] for name in layout.linear} - {HEAD}
    return ends | {layout.embedding.rpartition(".")[2], HEAD} if has_embedding else ends


def _keys_that_vllm_refuses(contents: Contents, raw: Mapping[str, Any]) -> list[str]:
    refuses = [f"a configuration without {key}" for key in _VLLM_REQUIRED if key not in raw]
    refuses += [key for key in _VLLM_REFUSED_KEYS if raw.get(key)]
    refuses += [f"bias={shown(raw['bias'])}"] if raw.get("bias", "none") != "none" else []
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _VLLM_STARTS:
        refuses.append(f"init_lora_weights={shown(start)}")
    rank = max(contents.config.r, *contents.config.rank_pattern.values(), 0)
    if rank > _VLLM_RANK:
        enough = next((limit for limit in _VLLM_RANKS if limit >= rank), None)
        without = f" without --max-lora-rank {enough}" if enough else f", at most {_VLLM_RANKS[-1]}"
        refuses.append(f"rank {rank}{without}")
    return refuses


def in_words(found: Mapping[str, EngineFindings]) -> list[str]:
    """A sentence for each finding, for people."""
    names = {"peft": "PEFT", "vllm": "vLLM"}
    lines = []
    for engine, kinds in found.items():
        for kind, values in kinds.items():
            first = f"{len(values)} tensors, first {values[0]}" if kind == "leaves_out" else "; ".join(values)
            lines.append(f"{names[engine]} {kind.replace('_', ' ')}: {first}")
    return lines
