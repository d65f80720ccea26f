"""Writes PEFT adapters in the forms of other programs: the same numbers under other names, shapes and files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MLX_WEIGHTS = "adapters.safetensors"
# What mlx-lm 0.32 writes: all its options, of which three are read when an adapter is loaded.
MLX_CONFIG: dict[str, Any] = {
    "adapter_path": "adapters", "batch_size": 4, "config": None, "data": "data", "fine_tune_type": "lora",
    "grad_checkpoint": False, "iters": 1000, "learning_rate": 1e-5, "lr_schedule": None, "mask_prompt": False,
    "max_seq_length": 2048, "model": "mlx-community/Llama-3.2-1B-Instruct-4bit", "num_layers": 16, "optimizer": "adam",
    "optimizer_config": {"adam": {}}, "project_name": None, "report_to": None, "resume_adapter_file": None,
    "save_every": 100, "seed": 0, "steps_per_eval": 200, "steps_per_report": 10, "test": False, "train": True,
}  # fmt: skip
_MLX_PARTS = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
_MLX_PARTS |= {"lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b"}


def mlx_tensors(folder: Path) -> dict[str, Any]:
    """The pairs of a PEFT folder as mlx-lm names and turns them."""
    found = {}
    for key, value in load_file(folder / WEIGHTS).items():
        name = key.removeprefix("base_model.model.")
        theirs = next((part for part in _MLX_PARTS if name.endswith(part)), None)
        if theirs is not None:
            found[name.removesuffix(theirs) + _MLX_PARTS[theirs]] = value.T if value.ndim == 2 else value
    return found


def write_mlx(folder: Path, tensors: dict[str, Any], rank: int, scale: float, **changes: Any) -> Path:
    """A folder of mlx-lm. `changes`: keys of the configuration, those of `lora_parameters` below it; `...` removes."""
    folder.mkdir(exist_ok=True)
    parameters = {"rank": rank, "dropout": 0.0, "scale": scale} | changes.pop("lora_parameters", {})
    config = MLX_CONFIG | {"lora_parameters": parameters} | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / MLX_WEIGHTS)
    return folder


def as_mlx(source: Path, target: Path, **changes: Any) -> Path:
    """The same adapter as mlx-lm has it."""
    raw = json.loads((source / CONFIG).read_text())
    kind = "dora" if raw.get("use_dora") else "lora"
    rank, scale = raw["r"], raw["lora_alpha"] / raw["r"]
    return write_mlx(target, mlx_tensors(source), rank, scale, **({"fine_tune_type": kind} | changes))


def as_pickle(source: Path, target: Path, name: str = PICKLE, **options: Any) -> Path:
    """The same adapter with its weights as torch pickles them."""
    target.mkdir(exist_ok=True)
    (target / CONFIG).write_bytes((source / CONFIG).read_bytes())
    torch.save(load_tensors(source / WEIGHTS), target / name, **options)
    return target


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_GGUF_PARTS = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
_GGUF_PARTS |= {"lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b"}


def gguf_name(module: str) -> str:
    """llama.cpp's name of the weight of a module of a decoder."""
    if module in ("lm_head", "model.embed_tokens"):
        return {"lm_head": "output", "model.embed_tokens": "token_embd"}[module] + ".weight"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.weight"


def gguf_tensors(folder: Path, heads: tuple[int, int] | None) -> dict[str, Any]:
    """The pairs of a PEFT folder as llama.cpp's converter names them. `heads`: query and key heads whose rows it puts
    into its own order, as for Llama; None: it does not."""
    found = {}
    for key, value in load_file(folder / WEIGHTS).items():
        name = re.sub(r"^model\.(?:language|text)_model\.", "model.", key.removeprefix("base_model.model."))
        theirs = next((part for part in _GGUF_PARTS if name.endswith(part)), None)
        # the converter leaves towers out
        if theirs is None or any(tower in name for tower in ("vision", "projector", "connector")):
            continue
        weight, half = gguf_name(name.removesuffix(theirs).rstrip(".")), _GGUF_PARTS[theirs]
        if heads and half == "lora_b" and weight.endswith(("attn_q.weight", "attn_k.weight")):
            count = heads[0] if "attn_q" in weight else heads[1]
            rows, rank = value.shape
            # The converter's `permute`: [heads, 2, half a head, rank] becomes [heads, half a head, 2, rank].
            value = value.reshape(count, 2, rows // count // 2, rank).swapaxes(1, 2).reshape(rows, rank)
        if weight == "token_embd.weight" and half == "lora_a":
            value = value.T
        found[f"{weight}.{half}"] = np.ascontiguousarray(value)
    return found


def write_gguf(path: Path, architecture: str, tensors: dict[str, Any], kind: str = "F32", **keys: Any) -> Path:
    """An adapter file in GGUF. `keys`: metadata with `__` for a dot; `...` leaves a key out."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    metadata = {"general__type": "adapter", "adapter__type": "lora"} | keys
    path.parent.mkdir(exist_ok=True)
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
    number = GGMLQuantizationType[kind]
    for name, value in tensors.items():
        if kind == "F32":
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quantize(value, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_gguf(source: Path, target: Path, architecture: str, heads: tuple[int, int] | None) -> Path:
    """The same adapter in GGUF, alone in a folder."""
    alpha = float(json.loads((source / CONFIG).read_text())["lora_alpha"])
    write_gguf(target / "adapter.gguf", architecture, gguf_tensors(source, heads), adapter__lora__alpha=alpha)
    return target


# Architectures of llama.cpp that have other names than the family; the first has the order of heads of Llama's.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "gemma3_text": "gemma3"}


def as_gguf_of(base: Path, source: Path, target: Path) -> Path:
    """The same adapter in GGUF, as the converter writes it for a base model's folder, of a model with images too."""
    config = json.loads((base / "config.json").read_text())
    config = config.get("text_config") or config
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    return as_gguf(source, target, architecture, heads if architecture == "llama" else None)


def as_tinker(source: Path, target: Path) -> Path:
    """The same adapter as Tinker saves it: another name of the head, and `all-linear` whatever was trained."""
    target.mkdir(exist_ok=True)
    raw = json.loads((source / CONFIG).read_text())
    kept = {key: raw[key] for key in ("base_model_name_or_path", "peft_type", "r", "lora_alpha")}
    (target / CONFIG).write_text(json.dumps(kept | {"target_modules": "all-linear", "use_rslora": False}))
    tensors = {
        key.replace("base_model.model.lm_head.", "base_model.model.model.unembed_tokens."): value
        for key, value in load_file(source / WEIGHTS).items()
        if ".base_layer." not in key
    }
    save_file(tensors, target / WEIGHTS)
    return target
