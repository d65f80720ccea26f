"""Samples tokens from logits: argmax, or a draw after temperature, top-k and top-p, in that order.

`sample_tokens` works on the device, `choose_tokens` on a CPU. One uniform number u in [0, 1) per row decides, a pure
function of (seed, stream, position): SplitMix64's finaliser applied once per key (Steele, Lea, Flood 2014). With
weights w = exp((logit - largest) / temperature), top-k and then top-p keep the first tokens in order of falling logits,
equal ones in order of token ids. The draw is the first kept token, in order of token ids, whose running sum of w
exceeds u times the total of kept ones. Weights are whole numbers (`types.weights_of`), whose sums are exact: all
implementations choose the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import choose_further_tokens, choose_tokens, largest_tokens
from .largest import largest_of_rows
from .types import LARGEST_TEMPERATURE, NO_TOKEN, SMALLEST_TEMPERATURE, Choices, SamplingRows

__all__ = [
    "LARGEST_TEMPERATURE",
    "NO_TOKEN",
    "SMALLEST_TEMPERATURE",
    "Choices",
    "SamplingRows",
    "choose_further_tokens",
    "choose_tokens",
    "largest_of_rows",
    "largest_tokens",
    "sample_tokens",
]


def sample_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Token ids, int64 [num_rows], from `logits` [num_rows, vocab_size]; rows are contiguous.

    A row with NaN gets any token of the vocabulary."""
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    assert len(rows.temperature) == len(logits), f"{len(rows.temperature)} rows of sampling, {len(logits)} of logits"
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    from .triton import sample

    sample(tokens, logits, rows)
    return tokens
