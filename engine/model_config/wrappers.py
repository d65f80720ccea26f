"""Finds the text model in the configuration of a model that reads images, too (a wrapper). No torch here.

A wrapper's `config.json` has its text model's keys in `text_config`; older files of Qwen2-VL have them at the top. Its
checkpoint has the text model's tensors below other names, which transformers has changed with version 4.52. Towers for
images, video and sound stand beside it: no token of text reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .families import FAMILIES, TEXT_FAMILIES
from .family import Family
from .raw import RawConfig

# Modules of towers and of what joins them to the text model, in checkpoints and in adapters.
_TOWERS = (
    r"(?:model\.)?(?:visual|vision_tower|vision_model|vision_embed_tokens|vision_language_adapter|patch_merger"
    r"|multi_modal_projector|mm_projector|embed_vision|embed_audio|audio_tower|connector)\."
)
_LLAVA_PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
_QWEN_PREFIXES = (("model.language_model.", "model."), ("language_model.", "model."))
_IDEFICS_PREFIXES = (("model.text_model.", "model."), ("text_model.", "model."))
# Sizes that transformers assumes for keys that the text part of Gemma 3 lacks: published files have few of them.
_GEMMA3_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_LLAMA_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2_VL_SIZES = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_QWEN3_VL_SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN3_5_SIZES = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}


# Keys of a wrapper's parts.
_PARTS = ("text_config", "vision_config")
_AUDIO = "audio_config"


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """One family of models with images."""

    #: `model_type` of the text part -> its family. The first counts where the file says nothing.
    families: Mapping[str, Family]
    #: Published models, for the table of families.
    models: str
    #: Prefixes of the text model's names in checkpoints, see `ModuleNames`.
    prefixes: tuple[tuple[str, str], ...]
    #: Sizes that transformers assumes for keys that the text part lacks.
    sizes: Mapping[str, int] = field(default_factory=dict)
    #: Whether embedding and head are one where the file says nothing.
    is_tied: bool = False
    #: Whether the text part may say, too, that embedding and head are one.
    is_tied_by_text: bool = False
    #: Whether the text part's keys may stand at the top.
    may_be_flat: bool = False
    #: Keys of the parts.
    parts: tuple[str, ...] = _PARTS


def _families(*names: str) -> dict[str, Family]:
    return {name: FAMILIES.get(name) or TEXT_FAMILIES[name] for name in names}


# The wrapper's class leaves out the cap of logits, which the text model's own class applies.
_GEMMA3 = replace(
    FAMILIES["gemma3_text"],
    has_logit_softcap=False,
    ignored_keys=(*FAMILIES["gemma3_text"].ignored_keys, "final_logit_softcapping"),
)


#: Wrappers whose text model is served, by `model_type`.
WRAPPERS: Mapping[str, _Wrapper] = {
    "gemma3": _Wrapper(
        {"gemma3_text": _GEMMA3}, "Gemma 3 from 4B on", _LLAVA_PREFIXES, _GEMMA3_SIZES, is_tied=True
    ),
    "gemma4": _Wrapper(
        _families("gemma4_text"), "Gemma 4, dense", _LLAVA_PREFIXES, is_tied=True, parts=(*_PARTS, _AUDIO)
    ),
    "mistral3": _Wrapper(
        _families("mistral", "ministral3"), "Mistral Small 3.1 and 3.2, Ministral 3", _LLAVA_PREFIXES, is_tied=True
    ),
    "idefics3": _Wrapper(_families("llama"), "SmolVLM, Idefics 3", _IDEFICS_PREFIXES, _LLAMA_SIZES),
    "smolvlm": _Wrapper(_families("llama"), "SmolVLM 2", _IDEFICS_PREFIXES, _LLAMA_SIZES),
    "qwen2_vl": _Wrapper(
        _families("qwen2_vl_text"), "Qwen2-VL", _QWEN_PREFIXES, _QWEN2_VL_SIZES, is_tied_by_text=True, may_be_flat=True
    ),
    "qwen2_5_vl": _Wrapper(
        _families("qwen2_5_vl_text"), "Qwen2.5-VL", _QWEN_PREFIXES, _QWEN2_VL_SIZES, is_tied_by_text=True,
        may_be_flat=True,
    ),
    "qwen3_vl": _Wrapper(
        _families("qwen3_vl_text"), "Qwen3-VL, dense", _QWEN_PREFIXES, _QWEN3_VL_SIZES, is_tied_by_text=True
    ),
    "qwen3_5": _Wrapper(
        _families("qwen3_5_text"), "Qwen 3.5, dense", _QWEN_PREFIXES, _QWEN3_5_SIZES, is_tied_by_text=True
    ),
}  # fmt: skip
# Names of text parts in older files, which have the wrapper's own, and the names of today.
_SAME = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
# Keys whose value at the top counts before that of the text part.
_AT_TOP = ("eos_token_id", "bos_token_id")


def text_of(raw: RawConfig) -> tuple[Family, RawConfig] | None:
    """Family and configuration of a wrapper's text model; None for what is no wrapper, or one that is not served.
    A text model of no served family is noted as a problem in `raw`.
    """
    wrapper = WRAPPERS.get(raw.model_type)
    if wrapper is None:
        return None
    is_flat = wrapper.may_be_flat and raw.get("text_config") is None
    values = raw.all_values() if is_flat else raw.mapping("text_config")
    values = {key: value for key, value in values.items() if key not in wrapper.parts}
    if not values:
        raw.damage("text_config", "expected the keys of the text model")
    first = next(iter(wrapper.families))
    named = str(first if is_flat else values.get("model_type") or first)
    name = raw.part("text_config", values).choice("model_type", wrapper.families, _SAME.get(named, named))
    family = wrapper.families[name]
    at_top = {key: raw.get(key) for key in _AT_TOP if raw.get(key) is not None}
    tied = raw.get("tie_word_embeddings")
    is_tied = (wrapper.is_tied if tied is None else tied) or (
        wrapper.is_tied_by_text and values.get("tie_word_embeddings") is True
    )
    text = raw.part(
        "" if is_flat else "text_config",
        {**values, **at_top, "tie_word_embeddings": is_tied},
        {**family.defaults, **wrapper.sizes},
    )
    passed_over = "|".join(filter(None, (_TOWERS, family.names.passed_over)))
    names = replace(family.names, stored_prefixes=wrapper.prefixes, passed_over=passed_over)
    return replace(family, names=names), text
