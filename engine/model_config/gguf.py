"""The GGUF architectures that are read: each as data, by the family that it stands for.

Names of tensors follow from the family's own names: llama.cpp has one name for each part of a layer, whatever the
family calls it. An architecture says besides what llama.cpp's converter does to a checkpoint: which rows it reorders,
and which keys it writes. Source: llama.cpp `conversion/` and gguf-py's `constants.py` and `tensor_mapping.py`, which a
test compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .families import FAMILIES
from .family import Family
from .names import PackedSite


@dataclass(frozen=True, slots=True)
class _Architecture:
    """One architecture, by how its files differ from the checkpoints of its family."""

    #: `model_type` of the family.
    family: str
    #: Class of transformers.
    transformers_class: str
    #: A key, and `model_type` and class of files in which it is set, where that is another family.
    other: tuple[str, str, str] | None = None
    #: Whether each head's query and key rows are reordered, from (half, pair) to (pair, half).
    has_paired_rows: bool = False
    #: Name of the norm of the MLP's input.
    before_mlp: str = "ffn_norm"
    #: Whether files have the norms of queries and keys that checkpoints of the family may have.
    has_head_norms: bool = True
    #: Keys of the model that are read for it besides those that every architecture has.
    keys: tuple[str, ...] = ()
    #: Keys of other layers that the converter writes for every model of the family.
    keys_of_others: tuple[str, ...] = ()


_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_LAYER_NORM = "attention.layer_norm_epsilon"
_GRANITE_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned")
_SWA_HEADS = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
_OF_MAMBA = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank")
_OF_EXPERTS = ("expert_shared_feed_forward_length", "expert_used_count")

#: `general.architecture` -> how its files are read.
ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", has_paired_rows=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": _Architecture("gemma", "GemmaForCausalLM"),
    "gemma2": _Architecture(
        "gemma2", "Gemma2ForCausalLM", keys=(_WINDOW, "attn_logit_softcapping", "final_logit_softcapping")
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys=(_WINDOW, _PATTERN, "final_logit_softcapping", "rope.freq_base_swa"),
    ),
    "gemma4": _Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        keys=(
            *(_WINDOW, _PATTERN, *_SWA_HEADS, "attention.shared_kv_layers", "embedding_length_per_layer_input"),
            *("final_logit_softcapping", "rope.freq_base_swa"),
        ),
    ),
    # for text the positions of a model with images have one axis: it computes what the family without images does
    "qwen2vl": _Architecture("qwen2", "Qwen2ForCausalLM", keys=("rope.dimension_sections",)),
    "qwen3vl": _Architecture(
        "qwen3", "Qwen3ForCausalLM", keys=("rope.dimension_sections",), keys_of_others=("n_deepstack_layers",)
    ),
    "qwen35": _Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        before_mlp="post_attention_norm",
        keys=(
            *_OF_MAMBA,
            *("full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections"),
            "nextn_predict_layers",
        ),
    ),
    "phi2": _Architecture("phi", "PhiForCausalLM", has_head_norms=False, keys=(_LAYER_NORM,)),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", keys=(_WINDOW, "rope.scaling.attn_factor")),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", has_paired_rows=True),
    "granite": _Architecture(
        "granite",
        "GraniteForCausalLM",
        has_paired_rows=True,
        keys=_GRANITE_SCALES,
        keys_of_others=(*_OF_MAMBA, *_OF_EXPERTS),
    ),
    "mistral3": _Architecture(
        "mistral",
        "MistralForCausalLM",
        other=("attention.temperature_scale", "ministral3", "Ministral3ForCausalLM"),
        has_paired_rows=True,
        keys=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    ),
    "seed_oss": _Architecture("seed_oss", "SeedOssForCausalLM", before_mlp="post_attention_norm"),
    "ernie4_5": _Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "arcee": _Architecture("arcee", "ArceeForCausalLM", has_paired_rows=True),
    "command-r": _Architecture("cohere", "CohereForCausalLM", keys=(_LAYER_NORM, "logit_scale")),
    "cohere2": _Architecture("cohere2", "Cohere2ForCausalLM", keys=(_LAYER_NORM, "logit_scale", _WINDOW, _PATTERN)),
    "exaone4": _Architecture("exaone4", "Exaone4ForCausalLM", keys=(_WINDOW, _PATTERN)),
    "chatglm": _Architecture("glm", "GlmForCausalLM"),
    "glm4": _Architecture("glm4", "Glm4ForCausalLM"),
    "gpt2": _Architecture("gpt2", "GPT2LMHeadModel", keys=(_LAYER_NORM,)),
    "hunyuan-dense": _Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "olmo2": _Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        other=(_WINDOW, "olmo3", "Olmo3ForCausalLM"),
        keys=(_WINDOW, _PATTERN, "rope.freq_base_swa"),
    ),
    "starcoder2": _Architecture("starcoder2", "Starcoder2ForCausalLM", keys=(_LAYER_NORM,)),
}
#: Names of a layer's linear layers, by how many checkpoints have for the site.
SITES: Mapping[tuple[PackedSite, int], tuple[str, ...]] = {
    ("qkv", 3): ("attn_q", "attn_k", "attn_v"),
    ("qkv", 1): ("attn_qkv",),
    ("o", 1): ("attn_output",),
    ("gate_up", 2): ("ffn_gate", "ffn_up"),
    ("gate_up", 1): ("ffn_up",),
    ("down", 1): ("ffn_down",),
    ("input_gate", 1): ("inp_gate",),
    ("input_projection", 1): ("proj",),
    ("all_inputs", 1): ("per_layer_model_proj",),
}
#: Tensors of the gated delta rule below its module -> their names in files.
DELTA: Mapping[str, str] = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def family_of(architecture: str, metadata: Mapping[str, Any]) -> tuple[Family, str]:
    """The family that a file stands for, and the class of transformers."""
    read = ARCHITECTURES[architecture]
    if read.other is not None:
        key, name, class_name = read.other
        if metadata.get(f"{architecture}.{key}"):
            return FAMILIES[name], class_name
    return FAMILIES[read.family], read.transformers_class


def architectures_of(family: str) -> tuple[str, ...]:
    """Architectures that files of a family may have. `family`: its `model_type`."""
    found = [name for name, read in ARCHITECTURES.items() if family in (read.family, *(read.other or ())[1:2])]
    # Models of the first Mistral are files of Llama.
    return ("llama", *found) if family == "mistral" else tuple(found)


@cache
def linear_parts(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Name of a layer's weight in files -> linear layers below the layer that it may be, for the family of a
    `model_type`.
    """
    family = FAMILIES[model_type]
    found: dict[str, tuple[str, ...]] = {}
    in_layers = {site: modules for site, modules in family.names.sites.items() if site != "all_inputs"}
    for site, modules in in_layers.items():
        for name, module in zip(SITES[site, len(modules)], modules, strict=True):
            found[name] = (*found.get(name, ()), module)
    for theirs, ours in DELTA.items() if family.has_delta_layers else ():
        if theirs.startswith("in_proj_"):
            stem = ours.removesuffix(".weight")
            found[stem] = (*found.get(stem, ()), f"{family.names.delta}.{theirs.removesuffix('.weight')}")
    return found


