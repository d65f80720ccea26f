"""Describes the families of dense models: each as data, by what it differs in from Llama.

A new family is an entry here, or in `other_families` where its layers are others than Llama's, and a case of
`tests/oracle/tiny_bases.py`. docs/internals/changing.md says how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .family import ACTIVATIONS, LLAMA_NAMES, PLAIN, Family
from .gemma4 import read_layers as read_gemma4_layers
from .names import LayerInputs, LayerNorms, ModuleNames, PackedSite
from .other_families import OTHER_FAMILIES

QUERY_KEY_NORMS = LayerNorms(query="self_attn.q_norm", key="self_attn.k_norm")
SANDWICH_NORMS = LayerNorms(
    attention_output="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_QWEN = {
    **PLAIN,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_LLAMA = Family(
    "llama",
    PLAIN,
    models="Llama 2 and 3, SmolLM2, TinyLlama",
    differs_by="`attention_bias`, `mlp_bias`",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_MISTRAL = Family(
    "mistral",
    {**PLAIN, "max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    models="Mistral",
    differs_by="a sliding window in every layer, or none",
    window_rule="every_layer",
)
_QWEN2 = Family(
    "qwen2",
    _QWEN,
    models="Qwen 2 and 2.5",
    differs_by="biases on q, k and v; sliding windows in the last layers",
    qkv_bias=True,
    window_rule="last_layers",
)
# Linear layers of the gated delta rule: what it convolves, gates, how much is written, how much is forgotten.
_DELTA_SITES: Mapping[PackedSite, tuple[str, ...]] = {
    "qkv": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    "o": ("linear_attn.out_proj",),
}
_QWEN3 = Family(
    "qwen3",
    {**_QWEN, "head_dim": 128},
    models="Qwen 3, dense",
    differs_by="norms on queries and keys",
    names=replace(LLAMA_NAMES, norms=QUERY_KEY_NORMS),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    window_rule="last_layers",
)
_GEMMA1 = Family(
    "gemma",
    {**_GEMMA, "num_key_value_heads": 16},
    models="Gemma 1",
    differs_by="scaled embeddings; norm weights stored as the difference from 1",
    norm_kind="rms_from_zero",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    # Gemma's first configurations say gelu and mean its tanh form, with which the models were trained
    activations={**ACTIVATIONS, "gelu": "gelu_tanh"},
    scales_embeddings=True,
    ignored_keys=("use_bidirectional_attention",),
)
_GEMMA2 = replace(
    _GEMMA1,
    name="gemma2",
    models="Gemma 2",
    differs_by="norms before and after attention and MLP; softcaps on scores and logits; alternating windows",
    defaults={**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    names=replace(LLAMA_NAMES, norms=SANDWICH_NORMS),
    activation_key="hidden_activation",
    activations=ACTIVATIONS,
    window_rule="all_but_every_nth",
    window_period=2,
    has_query_scalar=True,
    has_attention_softcap=True,
    has_logit_softcap=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    models="Gemma 3, text",
    differs_by="as Gemma 2 without softcap on scores; norms on queries and keys; two sets of rotary settings",
    defaults={
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    names=replace(LLAMA_NAMES, norms=replace(SANDWICH_NORMS, query="self_attn.q_norm", key="self_attn.k_norm")),
    window_period=6,
    window_period_key="sliding_window_pattern",
    rope_kinds=("default", "linear", "llama3"),
    has_ropes_by_layer_type=True,
    has_attention_softcap=False,
    ignored_keys=("use_bidirectional_attention", "attn_logit_softcapping"),
)
_GEMMA4_NORMS = replace(
    SANDWICH_NORMS,
    query="self_attn.q_norm",
    key="self_attn.k_norm",
    layer_input="post_per_layer_input_norm",
)
_GEMMA4 = replace(
    _GEMMA3,
    name="gemma4_text",
    models="Gemma 4, dense, text",
    differs_by="as Gemma 3 with plain norm weights; heads and MLPs by layer; norms on values; the last layers read "
    "keys and values of earlier ones; inputs of each layer by token; a factor of each layer",
    defaults={
        **_GEMMA,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
    names=replace(
        LLAMA_NAMES,
        sites={
            **LLAMA_NAMES.sites,
            "input_gate": ("per_layer_input_gate",),
            "input_projection": ("per_layer_projection",),
            "all_inputs": (LayerInputs().projection,),
        },
        norms=_GEMMA4_NORMS,
        layer_inputs=LayerInputs(),
        layer_scalar="layer_scalar",
    ),
    norm_kind="rms",
    window_period_key=None,
    rope_kinds=("default", "linear", "llama3", "proportional"),
    windowed_theta=10_000.0,
    can_rotate_partially=True,
    read_layers=read_gemma4_layers,
    has_layer_inputs=True,
    has_query_scalar=False,
    has_unit_scale=True,
    ignored_keys=("enable_moe_block",),
    own_keys={
        "global_head_dim": "features of a head in layers that attend to all",
        "num_global_key_value_heads": "key heads of such layers where keys are values",
        "per_layer_config": "heads of single layers",
        "attention_k_eq_v": "values that are the keys",
        "num_kv_shared_layers": "layers that read keys and values of earlier ones",
        "use_double_wide_mlp": "MLPs of such layers",
        "hidden_size_per_layer_input": "inputs of each layer",
        "vocab_size_per_layer_input": "tokens that have such inputs",
        "enable_moe_block": "a mixture of experts, which is refused",
    },
)
_PHI3 = Family(
    "phi3",
    {
        **PLAIN,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    models="Phi-3, Phi-3.5, Phi-4 (also mini)",
    differs_by="packed `qkv_proj` and `gate_up_proj`, LongRoPE, partial rotation",
    names=ModuleNames(
        sites={
            "qkv": ("self_attn.qkv_proj",),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_up_proj",),
            "down": ("mlp.down_proj",),
        }
    ),
    window_rule="every_layer",
    rope_kinds=("default", "longrope"),
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    can_rotate_partially=True,
)
_QWEN2_VL = replace(
    _QWEN2,
    name="qwen2_vl_text",
    defaults={
        **_QWEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
    rope_kinds=("default", "linear", "yarn"),
    rope_aliases={"mrope": "default"},
    has_position_axes=True,
    own_keys={"rope_parameters.mrope_section": "axes of positions, which are equal for text"},
)
_QWEN3_VL = replace(
    _QWEN3,
    name="qwen3_vl_text",
    defaults={
        **PLAIN,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128_000,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
    window_rule="none",
    rope_kinds=("default", "linear", "yarn"),
    rope_aliases={"mrope": "default"},
    has_position_axes=True,
    own_keys=dict.fromkeys(
        ("rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"),
        "axes of positions, which are equal for text",
    ),
)
_QWEN3_5 = replace(
    _QWEN3,
    name="qwen3_5_text",
    models="Qwen 3.5, dense",
    differs_by="the gated delta rule in three of four layers; a gate of attention's output; norms on queries and keys; "
    "a quarter of each head is rotated; norm weights stored as the difference from 1",
    defaults={
        **PLAIN,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    names=replace(
        LLAMA_NAMES,
        norms=QUERY_KEY_NORMS,
        delta="linear_attn",
        delta_sites=_DELTA_SITES,
        # layers that predict further tokens
        passed_over=r"mtp\.",
    ),
    norm_kind="rms_from_zero",
    window_rule="none",
    has_delta_layers=True,
    has_output_gate=True,
    can_rotate_partially=True,
    rope_aliases={"mrope": "default"},
    has_position_axes=True,
    own_keys={
        **dict.fromkeys(
            ("rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"),
            "axes of positions, which are equal for text",
        ),
        **dict.fromkeys(
            ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
            "heads of the gated delta rule",
        ),
        "linear_conv_kernel_dim": "tokens of its convolution",
        "full_attention_interval": "layers without it, where layer_types does not list them",
    },
)
_MINISTRAL3 = replace(
    _MISTRAL,
    name="ministral3",
    models="Ministral 3",
    differs_by="queries that grow with their position (`llama_4_scaling_beta`)",
    defaults={
        **PLAIN,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    rope_kinds=("default", "linear", "yarn"),
    has_query_growth=True,
    own_keys={"rope_parameters.llama_4_scaling_beta": "growth of queries with their position"},
)
_MINISTRAL = replace(
    _MISTRAL,
    name="ministral",
    models="Ministral",
    differs_by="sliding windows in the layers that `layer_types` names",
    defaults={**_MISTRAL.defaults, "bos_token_id": 1, "eos_token_id": 2},
    window_rule="every_layer_unless_listed",
)
_SMOLLM3 = replace(
    _LLAMA,
    name="smollm3",
    models="SmolLM3",
    differs_by="no rotary embedding in every fourth layer, or in those of `no_rope_layers`",
    defaults={
        **PLAIN,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    window_rule="unrotated_layers",
    rope_rule="listed_layers",
    own_keys=dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), "layers without a rotary embedding"),
)
_GRANITE = replace(
    _LLAMA,
    name="granite",
    models="Granite 3, dense",
    differs_by="factors of embeddings, scores of attention, outputs of attention and MLP, and logits",
    defaults={
        **PLAIN,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    factors={
        "embedding_scale": "embedding_multiplier",
        "attention_scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_divisor": "logits_scaling",
    },
    own_keys={
        "embedding_multiplier": "factor of embeddings",
        "attention_multiplier": "factor of attention's scores",
        "residual_multiplier": "factor of the outputs of attention and MLP",
        "logits_scaling": "divisor of logits",
    },
)
_GRANITE_DENSE = replace(
    _GRANITE,
    name="granitemoehybrid",
    models="Granite 4, dense, without Mamba layers",
    differs_by="as `granite`; packed `shared_mlp.input_linear`; no rotary embedding unless `position_embedding_type` "
    "is `rope`",
    defaults={**_GRANITE.defaults, "shared_intermediate_size": 1024, "num_local_experts": 8},
    names=replace(
        LLAMA_NAMES,
        sites={
            **LLAMA_NAMES.sites,
            "gate_up": ("shared_mlp.input_linear",),
            "down": ("shared_mlp.output_linear",),
        },
    ),
    mlp_bias=False,
    aliases={"layer_types": "layers_block_type"},
    mlp_size_key="shared_intermediate_size",
    lists_attention=True,
    rope_rule="if_asked",
    own_keys={
        **_GRANITE.own_keys,
        "shared_intermediate_size": "sizes",
        "layers_block_type": "kinds of layers",
        "position_embedding_type": "whether layers have a rotary embedding",
    },
    other_layers=(
        *("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "mamba_n_heads", "mamba_n_groups"),
        *("mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "mamba_conv_bias"),
        *("mamba_proj_bias", "time_step_limit", "time_step_min", "time_step_max"),
    ),
)
_GRANITE_WINDOWED = replace(
    _GRANITE,
    name="granite_swa",
    models="Granite SWASH",
    differs_by="as `granite`; attention sinks; windows in three of four layers; a base of the rotary frequencies for "
    "each layer, and layers without",
    defaults={
        **_GRANITE.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "bos_token_id": 100_257,
        "eos_token_id": 100_257,
    },
    names=replace(LLAMA_NAMES, sinks="self_attn.sinks"),
    window_rule="all_but_first_of_n",
    window_period=4,
    rope_rule="listed_thetas",
    own_keys={**_GRANITE.own_keys, "layer_rope_theta": "base of the rotary frequencies of each layer"},
)
_SEED_OSS = Family(
    "seed_oss",
    {
        **PLAIN,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    models="Seed-OSS",
    differs_by="biases on q, k and v; `attention_out_bias`, `mlp_bias`",
    qkv_bias="attention_bias",
    o_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    own_keys={"attention_out_bias": "bias of attention's output"},
)
_HELIUM = Family(
    "helium",
    {
        **PLAIN,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    models="Helium",
    differs_by="neighbouring features are rotated together; `attention_bias`, `mlp_bias`",
    is_rope_interleaved=True,
    qkv_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_ERNIE = Family(
    "ernie4_5",
    {
        **PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    models="ERNIE 4.5, dense",
    differs_by="neighbouring features are rotated together; `use_bias`",
    is_rope_interleaved=True,
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    own_keys={"use_bias": "biases"},
)
_VAULTGEMMA = replace(
    _GEMMA2,
    name="vaultgemma",
    models="VaultGemma",
    differs_by="as Gemma 2 without norms behind attention and MLP",
    defaults={**_GEMMA2.defaults, "bos_token_id": 2, "eos_token_id": 1},
    names=replace(LLAMA_NAMES, norms=LayerNorms(before_mlp="pre_feedforward_layernorm")),
)
#: The families that are described by data, by `model_type`.
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _LLAMA, _MISTRAL, _MINISTRAL, _MINISTRAL3, _QWEN2, _QWEN3, _QWEN3_5, _GEMMA1, _GEMMA2, _GEMMA3, _GEMMA4,
        _VAULTGEMMA, _PHI3, _SMOLLM3, _GRANITE, _GRANITE_DENSE, _GRANITE_WINDOWED, _SEED_OSS, _HELIUM, _ERNIE,
        *OTHER_FAMILIES,
    )
}  # fmt: skip
#: Families that are the text of a model with images, and no model of their own.
TEXT_FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (_QWEN2_VL, replace(_QWEN2_VL, name="qwen2_5_vl_text"), _QWEN3_VL)
}
