"""Loads the base model's tensors from safetensors, or makes random ones for benchmarks.

Every tensor that the architecture needs must be there with the right shape, and every tensor that is there must be
needed: a checkpoint that holds more is of another architecture than its `config.json` says. Weights of converted GGUF
files may be bytes of blocks; then the file's metadata has their kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...system.untrusted import parse_json
from ..config import EngineConfig
from ..errors import ModelFilesError
from ..model_config.folder import has_tensor, weight_files
from ..model_config.model import HEAD, ModelConfig
from ..model_config.partition import Partition, Piece
from ..peft.cut import taken
from .gguf.blocks import METADATA_KEY, GgufWeight, Weight, plain

# Tensors that older checkpoints carry and that the configuration determines.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_STORED_AS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEAD_WEIGHT = f"{HEAD}.weight"


def stored_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the base, by checkpoint name. A tied head is not stored."""
    return {
        name: shape for name, shape in model.parameter_shapes().items() if not (model.is_tied and name == _HEAD_WEIGHT)
    }


def load_weights(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    partition: Partition | None = None,
) -> dict[str, Weight]:
    """The base's parameters, or a member's part of them, as `config.load_format` says: read, or random. Raises
    `ModelFilesError`."""
    if config.load_format == "dummy":
        return dict(dummy_weights(model if partition is None else partition.shard, dtype, device))
    stored = stored_weights(folder, model, partition)
    return {name: plain(stored.pop(name), dtype).to(device) for name in list(stored)}


def stored_weights(folder: Path, model: ModelConfig, partition: Partition | None = None) -> dict[str, Weight]:
    """All parameters of a model folder as they are stored, mapped from files; or of each the part of a member, read
    from its place in the file.

    Raises `ModelFilesError` naming missing, unexpected and misshapen tensors, all of them at once.
    """
    expected = stored_shapes(model)
    transposed = _transposed(model)
    weights: dict[str, Weight] = {}
    passed_over: set[str] = set()
    problems: list[str] = []
    for name, tensor in _stored_tensors(folder, model, partition):
        if _DERIVED.match(name):
            continue
        if name in weights or name in passed_over:
            problems.append(f"{name}: in two files of the checkpoint, unclear which one is meant")
        elif name not in expected:
            problems.append(f"{name}: not part of a {model.family} model with this config.json")
        elif tuple(tensor.shape) != (shape := expected[name][::-1] if name in transposed else expected[name]):
            problems.append(f"{name}: shape {tuple(tensor.shape)}, config.json implies {shape}")
        elif isinstance(tensor, Tensor | _StoredSlice) and tensor.dtype not in _DTYPES:
            problems.append(f"{name}: stored as {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
        elif isinstance(tensor, _StoredSlice):
            part = tensor.part()
            if part is None:
                passed_over.add(name)
            else:
                weights[name] = part
        elif name in transposed and isinstance(tensor, Tensor):
            weights[name] = tensor.t().contiguous()
        else:
            weights[name] = tensor
    found = weights.keys() | passed_over
    problems += [f"{name}: missing" for name in expected.keys() - found if not _named(name, problems)]
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        raise ModelFilesError(f"{folder}: {len(problems)} tensors do not fit the model: {shown}. Check --model.")
    return weights


def _transposed(model: ModelConfig) -> frozenset[str]:
    """Weights that the checkpoint stores as [in_features, out_features]."""
    return frozenset(f"{module}.weight" for module in model.batched_modules() if model.names.is_transposed)


def dummy_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters of the right shapes, for benchmarks: normal with a deviation of 0.02, norms of ones."""
    # on the meta device there are shapes and no numbers
    generator = None if device.type == "meta" else torch.Generator(device=device)
    weights = {}
    for number, (name, shape) in enumerate(stored_shapes(model).items()):
        if generator is not None:
            # of its own: members of a group have the same numbers in what all of them have whole
            generator.manual_seed(seed + number)
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            weights[name] = tensor if generator is None else tensor.normal_(0.0, 0.02, generator=generator)
    return weights


def _named(name: str, problems: list[str]) -> bool:
    return any(problem.startswith(f"{name}:") for problem in problems)


class _StoredSlice:
    """A tensor of an open file, of which a member's part can be read."""

    def __init__(self, name: str, stored: Any, partition: Partition) -> None:
        self._name, self._stored, self._partition = name, stored, partition
        self.shape: tuple[int, ...] = tuple(stored.get_shape())
        self.dtype: torch.dtype | str = _STORED_AS.get(stored.get_dtype(), stored.get_dtype())

    def part(self) -> Tensor | None:
        """A copy of the member's part, so that the file can be closed; None of a bias that another member adds."""
        module, _, kind = self._name.rpartition(".")
        partition = self._partition
        outputs, inputs = partition.parameter(self._name)
        if kind == "bias" and not partition.adds_bias(module):
            return None
        if partition.is_by_token(module):
            part = taken(self._stored, 0, (Piece(*partition.tokens(self.shape[0])),))
        elif outputs is not None:
            part = taken(self._stored, 0, outputs)
        elif inputs is not None:
            part = taken(self._stored, 1, inputs)
        else:
            part = self._stored[:]
        return part.clone(memory_format=torch.contiguous_format)


def _stored_tensors(
    folder: Path, model: ModelConfig, partition: Partition | None
) -> Iterator[tuple[str, Weight | _StoredSlice]]:
    """Tensors by the engine's names. The one tensor of a tied model may be stored as the embedding or as the head.
    Tensors that text does not reach are left out.
    """
    embedding = f"{model.names.embedding}.weight"
    is_head_alone = model.is_tied and not has_tensor(folder, model.names.spellings(embedding))
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                kinds = dict(parse_json((file.metadata() or {}).get(METADATA_KEY, "{}")))
                for stored_name in file.keys():  # noqa: SIM118  (not a mapping)
                    own_name = model.names.of_stored(stored_name)
                    if own_name is None:
                        continue
                    name = own_name
                    if name == _HEAD_WEIGHT and model.is_tied:
                        if not is_head_alone:
                            continue  # equal to the embedding: see `has_own_head`
                        name = embedding
                    if partition is not None:
                        yield name, _StoredSlice(name, file.get_slice(stored_name), partition)
                        continue
                    tensor = file.get_tensor(stored_name)
                    yield name, GgufWeight.of_file(tensor, kinds[stored_name]) if stored_name in kinds else tensor
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelFilesError(f"{path}: not a readable safetensors file ({error}). Fetch it again.") from None
