"""Says how other engines read an adapter, where that is known: tensors that they leave out, and what they refuse.

PEFT: the rules of `set_peft_model_state_dict` (0.21), which loads tensors by name and passes over the others without a
word; a test compares them with PEFT. vLLM: the rules of its loader as its source has them (`vllm/lora/lora_model.py`,
`peft_helper.py`, `utils.py` at the end of 2025); vLLM was not run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from .names import LORA_ROLES, parse_name
from .sites import Contents, LoraSite

#: Findings about one engine by kind: `leaves_out` (tensors), `refuses` and `differs` (clauses).
EngineFindings = Mapping[str, tuple[str, ...]]
_VLLM_PAIR = re.compile(r"\.lora_[AB]\.weight$|\.lora_embedding_[AB]$")
_VLLM_SKIPPED = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
# Largest rank that vLLM serves unless `--max-lora-rank` says otherwise.
_VLLM_RANK = 16


def other_engines(
    contents: Contents, sites: Collection[LoraSite], targeted: Collection[str]
) -> dict[str, EngineFindings]:
    """Engine -> what is known of how it reads this adapter; only findings that there are.

    `targeted`: modules of the trained model that the configuration targets.
    """
    found = {"peft": {"leaves_out": _left_out_by_peft(contents, targeted)}, "vllm": _vllm(contents, sites)}
    return {
        engine: kinds
        for engine, findings in found.items()
        if (kinds := {kind: tuple(values) for kind, values in findings.items() if values})
    }


def _left_out_by_peft(contents: Contents, targeted: Collection[str]) -> list[str]:
    """LoRA tensors of modules that PEFT gives no pair, and tensors whose name PEFT never makes."""
    stray = {name.key for name in contents.names if name.role in LORA_ROLES and name.module not in targeted}
    return sorted(stray | {key for key in contents.entries if parse_name(key) is None})


def _vllm(contents: Contents, sites: Iterable[LoraSite]) -> dict[str, list[str]]:
    config = contents.config
    skipped = sorted(key for key in contents.entries if key.endswith(_VLLM_SKIPPED))
    other = sorted(key for key in contents.entries if not (_VLLM_PAIR.search(key) or key.endswith(_VLLM_SKIPPED)))
    refuses = ["modules_to_save"] if config.modules_to_save else []
    refuses += ["use_dora"] if config.use_dora else []
    refuses += [f"{len(other)} tensors that are no LoRA pair, first {other[0]}"] if other else []
    refuses += [f"r={config.r} without --max-lora-rank {config.r}"] if config.r > _VLLM_RANK else []
    plain = replace(config, rank_pattern={}, alpha_pattern={})
    # One factor for all modules: patterns are not read.
    factor = plain.scalings(["any"])["any"] if config.r > 0 else 0.0
    scaled = sorted(site.module for site in sites if site.scaling != factor)
    differs = []
    if scaled:
        differs.append(
            f"{len(scaled)} layers, first {scaled[0]}, are scaled by {factor:g}: rank_pattern and alpha_pattern are "
            "not read"
        )
    return {"leaves_out": skipped, "refuses": refuses, "differs": differs}


def in_words(found: Mapping[str, EngineFindings]) -> list[str]:
    """A sentence for each finding, for people."""
    names = {"peft": "PEFT", "vllm": "vLLM"}
    lines = []
    for engine, kinds in found.items():
        for kind, values in kinds.items():
            first = f"{len(values)} tensors, first {values[0]}" if kind == "leaves_out" else "; ".join(values)
            lines.append(f"{names[engine]} {kind.replace('_', ' ')}: {first}")
    return lines
