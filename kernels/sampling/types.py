"""How each row of logits is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
