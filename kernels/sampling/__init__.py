"""From logits to tokens: argmax, or a draw after temperature, top-k and top-p, in that order, on the device.

One uniform number u in [0, 1) per row decides, a pure function of (seed, stream, position): SplitMix64's finaliser
applied once per key (Steele, Lea, Flood 2014), the very numbers of the CPU engine. With weights w = exp((logit -
largest) / temperature), the draw is the first token whose running sum of w exceeds u times their total: in order of
falling logits where top-k or top-p cut, else in order of token ids. Equal logits stand in order of token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..launch import uses_triton

# Beyond these the draw is the same to the last bit: among the largest alone, or among all alike. Quotients of fp32
# logits stay numbers between them.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled, tensors of length num_rows on the device of the logits.

    `temperature` fp32 (0: argmax; else from `SMALLEST_TEMPERATURE` to `LARGEST_TEMPERATURE`),
    `top_k` int32 (0: off), `top_p` fp64 (1: off); `seeds`, `streams`, `positions` int64, read as 64 bits without a
    sign.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    streams: Tensor
    positions: Tensor


def sample_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Token ids, int64 [num_rows], from `logits` [num_rows, vocab_size]; rows are contiguous.

    A row with NaN gets any token of the vocabulary."""
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    assert len(rows.temperature) == len(logits), f"{len(rows.temperature)} rows of sampling, {len(logits)} of logits"
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if uses_triton(logits.device):
        from .triton import sample
    else:
        from .reference import sample
    sample(tokens, logits, rows)
    return tokens
