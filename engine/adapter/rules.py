"""What every other key of `adapter_config.json` means for inference: irrelevant, or a reason to refuse.

Key names follow PEFT's `LoraConfig` up to 0.21; a key that no rule knows is refused unless it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .config import AdapterConfig
from .ledger import Ledger

_DESCRIPTIVE = "describes where the adapter comes from"
_TRAINING = "only acts during training"
_INITIAL = "only says how training started"

IRRELEVANT: Mapping[str, str] = {
    "auto_mapping": _DESCRIPTIVE,
    "base_model_name_or_path": f"{_DESCRIPTIVE}; shapes are checked against the base at hand",
    "revision": _DESCRIPTIVE,
    "peft_version": _DESCRIPTIVE,
    "inference_mode": _TRAINING,
    "lora_dropout": _TRAINING,
    "loftq_config": f"{_INITIAL} (init_lora_weights is judged)",
    "eva_config": _INITIAL,
    "corda_config": f"{_INITIAL} (init_lora_weights is judged)",
    "lora_ga_config": f"{_INITIAL} (init_lora_weights is judged)",
    "runtime_config": "PEFT ignores it in files",
    "megatron_core": "names a library, judged by megatron_config",
    "qalora_group_size": "judged by use_qalora",
    "fan_in_fan_out": "this base stores every layer as [out, in]; PEFT switches it off there too",
}

_PLAIN = "Train or convert to plain LoRA"
REFUSED_WHEN_SET: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA acts on part of a prompt only, expected null. Use a plain LoRA",
    "layer_replication": "repeats layers of the base, expected null. Build that base first and name it as --model",
    "target_parameters": f"adapts bare parameters, expected null. {_PLAIN} on modules",
    "megatron_config": f"adapts Megatron's parallel layers, expected null. {_PLAIN}",
    "use_qalora": f"pools inputs for a quantised base, expected false. {_PLAIN}",
    "velora_config": f"VeLoRA layers, expected null. {_PLAIN}",
    "arrow_config": f"routes tokens between adapters, expected null. {_PLAIN}",
    "kasa_config": f"KaSA truncates the base's weights, expected null. {_PLAIN}",
    "monteclora_config": f"samples its weights at random, expected null. {_PLAIN}",
    "use_bdlora": f"stores block-diagonal factors, expected null. {_PLAIN}",
    "enable_lora": f"packs several projections into one pair (PEFT before 0.3), expected null. {_PLAIN}",
}

_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "mica")
_BASE_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_GENERATING_TASKS = (None, "CAUSAL_LM")


def judge_keys(raw: Mapping[str, Any], ledger: Ledger) -> None:
    """Enter every key of the configuration that `AdapterConfig` does not read."""
    _judge_peft_type(raw, ledger)
    read_elsewhere = {f.name for f in fields(AdapterConfig)} | {"peft_type"}
    for key, value in raw.items():
        if key in read_elsewhere:
            continue
        if key == "task_type":
            _judge_task(value, ledger)
        elif key == "init_lora_weights":
            _judge_start(value, ledger)
        elif key in IRRELEVANT:
            ledger.ignore_key(key, IRRELEVANT[key])
        elif not _is_set(value):
            known = "not set" if key in REFUSED_WHEN_SET else "not known here, but not set"
            ledger.ignore_key(key, known)
        else:
            why = REFUSED_WHEN_SET.get(
                key, "this key is not known, so what it changes is not known. Remove it if it does not matter"
            )
            ledger.refuse_key(key, value, why)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _judge_peft_type(raw: Mapping[str, Any], ledger: Ledger) -> None:
    if raw.get("peft_type") == "LORA":
        ledger.use_key("peft_type")
        return
    ledger.refuse_key(
        "peft_type", raw.get("peft_type"), "expected 'LORA'; other methods are not computed here. Train a LoRA adapter"
    )


def _judge_task(value: Any, ledger: Ledger) -> None:
    if value in _GENERATING_TASKS:
        ledger.ignore_key("task_type", "the adapter is for text generation, or does not say")
    else:
        ledger.refuse_key("task_type", value, "expected 'CAUSAL_LM'; this adapter was not trained to generate text")


def _judge_start(value: Any, ledger: Ledger) -> None:
    """Some starts move part of the base's weights into the adapter: on the plain base it would be wrong."""
    key = "init_lora_weights"
    name = value.lower() if isinstance(value, str) else value
    if name is None or isinstance(name, bool) or name in _HARMLESS_STARTS:
        ledger.ignore_key(key, f"{_INITIAL}, the base's weights stayed as they were")
    elif isinstance(name, str) and name.startswith(_BASE_CHANGING_STARTS):
        ledger.refuse_key(
            key,
            value,
            "this start changed the base's weights, so the tensors do not fit the plain base. Convert with "
            "PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...), which writes true here",
        )
    else:
        expected = ", ".join(repr(name) for name in _HARMLESS_STARTS)
        ledger.refuse_key(key, value, f"expected true, false or one of {expected}")
