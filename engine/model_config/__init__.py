"""Reads a Hugging Face `config.json` as a `ModelConfig`, or refuses its family by name. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import EngineError
from .classifier import DEFAULT_LABELS, PROBLEM_TYPES, default_labels, read_labels
from .families import FAMILIES
from .keys import ONE_EXPERT, REFUSED, is_set
from .llama import read_llama_shaped
from .model import ModelConfig
from .opt import DEFAULTS as OPT_DEFAULTS
from .opt import read_opt
from .raw import RawConfig
from .wrappers import WRAPPERS, text_of

SUPPORTED_MODEL_TYPES = (*sorted(FAMILIES), "opt", *WRAPPERS)
_GENERATES, _CLASSIFIES = "ForCausalLM", "ForSequenceClassification"
# Ends of the names of classes that generate text, where it is another.
_OTHER_NAMES = {"gpt2": "LMHeadModel", **dict.fromkeys(WRAPPERS, "ForConditionalGeneration")}
__all__ = ["SUPPORTED_MODEL_TYPES", "parse_model_config"]


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` from `config.json` and `generation_config.json`, as transformers 4 or 5 write them.

    Raises `EngineError` for what is not computed exactly and `ModelFilesError` for what is missing or
    makes no sense, with all problems in one message.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise EngineError(
            f"config.json model_type={model_type!r}: not supported. Supported: {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    family = FAMILIES.get(model_type)
    values = RawConfig(model_type, raw, *((family.defaults, family.aliases) if family else (OPT_DEFAULTS, None)))
    if model_type in WRAPPERS:
        values = RawConfig(model_type, raw, {})
    _refuse_variants(values)
    facts = _facts_of_classifiers(values)
    inner = text_of(values)
    if inner is not None:
        family, text = inner
        _refuse_keys(text, tuple(family.own_keys))
        if facts["pad_token_id"] is None and type(text.get("pad_token_id")) is int:
            facts["pad_token_id"] = text.get("pad_token_id")
        return replace(read_llama_shaped(family, text, generation), wrapper=model_type, **facts)
    model = read_llama_shaped(family, values, generation) if family else read_opt(values, generation)
    return replace(model, **facts)


def _facts_of_classifiers(raw: RawConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` about labels. A model that generates text may have some for its adapters."""
    labels: tuple[str, ...] = ()
    try:
        labels = read_labels(raw.get("id2label"))
    except ValueError as error:
        raw.damage("id2label", f"expected {error}")
    problem_type, pad = raw.get("problem_type") or "", raw.get("pad_token_id")
    if problem_type not in ("", *PROBLEM_TYPES):
        raw.refuse("problem_type", f"supported: {', '.join(PROBLEM_TYPES)}")
    facts = {"labels": labels, "problem_type": problem_type, "pad_token_id": pad if type(pad) is int else None}
    if not _is_classifier(raw):
        return facts
    count = raw.optional_integer("num_labels") or DEFAULT_LABELS
    return facts | {"is_classifier": True, "is_tied": True, "labels": labels or default_labels(count)}


def _is_classifier(raw: RawConfig) -> bool:
    given = raw.get("architectures")
    names = list(map(str, given)) if isinstance(given, list) else []
    generates = _OTHER_NAMES.get(raw.model_type, _GENERATES)
    return not any(name.endswith(generates) for name in names) and any(name.endswith(_CLASSIFIES) for name in names)


def _refuse_variants(raw: RawConfig) -> None:
    """Refuse variants that no family supports: only plain, dense causal language models are served."""
    is_wrapper, family = raw.model_type in WRAPPERS, FAMILIES.get(raw.model_type)
    _refuse_keys(raw, WRAPPERS[raw.model_type].parts if is_wrapper else tuple(family.own_keys if family else ()))
    generates = _OTHER_NAMES.get(raw.model_type, _GENERATES)
    names = (generates,) if is_wrapper else (generates, _CLASSIFIES)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raw.damage("architectures", "expected a list of names")
    elif architectures and not any(str(name).endswith(names) for name in architectures):
        kinds = " or ".join(f"…{name}" for name in names)
        raw.refuse("architectures", f"expected a model that generates text or classifies it, {kinds}")


def _refuse_keys(raw: RawConfig, known: tuple[str, ...] = ()) -> None:
    """Refuse keys that ask for what is not computed. `known`: keys that are read here all the same."""
    quantization = raw.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raw.refuse("quantization_config.quant_method", "expected the unquantized checkpoint", method)
    for key, why in REFUSED.items():
        value = raw.get(key)
        is_one_expert = key in ONE_EXPERT and type(value) is int and value == 1
        is_of_images = key == "use_bidirectional_attention" and value == "vision"
        if key not in ("quantization_config", *known) and is_set(value) and not (is_one_expert or is_of_images):
            raw.refuse(key, why)
