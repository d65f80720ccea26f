"""Classifies every key of `config.json`: read, without effect on answers and why, or refused. Others are named.

A test walks the keys that transformers' configuration and model classes of the supported families read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .families import FAMILIES
from .wrappers import WRAPPERS

#: Key -> what it decides.
READ: Mapping[str, str] = {
    "model_type": "the family",
    "architectures": "a model that generates text, one that classifies it, or a refusal",
    **dict.fromkeys(("id2label", "num_labels", "problem_type"), "labels of classifiers, and what their numbers mean"),
    "pad_token_id": "the token behind a text that a classifier passes over",
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "intermediate_size", "ffn_dim", "head_dim"), "sizes"),
    **dict.fromkeys(("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), "sizes"),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), "the MLP's function"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_elementwise_affine", "do_layer_norm_before"), "norms"),
    "_remove_final_layer_norm": "norms",
    **dict.fromkeys(("attention_bias", "mlp_bias", "enable_bias"), "biases, in families whose class has the key"),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), "the context"),
    **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"), "rotary embedding"),
    "rope_local_base_freq": "rotary embedding",
    **dict.fromkeys(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), "windows"),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), "windows"),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), "scales, caps"),
    "tie_word_embeddings": "one tensor for embedding and head, unless the checkpoint has two that differ",
    **dict.fromkeys(("eos_token_id", "bos_token_id"), "ends of answers, beginnings of texts"),
    "tokenizer_class": "the tokenizer's class, where tokenizer_config.json has none",
    **dict.fromkeys(("gguf_blocks", "gguf_unread_keys"), "written by the conversion of GGUF files"),
}
_OF_TRAINING = "of training"
_OF_OUTPUTS = "what transformers returns"
_OF_CLASSIFIERS = "of classifiers"
_OF_SAMPLING = "an option of generation: jobs give their own, or take generation_config.json's by --generation-config"
_OF_HEADS = "of heads for other tasks"
_OF_IMAGES = "of images, which no row may have"
_OF_WRITERS = "who wrote the file, and how"
#: Key -> why it changes no answer.
IRRELEVANT: Mapping[str, str] = {
    **dict.fromkeys(("attention_dropout", "dropout", "activation_dropout", "embd_pdrop", "resid_pdrop"), _OF_TRAINING),
    **dict.fromkeys(("attn_pdrop", "residual_dropout", "embedding_dropout", "hidden_dropout"), _OF_TRAINING),
    "reorder_and_upcast_attn": "the same numbers",
    **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"), _OF_HEADS),
    **dict.fromkeys(("summary_first_dropout", "summary_last_dropout"), _OF_HEADS),
    "eod_token_id": "of training",
    "neftune_noise_alpha": "of training",
    **dict.fromkeys(("perceiver_config", "use_resampler", "pixel_shuffle_factor", "scale_factor"), _OF_IMAGES),
    **dict.fromkeys(("is_llama_config", "transformers.js_config", "_pad_token_id"), _OF_WRITERS),
    **dict.fromkeys(("_flash_attn_2_enabled", "_use_flash_attention_2"), "the same numbers"),
    **dict.fromkeys(("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "boi_token_id"), _OF_IMAGES),
    **dict.fromkeys(("eoi_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), _OF_IMAGES),
    **dict.fromkeys(
        ("audio_token_id", "boa_token_id", "eoa_token_index", "eoa_token_id"), "of sound, which no row may have"
    ),
    **dict.fromkeys(("vision_token_id", "video_token_index", "projector_hidden_act"), _OF_IMAGES),
    **dict.fromkeys(("vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"), _OF_IMAGES),
    **dict.fromkeys(("layerdrop", "initializer_range", "init_std", "gradient_checkpointing"), _OF_TRAINING),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict", "torchscript"), _OF_OUTPUTS),
    **dict.fromkeys(("use_return_dict", "use_cache"), _OF_OUTPUTS),
    **dict.fromkeys(("label2id", "finetuning_task", "classifier_dropout"), _OF_CLASSIFIERS),
    **dict.fromkeys(("_name_or_path", "name_or_path", "transformers_version", "unsloth_version"), _OF_WRITERS),
    **dict.fromkeys(("unsloth_fixed", "_commit_hash", "model_name", "use_bfloat16"), _OF_WRITERS),
    **dict.fromkeys(("torch_dtype", "dtype"), "numbers are read as they are stored, and computed as --dtype says"),
    **dict.fromkeys(
        ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"), "the same numbers"
    ),
    **dict.fromkeys(("_attn_implementation_internal", "_experts_implementation", "experts_implementation"), "the same"),
    **dict.fromkeys(("chunk_size_feed_forward", "pretraining_tp", "is_decoder", "tensor_parallel"), "the same numbers"),
    **dict.fromkeys(("sep_token_id", "decoder_start_token_id", "cls_token_id"), "of other tasks"),
    **dict.fromkeys(("image_token_index", "image_token_id", "prefix", "task_specific_params"), "of other tasks"),
    **dict.fromkeys(("max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_p"), _OF_SAMPLING),
    **dict.fromkeys(("top_k", "typical_p", "repetition_penalty", "length_penalty", "num_beams"), _OF_SAMPLING),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty", "early_stopping", "num_return_sequences"), _OF_SAMPLING),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"), _OF_SAMPLING),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"), _OF_SAMPLING),
    **dict.fromkeys(("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"), _OF_SAMPLING),
    **dict.fromkeys(("output_scores", "return_dict_in_generate", "cache_implementation"), _OF_SAMPLING),
    "top_k_experts": "of a mixture of experts, which is refused by its own key",
    "auto_map": "code of the folder, which is never run; transformers has the families built in",
    "pruned_heads": "transformers 5 does not read it",
    "tf_legacy_loss": "transformers 5 does not read it",
    "base_model_tp_plan": "for several devices in transformers",
    "base_model_pp_plan": "for several devices in transformers",
    "ep_plan": "for several devices in transformers",
}
#: Key -> why it is refused where it is set.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
        "expected none: mixtures of experts are not computed",
    ),
    "per_layer_config": "expected none: sizes of single layers are read in Gemma 4 alone",
    "quantization_config": "expected the unquantized checkpoint",
    "compression_config": "expected the unquantized checkpoint",
    "is_encoder_decoder": "expected false: only decoders are computed",
    "add_cross_attention": "expected false: only decoders are computed",
    "tie_encoder_decoder": "expected false: only decoders are computed",
    "use_bidirectional_attention": "expected null or false: each token sees those before it",
    **dict.fromkeys(("qk_layer_norms", "rope_interleaved"), "expected false, as in all files of transformers' class"),
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), "expected none, but in models with images"),
    "transformers_weights": "another file of weights than model.safetensors, which is read",
}
#: Keys inside of `rope_scaling` and `rope_parameters`.
ROPE_READ: Mapping[str, str] = {
    **dict.fromkeys(("rope_type", "type"), "the kind"),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor", "attention_factor"), "every kind that has it"),
    "original_max_position_embeddings": "yarn, llama3, longrope",
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"), "yarn"),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), "llama3"),
    **dict.fromkeys(("short_factor", "long_factor"), "longrope"),
    **dict.fromkeys(("full_attention", "sliding_attention"), "settings by kind of layer, in Gemma 3"),
}
_ROPES = ("rope_scaling", "rope_parameters")
#: Keys of mixtures of experts whose value 1 means a dense model.
ONE_EXPERT = ("num_experts",)


def is_set(value: Any) -> bool:
    """Whether a value of a key asks for anything."""
    return value is not None and value is not False and value not in ("", [], {}, 0)


def unknown_keys(raw: Mapping[str, Any]) -> list[str]:
    """Keys that are set and that neither this engine nor transformers' classes of the supported families read."""
    model_type, text = raw.get("model_type"), raw.get("text_config")
    if isinstance(model_type, str) and model_type in WRAPPERS:
        families = WRAPPERS[model_type].families
        inner = str(text.get("model_type")) if isinstance(text, Mapping) else ""
        family = families.get(inner, next(iter(families.values())))
        of_text = _unknown_among(text, family.own_keys) if isinstance(text, Mapping) else []
        return sorted([*_unknown_among(raw, family.own_keys), *(f"text_config.{key}" for key in of_text)])
    of_type = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if of_type is None:
        return _unknown_among(raw, {})
    return _unknown_among(raw, {**of_type.own_keys, **dict.fromkeys(of_type.other_layers, "")})


def _unknown_among(raw: Mapping[str, Any], own_keys: Mapping[str, str]) -> list[str]:
    """Keys of an object that are set and that nothing reads. `own_keys`: those that the family alone reads."""
    found = [key for key, value in raw.items() if is_set(value) and not (_is_known(key) or key in own_keys)]
    for place in _ROPES:
        inner = raw.get(place)
        for part, values in ((place, inner), *_parts(place, inner)):
            if isinstance(values, Mapping):
                found += [
                    f"{part}.{key}"
                    for key, value in values.items()
                    if is_set(value) and key not in ROPE_READ and f"rope_parameters.{key}" not in own_keys
                ]
    return sorted(found)


def _is_known(key: str) -> bool:
    return key in READ or key in IRRELEVANT or key in REFUSED


def _parts(place: str, ropes: Any) -> list[tuple[str, Any]]:
    kinds = ("full_attention", "sliding_attention")
    return [(f"{place}.{kind}", ropes[kind]) for kind in kinds if kind in ropes] if isinstance(ropes, Mapping) else []
