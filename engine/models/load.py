"""Loads the base model's tensors from safetensors, or makes random ones for benchmarks.

Every tensor that the architecture needs must be there with the right shape, and every tensor that is there must be
needed: a checkpoint that holds more is of another architecture than its `config.json` says. Weights of converted GGUF
files may be bytes of blocks; then the file's metadata has their kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import EngineConfig, read_json
from ..errors import ModelFilesError
from ..model_config.model import HEAD, ModelConfig
from ..untrusted import parse_json
from .gguf.blocks import METADATA_KEY, GgufWeight, Weight, plain

# Tensors that older checkpoints carry and that the configuration determines.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEAD_WEIGHT = f"{HEAD}.weight"


def stored_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the base, by checkpoint name. A tied head is not stored."""
    return {
        name: shape for name, shape in model.parameter_shapes().items() if not (model.is_tied and name == _HEAD_WEIGHT)
    }


def load_weights(
    folder: Path, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Weight]:
    """The base's parameters as `config.load_format` says: read, or random. Raises `ModelFilesError`."""
    if config.load_format == "dummy":
        return dict(dummy_weights(model, dtype, device))
    stored = stored_weights(folder, model)
    return {name: plain(stored.pop(name), dtype).to(device) for name in list(stored)}


def stored_weights(folder: Path, model: ModelConfig) -> dict[str, Weight]:
    """All parameters of a model folder as they are stored, mapped from files.

    Raises `ModelFilesError` naming missing, unexpected and misshapen tensors, all of them at once.
    """
    expected = stored_shapes(model)
    weights: dict[str, Weight] = {}
    problems: list[str] = []
    for name, tensor in _stored_tensors(folder):
        if _DERIVED.match(name) or (name == _HEAD_WEIGHT and model.is_tied):
            continue
        if name not in expected:
            problems.append(f"{name}: not part of a {model.family} model with this config.json")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, config.json implies {expected[name]}")
        elif isinstance(tensor, Tensor) and tensor.dtype not in _DTYPES:
            problems.append(f"{name}: stored as {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
        else:
            weights[name] = tensor
    problems += [f"{name}: missing" for name in expected.keys() - weights.keys() if not _named(name, problems)]
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        raise ModelFilesError(f"{folder}: {len(problems)} tensors do not fit the model: {shown}. Check --model.")
    return weights


def dummy_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters of the right shapes, for benchmarks: normal with a deviation of 0.02, norms of ones."""
    # on the meta device there are shapes and no numbers
    generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for name, shape in stored_shapes(model).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            weights[name] = tensor.normal_(0.0, 0.02, generator=generator)
    return weights


def _named(name: str, problems: list[str]) -> bool:
    return any(problem.startswith(f"{name}:") for problem in problems)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Weight]]:
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                kinds = dict(parse_json((file.metadata() or {}).get(METADATA_KEY, "{}")))
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    tensor = file.get_tensor(name)
                    yield name, GgufWeight.of_file(tensor, kinds[name]) if name in kinds else tensor
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelFilesError(f"{path}: not a readable safetensors file ({error}). Fetch it again.") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises `ModelFilesError` when there are none."""
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
