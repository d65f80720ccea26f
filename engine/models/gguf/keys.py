"""Every metadata key of GGUF files, and its treatment in a model of a supported architecture.

llama.cpp reads what these keys ask for. A key is read, known not to matter, or refused by name unless its value asks
for nothing. Keys that stand in no list are refused where they begin as the architecture's or the tokenizer's do. Others
are named in a job's notes: nothing reads them. Source: llama.cpp `src/llama-arch.cpp`, `src/llama-model.cpp`, and
gguf-py's `constants.py`, which a test compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....system.untrusted import shown, shown_name
from ...model_config.gguf import ARCHITECTURES

#: Keys of the model that are read whether their value is a number or a list.
LISTS = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "attention.sliding_window_pattern",
    "rope.dimension_sections",
    "attention.recurrent_layers",
)
_OF_MODEL, _OF_TOKENIZER = "{arch}.", "tokenizer."


@dataclass(frozen=True, slots=True)
class Key:
    """Treatment of a key. `why`: reason for messages. `neutral`: values of a refused key that ask for nothing."""

    fate: Literal["read", "ignored", "named", "refused"]
    why: str = ""
    neutral: tuple[Any, ...] = ()


def _keys(prefix: str, names: str, key: Key) -> dict[str, Key]:
    return {f"{prefix}{name}": key for name in names.split()}


def _refused(why: str, *neutral: Any) -> Key:
    return Key("refused", why, neutral)


#: Key, with `{arch}` for the architecture, -> its treatment.
KEYS: Mapping[str, Key] = {
    # the file
    **_keys("general.", "architecture alignment", Key("read")),
    "general.type": _refused("adapters, projectors and tables are no models", "model"),
    **_keys("general.", "quantization_version file_type", Key("ignored", "each tensor names its own kind")),
    **_keys(
        "general.",
        "name author version organization finetune basename description quantized_by size_label license license.name "
        "license.link url doi uuid repo_url source.url source.doi source.uuid source.repo_url base_model.count "
        "dataset.count tags languages",
        Key("ignored", "describes the file"),
    ),
    **{
        f"general.{of}.{{id}}.{name}": Key("ignored", "describes the file")
        for of in ("base_model", "dataset")
        for name in ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")
    },
    **_keys(
        "general.sampling.",
        "sequence top_k top_p min_p xtc_probability xtc_threshold temp penalty_last_n penalty_repeat mirostat "
        "mirostat_tau mirostat_eta",
        Key("ignored", "defaults of llama.cpp's commands; a job says its own sampling"),
    ),
    "split.count": _refused("one file of several: join them with gguf-split --merge", 0, 1),
    **_keys("split.", "no tensors.count", Key("ignored", "of files that are cut, which split.count says")),
    # the model
    **_keys(
        _OF_MODEL,
        "context_length embedding_length block_count feed_forward_length attention.head_count attention.head_count_kv "
        "attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.dimension_count "
        "rope.freq_base rope.scaling.type rope.scaling.factor rope.scale_linear rope.scaling.original_context_length "
        "rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast "
        "rope.scaling.yarn_beta_slow",
        Key("read"),
    ),
    f"{_OF_MODEL}vocab_size": Key("ignored", "the embedding's rows, which are counted"),
    f"{_OF_MODEL}tensor_data_layout": _refused("another order of rows", "Meta AI original pth"),
    f"{_OF_MODEL}attention.causal": _refused("attention to later tokens", True),
    f"{_OF_MODEL}use_parallel_residual": _refused("another layer", False),
    f"{_OF_MODEL}swin_norm": _refused("another norm", False),
    **_keys(
        _OF_MODEL,
        "attention.max_alibi_bias attention.clamp_kqv attention.sliding_window attn_logit_softcapping "
        "final_logit_softcapping router_logit_softcapping swiglu_clamp_exp swiglu_clamp_shexp",
        _refused("another attention or activation", 0),
    ),
    **_keys(
        _OF_MODEL,
        "logit_scale residual_scale embedding_scale attention.output_scale attention.temperature_scale "
        "rope.scaling.attn_factor",
        _refused("numbers are scaled", 0, 1),
    ),
    f"{_OF_MODEL}attention.scale": _refused("scores of attention are scaled otherwise", 0),
    **_keys(
        _OF_MODEL,
        "expert_count expert_used_count expert_shared_count expert_feed_forward_length "
        "expert_shared_feed_forward_length expert_chunk_feed_forward_length expert_group_count "
        "expert_group_used_count expert_gating_func experts_per_group expert_weights_scale expert_group_scale "
        "moe_every_n_layers moe_latent_size interleave_moe_layer_step leading_dense_block_count",
        _refused("a mixture of experts", 0),
    ),
    f"{_OF_MODEL}expert_weights_norm": _refused("a mixture of experts", False),
    **_keys(_OF_MODEL, "nextn_predict_layers n_deepstack_layers", _refused("layers of its own", 0)),
    f"{_OF_MODEL}rope.scaling.finetuned": Key("ignored", "how the model was trained"),
    **_keys(
        _OF_MODEL,
        "rope.scaling.alpha rope.scaling.yarn_log_multiplier",
        _refused("other rotary positions", 0),
    ),
    **_keys(
        _OF_MODEL,
        "rope.dimension_count_swa rope.dimension_sections rope.freq_base_swa attention.key_length_swa "
        "attention.value_length_swa attention.sliding_window_pattern attention.shared_kv_layers "
        "attention.temperature_length attention.layer_norm_epsilon attention.group_norm_epsilon "
        "attention.group_norm_groups attention.q_lora_rank attention.kv_lora_rank attention.decay_lora_rank "
        "attention.iclr_lora_rank attention.value_residual_mix_lora_rank attention.gate_lora_rank "
        "attention.relative_buckets_count attention.key_length_mla attention.value_length_mla "
        "embedding_length_out features_length decoder_start_token_id decoder_block_count rescale_every_n_layers "
        "time_mix_extra_dim time_decay_extra_dim token_shift_count full_attention_interval "
        "activation_sparsity_scale altup.active_idx altup.num_inputs embedding_length_per_layer_input "
        "{dense}_feat_in {dense}_feat_out kda.head_dim wkv.head_size shortconv.l_cache convnext.embedding_length "
        "convnext.block_count posnet.embedding_length posnet.block_count ssm.conv_kernel ssm.inner_size "
        "ssm.state_size ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms classifier.output_labels",
        _refused("of another model"),
    ),
    f"{_OF_MODEL}pooling_type": Key("ignored", "of embeddings, which are not asked for"),
    # other files
    **_keys(
        "adapter.", "type lora.alpha lora.task_name lora.prompt_prefix alora.invocation_tokens", _refused("an adapter")
    ),
    **_keys("diffusion.", "shift_logits", _refused("a model that does not write from left to right")),
    **_keys("xielu.", "alpha_p alpha_n beta eps", _refused("another activation")),
    **_keys("imatrix.", "chunk_count chunk_size datasets", Key("ignored", "how weights were quantised")),
    **_keys(
        "quantize.imatrix.",
        "file dataset entries_count chunks_count",
        Key("ignored", "how weights were quantised"),
    ),
    # the tokenizer
    **_keys(
        "tokenizer.ggml.",
        "model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id "
        "unknown_token_id padding_token_id add_bos_token add_space_prefix",
        Key("read"),
    ),
    "tokenizer.chat_template": Key("read"),
    **_keys("tokenizer.ggml.", "add_eos_token add_sep_token", _refused("prompts that end before the answer", False)),
    **_keys(
        "tokenizer.ggml.",
        "seperator_token_id mask_token_id cls_token_id fim_pre_token_id fim_suf_token_id fim_mid_token_id "
        "fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id suffix_token_id middle_token_id",
        Key("ignored", "tokens that only a prompt would name; they are in the list of tokens"),
    ),
    **_keys(
        "tokenizer.ggml.",
        "token_type_count remove_extra_whitespaces precompiled_charsmap",
        Key("ignored", "of BERT and Unigram tokenizers, whose model is refused"),
    ),
    "tokenizer.huggingface.json": Key("ignored", "the same tokenizer again; llama.cpp and transformers pass it over"),
    "tokenizer.rwkv.world": _refused("another tokenizer"),
    **_keys(
        "tokenizer.", "chat_template.{name} chat_templates",
        Key("ignored", "further templates; tokenizer.chat_template is the default one"),
    ),
}  # fmt: skip


def key_of(name: str, architecture: str) -> Key:
    """The treatment of a key of a file."""
    pattern = name.replace(f"{architecture}.", _OF_MODEL, 1) if name.startswith(f"{architecture}.") else name
    of_model, read = pattern.removeprefix(_OF_MODEL), ARCHITECTURES.get(architecture)
    if read is not None and of_model in read.keys:
        return Key("read")
    if read is not None and of_model in read.keys_of_others:
        return Key("ignored", "of layers that its files do not have")
    found = KEYS.get(pattern) or next((KEYS[form] for form in _with_places(pattern) if form in KEYS), None)
    if found is not None:
        return found
    if pattern.startswith((_OF_MODEL, _OF_TOKENIZER)):
        return _refused("not known here")
    return Key("named")


def _with_places(name: str) -> Iterator[str]:
    """Forms of a key with `{id}` or `{name}` in it."""
    parts = name.split(".")
    yield ".".join("{id}" if part.isdigit() else part for part in parts)
    yield ".".join([*parts[:-1], "{name}"])


def named_keys(names: Collection[str], architecture: str) -> list[str]:
    """Keys of a file that nothing reads, neither this engine nor llama.cpp as far as is known."""
    return [name for name in names if key_of(name, architecture).fate == "named"]


def refused_keys(values: Mapping[str, Any], arrays: Collection[str]) -> list[str]:
    """A sentence for each key that asks for what is not served. `arrays`: keys whose values are lists."""
    architecture, problems = str(values["general.architecture"]), []
    for name in (*values, *arrays):
        key, value = key_of(name, architecture), values.get(name)
        of_model = name.removeprefix(f"{architecture}.")
        is_per_layer = name in arrays and of_model != name and key.fate == "read" and of_model not in LISTS
        if is_per_layer:
            problems.append(f"{name} differs by layer: not supported.")
        elif key.fate == "refused" and not (name in values and value in key.neutral):
            shown_value = f"={shown(value)}" if name in values else ""
            problems.append(f"{shown_name(name)}{shown_value}: not supported ({key.why}).")
    return problems
