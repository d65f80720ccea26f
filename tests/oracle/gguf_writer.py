"""Writes models of transformers as GGUF files as llama.cpp's converter does (`conversion/` of its repository).

Names of tensors are those of gguf-py's own table. What the converter does to weights and keys is said once more here,
and not taken from the code that is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

#: Architectures whose query and key rows the converter reorders.
REORDERED = ("llama", "smollm3", "granite", "arcee", "mistral3")
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
NUM_TOKENS = 272
Array = np.ndarray[Any, Any]


def byte_tokens(num_tokens: int = NUM_TOKENS) -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, then a few tokens of our own up to the vocabulary size."""
    tokens = [*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "hello"]
    return [*tokens, *(f"<extra_{i}>" for i in range(num_tokens - len(tokens) - 2)), "<s>", "<end>"]


def write_as_converted(
    path: Path,
    model: torch.nn.Module,
    architecture: str,
    keys: Mapping[str, Any],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """`keys`: keys of the architecture beyond those that all have, without its name. `kind`: of matrices."""
    _names(model, architecture)
    config = model.config.to_dict()
    writer = GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    if architecture == "qwen35":
        _add_delta(writer, config)
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    _add_tokenizer(writer, config["vocab_size"])
    for key, value in keys.items():
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    for name, array in _tensors(model, architecture):
        if array.ndim == 2 and "norm" not in name and array.shape[1] % 32 == 0:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _names(model: torch.nn.Module, architecture: str) -> gguf.TensorNameMap:
    if architecture not in ARCHITECTURES:
        pytest.skip(f"this version of gguf has no names for {architecture}")
    return gguf.get_tensor_name_map(ARCHITECTURES[architecture], model.config.num_hidden_layers)


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _add_sizes(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """What the converter writes for every text model that has it."""
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    writer.add_block_count(_first(config, ["num_hidden_layers", "n_layer"]))
    for add, names in (
        (writer.add_context_length, ["max_position_embeddings", "n_positions"]),
        (writer.add_embedding_length, ["hidden_size", "n_embd"]),
        (writer.add_feed_forward_length, ["intermediate_size", "n_inner"]),
        (writer.add_head_count, ["num_attention_heads", "n_head"]),
        (writer.add_head_count_kv, ["num_key_value_heads"]),
        (writer.add_layer_norm_rms_eps, ["rms_norm_eps"]),
        (writer.add_layer_norm_eps, ["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"]),
        (writer.add_key_length, ["head_dim"]),
        (writer.add_value_length, ["head_dim"]),
    ):
        if (value := _first(config, names)) is not None:
            add(value)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])


def _add_delta(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Sizes of the gated delta rule, and a quarter of each head, which is rotated."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_rope_dimension_count(int(config["head_dim"] * 0.25))
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_gemma4(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Heads, MLPs and windows by layer. transformers keeps heads of layers that attend to all in `per_layer_config`."""
    full = _of_full(config)
    is_windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    num_shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_windowed)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full["head_dim"])
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(config["head_dim"])
    if config["use_double_wide_mlp"]:
        first = len(is_windowed) - num_shared
        writer.add_feed_forward_length([inner if layer < first else 2 * inner for layer in range(len(is_windowed))])
    if "num_key_value_heads" in full:
        kv_heads = (config["num_key_value_heads"], full["num_key_value_heads"])
        writer.add_head_count_kv([kv_heads[not item] for item in is_windowed])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _of_full(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Heads of Gemma 4's layers that attend to all; the last one does."""
    of_layers: dict[str, Any] = config["per_layer_config"]
    return of_layers[str(config["num_hidden_layers"] - 1)]


def _add_tokenizer(writer: GGUFWriter, num_tokens: int) -> None:
    tokens = byte_tokens(num_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(num_tokens - 2)
    writer.add_eos_token_id(num_tokens - 1)


def _tensors(model: torch.nn.Module, architecture: str) -> Iterator[tuple[str, Array]]:
    config, names = model.config, _names(model, architecture)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array: Array = tensor.float().numpy()
        name, array = moved(name, array, config, architecture)
        if name.endswith("layer_scalar"):
            name += ".weight"
        if architecture in ("gemma", "gemma2", "gemma3") and "norm" in name:
            array = array + 1
        if architecture == "gpt2" and array.ndim == 2 and ".h." in name:
            array = array.T
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(array, 2)
            block = name.split(".")[2]
            yield from ((f"blk.{block}.ffn_gate.weight", gate), (f"blk.{block}.ffn_up.weight", up))
            continue
        if name.endswith("shared_mlp.output_linear.weight"):
            yield f"blk.{name.split('.')[2]}.ffn_down.weight", array
            continue
        if name.endswith("A_log"):
            yield str(names.get_name(name)), array
            continue
        stem, _, part = name.rpartition(".")
        of_gguf = names.get_name(stem)
        assert of_gguf is not None, name
        yield f"{of_gguf}.{part}", array
    yield from _rope_factors(config.to_dict())


def moved(name: str, array: Array, config: Any, architecture: str) -> tuple[str, Array]:
    """A tensor of a checkpoint with its rows and columns in the order of files, and its name for gguf-py's table."""
    if architecture in REORDERED and ("q_proj" in name or "k_proj" in name):
        return name, _reordered(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    return _of_delta(name, array, config) if architecture == "qwen35" else (name, array)


def _reordered(rows: Array, num_heads: int) -> Array:
    """Each head's two rotary halves interleaved."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _of_delta(name: str, array: Array, config: Any) -> tuple[str, Array]:
    """A tensor of Qwen 3.5: value heads from the order of key heads into one in which those of a key head are apart."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return name, array + 1
    if "linear_attn" not in name:
        return name, array
    if name.endswith("A_log"):
        array = -np.exp(array)
    if "conv1d" in name:
        array = array.squeeze(1)
    keys, order, rows = config.linear_num_key_heads, *value_order(config)
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * keys * config.linear_key_head_dim
        array = np.concatenate([array[:first], array[first:][rows]])
    elif "in_proj_z" in name:
        array = array[rows]
    elif "out_proj" in name:
        array = array[:, rows]
    elif not name.endswith("norm.weight"):
        array = array[order]
    return name.replace(".dt_bias", ".dt_proj.bias"), array


def value_order(config: Any) -> tuple[Array, Array]:
    """Value heads in the order of a file, and their features."""
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    order = np.arange(values).reshape(keys, values // keys).T.flatten()
    return order, (order[:, None] * size + np.arange(size)).flatten()


def _rope_factors(config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    rope = config.get("rope_parameters") or {}
    if (full := rope.get("full_attention", {})).get("rope_type") == "proportional":
        half = _of_full(config)["head_dim"] // 2
        rotated = int(2 * half * full["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    for length in ("long", "short"):
        if rope.get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)
