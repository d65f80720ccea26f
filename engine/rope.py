"""Rotary frequencies of each kind that `config.json` can name. The rotation itself is `kernels.rotary`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import ModelConfig, RopeConfig


def rotary_frequencies(model: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position, [head_dim // 2] in fp32 radians, and the factor on cosine and sine."""
    rope = model.rope
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / float(rope.scaling["factor"])
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor = float(rope.scaling["factor"])
    low, high = float(rope.scaling["low_freq_factor"]), float(rope.scaling["high_freq_factor"])
    original = float(rope.scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(is_between, blended, stretched)
