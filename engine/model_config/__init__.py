"""Reads a Hugging Face `config.json` as a `ModelConfig`, or refuses its family by name. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import EngineError
from .families import LLAMA_SHAPED
from .keys import REFUSED, is_set
from .llama import read_llama_shaped
from .model import ModelConfig
from .opt import DEFAULTS as OPT_DEFAULTS
from .opt import read_opt
from .raw import RawConfig

SUPPORTED_MODEL_TYPES = (*sorted(LLAMA_SHAPED), "opt")
# Other spellings of what a supported family already says, for the message.
_HINTS = {"gemma3": " Its text model alone has model_type='gemma3_text'."}
__all__ = ["SUPPORTED_MODEL_TYPES", "parse_model_config"]


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` from `config.json` and `generation_config.json`, as transformers 4 or 5 write them.

    Raises `EngineError` for what is not computed exactly and `ModelFilesError` for what is missing or
    makes no sense, with all problems in one message.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise EngineError(
            f"config.json model_type={model_type!r}: not supported.{_HINTS.get(model_type, '')} "
            f"Supported: {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    family = LLAMA_SHAPED.get(model_type)
    values = RawConfig(model_type, raw, family.defaults if family else OPT_DEFAULTS)
    _refuse_variants(values)
    return read_llama_shaped(family, values, generation) if family else read_opt(values, generation)


def _refuse_variants(raw: RawConfig) -> None:
    """Refuse variants that no family supports: only plain, dense causal language models are served."""
    quantization = raw.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raw.refuse("quantization_config.quant_method", "expected the unquantized checkpoint", method)
    for key, why in REFUSED.items():
        if key != "quantization_config" and is_set(raw.get(key)):
            raw.refuse(key, why)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raw.damage("architectures", "expected a list of names")
    elif architectures and not any(str(name).endswith("ForCausalLM") for name in architectures):
        raw.refuse("architectures", "expected a model that generates text, named …ForCausalLM")
