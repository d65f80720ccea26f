"""The base model's tensors, read from safetensors or made up for benchmarks.

Every tensor that the architecture needs must be there with the right shape, and every tensor that is there must be
needed: a checkpoint that holds more is of another architecture than its `config.json` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig, read_json
from .errors import ModelFilesError

# Tensors that older checkpoints carry and that the configuration determines.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$")


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the base, by checkpoint name. A tied `lm_head` is not a parameter."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, model.hidden_size)}
    for module, (out_features, in_features) in model.linear_shapes().items():
        if module == "lm_head" and model.is_tied:
            continue
        shapes[f"{module}.weight"] = (out_features, in_features)
        if _has_bias(model, module):
            shapes[f"{module}.bias"] = (out_features,)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (model.hidden_size,)
        shapes[prefix + "post_attention_layernorm.weight"] = (model.hidden_size,)
        if model.has_qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (model.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (model.head_dim,)
    shapes["model.norm.weight"] = (model.hidden_size,)
    return shapes


def read_weights(folder: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """All parameters of a model folder in `dtype` on `device`.

    Raises `ModelFilesError` naming missing, unexpected and misshapen tensors, all of them at once.
    """
    expected = parameter_shapes(model)
    weights: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in _stored_tensors(folder):
        if _DERIVED.match(name) or (name == "lm_head.weight" and model.is_tied):
            continue
        if name not in expected:
            problems.append(f"{name}: not part of a {model.family} model with this config.json")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, config.json implies {expected[name]}")
        else:
            weights[name] = tensor.to(device=device, dtype=dtype)
    problems += [f"{name}: missing" for name in expected.keys() - weights.keys() if not _named(name, problems)]
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        raise ModelFilesError(f"{folder}: {len(problems)} tensors do not fit the model: {shown}. Check --model.")
    return weights


def dummy_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters of the right shapes, for benchmarks: normal with a deviation of 0.02, norms of ones."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(model).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            weights[name] = tensor.normal_(0.0, 0.02, generator=generator)
    return weights


def _has_bias(model: ModelConfig, module: str) -> bool:
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        return model.has_qkv_bias
    if module.endswith("o_proj"):
        return model.has_o_bias
    return model.has_mlp_bias and ".mlp." in module


def _named(name: str, problems: list[str]) -> bool:
    return any(problem.startswith(f"{name}:") for problem in problems)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"{path}: not a readable safetensors file ({error}). Fetch it again.") from None


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / "model.safetensors.index.json"
    if not index_path.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise ModelFilesError(f"{folder}: neither model.safetensors nor its index is there. Check --model.")
        return [single]
    names = set(map(str, dict(read_json(index_path).get("weight_map", {})).values()))
    outside = sorted(name for name in names if Path(name).name != name)
    if outside or not names:
        raise ModelFilesError(f"{index_path}: weight_map must name files of this folder, found {outside or 'none'}.")
    return [folder / name for name in sorted(names)]
