"""How each row of logits is sampled, and what a logit weighs in a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Beyond these the draw is the same to the last bit: among the largest alone, or among all alike. Quotients of fp32
# logits stay numbers between them.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-30, 1e30
# In place of a token where the logits choose none: NaN or infinity among them, or nothing left to choose.
NO_TOKEN = -1
LOG2_E = 1.4426950408889634
# Of 2^f for f from 0 to 1, to 1.7e-7 of it in fp32: coefficients of f^5 to f^1; that of f^0 is 1.
POWERS_OF_2 = (
    0.0018671301659196615,
    0.009017029777169228,
    0.05579991266131401,
    0.24016444385051727,
    0.6931512951850891,
)


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


class Choices(NamedTuple):
    """How tokens are chosen on a CPU, arrays [num_rows].

    `places`: int64, rows of the logits. `temperature`: fp64, 0 for the largest logit. `top_k`: int64, 0 is off.
    `top_p`: fp64, 1 is off. `uniforms`: fp64 in [0, 1), not read at temperature 0.
    """

    places: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]


def weights_of(logits: Tensor, largest: float, temperature: float) -> Tensor:
    """`2^44 exp((logit - largest) / temperature)` as whole numbers, int64 of the shape of `logits`; 0 for NaN.

    Whole numbers have the same sum in any order. All operations are in fp32 and rounded one by one, so that every
    implementation has the same bits.
    """
    slope = np.float32(LOG2_E) / np.float32(min(max(temperature, SMALLEST_TEMPERATURE), LARGEST_TEMPERATURE))
    exponent = (logits.float() - largest) * float(slope)
    exponent = torch.where(exponent > -48, exponent, -48.0)
    whole = (exponent - 0.5 + 12582912.0) - 12582912.0  # 1.5 * 2^23 rounds to whole numbers
    fraction = exponent - whole
    power = torch.full_like(fraction, POWERS_OF_2[0])
    for coefficient in (*POWERS_OF_2[1:], 1.0):
        power = power * fraction + coefficient
    # a fraction of 2^23 from its bits, which has 1 where the exponent is that of 1
    mantissa = power.view(torch.int32).long() - 0x3F000000
    return (mantissa << 21) >> -whole.long()


def share_of(total: int, share: float) -> int:
    """`share`, at most 1, times `total`, cut to a whole number."""
    return min(int(float(total) * share), total)