def norm_names(architecture: str, family: Family) -> dict[str, str]:
    """Name of a layer's norm -> its name in checkpoints."""
    norms, read = family.names.norms, ARCHITECTURES[architecture]
    places = {
        "attn_norm": norms.before_attention,
        "post_attention_norm": norms.attention_output,
        read.before_mlp: norms.before_mlp,
        "post_ffw_norm": norms.mlp_output,
        "attn_q_norm": norms.query if read.has_head_norms else None,
        "attn_k_norm": norms.key if read.has_head_norms else None,
        "post_norm": norms.layer_input,
    }
    return {ours: theirs for ours, theirs in places.items() if theirs is not None}


def linear_names(family: Family, in_layers: Collection[str]) -> Iterator[tuple[PackedSite, str, tuple[str, ...]]]:
    """Site, name and checkpoint names of each linear layer; several where the file has q, k and v as one.

    `in_layers`: the names of tensors in the file's layers, without the numbers of layers.
    """
    is_fused = "attn_qkv.weight" in in_layers and not family.has_delta_layers
    for site, modules in family.names.sites.items():
        if site == "qkv" and len(modules) == 3 and is_fused:
            yield site, "attn_qkv", modules
        else:
            for name, module in zip(SITES[site, len(modules)], modules, strict=True):
                yield site, name, (module,)
