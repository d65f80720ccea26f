"""Describes families whose layers differ from Llama's in their norms, their MLP or the order of their parts."""

from __future__ import annotations

from dataclasses import replace

from .family import LLAMA_NAMES, PLAIN, Family
from .names import LayerNorms, ModuleNames

_NORMS_BEHIND = LayerNorms(
    before_attention=None,
    attention_output="post_attention_layernorm",
    before_mlp=None,
    mlp_output="post_feedforward_layernorm",
    query="self_attn.q_norm",
    key="self_attn.k_norm",
)
_OLMO2 = Family(
    "olmo2",
    {**PLAIN, "rms_norm_eps": 1e-5, "eos_token_id": 50_279},
    models="OLMo 2",
    differs_by="norms behind attention and MLP; norms over all queries and all keys together",
    names=replace(LLAMA_NAMES, norms=_NORMS_BEHIND),
    head_norm="whole",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
)
_OLMO3 = replace(
    _OLMO2,
    name="olmo3",
    models="OLMo 3",
    differs_by="as OLMo 2; windows in three of four layers; rotary settings by kind of layer",
    defaults={**_OLMO2.defaults, "rope_theta": 500_000.0, "sliding_window": 4096},
    window_rule="all_but_every_nth",
    window_period=4,
    rope_kinds=("default", "linear", "yarn", "llama3"),
    has_ropes_by_layer_type=True,
    windowed_theta=500_000.0,
)
_EXAONE4 = Family(
    "exaone4",
    {
        **PLAIN,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    models="EXAONE 4",
    differs_by="norms behind attention and MLP; norms on queries and keys; windows, and no rotary embedding in layers "
    "without one",
    names=replace(LLAMA_NAMES, norms=_NORMS_BEHIND),
    window_rule="all_but_every_nth",
    window_period=4,
    window_period_key="sliding_window_pattern",
    rope_rule="windowed_layers_or_all",
)
_GLM = Family(
    "glm",
    {
        **PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 0.00000015625,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151_329, 151_336, 151_338],
    },
    models="GLM-4 (`-hf`)",
    differs_by="half of each head is rotated, neighbouring features together; packed `gate_up_proj`; biases on q, k, v",
    names=replace(LLAMA_NAMES, sites={**LLAMA_NAMES.sites, "gate_up": ("mlp.gate_up_proj",)}),
    qkv_bias="attention_bias",
    can_rotate_partially=True,
    is_rope_interleaved=True,
    rope_kinds=("default", "linear", "yarn"),
)
_GLM4 = replace(
    _GLM,
    name="glm4",
    models="GLM-4-0414",
    differs_by="as `glm`; norms before and after attention and MLP",
    names=replace(
        _GLM.names,
        norms=LayerNorms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm"),
    ),
)
_ONE_NORM = LayerNorms(before_mlp=None)
_COHERE = Family(
    "cohere",
    {
        **PLAIN,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255_001,
    },
    models="Command R and R+, Aya",
    differs_by="attention and MLP side by side; LayerNorm without bias; neighbouring features are rotated together; "
    "a factor of logits; norms on queries and keys where `use_qk_norm` is true",
    names=replace(LLAMA_NAMES, norms=replace(_ONE_NORM, query="self_attn.q_norm", key="self_attn.k_norm")),
    norm_kind="layer_no_bias",
    norm_eps_key="layer_norm_eps",
    head_norm="own_head",
    head_norm_key="use_qk_norm",
    is_parallel=True,
    is_rope_interleaved=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    factors={"logit_scale": "logit_scale"},
    own_keys={
        "layer_norm_eps": "norms",
        "logit_scale": "factor of logits",
        "use_qk_norm": "norms of queries and keys",
    },
)
_COHERE2 = replace(
    _COHERE,
    name="cohere2",
    models="Command R7B, Command A",
    differs_by="as `cohere`; windows in three of four layers, and no rotary embedding in the others",
    defaults={**_COHERE.defaults, "rope_theta": 10_000.0, "sliding_window": 4096},
    names=replace(LLAMA_NAMES, norms=_ONE_NORM),
    head_norm_key=None,
    window_rule="all_but_every_nth",
    window_period=4,
    window_period_key="sliding_window_pattern",
    rope_rule="windowed_layers",
    own_keys={"layer_norm_eps": "norms", "logit_scale": "factor of logits"},
)
_STARCODER2 = Family(
    "starcoder2",
    {
        **PLAIN,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    models="StarCoder2",
    differs_by="LayerNorm, biases, no gate; a sliding window in every layer, or none",
    names=replace(LLAMA_NAMES, sites={**LLAMA_NAMES.sites, "gate_up": ("mlp.c_fc",), "down": ("mlp.c_proj",)}),
    norm_kind="layer",
    norm_eps_key="norm_epsilon",
    has_gate=False,
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    window_rule="every_layer",
    own_keys={"norm_epsilon": "norms", "use_bias": "biases"},
)
_HUNYUAN = Family(
    "hunyuan_v1_dense",
    {**PLAIN, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    models="HunYuan, dense",
    differs_by="norms on queries and keys behind their rotation; `alpha` of the rotary embedding",
    names=replace(LLAMA_NAMES, norms=LayerNorms(query="self_attn.query_layernorm", key="self_attn.key_layernorm")),
    head_norm="rotated_head",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_fixed_stretch=True,
    own_keys={"rope_parameters.alpha": "stretch of the frequencies"},
)
_ARCEE = Family(
    "arcee",
    {
        **PLAIN,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    models="AFM",
    differs_by="no gate; the squared `relu`",
    names=replace(LLAMA_NAMES, sites={**LLAMA_NAMES.sites, "gate_up": ("mlp.up_proj",)}),
    has_gate=False,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_GPT2 = Family(
    "gpt2",
    {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1024,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    models="GPT-2, DistilGPT-2",
    differs_by="learned positions, LayerNorm, biases, no gate; weights are stored transposed (`Conv1D`)",
    names=ModuleNames(
        sites={"qkv": ("attn.c_attn",), "o": ("attn.c_proj",), "gate_up": ("mlp.c_fc",), "down": ("mlp.c_proj",)},
        norms=LayerNorms(before_attention="ln_1", before_mlp="ln_2"),
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        positions="transformer.wpe",
        stored_prefixes=(
            ("transformer.", "transformer."),
            ("lm_head.", "lm_head."),
            ("score.", "score."),
            ("", "transformer."),
        ),
        passed_over=r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)$",
        is_transposed=True,
    ),
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    norm_kind="layer",
    norm_eps_key="layer_norm_epsilon",
    has_gate=False,
    mlp_size_key="n_inner",
    has_default_mlp_size=True,
    has_grouped_heads=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    activation_key="activation_function",
    rope_rule="no_layer",
    ignored_keys=("scale_attn_by_inverse_layer_idx",),
    required_keys=("scale_attn_weights",),
    own_keys={
        **dict.fromkeys(("n_embd", "n_layer", "n_head", "n_positions", "n_inner"), "sizes"),
        "layer_norm_epsilon": "norms",
        "scale_attn_weights": "expected true",
        "scale_attn_by_inverse_layer_idx": "expected false",
    },
)
_PHI = Family(
    "phi",
    {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    models="Phi-1, 1.5 and 2",
    differs_by="attention and MLP side by side; LayerNorm, biases (also of the head), no gate; half of each head is "
    "rotated; norms on queries and keys where `qk_layernorm` is true",
    names=replace(
        LLAMA_NAMES,
        sites={**LLAMA_NAMES.sites, "o": ("self_attn.dense",), "gate_up": ("mlp.fc1",), "down": ("mlp.fc2",)},
        norms=replace(_ONE_NORM, query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
        final_norm="model.final_layernorm",
    ),
    norm_kind="layer",
    norm_eps_key="layer_norm_eps",
    head_norm_key="qk_layernorm",
    is_parallel=True,
    has_gate=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    has_head_bias=True,
    can_rotate_partially=True,
    own_keys={"layer_norm_eps": "norms", "qk_layernorm": "norms of queries and keys"},
)
#: The families of this file.
OTHER_FAMILIES = (
    _ARCEE, _COHERE, _COHERE2, _EXAONE4, _GLM, _GLM4, _GPT2, _HUNYUAN, _OLMO2, _OLMO3, _PHI, _STARCODER2,
)  # fmt: skip
