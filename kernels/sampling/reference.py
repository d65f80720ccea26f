"""The plain twin of `sample_tokens`: one row at a time, by sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from .types import SamplingRows

_MASK = (1 << 64) - 1


def uniform(seed: int, stream: int, position: int) -> float:
    """The number in [0, 1) of (seed, stream, position)."""
    state = 0
    for key in (seed, stream, position):
        state = ((state ^ key & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return float(state >> 11) * 2.0**-53


def sample(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """See `sample_tokens`."""
    for row in range(len(logits)):
        temperature, top_k, top_p = float(rows.temperature[row]), int(rows.top_k[row]), float(rows.top_p[row])
        if temperature == 0:
            tokens[row] = logits[row].argmax()
            continue
        values = logits[row].double()
        is_cut = top_k > 0 or top_p < 1
        order = values.argsort(descending=True, stable=True) if is_cut else torch.arange(len(values))
        weights = ((values - values.max()) / temperature).exp()[order.to(values.device)]
        weights = weights[: top_k or len(weights)]
        if top_p < 1:
            before = weights.cumsum(0) - weights
            weights = weights[: max(1, int((before < top_p * weights.sum()).sum()))]
        u = uniform(int(rows.seeds[row]), int(rows.streams[row]), int(rows.positions[row]))
        cumulative = weights.cumsum(0)
        index = int((cumulative <= u * cumulative[-1]).sum())
        tokens[row] = order[min(index, len(weights) - 1)]
