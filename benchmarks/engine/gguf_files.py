"""Llama models and their LoRA adapters as GGUF files, for engines that read nothing else.

Rows of query and key projections change places: GGUF has the two halves of a head's rotary pairs side by side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file

_FILE_TYPES: Mapping[GGMLQuantizationType, LlamaFileType] = {
    GGMLQuantizationType.F32: LlamaFileType.ALL_F32,
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.BF16: LlamaFileType.MOSTLY_BF16,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Array = NDArray[np.float32]


def write_gguf_model(folder: Path, path: Path, weights: GGMLQuantizationType) -> None:
    """Write a Llama checkpoint of one file, with its byte-level BPE tokenizer. Raises ValueError for other models."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: model_type is {config['model_type']!r}; only llama is written as GGUF.")
    writer = GGUFWriter(str(path), "llama")
    writer.add_file_type(_FILE_TYPES[weights])
    heads = _heads(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads["attn_q"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = _short_name(name.removesuffix(".weight"))
        numbers = _permuted(tensor.float().numpy(), heads.get(short.rpartition(".")[2]))
        kind = weights if numbers.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(f"{short}.weight", quantize(numbers, kind), raw_dtype=kind)
    _close(writer)


def write_gguf_adapter(model_folder: Path, folder: Path, path: Path) -> None:
    """Write a PEFT adapter of linear layers for `write_gguf_model` of its base, in fp32."""
    heads = _heads(json.loads((model_folder / "config.json").read_text(encoding="utf-8")))
    writer = GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        short = _short_name(layer)
        of_heads = heads.get(short.rpartition(".")[2]) if side == "lora_B" else None
        writer.add_tensor(f"{short}.weight.{side.lower()}", _permuted(tensor.float().numpy(), of_heads))
    _close(writer)


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}


def _short_name(layer: str) -> str:
    if layer in _OUTSIDE:
        return _OUTSIDE[layer]
    _, _, number, rest = layer.split(".", 3)
    return f"blk.{number}.{_NAMES[rest]}"


def _permuted(numbers: Array, num_heads: int | None) -> Array:
    if num_heads is None:
        return numbers
    halves = numbers.reshape(num_heads, 2, -1, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)


def _add_tokenizer(writer: GGUFWriter, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = sorted((tokenizer["model"]["vocab"] | added).items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([text for text, _ in vocabulary])
    control = set(added.values())
    writer.add_token_types([TokenType.CONTROL if token in control else TokenType.NORMAL for _, token in vocabulary])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
