"""Computes the rotary angles of each kind that `config.json` can name. `kernels.rotary` does the rotation.

Legend: T tokens of the step, F = rotary_size / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ...kernels.rotary import rotary_tables
from ..model_config.layer import RopeConfig, RopeKind


class Rope:
    """One rotary embedding. `frequencies` [F] are those of a row that fits the original context."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._config = config
        exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.int64).float() / config.rotary_size
        self._exponents = exponents.to(device)
        self.frequencies = _FREQUENCIES[config.kind](exponents, config).to(device)
        self._long_frequencies = self.frequencies
        if config.kind == "longrope":
            self._long_frequencies = _divided(exponents, config, "long_factor").to(device)

    def tables(
        self, positions: Tensor, lengths: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine for tokens at `positions` [T], each [T, 1, F]. `lengths`, which some kinds read, are those of
        each token's row, [T]: tokens of its prompt, and tokens known by now.
        """
        frequencies = self.frequencies
        if self._config.kind == "longrope":
            frequencies = self._by_length(lengths)
        elif self._config.kind == "dynamic":
            frequencies = self._stretched(positions, lengths)
        return rotary_tables(positions.float()[:, None] * frequencies, self._config.attention_factor, dtype)

    def _by_length(self, lengths: tuple[Tensor, Tensor] | None) -> Tensor:
        """Ding 2024 (LongRoPE): one set for rows within the original context, another for longer ones, [T, F]."""
        assert lengths is not None, f"{self._config.kind} needs the lengths of rows"
        _, known = lengths
        is_long = known > self._config.scaling["original_max_position_embeddings"]
        return torch.where(is_long[:, None], self._long_frequencies, self.frequencies)

    def _stretched(self, positions: Tensor, lengths: tuple[Tensor, Tensor] | None) -> Tensor:
        """NTK-aware scaling (Peng 2023, appendix A) to the row's length when the token was first computed, [T, F]:
        keys already stored keep their angles, as they do in transformers."""
        assert lengths is not None, f"{self._config.kind} needs the lengths of rows"
        prompt, _ = lengths
        scaling, size = self._config.scaling, self._config.rotary_size
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        reached = torch.maximum(prompt, positions + 1).clamp(min=original)
        stretch = factor * reached.double() / original - (factor - 1)
        theta = (self._config.theta * stretch ** (size / (size - 2))).float()
        return torch.reciprocal(torch.pow(theta[:, None], self._exponents))


def restart_lengths(ropes: Iterable[RopeConfig | None]) -> frozenset[int]:
    """Lengths of a row, in tokens, at which all its tokens must be computed anew, because all its angles change."""
    long = (rope for rope in ropes if rope is not None and rope.kind == "longrope")
    return frozenset(rope.scaling["original_max_position_embeddings"] + 1 for rope in long)


def _plain(exponents: Tensor, config: RopeConfig) -> Tensor:
    return torch.reciprocal(torch.pow(config.theta, exponents))


def _linear(exponents: Tensor, config: RopeConfig) -> Tensor:
    factor: float = config.scaling["factor"]
    return _plain(exponents, config) / factor


def _divided(exponents: Tensor, config: RopeConfig, key: str = "short_factor") -> Tensor:
    factors = torch.tensor(config.scaling[key], dtype=torch.float32)
    return torch.reciprocal(factors * torch.pow(config.theta, exponents))


def _proportional(exponents: Tensor, config: RopeConfig) -> Tensor:
    """Gemma 4: the first features of each half turn, as if all did, and the others stand still."""
    turning = int(config.scaling["share"] * config.rotary_size // 2)
    frequencies = _plain(exponents, config) / config.scaling["factor"]
    return torch.where(torch.arange(len(frequencies)) < turning, frequencies, 0.0)


def _yarn(exponents: Tensor, config: RopeConfig) -> Tensor:
    """Peng 2023 (YaRN), section 3.2: features that turn often are kept, slow ones stretched, a ramp between."""
    scaling, size = config.scaling, config.rotary_size
    factor: float = scaling["factor"]

    def feature(num_turns: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(config.theta))

    low, high = feature(scaling["beta_fast"]), feature(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = _plain(exponents, config)
    return kept / factor * ramp + kept * (1 - ramp)


def _llama3(exponents: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    frequencies, scaling = _plain(exponents, config), config.scaling
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(is_between, blended, stretched)


_FREQUENCIES: Mapping[RopeKind, Callable[[Tensor, RopeConfig], Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _divided,
    "proportional": _proportional,
}
